"""Our command as bash and as YAML, and the report."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from vime.cli import migrate
from vime.config.parse import own_flags
from vime.errors import ConfigError
from vime.migrate.expand import Item
from vime.migrate.flags import Flag
from vime.migrate.notes import Note
from vime.migrate.values import Reference, Value, literal
from vime.migrate.write import Command, report, run_sh, run_yaml


def command(*flags: Flag, **more: object) -> Command:
    """A command with these flags."""
    return Command(source="old.sh", flags=flags, **more)  # type: ignore[arg-type]


def flag(name: str, *values: str | Value, group: str | None = None, pending: bool = False) -> Flag:
    """A flag with text values."""
    return Flag(name, tuple(literal(value) if isinstance(value, str) else value for value in values), "line 1", group, pending)


def words_of(script: str) -> list[str]:
    """The words of the flags' array."""
    inside = re.search(r"flags=\((.*)\n\)\n", script, re.DOTALL)
    assert inside is not None
    return shlex.split(inside.group(1), comments=True)


def test_words_survive_the_shell() -> None:
    values = ["plain", "two words", 'quo"te', "sin'gle", "$NOT", "a\\b", '{"k": [1, 2]}', "", "#x", "*"]
    assert words_of(run_sh(command(flag("--x", *values)))) == ["--x", *values]


def test_variables_stay_variables_and_those_without_a_default_are_asked_for() -> None:
    value = Value(("/a b/", Reference("DIR"), '/"x'))
    script = run_sh(command(flag("--x", value, Value((Reference("N", literal("4")),)), Value((Reference("M", None, "computed by `y`"),)))))
    assert '--x "/a b/${DIR}/\\"x" "${N:-4}" "${M}"' in script
    assert ': "${DIR:?the script takes it from the environment}"' in script
    assert ': "${M:?computed by \\`y\\`}"' in script
    assert "${N:?" not in script


def test_the_environment_stands_before_the_command() -> None:
    script = run_sh(
        command(flag("--x"), environment={"A": Item(literal("1 2"), "")}, unset=["B"], folder=literal("/repo"), passes_arguments=True)
    )
    lines = [line for line in script.splitlines() if line and not line.startswith("#")]
    assert lines == [
        "set -euo pipefail",
        "cd /repo",
        "unset B",
        "export A='1 2'",
        "flags=(",
        "    --x",
        ")",
        'vime train "${flags[@]}" "$@"',
    ]


def test_flags_stand_under_the_array_that_they_came_from() -> None:
    script = run_sh(command(flag("--a"), flag("--b", group="B"), flag("--c", group="B"), flag("--d", group="D")))
    inside = script.partition("flags=(")[2].partition(")")[0]
    assert [line.strip() for line in inside.strip().splitlines()] == ["--a", "# B", "--b", "--c", "# D", "--d"]


def test_what_is_not_available_is_commented_out_on_request_only() -> None:
    flags = (flag("--a"), flag("--b", "1", pending=True))
    assert words_of(run_sh(command(*flags))) == ["--a", "--b", "1"]
    available = run_sh(command(*flags, available_only=True))
    assert words_of(available) == ["--a"]
    assert "# not available yet: --b 1" in available


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], True),
        (["3"], 3),
        (["1e-6"], 1e-6),
        (["2.5E5"], 2.5e5),
        (["-0.5"], -0.5),
        (["0.90"], 0.9),
        (["word"], "word"),
        (["no"], "no"),
        (["null"], "null"),
        (["two words: #1"], "two words: #1"),
        (['{"enable": false}'], {"enable": False}),
        (["{rollout_id}"], "{rollout_id}"),
        (["held", "/a.jsonl"], ["held", "/a.jsonl"]),
        (["1", "2"], [1, 2]),
        (["1_000"], "1_000"),
        (["0123"], "0123"),
    ],
)
def test_a_yaml_file_holds_the_values(values: list[str], expected: object) -> None:
    text, notes = run_yaml(command(flag("--some-flag", *values)))
    assert yaml.safe_load(text) == {"some-flag": expected}
    assert not notes


