"""`make quickstart`: makes the assets, shows the two training commands and runs them, and tries the trained model.

    python -m examples.quickstart [--folder runs/quickstart] [--steps 200] [--show]

An interrupted run goes on from its last commit; `rm -r runs/quickstart` starts afresh.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.quickstart.make_assets import AssetSpec, make_assets
from examples.quickstart.recipe import GRPO_STEPS, grpo_flags, sft_flags, shown

NUM_SHOWN = 6  # held-out prompts whose answers are printed, before and after


def main() -> int:
    """Run the quickstart; the exit code is that of the first command that fails."""
    parser = argparse.ArgumentParser(prog="python -m examples.quickstart", description="SFT, then GRPO, on two CPU cores.")
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart"), help="where everything goes (default: %(default)s)")
    parser.add_argument("--show", action="store_true", help="print the two training commands and stop")
    parser.add_argument("--steps", type=int, default=GRPO_STEPS, help="GRPO steps (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps takes 1 or more, got {arguments.steps}")
    folder: Path = arguments.folder
    stages = [("supervised start", sft_flags(folder), folder / "sft" / "hf"), ("GRPO", grpo_flags(folder, arguments.steps), folder / "hf")]
    if arguments.show:
        print("\n\n".join(shown(flags) for _, flags, _ in stages))
        return 0

    begun = time.monotonic()
    make_assets(folder / "assets", AssetSpec())
    print(f"quickstart: a small Qwen3 model and three files of sums are in {folder / 'assets'}")
    for number, (name, flags, result) in enumerate(stages, 1):
        print(f"\n── {number} of {len(stages)}: {name} " + "─" * 60 + f"\n{shown(flags)}\n", flush=True)
        if name == "supervised start" and (result / "config.json").exists():
            print(f"quickstart: done already, {result} is there")
            continue
        code = _run([sys.executable, "-m", "vime.cli.main", "train", *flags])
        if code != 0:
            print(f"quickstart: the {name} ended with exit code {code}; its message is above.", file=sys.stderr)
            return code
    _report(folder, time.monotonic() - begun)
    return 0


def _run(command: list[str]) -> int:
    """The command's exit code. Ctrl-C reaches it, too, and it cleans up by itself: we only wait. A SIGTERM is handed on."""
    process = subprocess.Popen(command)
    old = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    code = process.wait()
    signal.signal(signal.SIGINT, old[0])
    signal.signal(signal.SIGTERM, old[1])
    return code


def _report(folder: Path, seconds: float) -> None:
    """Answers before and after from the saved Hugging Face folders, where everything lies, and what to type next."""
    rows = [json.loads(line) for line in (folder / "assets" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
    before, after = (_answers(path, rows) for path in (folder / "sft" / "hf", folder / "hf"))
    print("\n── What it learnt " + "─" * 60)
    print("held-out sum      right answer   before   after")
    for row, old, new in list(zip(rows, before, after, strict=True))[:NUM_SHOWN]:
        print(f"{row['input'][-1]['content']:<18}{row['label']:>12}{old:>9}{new:>8}")
    shares = [sum(a == row["label"] for a, row in zip(answers, rows, strict=True)) / len(rows) for answers in (before, after)]
    print(f"right of {len(rows)} held-out sums (greedy, in transformers): {shares[0]:.2f} before GRPO, {shares[1]:.2f} after")
    print(f"\nquickstart: done in {seconds / 60:.1f} minutes")
    print(f"  model    {folder / 'hf'} (transformers loads it)")
    print(f"  curve    {folder / 'grpo' / 'reward.png'}")
    print(f"  metrics  {folder / 'grpo' / 'metrics.jsonl'}, {folder / 'grpo' / 'tensorboard'}")
    print(f"  samples  {folder / 'grpo' / 'samples.jsonl'}")
    print("\nNext:")
    print(f"  .venv/bin/tensorboard --logdir {folder / 'grpo' / 'tensorboard'}")
    print("  .venv/bin/python -m examples.quickstart --show      # the two commands, to change and run yourself")
    print("  .venv/bin/vime train --help")


def _answers(model_folder: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Greedy answers of a saved model, as text."""
    import torch  # the training commands need the memory first
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    prompts = [tokenizer.apply_chat_template(row["input"], tokenize=False, add_generation_prompt=True) for row in rows]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        out = model.generate(**batch, max_new_tokens=8, do_sample=False)
    return [text.strip() for text in tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)]


if __name__ == "__main__":
    sys.exit(main())
