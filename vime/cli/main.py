"""`vime`: the console script. `vime train <flags>` parses, checks, starts the run and cleans up behind it.

Heavy imports wait until the command line is known to be right: `vime --help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from vime import __version__
from vime.errors import ConfigError, VimeError

__all__ = ["main"]

USAGE = """usage: vime <command> [flags]

  train       train a model: rollout, training and weight sync in one loop
  version     print the version

`vime train --help` lists the flags. `python train.py <flags>` is the same as `vime train <flags>`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the process's exit code: 0 done, 1 failed, 2 wrong command line, 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if args[0] in ("version", "--version"):
        print(f"vime {__version__}")
        return 0
    if args[0] != "train":
        print(f"vime: unknown command '{args[0]}'.\n\n{USAGE}", file=sys.stderr)
        return 2
    return _train(args[1:])


def _train(argv: list[str]) -> int:
    from vime.config.parse import help_text
    from vime.utils.arguments import parse_args, print_config

    if "--help" in argv or "-h" in argv:
        print(help_text())
        return 0
    show_only = "--print-config" in argv
    argv = [token for token in argv if token != "--print-config"]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # users' hooks live where they start the run
    try:
        config = parse_args(argv)
        if show_only:
            print(print_config(config))
            return 0
        from vime.cli.train import train

        for number in (signal.SIGINT, signal.SIGTERM):  # after the import of Ray, which sets a handler of its own
            signal.signal(number, _interrupt)
        train(config)
    except ConfigError as error:
        print(f"vime: the command line has {len(error.problems)} problem{'s' * (len(error.problems) > 1)}.\n{error}", file=sys.stderr)
        return error.exit_code
    except VimeError as error:
        print(f"vime: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(
            f"vime: {type(error).__name__}: {error}. Mend that and run the same command again: it resumes from the last commit.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("vime: interrupted; the run has been ended. The same command resumes from the last commit.", file=sys.stderr)
        return 130
    return 0


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """End the run; further signals are ignored, so that they cannot cut the clean-up short."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
