"""Supervised samples: what is trained, what is context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.support import make_args
from vime.errors import ConfigError, DataError
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.sft_rollout import generate_rollout
from vime.utils.types import Sample


def rolled(model_dir: Path, tmp_path: Path, rows: list[dict[str, Any]], **flags: Any) -> Any:
    """The SFT rollout of some rows."""
    file = tmp_path / "sft.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = make_args(hf_checkpoint=str(model_dir), prompt_data=str(file), rollout_batch_size=len(rows), **flags)
    return generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def trained_text(sample: Sample, tokenizer: Any) -> list[str]:
    """The runs of trained tokens, decoded."""
    assert sample.loss_mask is not None
    runs, last = [], 0
    for token, flag in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True):
        if flag and not last:
            runs.append([])
        if flag:
            runs[-1].append(token)
        last = flag
    return [tokenizer.decode(piece) for piece in runs]


def test_every_assistant_turn_of_a_conversation_is_trained(model_dir: Path, tmp_path: Path, tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "4"},
    ]
    output = rolled(model_dir, tmp_path, [{"input": chat}])
    sample = output.samples[0][0]
    assert tokenizer.decode(sample.tokens) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert trained_text(sample, tokenizer) == ["2<|im_end|>", "4<|im_end|>"]
    assert sample.loss_mask[0] == 1
    assert sample.status is Sample.Status.COMPLETED
    assert sample.reward == 0.0
    assert output.metrics["rollout/trained_tokens"] == 4.0


def test_a_prompt_with_a_label_trains_the_label_and_the_end_token(model_dir: Path, tmp_path: Path, tokenizer: Any) -> None:
    row = {"input": [{"role": "user", "content": "3+4="}], "label": 7}
    sample = rolled(model_dir, tmp_path, [row], label_key="label", apply_chat_template=True).samples[0][0]
    assert tokenizer.decode(sample.tokens) == "<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n7<|im_end|>"
    assert trained_text(sample, tokenizer) == ["7<|im_end|>"]
    assert sample.response_length == 2


def test_text_without_a_label_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to train on"):
        rolled(model_dir, tmp_path, [{"input": "just text"}])


def test_a_conversation_without_an_answer_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no assistant turn"):
        rolled(model_dir, tmp_path, [{"input": [{"role": "user", "content": "hello"}]}])


def test_it_does_not_evaluate(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="cannot evaluate"):
        generate_rollout(make_args(hf_checkpoint=str(model_dir)), 0, None, evaluation=True)
