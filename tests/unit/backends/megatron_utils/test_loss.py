"""The loss of a micro-batch against plain loops over samples and tokens, and the same whatever the packing and the split."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.algorithms.advantages import compute_advantages
from vime.backends.megatron_utils.loss import LossHooks, loss_from_logits, packed_log_probs, value_loss
from vime.backends.megatron_utils.loss_policy import with_mean_importance
from vime.config.sections import AlgorithmConfig, DataConfig, RewardConfig
from vime.errors import ConfigError, DataError, HookError
from vime.packing.build import build_train_batches
from vime.packing.pack import AGGREGATIONS, PackedBatch, aggregation_of, pack
from vime.types import FILLER_ID, StepPlan, TrainBatch, TrainSample
from vime.utils.types import Sample

VOCAB, WIDTH = 11, 12  # one column of padding
CONSTANT = 16  # tokens, for --loss-aggregation constant
FULL = AlgorithmConfig(
    eps_clip=0.2,
    eps_clip_high=0.28,
    eps_clip_c=3.0,
    use_kl_loss=True,
    kl_loss_coef=0.1,
    kl_loss_type="k3",
    entropy_coef=0.01,
)


def rollout(lengths: list[tuple[int, int]], siblings: int = 1) -> list[Sample]:
    """Scored samples with these (prompt, response) lengths, in groups of four samples; each third token is not trained."""
    generator = np.random.default_rng(sum(r for _, r in lengths))
    out = []
    for index, (prompt, response) in enumerate(lengths):
        rollout_id = index // siblings
        out.append(
            Sample(
                index=index,
                rollout_id=rollout_id,
                group_index=rollout_id // 4,
                tokens=generator.integers(0, VOCAB, prompt + response).tolist(),
                response_length=response,
                loss_mask=[int(position % 3 != 1) for position in range(response)],
                reward=float(rollout_id % 3),
                rollout_log_probs=(-3 * generator.random(response)).tolist(),
                status=Sample.Status.COMPLETED,
            )
        )
    return out


def token_values(sample_id: int, count: int, salt: int) -> torch.Tensor:
    """[count] log-probs that belong to a sample, whatever the packing."""
    return -3 * torch.rand(count, generator=torch.Generator().manual_seed(100 * salt + sample_id + 1))


def logits_of(sample: TrainSample) -> torch.Tensor:
    """[T, WIDTH] float64 logits that belong to a sample."""
    generator = torch.Generator().manual_seed(sample.sample_id + 1)
    return 2 * torch.randn(sample.length, WIDTH, generator=generator, dtype=torch.float64)


def micro_batch(members: list[TrainSample], plan: StepPlan, algorithm: AlgorithmConfig, multiple_of: int = 1) -> PackedBatch:
    """Packed, with advantages, old and reference log-probs."""
    packed = pack(members, plan, aggregation=aggregation_of(algorithm), constant_length=CONSTANT, multiple_of=multiple_of)
    return packed.with_token_values(
        advantages=compute_advantages(members, algorithm)[0],
        old_log_probs=[token_values(s.sample_id, s.response_length, 1) for s in members],
        ref_log_probs=[token_values(s.sample_id, s.response_length, 2) for s in members],
    )


def whole_step(
    batches: list[TrainBatch], algorithm: AlgorithmConfig, multiple_of: int = 1
) -> tuple[float, dict[str, float], dict[int, torch.Tensor]]:
    """Loss, metrics and the gradient of each sample's logits, summed over all ranks and micro-batches."""
    loss, metrics, gradients = 0.0, dict[str, float](), dict[int, torch.Tensor]()
    for batch in batches:
        for plan in batch.steps:
            for micro in plan.micro_batches:
                members = [batch.samples[i] for i in micro]
                packed = micro_batch(members, plan, algorithm, multiple_of)
                leaves = [logits_of(s).requires_grad_() for s in members]
                padding = torch.full((packed.num_tokens - sum(s.length for s in members), WIDTH), 7.0, dtype=torch.float64)
                part, sums = loss_from_logits(torch.cat([*leaves, padding]), packed, algorithm, temperature=0.9, vocab_size=VOCAB)
                part.backward()
                loss += part.item()
                for name, value in sums.items():
                    metrics[name] = metrics.get(name, 0.0) + value.item()
                for sample, leaf in zip(members, leaves, strict=True):
                    assert leaf.grad is not None
                    assert sample.sample_id == FILLER_ID or sample.sample_id not in gradients
                    gradients[sample.sample_id] = leaf.grad
    return loss, metrics, gradients


