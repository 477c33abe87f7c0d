"""`parse_args`: the command line -> one validated `RunConfig`. Nothing of Ray, torch, vLLM or Megatron is loaded here.

argv ── split by owner ──▶ ours: typed sections, bounds, rules between flags
                      ├──▶ Megatron's own parser  ┐ each in a process of its own, side by side: their imports take
                      ├──▶ vLLM's own parser      │ seconds, and the driver stays light
                      └──▶ vllm-router's parser   ┘
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from vime.config import RunConfig
from vime.config.parse import flag_table, nearest, parse_own
from vime.config.paths import with_absolute_paths
from vime.config.rules import check_rules
from vime.config.split import OwnedTokens, split_tokens
from vime.errors import ConfigError

__all__ = ["parse_args"]

OWNER_DEADLINE = 180.0  # seconds an owner's parser may take, its imports included


def parse_args(argv: Sequence[str] | None = None) -> RunConfig:
    """Parse and validate the command line (default: sys.argv[1:]). Paths come out absolute.

    Raises ConfigError with every problem found.
    """
    table = flag_table()
    tokens = split_tokens(sys.argv[1:] if argv is None else argv, table.keys())
    problems: list[str] = []
    sections: dict[str, Any] = {}
    try:
        sections = parse_own(tokens.own)
    except ConfigError as error:
        problems += error.problems
    megatron, owner_problems = _finish_owners(_start_owners(tokens, _model_options(sections)))
    problems += owner_problems
    if problems:
        raise ConfigError(*problems)
    config = RunConfig(
        **sections,
        megatron_tokens=tuple(tokens.megatron),
        vllm_tokens=tuple(tokens.vllm),
        router_tokens=tuple(tokens.router),
        given=frozenset(table[flag][1].name for flag, _ in tokens.own),
        megatron=megatron,
    )
    check_rules(config)
    return with_absolute_paths(config)


def _model_options(sections: dict[str, Any]) -> list[str]:
    """What Megatron's check needs to compare shape flags and parallel sizes with the model; nothing while that is unknown."""
    if not sections or sections["debug"].debug_rollout_only:
        return []
    folder, cluster = sections["model"].hf_checkpoint, sections["cluster"]
    if folder is None or not os.path.isdir(folder):
        return []  # a rule speaks of that
    return ["--hf-checkpoint", folder, "--world-size", str(cluster.actor_num_nodes * cluster.actor_num_gpus_per_node)]


def _start_owners(tokens: OwnedTokens, model_options: list[str]) -> dict[str, subprocess.Popen[str]]:
    """Start the parsers that have tokens to check; Megatron's always, since its defaults are wanted too."""
    commands = {"megatron": ["vime.backends.megatron_utils.arguments", *model_options, "--", *tokens.megatron]}
    if tokens.vllm:
        commands["vllm"] = ["vime.backends.vllm_utils.arguments", "vllm", *tokens.vllm]
    if tokens.router:
        commands["router"] = ["vime.backends.vllm_utils.arguments", "router", *tokens.router]
    env = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    return {
        owner: subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        for owner, command in commands.items()
    }


def _finish_owners(owners: dict[str, subprocess.Popen[str]]) -> tuple[dict[str, Any], list[str]]:
    """Megatron's resolved plain values, and every problem that the owners reported."""
    megatron: dict[str, Any] = {}
    problems: list[str] = []
    for owner, process in owners.items():
        try:
            out, err = process.communicate(timeout=OWNER_DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            problems.append(f"{owner}'s own parser did not answer within {OWNER_DEADLINE:g} s: is the machine overloaded?")
            continue
        if process.returncode == 2:
            problems += [_with_our_names(line) for line in err.strip().splitlines() if line.strip()]
        elif process.returncode != 0:
            problems.append(f"{owner}'s own parser failed (exit {process.returncode}): {err.strip()[-2000:]}")
        elif owner == "megatron":
            megatron = json.loads(out.strip().splitlines()[-1])
    return megatron, problems


def _with_our_names(problem: str) -> str:
    """Add our own flags that are spelled like an unknown one."""
    if "unknown" not in problem.lower() and "unrecognized" not in problem.lower():
        return problem
    match = re.search(r"--[\w.-]+", problem)
    ours = nearest(match.group(), flag_table(), count=2) if match else []
    ours = [f"{flag} ({flag_table()[flag][0]})" for flag in ours if flag not in problem]
    return problem + (f" Of vime's own flags: {', '.join(ours)}." if ours else "")


def print_config(config: RunConfig) -> str:
    """The resolved configuration as JSON, one section each, plus the raw tokens of the other owners."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name not in ("megatron", "given"):
            out[f.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else list(value)  # type: ignore[arg-type]
    return json.dumps(out, indent=2)
