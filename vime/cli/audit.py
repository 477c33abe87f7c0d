"""`vime audit RUN`: proves from a run's ledger, commits and metrics that nothing was lost or trained twice, or names what was."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vime.audit.report import as_json, as_text, audit
from vime.errors import VimeError

__all__ = ["main"]

CANNOT = 2


def main(argv: Sequence[str]) -> int:
    """Exit code 0 when all is well, 1 when something is wrong, 2 when the run cannot be audited."""
    parser = argparse.ArgumentParser(
        prog="vime audit",
        allow_abbrev=False,
        description="Prove that a run lost no prompt and trained on none twice, or name them. The run may go on, or have been killed.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's --save folder; of a run without --save its --log-dir")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(list(argv))
    try:
        report = audit(Path(options.run))
    except (VimeError, OSError) as error:
        print(f"vime audit: {error}", file=sys.stderr)
        return CANNOT
    print(as_json(report) if options.json else as_text(report))
    return 0 if report.clean else 1