def batches_of(samples: list[Sample], algorithm: AlgorithmConfig, data: DataConfig, dp_size: int) -> list[TrainBatch]:
    """One optimizer step."""
    return build_train_batches(
        samples, rollout_id=0, data=data, algorithm=algorithm, reward=RewardConfig(), dp_size=dp_size, args=SimpleNamespace(reward_key=None)
    )


def by_hand(samples: list[TrainSample], algorithm: AlgorithmConfig) -> tuple[float, dict[str, float]]:
    """The step's loss and metrics by loops over samples and tokens in Python floats."""
    trained = sum(float(s.loss_mask.sum()) for s in samples)
    rollouts = len({s.rollout_id for s in samples})
    sums = dict.fromkeys(["pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "kl_loss", "train_rollout_logprob_abs_diff"], 0.0)
    for sample in samples:
        logits = logits_of(sample).numpy()[:, :VOCAB] / 0.9
        old = token_values(sample.sample_id, sample.response_length, 1).tolist()
        ref = token_values(sample.sample_id, sample.response_length, 2).tolist()
        mine = sum(float(s.loss_mask.sum()) for s in samples if s.rollout_id == sample.rollout_id)
        for j in range(sample.response_length):
            if not sample.loss_mask[j]:
                continue
            position = sample.length - sample.response_length + j
            row = [math.exp(z) for z in logits[position - 1]]
            p = [e / sum(row) for e in row]
            new = math.log(p[int(sample.tokens[position])])
            ratio, advantage = math.exp(new - old[j]), float(np.float32(sample.reward))
            bounded = min(max(ratio, 1 - algorithm.eps_clip), 1 + (algorithm.eps_clip_high or algorithm.eps_clip))
            pg = max(-ratio * advantage, -bounded * advantage)
            if algorithm.eps_clip_c is not None and advantage < 0:
                pg = min(pg, -algorithm.eps_clip_c * advantage)
            d = new - ref[j]
            assert sample.rollout_log_probs is not None
            own = float(sample.loss_mask.sum())
            weight = {"token": 1 / trained, "rollout": 1 / mine / rollouts, "sequence": 1 / own / len(samples),
                      "constant": 1 / CONSTANT / rollouts}[algorithm.loss_aggregation]  # fmt: skip
            sums["pg_loss"] += weight * pg
            sums["entropy_loss"] += weight * -sum(q * math.log(q) for q in p)
            sums["pg_clipfrac"] += weight * (-bounded * advantage > -ratio * advantage)
            sums["ppo_kl"] += weight * (old[j] - new)
            sums["kl_loss"] += weight * (math.exp(-d) - 1 + d)
            sums["train_rollout_logprob_abs_diff"] += weight * abs(old[j] - float(sample.rollout_log_probs[j]))
    loss = sums["pg_loss"] - algorithm.entropy_coef * sums["entropy_loss"] + algorithm.kl_loss_coef * sums["kl_loss"]
    return loss, {"loss": loss, **sums}


LENGTHS = [(3, 4), (1, 9), (2, 1), (5, 6), (2, 2), (1, 3), (4, 12), (2, 5)]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("siblings", [1, 2])
def test_policy_loss_and_metrics_equal_loops_over_tokens(aggregation: str, siblings: int) -> None:
    algorithm = replace(FULL, loss_aggregation=aggregation)
    batches = batches_of(rollout(LENGTHS, siblings), algorithm, DataConfig(micro_batch_size=3), 1)
    loss, metrics, _ = whole_step(batches, algorithm, multiple_of=8)
    expected, expected_metrics = by_hand(list(batches[0].samples), algorithm)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6, abs=1e-6)
    assert 0 < metrics["pg_clipfrac"] < 1


@given(
    lengths=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=10),
    dp_size=st.integers(1, 3),
    budget=st.integers(6, 40),
    multiple_of=st.sampled_from([1, 4, 16]),
    aggregation=st.sampled_from(AGGREGATIONS),
    estimator=st.sampled_from(["grpo", "gspo", "cispo"]),
    siblings=st.integers(1, 2),
)
@settings(max_examples=40, deadline=None)
def test_loss_and_gradients_do_not_depend_on_packing_or_split(
    lengths: list[tuple[int, int]], dp_size: int, budget: int, multiple_of: int, aggregation: str, estimator: str, siblings: int
) -> None:
    corrections = {"use_tis": True, "tis_level": "geometric", "use_rs": True, "rs_level": "sequence", "rs_lower_bound": 1e-3}
    algorithm = replace(FULL, loss_aggregation=aggregation, advantage_estimator=estimator, use_opsm=True, **corrections)  # type: ignore[arg-type]
    samples = rollout(lengths, siblings)
    one_by_one = whole_step(batches_of(samples, algorithm, DataConfig(micro_batch_size=1), 1), algorithm)
    data = DataConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=budget)
    packed = whole_step(batches_of(samples, algorithm, data, dp_size), algorithm, multiple_of)
    assert packed[0] == pytest.approx(one_by_one[0], abs=1e-9)
    assert packed[1] == pytest.approx(one_by_one[1], abs=1e-6)
    assert set(one_by_one[2]) == set(range(len(lengths)))
    for sample_id, gradient in one_by_one[2].items():
        torch.testing.assert_close(packed[2][sample_id], gradient, rtol=0, atol=1e-9)
    filler = packed[2].get(FILLER_ID)
    assert filler is None or filler.count_nonzero() == 0


