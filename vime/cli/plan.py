"""`vime plan <flags>`: what a run will be and whether it fits, without starting anything.

    vime plan [--json] [--gpu NAME] [--device-memory GiB] ... <the flags of vime train>

Exit code 0 when the run fits, 2 when it does not or when the command line is wrong.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vime.config import SECTIONS, RunConfig
from vime.config.fields import flag_specs
from vime.config.help import topic_text
from vime.errors import ConfigError, VimeError
from vime.hooks import check_all
from vime.plan.devices import GPUS
from vime.plan.plan import make_plan
from vime.plan.report import as_json, as_text
from vime.plan.search import offers
from vime.plan.settings import PlanOptions, settings_of
from vime.rollout.check import check_prompt_files
from vime.utils.arguments import parse_args

__all__ = ["dry_run", "main", "plan_options", "show", "with_own_options"]

MOST = 10**9  # of any number that the plan is given
MOST_PROCESSES = 4096  # the plan lists each of them
OPTIONS: dict[str, tuple[type, str]] = {  # flag -> (type, help); the names of PlanOptions
    "--gpu": (str, f"which GPU the run gets: {', '.join(GPUS)} [H200]"),
    "--device-memory": (float, "GiB of one GPU (on a CPU: of the machine); default: the GPU's, or this machine's"),
    "--host-memory": (float, "GiB of a node's memory; default: not checked, on a CPU this machine's"),
    "--gpus-per-node": (int, "GPUs of a node [8]"),
    "--sync-bandwidth": (float, "1e9 bytes a second that a weight sync moves into an engine [20; on a CPU 0.25]"),
    "--mean-prompt-len": (int, "tokens of a prompt in the mean; default: half of the longest"),
    "--mean-response-len": (int, "tokens of a response in the mean; default: half of --rollout-max-response-len"),
}
USAGE = "\n".join(
    [
        "usage: vime plan [--json] [options] <the flags of vime train>, which `vime train --help` lists\n",
        "  --json\n      machine-readable output",
        *(f"  {flag}{'' if kind is str else ' N'}\n      {text}" for flag, (kind, text) in OPTIONS.items()),
    ]
)


def main(argv: Sequence[str]) -> int:
    """Plan the run that `argv` describes; also what is not runnable yet can be planned."""
    if "--help" in argv or "-h" in argv:
        print(USAGE)
        return 0
    if topics := [token.removeprefix("--help=") for token in argv if token.startswith("--help=")]:
        print(USAGE if topics[0] in OPTIONS else topic_text(topics[0]))
        return 0
    options, as_program, flags = plan_options(argv)
    with ThreadPoolExecutor(max_workers=2) as pool:  # each waits for the owners' parsers, which are processes of their own
        refused = pool.submit(_refused, flags)
        try:
            config = parse_args(flags, planned=True)
        except ConfigError as error:
            raise ConfigError(*with_own_options(error.problems)) from None
        return show(config, options, as_program=as_program, not_runnable=refused.result())


def with_own_options(problems: Sequence[str]) -> list[str]:
    """Add to each unknown flag the plan's own options that are spelled like it."""
    out = []
    for problem in problems:
        match = re.match(r"unknown flag (--[\w-]+)", problem)
        near = difflib.get_close_matches(match[1], OPTIONS, n=2, cutoff=0.75) if match else []
        out.append(problem + (f" Of vime plan's own: {', '.join(near)}." if near else ""))
    return out


def _refused(flags: list[str]) -> list[str]:
    """Why `vime train` would not start with these flags."""
    try:
        parse_args(flags)
    except VimeError as error:
        return error.problems if isinstance(error, ConfigError) else [str(error)]
    return []


def dry_run(config: RunConfig) -> int:
    """`vime train --dry-run`: the plan of a valid configuration, whose hooks and prompt files are looked at as for a start."""
    check_all(config)
    check_prompt_files(config.args)
    return show(config, PlanOptions(), as_program=False, not_runnable=[])


def show(config: RunConfig, options: PlanOptions, *, as_program: bool, not_runnable: Sequence[str]) -> int:
    """Print the plan; 0 when it fits, 2 when not."""
    processes = config.actor_world_size + config.num_own_engines
    if processes > MOST_PROCESSES:
        raise ConfigError(
            f"the plan is of at most {MOST_PROCESSES} processes, this would be {processes}: see --actor-num-nodes, "
            "--actor-num-gpus-per-node, --rollout-num-gpus."
        )
    settings = settings_of(config, options)
    plan = make_plan(settings, exports=config.checkpoint.save_hf is not None, saves=config.checkpoint.save is not None)
    unbuilt = {spec.flag for cls in SECTIONS.values() for spec in flag_specs(cls) if spec.not_yet is not None}
    found = offers(settings, without=() if not_runnable else unbuilt) if plan.refusals else []
    if as_program:
        print(json.dumps(as_json(plan, found, not_runnable), indent=2))
    else:
        print(as_text(plan, found, not_runnable))
    return 2 if plan.refusals else 0


def plan_options(argv: Sequence[str]) -> tuple[PlanOptions, bool, list[str]]:
    """(the plan's own options, whether --json was given, the flags of the run). Raises ConfigError with all problems."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    rest: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        flag, equals, value = token.partition("=")
        if flag not in OPTIONS:
            rest.append(token)
            continue
        name = flag[2:].replace("-", "_")
        try:
            new = _value(flag, value if equals else next(tokens, None))
        except ValueError as error:
            problems.append(str(error))
            continue
        if values.setdefault(name, new) != new:
            problems.append(f"{flag} is given twice, as '{values[name]}' and '{new}': keep one.")
    if problems:
        raise ConfigError(*problems)
    return PlanOptions(**values), "--json" in rest, [token for token in rest if token != "--json"]


def _value(flag: str, text: str | None) -> Any:
    kind, _ = OPTIONS[flag]
    if text is None or text.startswith("--"):
        raise ValueError(f"{flag} needs a value.")
    if kind is str:
        if text.upper() not in GPUS:
            raise ValueError(f"{flag} {text}: not known. Known are {', '.join(GPUS)}; any other with --device-memory GiB.")
        return text.upper()
    try:
        number = kind(text)
    except ValueError:
        raise ValueError(f"{flag} takes a {'whole ' if kind is int else ''}number, got '{text}'.") from None
    if not 0 < number <= MOST:
        raise ValueError(f"{flag} must be above 0 and at most {MOST:g}, got {text}.")
    return number
