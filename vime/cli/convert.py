"""`vime convert`: Hugging Face folder to Megatron checkpoint and back, on the CPU."""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vime.errors import CheckpointError, ConfigError

__all__ = ["main"]

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
EXAMPLES = """examples:
  vime convert --to megatron HF_FOLDER OUT       a distributed checkpoint (torch_dist), for any parallel layout
  vime convert --to hf RUN/iter_0000099 OUT      a commit of `vime train --save RUN`; RUN alone means its latest
  vime convert --to hf CHECKPOINT OUT --hf-checkpoint HF_FOLDER    a checkpoint that does not say which model it is of"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vime convert: {message}. `vime convert --help` shows how it is used.")


def main(argv: Sequence[str]) -> int:
    """Run `vime convert`; exit code 0. Raises VimeError."""
    parser = _Parser(
        prog="vime convert", description="Convert model weights, on the CPU.", epilog=EXAMPLES, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--to", choices=("hf", "megatron"), required=True, help="what to write")
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the folder to read")
    parser.add_argument("target", metavar="OUT", type=Path, help="the folder to write; it must be new or empty")
    parser.add_argument("--hf-checkpoint", type=Path, help="config.json and tokenizer of the model (default: those kept in the checkpoint)")
    parser.add_argument("--shard-size", type=_size, help="largest safetensors file, like 500MB (default: 5GB)")
    given = parser.parse_args(argv)
    if given.to == "megatron" and (given.hf_checkpoint is not None or given.shard_size is not None):
        raise ConfigError("--hf-checkpoint and --shard-size have no effect with --to megatron: SOURCE is the Hugging Face folder.")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is loaded: the work is reading and writing
    logging.getLogger("vime").setLevel(logging.WARNING)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns of a compiler for GPUs without a GPU
    from vime.backends.megatron_utils.convert import checkpoint
    from vime.backends.megatron_utils.convert.writer import DEFAULT_SHARD_BYTES

    if given.to == "megatron":
        checkpoint.hf_to_megatron(given.source, given.target)
    else:
        source = _state_folder(given.source)
        model = _model_folder(given.hf_checkpoint, source)
        checkpoint.megatron_to_hf(source, given.target, hf_folder=model, shard_bytes=given.shard_size or DEFAULT_SHARD_BYTES)
    print(f"wrote {given.target}")
    return 0


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B?)", text.strip().upper())
    unit = found and (found.group(2) if found.group(2) in UNITS else found.group(2) + "B")
    if not found or unit not in UNITS or float(found.group(1)) <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no size: say 500MB or 5GB")
    return int(float(found.group(1)) * UNITS[str(unit)])


def _state_folder(source: Path) -> Path:
    """The folder with Megatron's files: that of a run's latest commit, of a commit, or the one given."""
    from vime.checkpoint import LATEST, check_commit, latest_commit

    if not source.is_dir():
        raise CheckpointError(f"{source} does not exist.")
    if (source / LATEST).is_file() and (commit := latest_commit(source)) is not None:
        return commit.trainer
    if (source / "commit.json").is_file():
        return check_commit(source).trainer
    return source


def _model_folder(given: Path | None, source: Path) -> Path:
    """Where config.json and tokenizer are."""
    if given is not None:
        return given
    kept = source / "hf"
    if (kept / "config.json").is_file():
        return kept
    raise ConfigError(f"{source} does not say which model it is of: give --hf-checkpoint, the Hugging Face folder that was trained.")