def example(algorithm: AlgorithmConfig = FULL) -> tuple[PackedBatch, torch.Tensor]:
    """One micro-batch that is a whole step, and its logits."""
    batch = batches_of(rollout(LENGTHS), algorithm, DataConfig(micro_batch_size=8), 1)[0]
    packed = micro_batch(list(batch.samples), batch.steps[0], algorithm)
    return packed, torch.cat([logits_of(s) for s in batch.samples])


def test_gradients_by_finite_differences() -> None:
    packed, logits = example()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: loss_from_logits(z, packed, FULL, temperature=0.9, vocab_size=VOCAB)[0], logits)


@pytest.mark.parametrize("algorithm", [FULL, AlgorithmConfig(loss_type="sft_loss")])
def test_logits_of_the_scored_rows_are_enough(algorithm: AlgorithmConfig) -> None:
    packed, logits = example(algorithm)
    rows = packed.scored_rows
    assert len(rows) < packed.num_tokens
    results = []
    for leaf, at in ((logits.clone().requires_grad_(), None), (logits[rows].requires_grad_(), rows)):
        loss, metrics = loss_from_logits(leaf, packed, algorithm, temperature=0.9, vocab_size=VOCAB, rows=at)
        loss.backward()
        results.append((loss, metrics, leaf.grad if at is not None else leaf.grad[rows]))  # type: ignore[index]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


def test_a_micro_batch_without_trained_tokens_has_loss_zero() -> None:
    packed, logits = example()
    untrained = PackedBatch(
        **{f: getattr(packed, f) for f in PackedBatch.__slots__}
        | {"loss_mask": torch.zeros_like(packed.loss_mask), "loss_weight": torch.zeros_like(packed.loss_weight)}
    )
    leaf = logits[untrained.scored_rows].requires_grad_()
    loss, _ = loss_from_logits(leaf, untrained, FULL, temperature=0.9, vocab_size=VOCAB, rows=untrained.scored_rows)
    loss.backward()
    assert leaf.shape[0] == 1
    assert loss.item() == 0.0
    assert not leaf.grad.any()  # type: ignore[union-attr]


def test_without_old_log_probs_the_policy_is_its_own_old_one() -> None:
    packed, logits = example(AlgorithmConfig())
    own = packed_log_probs(logits, packed, temperature=0.9, vocab_size=VOCAB)[0].detach()
    results = []
    for old in (None, own.float()):
        leaf = logits.clone().requires_grad_()
        without = PackedBatch(**{f: getattr(packed, f) for f in PackedBatch.__slots__} | {"old_log_probs": old})
        loss, metrics = loss_from_logits(leaf, without, AlgorithmConfig(), temperature=0.9, vocab_size=VOCAB)
        loss.backward()
        results.append((loss.item(), leaf.grad))
        assert metrics["ppo_kl"].item() == pytest.approx(0.0, abs=1e-6)
        assert metrics["pg_clipfrac"].item() == 0.0
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-6)


def test_rollout_log_probs_can_stand_for_the_old_policys() -> None:
    algorithm = AlgorithmConfig(use_rollout_logprobs=True)
    packed, logits = example(algorithm)
    swapped = packed.with_token_values(old_log_probs=packed.rollout_log_probs)  # type: ignore[arg-type]
    got = loss_from_logits(logits, packed, algorithm, temperature=1.0, vocab_size=VOCAB)
    expected = loss_from_logits(logits, swapped, AlgorithmConfig(), temperature=1.0, vocab_size=VOCAB)
    assert got[0].item() == expected[0].item()
    assert got[1]["train_rollout_logprob_abs_diff"] > 0.1


def test_metrics_are_detached_and_named_as_slimes() -> None:
    packed, logits = example()
    _, metrics = loss_from_logits(logits.requires_grad_(), packed, FULL, temperature=1.0, vocab_size=VOCAB)
    names = ["loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "kl_loss", "train_rollout_logprob_abs_diff"]
    assert list(metrics) == names
    assert not any(value.requires_grad for value in metrics.values())
    _, metrics = loss_from_logits(logits, packed, AlgorithmConfig(loss_type="sft_loss"), temperature=1.0, vocab_size=VOCAB)
    assert list(metrics) == ["loss"]


@pytest.mark.parametrize("per_token", [False, True])
def test_sft_loss_is_the_mean_negative_log_likelihood(per_token: bool) -> None:
    algorithm = AlgorithmConfig(loss_type="sft_loss", calculate_per_token_loss=per_token)
    packed, logits = example(algorithm)
    loss, _ = loss_from_logits(logits, packed, algorithm, temperature=1.0, vocab_size=VOCAB)
    nll = torch.nn.functional.cross_entropy(logits[:, :VOCAB], packed.labels, reduction="none")
    means = [(v * m).sum() / m.sum() for v, m in zip(packed.gather(nll), packed.gather(packed.loss_mask), strict=True)]
    expected = (nll * packed.loss_mask).sum() / packed.loss_mask.sum() if per_token else torch.stack(means).mean()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
def test_a_custom_loss_in_slimes_form_gives_the_built_in_loss(per_token: bool) -> None:
    built_in = AlgorithmConfig(loss_type="sft_loss", calculate_per_token_loss=per_token)
    custom = AlgorithmConfig(loss_type="custom_loss", calculate_per_token_loss=per_token)
    packed, logits = example(built_in)

    def user_loss(args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Callable[..., Any]) -> Any:
        assert args == "args"
        start, nll = 0, []
        for tokens, total, response in zip(batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True):
            rows = logits[0, start + total - response - 1 : start + total - 1, :VOCAB]
            nll.append(torch.nn.functional.cross_entropy(rows, tokens[total - response :], reduction="none"))
            start += total
        loss = sum_of_sample_mean(torch.cat(nll))
        return loss, {"nll": loss.detach(), "entropy": sum_of_sample_mean(torch.cat(batch["compute_log_probs"](with_entropy=True)[1]))}

    results = []
    for algorithm, hook in ((built_in, None), (custom, user_loss)):
        leaf = logits.clone().requires_grad_()
        loss, metrics = loss_from_logits(
            leaf, packed, algorithm, temperature=1.0, vocab_size=VOCAB, hooks=LossHooks(custom_loss=hook, args="args")
        )
        loss.backward()
        results.append((loss.item(), leaf.grad, metrics))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-6, atol=1e-7)
    assert results[1][2]["nll"].item() == pytest.approx(results[0][0], rel=1e-6)
    assert 0 < results[1][2]["entropy"].item() < math.log(VOCAB)


def test_a_recomputed_custom_loss_keeps_the_logits_alone_and_has_the_same_gradient() -> None:
    algorithm = AlgorithmConfig(loss_type="custom_loss")
    packed, logits = example(algorithm)
    calls = []

    def user_loss(args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Callable[..., Any]) -> Any:
        calls.append(logits.shape)
        rows = torch.cat([part.exp().log1p().sin() for part in packed.gather(logits[0])])
        return sum_of_sample_mean(rows.sum(-1)), {}

    gradients, kept = [], []
    for recompute in (False, True):
        leaf, sizes = logits.clone().requires_grad_(), []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hooks = LossHooks(custom_loss=user_loss, recompute=recompute)
            loss, _ = loss_from_logits(leaf, packed, algorithm, temperature=1.0, vocab_size=VOCAB, hooks=hooks)
        loss.backward()
        gradients.append(leaf.grad)
        kept.append(sum(sizes))
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])
    assert len(calls) == 3  # once, and once more in the backward pass
    assert kept[1] == logits.numel() < kept[0]


