"""The reward curve as a PNG, from metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from vime.observability.metrics import read_metrics

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

__all__ = ["plot_rewards"]


def plot_rewards(metrics_path: Path, out: Path) -> bool:
    """Draw training reward and held-out scores over steps. False when there is nothing to draw."""
    metrics = read_metrics(metrics_path)
    evals = {name: points for name, points in metrics.items() if name.startswith("eval/") and "/" not in name[5:] and "-" not in name[5:]}
    if "rollout/raw_reward" not in metrics and not evals:
        return False
    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    if "rollout/raw_reward" in metrics:
        steps, values = zip(*metrics["rollout/raw_reward"], strict=True)
        axes.plot([step + 1 for step in steps], values, color="#9db4c8", linewidth=1.2, label="training reward")
    for name, points in evals.items():
        steps, values = zip(*points, strict=True)
        axes.plot([step + 1 for step in steps], values, color="#c2410c", marker="o", markersize=4, label=f"{name[5:]} (held out)")
    axes.set_xlabel("training steps done")
    axes.set_ylabel("mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out)
    plt.close(figure)
    return True
