"""`vime`: the console script. A table of commands; each is imported when it is called, so that `vime --help` answers at once."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from vime import __version__
from vime.errors import ConfigError, VimeError

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command: `target` is "module:function" of a function (argv without the command's name) -> exit code.

    It may raise VimeError, OSError and KeyboardInterrupt: they are told here, without a traceback.
    """

    help: str
    target: str
    resumes: bool = False  # what was interrupted goes on when the same command is given again


COMMANDS: dict[str, Command] = {
    "train": Command(
        help="train a model: rollout, training and weight sync in one loop",
        target="vime.cli.launch:main",
        resumes=True,
    ),
    "convert": Command(help="convert weights between a Hugging Face folder and a Megatron checkpoint", target="vime.cli.convert:main"),
    "plan": Command(help="say what a run will be and whether it fits, without starting it", target="vime.cli.plan:main"),
    "audit": Command(help="prove that a run lost no prompt and trained on none twice, or name them", target="vime.cli.audit:main"),
    "migrate": Command(help="turn a launch script of slime's or Vime's into our command", target="vime.cli.migrate:main"),
    "replay": Command(help="compute a recorded step again and name the first stage that differs", target="vime.cli.replay:main"),
    "engine": Command(help="start one engine that runs take by --rollout-external-engine-addrs", target="vime.cli.engine:main"),
    "completion": Command(help="print a completion script: vime completion bash, or zsh", target="vime.cli.completion:main"),
    "doctor": Command(help="look at the machine and the packages, test them, and name cures", target="vime.cli.doctor:main"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the process's exit code: 0 done, 1 failed, 2 wrong command line, 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    if wrong := [word for word in args if not _is_text(word)]:
        print(f"vime: {wrong[0]!r} on the command line is no text in UTF-8: is it a name in another encoding? Rename it.", file=sys.stderr)
        return 2
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] in ("version", "--version"):
        print(f"vime {__version__}")
        return 0
    if args[0] not in COMMANDS:
        near = difflib.get_close_matches(args[0], COMMANDS, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        print(f"vime: unknown command '{args[0]}'.{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    return _run(COMMANDS[args[0]], args[1:])


def _is_text(word: str) -> bool:
    """Whether `word` can be written down: Python lets through bytes of an argument that are none of UTF-8's."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def usage() -> str:
    """The commands, one line each."""
    rows = [*((name, command.help) for name, command in COMMANDS.items()), ("version", "print the version")]
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        [
            "usage: vime <command> [flags]",
            "",
            *(f"  {name:<{width}}  {text}" for name, text in rows),
            "",
            "`vime train --help` lists the flags. `python train.py <flags>` is the same as `vime train <flags>`.",
        ]
    )


def _run(command: Command, argv: list[str]) -> int:
    """Call a command and tell its errors; exit code."""
    try:
        module, _, function = command.target.partition(":")
        return int(getattr(importlib.import_module(module), function)(argv))
    except ConfigError as error:
        print(f"vime: the command line has {len(error.problems)} problem{'s' * (len(error.problems) > 1)}.\n{error}", file=sys.stderr)
        return error.exit_code
    except VimeError as error:
        print(f"vime: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # who reads our output has closed it: vime train --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        again = " Mend that and run the same command again: it resumes from the last commit." if command.resumes else ""
        print(f"vime: {type(error).__name__}: {error}.{again}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = "; the run has been ended. The same command resumes from the last commit" if command.resumes else ""
        print(f"vime: interrupted{again}.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
