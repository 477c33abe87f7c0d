"""`parse_args`: the command line -> one validated `RunConfig`. Nothing of Ray, torch, vLLM or Megatron is loaded here.

--config files ─┐
argv ───────────┴─ split by owner ──▶ ours: typed sections, bounds, rules between flags
                                 ├──▶ Megatron's own parser  ┐ each in a process of its own, side by side: their imports
                                 ├──▶ vLLM's own parser      │ take seconds, and the driver stays light
                                 └──▶ vllm-router's parser   ┘

All of them say all that is wrong before the first error is raised.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vime.config import RunConfig
from vime.config.files import Own, layered, read_file
from vime.config.implied import with_implied
from vime.config.names import NameIndex
from vime.config.options import UNKNOWN
from vime.config.owners import OWNERS, Answer, ask, options_of
from vime.config.parse import own_flags, parse_own
from vime.config.paths import with_absolute_paths
from vime.config.rules import check_rules
from vime.config.served import ServedModel, read_served_models
from vime.config.sources import sources_of, with_sources
from vime.config.split import Given, OwnedTokens, by_owner, read_tokens
from vime.config.suggest import Names
from vime.errors import ConfigError

__all__ = ["parse_args"]

CONFIG = "--config"


def parse_args(argv: Sequence[str] | None = None, *, planned: bool = False) -> RunConfig:
    """Parse and validate the command line (default: sys.argv[1:]) and the files that it names. Paths come out absolute.

    With `planned` True it may ask for what is not available yet, and of the model folder only config.json is needed: the plan
    checks the layout itself. Raises ConfigError with every problem found.
    """
    flags = own_flags()
    given, problems = _all_given(sys.argv[1:] if argv is None else argv, flags)
    tokens = by_owner(given, flags)
    own = parse_own(tokens.own)
    served, wrong = _served(own.sections)
    problems += wrong
    tokens_of_groups = [word for model in served for group in model.groups for word in group.vllm_tokens]
    answers = ask(_questions(tokens, tokens_of_groups, ["--planned"] if planned else _model_options(own.sections)))
    megatron = answers["megatron"].values
    config = RunConfig(
        **own.sections,
        megatron_tokens=tuple(tokens.megatron),
        vllm_tokens=tuple(tokens.vllm),
        router_tokens=tuple(tokens.router),
        served=served,
        given=own.given,
        megatron=megatron.get("values", {}),
        sources={flags[one.flag][1].name if one.flag in flags else one.flag: one.source for one in given}
        | {f"megatron.{name}": origin for name, origin in megatron.get("origins", {}).items()},
    )
    sources = sources_of(given)
    found = (*own.problems, *_told(answers), *_broken_rules(config, own.unsure, planned))
    problems += [with_sources(problem, sources) for problem in found]
    if problems:
        raise ConfigError(*problems)
    return with_absolute_paths(with_implied(config))


def _all_given(argv: Sequence[str], flags: Own) -> tuple[list[Given], list[str]]:
    """(what files and command line give, later ones over earlier ones, problems in reading them).

    Raises ConfigError when nothing could be read of a file: what it holds would be said to be missing.
    """
    typed, problems = read_tokens(argv, NameIndex([*flags, CONFIG]))
    layers: list[list[Given]] = []
    unread = False
    for one in typed:
        if one.flag == CONFIG and not one.values:
            problems.append(f"{CONFIG} takes one or more files, got none.")
        for path in one.values if one.flag == CONFIG else ():
            found, wrong = read_file(path, flags)
            layers.append(found)
            problems += wrong
            unread |= bool(wrong) and not found
    if unread:
        raise ConfigError(*problems)
    problems += _unknown_nulls([one for layer in layers for one in layer], flags)
    return layered([*layers, [one for one in typed if one.flag != CONFIG]], flags), problems


def _unknown_nulls(given: Sequence[Given], flags: Own) -> list[str]:
    """Problems with other owners' flags that a file sets to null: no owner is handed those, and one that is mistyped takes nothing back."""
    nulls = [one for one in given if not one.raw and one.flag not in flags]
    if not nulls:
        return []
    try:
        names = Names(options_of(*OWNERS))
    except ConfigError as error:
        return error.problems
    return [f"{names.explain(one.flag)} ({one.source})" for one in nulls if not names.knows(one.flag)]


def _served(sections: Mapping[str, Any]) -> tuple[tuple[ServedModel, ...], list[str]]:
    """(what --vllm-config says, problems with it)."""
    path = sections["engine"].vllm_config
    try:
        return (read_served_models(path, sections["model"].hf_checkpoint) if path else ()), []
    except ConfigError as error:
        return (), error.problems


def _questions(tokens: OwnedTokens, of_groups: list[str], model_options: list[str]) -> dict[str, list[str]]:
    """What to ask whom: those that have tokens to check, and Megatron always, since its defaults are wanted, too."""
    asked = {"megatron": [*model_options, "--", *tokens.megatron]}
    if tokens.vllm or of_groups:
        asked["vllm"] = [*tokens.vllm, *of_groups]
    if tokens.router:
        asked["router"] = tokens.router
    return asked


def _model_options(sections: Mapping[str, Any]) -> list[str]:
    """What Megatron's check needs to compare shape flags, parallel sizes and adapters with the model; nothing while that is unknown."""
    if sections["debug"].debug_rollout_only:
        return []
    folder, cluster = sections["model"].hf_checkpoint, sections["cluster"]
    if folder is None or not os.path.isdir(folder):
        return []  # a rule speaks of that
    words = ["--hf-checkpoint", folder, "--world-size", str(cluster.actor_num_nodes * cluster.actor_num_gpus_per_node)]
    lora = sections["lora"]
    if lora.lora_rank is None or (lora.lora_load is not None and not os.path.isdir(lora.lora_load)):
        return words
    return [*words, "--lora", json.dumps(asdict(lora))]


def _told(answers: Mapping[str, Answer]) -> Iterator[str]:
    """Every problem that the owners reported; unknown flags with what was meant."""
    problems = [problem for answer in answers.values() for problem in answer.problems]
    if not any(problem.startswith(UNKNOWN) for problem in problems):
        yield from problems
        return
    try:
        names = Names(options_of(*OWNERS))
    except ConfigError as error:  # an owner is not installed: the others' names will do
        yield from error.problems
        names = Names({})
    for problem in problems:
        yield names.explain(problem.removeprefix(UNKNOWN).rstrip(".")) if problem.startswith(UNKNOWN) else problem


def _broken_rules(config: RunConfig, unsure: frozenset[str], planned: bool) -> list[str]:
    try:
        check_rules(config, unsure=unsure, planned=planned)
    except ConfigError as error:
        return error.problems
    return []
