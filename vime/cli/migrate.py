"""`vime migrate SCRIPT`: a slime or Vime launch script becomes our command, with a report of what changed."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from vime.errors import ConfigError
from vime.migrate.convert import convert
from vime.migrate.megatron import MegatronFlags
from vime.migrate.notes import Note
from vime.migrate.script import read_script
from vime.migrate.write import Command, report, run_sh, run_yaml

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vime migrate: {message}. See `vime migrate --help`.")


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 when a command was made, whatever the report says. Raises ConfigError for a script that cannot be read."""
    options = _options().parse_args(list(argv))
    script = read_script(options.script)  # before Megatron is loaded, which takes seconds
    command, notes = convert(script, megatron=_megatron(), device=options.device)
    command = replace(command, available_only=options.available_only)
    as_yaml = options.output is not None and options.output.endswith((".yaml", ".yml"))
    if as_yaml:
        text, more = run_yaml(command)
        notes = [*notes, *more]
    else:
        text = run_sh(command)
    if options.output is None:
        print(text)
    else:
        Path(options.output).write_text(text, encoding="utf-8")
        if not as_yaml:
            os.chmod(options.output, 0o755)
        print(f"wrote {options.output}\n")
    if options.check:
        notes = [*notes, *_checked(command)]
    print(report(notes), end="")
    return 0


def _options() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="vime migrate",
        description="Turn a bash script that starts slime or Vime into a command for vime. The script is read, never run.",
        allow_abbrev=False,
    )
    parser.add_argument("script", help="the bash script")
    parser.add_argument("--output", metavar="FILE", help="write run.sh, or run.yaml for `vime train --config`; default: print run.sh")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where the new command computes [cuda]")
    parser.add_argument("--available-only", action="store_true", help="put flags that are not available yet into comments")
    parser.add_argument("--check", action="store_true", help="ask `vime train`'s parsers about the result, vLLM's and the router's too")
    return parser


def _megatron() -> MegatronFlags | None:
    logging.disable(logging.WARNING)  # what third parties say while they are loaded is no concern of the user's
    try:
        return MegatronFlags()
    except ImportError as error:
        print(f"vime migrate: Megatron's flags are kept unchecked: {error}", file=sys.stderr)
        return None
    finally:
        logging.disable(logging.NOTSET)


def _checked(command: Command) -> list[Note]:
    """What `vime train` says to the flags that are available and whose values are known."""
    from vime.utils.arguments import parse_args

    argv = [word for flag in command.flags if not flag.pending and flag.texts is not None for word in (flag.name, *flag.texts)]
    try:
        parse_args(argv)
    except ConfigError as error:
        return [Note(kind="could not", place="", what="`vime train` would say", why=problem) for problem in error.problems]
    return []
