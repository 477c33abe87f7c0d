"""Owners are asked in processes of their own; one that cannot answer is a problem, not a traceback."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vime.config import owners
from vime.config.owners import OWNERS, ask, options_of
from vime.errors import ConfigError


def test_an_owner_that_cannot_be_asked_is_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(owners.OWNERS, "router", replace(OWNERS["router"], module="vime.no_such_module"))
    (problem,) = ask({"router": ["--policy", "random"]})["router"].problems
    assert problem.startswith("vllm-router's own parser cannot be asked (exit 1): ")
    assert "No module named vime.no_such_module" in problem


def test_a_process_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "DEADLINE", 0.0)
    (problem,) = ask({"router": ["--policy", "random"]})["router"].problems
    assert "did not answer within 0 s" in problem


def test_an_owner_that_is_not_installed_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(owners.OWNERS, "vllm", replace(OWNERS["vllm"], distributions=("no-such-package",)))
    with pytest.raises(ConfigError, match=r"vLLM is not installed \(package no-such-package\): run `make setup`"):
        options_of("vllm")


def test_the_state_of_an_owner_is_its_version_and_our_modules() -> None:
    keys = {name: owner.key() for name, owner in OWNERS.items()}
    assert len(set(keys.values())) == 3
    assert all("arguments.py" in key for key in keys.values())
    assert "flags.py" in keys["megatron"]
