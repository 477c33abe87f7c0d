"""The console script: a table of commands, and errors told without a traceback."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

from vime.cli import main as cli
from vime.errors import ConfigError, DataError


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A command "try" whose function raises `called.raises`, or returns 7."""
    module = types.SimpleNamespace(raises=None, argv=None)

    def run(argv: list[str]) -> int:
        module.argv = argv
        if module.raises is not None:
            raise module.raises
        return 7

    module.run = run
    monkeypatch.setitem(sys.modules, "a_command", module)  # type: ignore[arg-type]
    monkeypatch.setitem(cli.COMMANDS, "try", cli.Command(help="try it", target="a_command:run"))
    return module


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_each_command_of_the_table_is_there_and_says_what_it_does(name: str) -> None:
    module, _, function = cli.COMMANDS[name].target.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert f"  {name} " in cli.usage()
    assert cli.COMMANDS[name].help in cli.usage()


def test_a_command_gets_the_rest_of_the_line_and_gives_the_exit_code(called: types.SimpleNamespace) -> None:
    assert cli.main(["try", "--x", "1"]) == 7
    assert called.argv == ["--x", "1"]


def test_an_unknown_command_is_named_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    said = capsys.readouterr().err
    assert "unknown command 'trian'. Did you mean 'train'?" in said


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("--a is wrong.", "--b is wrong."), 2, "has 2 problems.\n1. --a is wrong.\n2. --b is wrong."),
        (DataError("row 3"), 1, "vime: DataError: row 3"),
        (OSError("disk full"), 1, "vime: OSError: disk full."),
        (KeyboardInterrupt(), 130, "vime: interrupted."),
    ],
)
def test_errors_are_told_without_a_traceback(
    called: types.SimpleNamespace, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str
) -> None:
    called.raises = error
    assert cli.main(["try"]) == code
    assert said in capsys.readouterr().err


def test_an_argument_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--save", "\udcff"]) == 2
    assert "is no text in UTF-8" in capsys.readouterr().err
