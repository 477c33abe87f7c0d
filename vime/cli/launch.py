"""`vime train <flags>`: parse, check, start the run and clean up behind it.

Heavy imports wait until the command line is known to be right: `vime train --help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run `vime train`; exit code 0. Raises VimeError, OSError, KeyboardInterrupt."""
    from vime.config.help import help_text, topic_text
    from vime.config.show import shown
    from vime.utils.arguments import parse_args

    topic = help_topic(argv)
    if topic is not None:
        print(topic_text(topic) if topic else help_text())
        return 0
    flags = [token for token in argv if token not in ("--print-config", "--dry-run")]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # users' hooks live where they start the run
    config = parse_args(flags)
    if "--print-config" in argv:
        print(shown(config))
        return 0
    if "--dry-run" in argv:
        from vime.cli.plan import dry_run

        return dry_run(config)
    from vime.cli.train import train

    for number in (signal.SIGINT, signal.SIGTERM):  # after the import of Ray, which sets a handler of its own
        signal.signal(number, _interrupt)
    train(config)
    return 0


def help_topic(argv: Sequence[str]) -> str | None:
    """What help is asked about: "" for everything, None when it is not asked for. --help=X and --help X are the same."""
    for i, token in enumerate(argv):
        if token.startswith("--help="):
            return token.removeprefix("--help=")
        if token in ("--help", "-h"):
            after = argv[i + 1 : i + 2]
            return after[0] if after and (i == 0 or not after[0].startswith("-")) else ""
    return None


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """End the run; further signals are ignored, so that they cannot cut the clean-up short."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt
