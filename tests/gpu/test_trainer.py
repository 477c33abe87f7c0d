"""The trainer on a CUDA device, in bfloat16, against transformers in float32 on the same weights."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.conftest import samples, train_batch
from vime.backends.megatron_utils.loss import loss_from_logits
from vime.backends.megatron_utils.step import forward_backward
from vime.config.sections import AlgorithmConfig
from vime.packing.pack import pack
from vime.types import StepPlan

LENGTHS = [(5, 40), (100, 200), (1, 3), (17, 300), (64, 64)]
NAMES = {  # ours -> transformers', of parameters that are the same tensor on both sides
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.layers.0.self_attention.linear_proj.weight": "model.layers.0.self_attn.o_proj.weight",
    "decoder.layers.0.self_attention.q_layernorm.weight": "model.layers.0.self_attn.q_norm.weight",
    "decoder.layers.0.mlp.linear_fc2.weight": "model.layers.0.mlp.down_proj.weight",
    "decoder.layers.3.mlp.linear_fc2.weight": "model.layers.3.mlp.down_proj.weight",
    "decoder.layers.2.input_layernorm.weight": "model.layers.2.input_layernorm.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Any:
    from transformers import Qwen3ForCausalLM

    model: Any = Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32).cuda()
    return model


def log_probs_of(model: Any, tokens: Any) -> torch.Tensor:
    ids = torch.as_tensor(tokens, device="cuda")[None]
    return model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)


def test_the_fence_for_machines_without_cuda_is_not_there(trainer: Any) -> None:
    import megatron.core.tensor_parallel.random as generators

    from vime.backends.megatron_utils import cpu_activate

    assert not cpu_activate.ACTIVE
    assert generators.CudaRNGStatesTracker.__module__.startswith("megatron.")
    assert {p.dtype for chunk in trainer._model for p in chunk.parameters()} == {torch.bfloat16}
    assert {p.main_grad.dtype for chunk in trainer._model for p in chunk.parameters()} == {torch.float32}


@pytest.mark.parametrize("length", [2, 33, 700])
def test_log_probs_agree_with_transformers(trainer: Any, reference: Any, length: int) -> None:
    """bfloat16 keeps 8 bits: logits of size 5 are off by 0.02 and a log-prob by as much; a wrong position or mask gives 0.3 and more."""
    tokens = samples([(0, length)], seed=length)[0].tokens
    with torch.no_grad():
        theirs = log_probs_of(reference, tokens)
    ours = torch.tensor(trainer.log_probs(tokens.tolist()), device="cuda")
    assert float((ours - theirs).abs().mean()) < 0.02
    assert float((ours - theirs).abs().max()) < 0.15


def test_packed_gradients_agree_with_transformers(trainer: Any, reference: Any) -> None:
    """Five sequences in one pack against one after the other; relative to the norm of each parameter's gradient."""
    given = samples(LENGTHS)
    plan = StepPlan(micro_batches=(tuple(range(len(given))),), num_rollouts=len(given), num_tokens=float(sum(r for _, r in LENGTHS)))
    packed = trainer._to_device(pack(given, plan, aggregation="token"))
    algorithm = AlgorithmConfig(loss_type="sft_loss")

    def loss(logits: torch.Tensor, micro: Any, rows: torch.Tensor | None) -> Any:
        return loss_from_logits(logits, micro, algorithm, temperature=1.0, vocab_size=1000, rows=rows)

    for chunk in trainer._model:
        chunk.zero_grad_buffer()
    ours = float(forward_backward(trainer._model, [packed], loss, whole=False)[0]["loss"])
    reference.zero_grad()
    trained = [log_probs_of(reference, sample.tokens)[-sample.response_length :] for sample in given]
    theirs = -torch.cat(trained).mean()
    theirs.backward()
    assert abs(ours - float(theirs)) < 5e-3 * float(theirs)
    mine = {name.removeprefix("module."): p.main_grad for chunk in trainer._model for name, p in chunk.named_parameters()}
    its = dict(reference.named_parameters())
    for name, other in NAMES.items():
        wanted = its[other].grad
        error = float((mine[name][: len(wanted)] - wanted).norm() / wanted.norm())  # the vocabulary is padded
        assert error < 0.05, f"{name}: relative error {error:.3f}"


def test_the_gradients_of_several_packs_add_up(trainer: Any) -> None:
    given = samples(LENGTHS)
    norms = []
    for micro_batches in [((0, 1, 2, 3, 4),), ((0, 3), (1,), (2, 4))]:
        batch = train_batch(given, micro_batches)
        parts = [trainer._pack(batch, batch.steps[0], micro) for micro in micro_batches]
        for chunk in trainer._model:
            chunk.zero_grad_buffer()
        forward_backward(trainer._model, parts, trainer._loss, whole=False)
        norms.append(torch.cat([p.main_grad.flatten() for chunk in trainer._model for p in chunk.parameters()]))
    assert float((norms[0] - norms[1]).norm() / norms[0].norm()) < 0.02  # bfloat16 products of other sizes


def test_training_learns_a_batch_by_heart_and_resumes_exactly_from_a_save(trainer: Any, tmp_path: Path) -> None:
    batch = train_batch(samples(LENGTHS, seed=3), ((0, 3), (1, 2, 4)))
    first = trainer.train(batch)
    for _ in range(30):
        last = trainer.train(batch)
    assert last["train/loss"] < 0.5 * first["train/loss"]
    trainer.save(str(tmp_path))
    kept = [p.detach().clone() for chunk in trainer._model for p in chunk.parameters()]
    step = trainer.step
    trainer.train(batch)
    assert any(not torch.equal(a, b) for a, b in zip(kept, (p for chunk in trainer._model for p in chunk.parameters()), strict=True))
    trainer.load(str(tmp_path))
    assert trainer.step == step
    assert all(torch.equal(a, b) for a, b in zip(kept, (p for chunk in trainer._model for p in chunk.parameters()), strict=True))
    again = trainer.train(batch)
    assert again["train/loss"] == pytest.approx(last["train/loss"], rel=0.2)


def test_the_policy_loss_takes_a_step_with_old_log_probs(trainer: Any, model_folder: Path) -> None:
    """The whole path of GRPO: the log-probs that two optimizer steps need first, advantages, clipping, entropy."""
    given = samples(LENGTHS, seed=5)
    half = [(0, 1), (2, 3, 4)]
    plans = tuple(train_batch([given[i] for i in part], (part,)).steps[0] for part in half)
    batch = dataclasses.replace(train_batch(given, ()), steps=plans)
    kept = trainer._config
    trainer._config = dataclasses.replace(kept, algorithm=AlgorithmConfig(advantage_estimator="grpo", entropy_coef=0.01))
    try:
        metrics = trainer.train(batch)
    finally:
        trainer._config = kept
    assert metrics["train/num_steps"] == 2
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["train/grad_norm"] > 0
    assert metrics["perf/log_probs_time"] > 0
