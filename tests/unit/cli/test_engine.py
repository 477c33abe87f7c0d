"""`vime engine`: what it needs before it starts anything."""

from __future__ import annotations

import pytest

from vime.backends.vllm_utils.control_guard import SECRET_ENV
from vime.cli.engine import main
from vime.errors import ConfigError


def test_without_arguments_it_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "--rollout-external-engine-addrs 127.0.0.1:N" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hf-checkpoint", "x"], "needs --port N"),
        (["--port"], "got ''"),
        (["--port=x"], "got 'x'"),
        (["--port", "70000"], "from 1 to 65535, got '70000'"),
    ],
)
def test_it_needs_a_port(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        main(words)


def test_it_needs_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_ENV, "short")
    with pytest.raises(ConfigError, match=f"{SECRET_ENV} must hold at least 16 characters, got 5"):
        main(["--port", "8101", "--hf-checkpoint", "x"])
