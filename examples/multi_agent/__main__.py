"""Trains the three roles on two CPU cores, from the quickstart's supervised start.

python -m examples.multi_agent [--folder runs/multi_agent] [--steps 60] [--show]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from examples.quickstart.make_assets import AssetSpec, make_assets
from examples.quickstart.recipe import grpo_flags, sft_flags, shown

STEPS = 60


def flags(folder: Path, steps: int = STEPS) -> list[str]:
    """The quickstart's GRPO flags with the roles' functions, and a smaller batch: an execution takes two or three turns."""
    out = grpo_flags(folder, steps)
    out[out.index("--rollout-batch-size") + 1] = "64"
    return [
        *out,
        *("--custom-generate-function-path", "examples.multi_agent.roles.solve_check_revise"),
        *("--custom-reward-post-process-path", "examples.multi_agent.roles.compare_by_role"),
        *("--custom-rollout-log-function-path", "examples.multi_agent.roles.log_roles"),
    ]


def main() -> int:
    """Make the model, give it a supervised start, train the roles; the exit code is that of the first command that fails."""
    parser = argparse.ArgumentParser(prog="python -m examples.multi_agent", description="Solver, checker and reviser, trained together.")
    parser.add_argument("--folder", type=Path, default=Path("runs/multi_agent"), help="where everything goes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the roles' training (default: %(default)s)")
    parser.add_argument("--show", action="store_true", help="print the training command and stop")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps takes 2 or more, got {arguments.steps}")
    folder: Path = arguments.folder
    if arguments.show:
        print(shown(flags(folder, arguments.steps)))
        return 0
    make_assets(folder / "assets", AssetSpec())
    stages = [flags(folder, arguments.steps)]
    if not (folder / "sft" / "hf" / "config.json").exists():
        stages.insert(0, sft_flags(folder))
    for stage in stages:
        code = subprocess.run([sys.executable, "-m", "vime.cli.main", "train", *stage], check=False).returncode
        if code != 0:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
