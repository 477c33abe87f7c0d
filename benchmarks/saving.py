"""How long training is held up by a save: in the foreground, and in the background (--async-save), in one process in turns.

    python -m benchmarks.saving [--hidden 512] [--layers 8] [--rounds 5] [--threads 2] [--folder DIR] [--out benchmarks/results/saving.json]

One trainer process, float32, random weights. Foreground: the whole save. Background: until the copy is taken, and the collective end;
training steps (forward and backward of one packed micro-batch) are taken while the thread writes, and told beside those without it.
Every write ends with fsync. Memory is the growth of the process at the moment in which copy and state are both there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.machine import describe_machine
from benchmarks.train_step import MODEL, make_trainer, our_batch, our_step, samples_of
from vime.backends.megatron_utils.actor import MegatronTrainer


def seconds_of(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def in_background(trainer: MegatronTrainer, path: Path, step: Callable[[], float]) -> dict[str, Any]:
    """One save behind training."""
    before = psutil.Process().memory_info().rss
    taken = seconds_of(lambda: trainer.start_save(str(path)))
    grown = psutil.Process().memory_info().rss - before
    begun, steps = time.perf_counter(), []
    thread = trainer._saving._thread  # type: ignore[union-attr]
    while thread is not None and thread.is_alive():
        steps.append(seconds_of(step))
    written = time.perf_counter() - begun
    ended = seconds_of(trainer.finish_save)
    return {"blocked": taken + ended, "written": written, "steps": steps, "grown": grown}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the checkpoints go; a temporary folder unless it is given")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = MODEL | {"hidden_size": options.hidden, "intermediate_size": 3 * options.hidden, "num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        trainer, _ = make_trainer(folder / "model", options.threads, shape)
        step = our_step(trainer, our_batch(samples_of("groups")))
        step()
        trainer._optimizer.prepare_grads()
        trainer._optimizer.step()
        foreground, background, alone = [], [], []
        for _ in range(options.rounds):
            alone.append(seconds_of(step))
            foreground.append(seconds_of(lambda: trainer.save(str(folder / "save"))))
            size = sum(file.stat().st_size for file in (folder / "save").rglob("*") if file.is_file())
            shutil.rmtree(folder / "save")
            background.append(in_background(trainer, folder / "save", step))
            shutil.rmtree(folder / "save")
        trainer.shutdown()
    blocked = [one["blocked"] for one in background]
    beside = [value for one in background for value in one["steps"]]
    out = {
        "checkpoint_mib": round(size / 2**20, 1),
        "foreground_s": [round(value, 3) for value in foreground],
        "blocked_s": [round(value, 3) for value in blocked],
        "written_behind_s": [round(one["written"], 3) for one in background],
        "step_alone_s": [round(value, 3) for value in alone],
        "step_beside_s": [round(value, 3) for value in beside],
        "grown_mib": [round(one["grown"] / 2**20, 1) for one in background],
        "blocked / foreground": round(statistics.median(blocked) / statistics.median(foreground), 3),
        "step beside / alone": round(statistics.median(beside) / statistics.median(alone), 3) if beside else None,
        "threads": options.threads,
        "machine": describe_machine(),
    }
    print(json.dumps(out, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