def raises(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> Any:
    """A hook with a bug."""
    return batch["no such field"]


def returns_a_float(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> Any:
    """A hook that cut the graph."""
    return 1.0, {}


def gives_wrong_length(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> Any:
    """A hook that confuses packed and response-aligned values."""
    return sum_of_sample_mean(logits[0, :, 0]), {}


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (raises, "raised KeyError: 'no such field'"),
        (returns_a_float, "returned float as loss"),
        (gives_wrong_length, "one value per response token"),
    ],
)
def test_a_custom_loss_that_fails_is_a_hook_error(hook: Any, message: str) -> None:
    algorithm = AlgorithmConfig(loss_type="custom_loss")
    packed, logits = example(algorithm)
    with pytest.raises(HookError, match=message):
        loss_from_logits(logits, packed, algorithm, temperature=1.0, hooks=LossHooks(custom_loss=hook))


CORRECTED = AlgorithmConfig(
    advantage_estimator="gspo", use_tis=True, tis_mode="clip", tis_clip_low=0.5, tis_clip=1.5, use_rs=True, rs_upper_bound=4.0,
    rs_lower_bound=0.2, use_opsm=True, opsm_delta=0.1, get_mismatch_metrics=True, use_kl_loss=True, kl_loss_coef=0.2, use_unbiased_kl=True,
)  # fmt: skip


def test_corrections_weigh_the_surrogate_and_nothing_else() -> None:
    """Token by token: clip(w) x kept x off-policy mask x GSPO's surrogate, and the KL term weighted by pi / pi_old."""
    packed, logits = example(CORRECTED)
    new = packed_log_probs(logits, packed, temperature=0.9, vocab_size=VOCAB)[0].tolist()
    old, engine, ref, advantages = (
        getattr(packed, name).tolist() for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
    )
    pg = kl = tis = rejected = masked = 0.0
    for where in packed.response_slices():
        trained = [t for t in range(where.start, where.stop) if packed.loss_mask[t]]
        if not trained:
            continue
        s = math.exp(sum(new[t] - old[t] for t in trained) / len(trained))
        drift = sum(engine[t] - new[t] for t in trained) / len(trained)
        for t in trained:
            weight = packed.loss_weight[t].item()
            w = math.exp(old[t] - engine[t])
            surrogate = max(-s * advantages[t], -min(max(s, 0.8), 1.2) * advantages[t])
            kept = 0.2 <= w <= 4.0
            silent = advantages[t] < 0 and drift > 0.1
            pg += weight * min(max(w, 0.5), 1.5) * kept * (not silent) * surrogate
            kl += weight * math.exp(new[t] - old[t]) * (new[t] - ref[t])
            tis, rejected, masked = tis + weight * min(max(w, 0.5), 1.5), rejected + weight * (not kept), masked + weight * silent
    loss, metrics = loss_from_logits(logits, packed, CORRECTED, temperature=0.9, vocab_size=VOCAB)
    expected = {"loss": pg + 0.2 * kl, "pg_loss": pg, "kl_loss": kl, "tis": tis, "rs_rejected_frac": rejected, "opsm_clipfrac": masked}
    assert {name: metrics[name].item() for name in expected} == pytest.approx(expected, abs=1e-6)
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    assert 0 < rejected < 1
    assert 0 < masked < 1
    assert {"ois", "mismatch_kl", "mismatch_k3_kl", "mismatch_chi2"} <= set(metrics)


def test_normalised_weights_have_mean_1_over_the_tokens_of_the_step() -> None:
    algorithm = AlgorithmConfig(use_tis=True, tis_batch_normalize=True, loss_aggregation="token")
    batch = batches_of(rollout(LENGTHS), algorithm, DataConfig(micro_batch_size=3), 1)[0]
    step = [micro_batch([batch.samples[i] for i in micro], batch.steps[0], algorithm) for micro in batch.steps[0].micro_batches]
    whole = with_mean_importance(step, algorithm, lambda sums: sums)
    seen: list[torch.Tensor] = []
    for half in (step[:1], step[1:]):  # two data-parallel ranks, each with its own sums
        with_mean_importance(half, algorithm, lambda sums: (seen.append(sums), sums)[1])  # type: ignore[func-returns-value]
    (split,) = {packed.mean_importance for packed in with_mean_importance(step[:1], algorithm, lambda _: seen[0] + seen[1])}
    assert [packed.mean_importance for packed in whole] == pytest.approx([split] * len(step), abs=1e-12)
    tis = 0.0
    for packed in whole:
        logits = torch.zeros(packed.num_tokens, WIDTH, dtype=torch.float64)
        tis += loss_from_logits(logits, packed, algorithm, temperature=1.0, vocab_size=VOCAB)[1]["tis"].item()
    assert tis == pytest.approx(1.0, abs=1e-6)


def test_gradients_with_corrections_by_finite_differences() -> None:
    packed, logits = example(CORRECTED)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: loss_from_logits(z, packed, CORRECTED, temperature=0.9, vocab_size=VOCAB)[0], logits)


