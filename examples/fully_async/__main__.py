"""The same run with generation and training in turns, and at once; prints what that saves.

python -m examples.fully_async [--folder runs/fully_async] [--steps 20] [--staleness 0 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from examples.quickstart.make_assets import AssetSpec, make_assets

CONFIG = Path(__file__).parent / "run.yaml"
WARM_UP = 2  # steps at the start that are left out of the means


def flags(folder: Path, steps: int, staleness: int) -> list[str]:
    """`vime train` flags of one run."""
    assets = folder / "assets"
    own = ["--hf-checkpoint", str(assets / "model"), "--prompt-data", str(assets / "train.jsonl"), "--num-rollout", str(steps)]
    own += ["--log-dir", str(folder / f"staleness_{staleness}")]
    if staleness:
        own += ["--max-weight-staleness", str(staleness), "--update-weight-in-flight", "--use-tis"]
    return ["--config", str(CONFIG), *own]


def report(folder: Path) -> dict[str, float]:
    """Means over a run's steps: seconds, idle seconds, staleness, reward."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row["source"] == "step"][WARM_UP:]
    names = {
        "step s": "perf/step_time",
        "trainer idle s": "perf/trainer_idle_time",
        "staleness": "rollout/staleness/mean",
        "staleness max": "rollout/staleness/max",
        "reward": "rollout/raw_reward",
    }
    return {short: statistics.fmean(row[name] for row in steps) for short, name in names.items()}


def main() -> int:
    """Run each staleness; the exit code is that of the first run that fails."""
    parser = argparse.ArgumentParser(prog="python -m examples.fully_async", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path("runs/fully_async"), help="where everything goes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (default: %(default)s)")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2], help="values to compare (default: 0 2)")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps takes {WARM_UP + 1} or more, got {arguments.steps}: the first {WARM_UP} are not measured")
    folder: Path = arguments.folder
    make_assets(folder / "assets", AssetSpec())
    found = {}
    for staleness in arguments.staleness:
        command = [sys.executable, "-m", "vime.cli.main", "train", *flags(folder, arguments.steps, staleness)]
        code = subprocess.run(command, check=False).returncode
        if code != 0:
            return code
        found[staleness] = report(folder / f"staleness_{staleness}")
    first = next(iter(found.values()))
    print("\nstaleness bound  " + "  ".join(f"{name:>14}" for name in first) + "         speed")
    for staleness, values in found.items():
        print(
            f"{staleness:>15}  "
            + "  ".join(f"{value:>14.3f}" for value in values.values())
            + f"{first['step s'] / values['step s']:>13.2f}x"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