def test_what_a_yaml_file_cannot_hold_is_told() -> None:
    flags = (flag("--a", Value((Reference("N", literal("4")),))), flag("--b", Value((Reference("M"),))))
    text, notes = run_yaml(command(*flags, passes_arguments=True))
    assert yaml.safe_load(text) == {"a": 4}
    assert [(note.kind, note.what) for note in notes] == [("could not", '"$@"'), ("changed", "--a ${N:-4}"), ("could not", "--b ${M}")]


def test_the_report_puts_what_has_one_reason_together() -> None:
    notes = [
        Note(kind="dropped", place="line 3", what="--b", why="no use."),
        Note(kind="changed", place="line 9", what="--old 1", why="spelled so.", new="--new 1"),
        Note(kind="dropped", place="line 5", what="--c", why="another."),
        Note(kind="dropped", place="line 4", what="--d", why="no use."),
        Note(kind="dropped", place="m.sh line 7", what="--e", why="no use."),
        Note(kind="added", place="", what="--f", why="vime needs it."),
    ]
    assert report(notes) == (
        "Changed\n  line 9: --old 1 -> --new 1\n      Spelled so.\n\n"
        "Added\n  --f\n      vime needs it.\n\n"
        "Dropped\n  lines 3-4: --b, --d; m.sh line 7: --e\n      No use.\n  line 5: --c\n      Another.\n"
    )


def test_no_line_of_a_report_is_longer_than_its_width() -> None:
    notes = [Note(kind="dropped", place=f"line {n}", what=f"--flag-{n} {n}", why="because " * 40) for n in range(1, 99, 2)]
    text = report(notes, width=100)
    assert max(map(len, text.splitlines())) <= 100
    assert all(f"--flag-{n} {n}" in " ".join(text.split()) for n in range(1, 99, 2))


def test_the_command_writes_a_file_that_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(migrate, "_megatron", lambda: None)
    old, new = tmp_path / "old.sh", tmp_path / "run.sh"
    base = "--rollout-batch-size 4 --num-rollout 1 --n-samples-per-prompt 2 --hf-checkpoint m --prompt-data p.jsonl"
    old.write_text(f"python train.py {base}")
    assert migrate.main([str(old), "--output", str(new), "--device", "cpu"]) == 0
    assert new.stat().st_mode & 0o111
    assert words_of(new.read_text())[:2] == ["--actor-num-gpus-per-node", "8"]
    assert "Added" in capsys.readouterr().out
    assert migrate.main([str(old), "--output", str(tmp_path / "run.yaml"), "--device", "cpu"]) == 0
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["rollout-batch-size"] == 4


def test_check_adds_what_the_parsers_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[list[str]] = []

    def refuse(argv: list[str]) -> None:
        asked.append(argv)
        raise ConfigError("--x is wrong.")

    monkeypatch.setattr(migrate, "_megatron", lambda: None)
    monkeypatch.setattr("vime.utils.arguments.parse_args", refuse)
    old = tmp_path / "old.sh"
    old.write_text("python train.py --rollout-batch-size 4 --num-rollout $N --colocate")
    assert migrate.main([str(old), "--check"]) == 0
    assert "--x is wrong." in capsys.readouterr().out.partition("Could not")[2]
    assert asked[0][:2] == ["--rollout-num-gpus", "8"]
    assert "--num-rollout" not in asked[0]  # its value is not known
    assert ("--colocate" in asked[0]) == ("cuda" not in own_flags()["--device"][1].choices_not_yet)  # without it, it has no effect


@pytest.mark.parametrize("argv", [[], ["a.sh", "--outptu", "x"], ["a.sh", "--device", "tpu"]])
def test_a_wrong_command_line_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="vime migrate"):
        migrate.main(argv)