def own_tis(*, args: Any, pg_loss: Any, train_log_probs: Any, rollout_log_probs: Any, loss_masks: Any, **more: Any) -> Any:
    """The built-in correction in slime's form: weights within [0, 2], and no token beyond 4."""
    assert [len(m) for m in loss_masks] == more["response_lengths"]
    weights = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    masks = [m * (w <= 4).float() for m, w in zip(loss_masks, weights.split(more["response_lengths"]), strict=True)]
    return pg_loss * weights.clamp(0, 2), masks, {"own_tis": weights.clamp(0, 2)}


def own_mean(total_lengths: Any, response_lengths: Any, loss_masks: Any, calculate_per_token_loss: bool) -> Any:
    """slime's default reducer for samples that are rollouts of their own."""

    def reduce(values: torch.Tensor) -> torch.Tensor:
        means = [(v * m).sum() / m.sum().clamp(min=1) for v, m in zip(values.split(response_lengths), loss_masks, strict=True)]
        return torch.stack(means).sum()

    return reduce


def test_a_users_correction_and_reducer_in_slimes_form_give_the_built_in_ones() -> None:
    built_in = AlgorithmConfig(use_tis=True, use_rs=True, rs_lower_bound=0.0, rs_upper_bound=4.0)
    packed, logits = example(built_in)
    expected, metrics = loss_from_logits(logits, packed, built_in, temperature=0.9, vocab_size=VOCAB)
    hooks = LossHooks(custom_tis=own_tis, pg_loss_reducer=own_mean, args=SimpleNamespace())
    got, own = loss_from_logits(logits, packed, AlgorithmConfig(use_tis=True), temperature=0.9, vocab_size=VOCAB, hooks=hooks)
    assert got.item() == pytest.approx(expected.item(), abs=1e-6)
    assert own["own_tis"].item() == pytest.approx(metrics["tis"].item(), abs=1e-6)


def test_a_correction_or_reducer_that_fails_is_a_hook_error() -> None:
    packed, logits = example()
    for hooks, message in (
        (LossHooks(custom_tis=lambda **k: k["nothing"], args=SimpleNamespace()), "--custom-tis-function-path"),
        (LossHooks(pg_loss_reducer=lambda *a: lambda x: x, args=SimpleNamespace()), "tensor with one element"),
    ):
        with pytest.raises(HookError, match=message):
            loss_from_logits(logits, packed, AlgorithmConfig(use_tis=True), temperature=1.0, hooks=hooks)


def test_the_value_loss_is_averaged_as_the_policys_is() -> None:
    packed, _ = example()
    values = torch.randn(packed.num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values.requires_grad_()
    sizes = list(zip(packed.sample_ids, packed.response_lengths, strict=True))
    packed = packed.with_token_values(values=[token_values(i, n, 3) for i, n in sizes], returns=[token_values(i, n, 4) for i, n in sizes])
    loss, metrics = value_loss(values, packed, value_clip=0.2)
    expected = 0.0
    for t in packed.trained_rows.tolist():
        v, o, g = values[t].item(), packed.values[t].item(), packed.returns[t].item()  # type: ignore[index]
        expected += packed.loss_weight[t].item() * max((v - g) ** 2, (min(max(v, o - 0.2), o + 0.2) - g) ** 2)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert list(metrics) == ["loss", "value_loss", "value_clipfrac", "values", "returns"]
    loss.backward()
    assert values.grad is not None
    assert not values.grad[packed.loss_mask == 0].any()


def test_missing_values_and_unknown_losses_are_refused() -> None:
    packed, logits = example()
    bare = PackedBatch(**{f: getattr(packed, f) for f in PackedBatch.__slots__} | {"ref_log_probs": None})
    with pytest.raises(DataError, match="no ref_log_probs, which --use-kl-loss needs"):
        loss_from_logits(logits, bare, FULL, temperature=1.0)
    with pytest.raises(ConfigError, match="--custom-loss-function-path"):
        loss_from_logits(logits, packed, AlgorithmConfig(loss_type="custom_loss"), temperature=1.0)
    with pytest.raises(ConfigError, match="known are policy_loss, sft_loss, custom_loss"):
        loss_from_logits(logits, packed, AlgorithmConfig(loss_type="mean"), temperature=1.0)
