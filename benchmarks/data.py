"""How long a large prompt file takes to open, what that costs in memory, and how fast prompts are drawn from it.

    python -m benchmarks.data [--rows 1000000] [--kind jsonl|parquet]

Makes the file in a temporary folder, opens it in a fresh process as a run does (tokenizer loaded before), draws 10,000
shuffled prompts, and prints JSON: seconds, and resident memory (unique pages of the process: the mapped file does not count).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import describe_machine
from examples.quickstart.make_assets import _make_tokenizer


def write_rows(path: Path, count: int) -> None:
    """Chat prompts with a label and metadata, about 300 bytes each."""
    text = "Add the numbers below and say the sum, please, without any further words. " * 2
    rows = (
        {"input": [{"role": "user", "content": f"{text}{n} + {n + 1} ="}], "label": str(2 * n + 1), "metadata": {"id": n}}
        for n in range(count)
    )
    if path.suffix == ".jsonl":
        with path.open("w") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def measure(path: str, tokenizer_folder: str) -> dict[str, Any]:
    """In a fresh process: open and draw."""
    from vime.data.prompts import PromptFormat
    from vime.data.stream import PromptStreams
    from vime.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_folder)
    form = PromptFormat(label_key="label", apply_chat_template=True, max_prompt_len=1000)
    before = psutil.Process().memory_full_info().uss
    begun = time.perf_counter()
    streams = PromptStreams(path, form, tokenizer, shuffle_seed=1, skip_bad=False)
    opened = time.perf_counter() - begun
    after = psutil.Process().memory_full_info().uss
    begun = time.perf_counter()
    for _ in range(10_000):
        streams.next()
    drawn = time.perf_counter() - begun
    begun = time.perf_counter()
    streams.state_dict()
    return {
        "rows": len(streams),
        "file_mib": round(Path(path).stat().st_size / 2**20, 1),
        "open_s": round(opened, 2),
        "uss_added_mib": round((after - before) / 2**20, 1),
        "prompts_drawn_per_s": round(10_000 / drawn),
        "uss_added_after_10000_mib": round((psutil.Process().memory_full_info().uss - before) / 2**20, 1),
        "digest_s": round(time.perf_counter() - begun, 2),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows.{options.kind}"
        write_rows(path, options.rows)
        _make_tokenizer().save_pretrained(Path(folder) / "tokenizer")
        command = [sys.executable, "-m", "benchmarks.data", "--measure", str(path), str(Path(folder) / "tokenizer")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(json.dumps({"kind": options.kind, **json.loads(done.stdout), "machine": describe_machine()}, indent=1))


if __name__ == "__main__":
    main()
