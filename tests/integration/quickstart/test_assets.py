"""The quickstart's assets and recipe: what they promise holds."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from examples.quickstart.make_assets import AssetSpec, make_assets
from examples.quickstart.recipe import grpo_flags, sft_flags
from examples.quickstart.reward import verified
from vime.utils.arguments import parse_args
from vime.utils.types import Sample

pytestmark = pytest.mark.integration

SMALL = AssetSpec(hidden_size=64, num_layers=1, ffn_size=64, num_sft=40, num_train=60, num_heldout=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quickstart folder with small assets, and the model where the supervised start leaves it."""
    path = tmp_path_factory.mktemp("quickstart")
    make_assets(path / "assets", SMALL)
    shutil.copytree(path / "assets" / "model", path / "sft" / "hf")
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_same_bytes_every_time(folder: Path, tmp_path: Path) -> None:
    make_assets(tmp_path, SMALL)
    files = [path.relative_to(tmp_path) for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert Path("model/model.safetensors") in files
    assert not [name for name in files if (tmp_path / name).read_bytes() != (folder / "assets" / name).read_bytes()]


def test_no_sum_is_in_two_files_or_twice_in_one(folder: Path) -> None:
    sums = [row["input"][0]["content"] for name in ("sft", "train", "heldout") for row in rows(folder / "assets" / f"{name}.jsonl")]
    assert len(sums) == 120
    assert len(set(sums)) == len(sums)


def test_labels_are_right_and_the_verifier_agrees(folder: Path) -> None:
    for row in rows(folder / "assets" / "heldout.jsonl"):
        assert sum(int(term) for term in row["input"][0]["content"].rstrip("=").split("+")) == int(row["label"])
        sample = Sample(response=f" {row['label']}\n", metadata=row["metadata"])
        assert asyncio.run(verified(None, sample)) == 1.0


def test_a_text_that_merely_contains_the_answer_gets_nothing(folder: Path) -> None:
    row = rows(folder / "assets" / "heldout.jsonl")[0]
    for response in (f"{row['label']}7", f"it is {row['label']}", ""):
        assert asyncio.run(verified(None, Sample(response=response, metadata=row["metadata"]))) == 0.0


def test_transformers_loads_the_model_and_the_template_ends_where_the_answer_begins(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "assets" / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "assets" / "model")
    row = rows(folder / "assets" / "train.jsonl")[0]
    prompt = tokenizer.apply_chat_template(row["input"], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*row["input"], {"role": "assistant", "content": row["label"]}], tokenize=False)
    assert whole.startswith(prompt + row["label"] + tokenizer.eos_token)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert len(ids) <= 32
    assert tokenizer.decode(ids) == prompt
    assert max(ids) < model.config.vocab_size == len(tokenizer)


def test_too_many_rows_are_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gave 100 different sums, 220 are wanted: ask for fewer rows"):
        make_assets(tmp_path, AssetSpec(hidden_size=64, num_layers=1, num_terms=2, num_sft=100, num_train=100, num_heldout=20))


def test_both_command_lines_are_valid(folder: Path) -> None:
    assert parse_args(sft_flags(folder)).debug.debug_train_only
    config = parse_args(grpo_flags(folder))
    assert (config.data.rollout_batch_size or 0) * config.data.n_samples_per_prompt == 512
