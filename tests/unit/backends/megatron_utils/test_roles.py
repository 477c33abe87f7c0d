"""Sets of weights that change places with those in a model; the critic's view of a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vime.backends.megatron_utils.critic import critic_config
from vime.backends.megatron_utils.lora_ops import is_adapter
from vime.backends.megatron_utils.loss_policy import needs_old_log_probs
from vime.backends.megatron_utils.roles import HeldWeights, SentVersions
from vime.config import sections as s
from vime.config.run import RunConfig
from vime.errors import DataError
from vime.packing.pack import PackedBatch, pack
from vime.types import StepPlan, TrainSample


def state(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def fill(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


def test_weights_change_places_and_come_back_bit_for_bit() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, track_running_stats=False))
    model.register_buffer("bias_of_experts", torch.zeros(5))
    held = HeldWeights([model])
    fill(model, 1)
    reference = state(model)
    held.keep("ref")
    fill(model, 2)
    policy, places = state(model), [p.data_ptr() for p in model.parameters()]
    assert "ref" in held
    assert "teacher" not in held
    for _ in range(2):
        with held.using("ref"):
            assert same(state(model), reference)
        assert same(state(model), policy)
    assert [p.data_ptr() for p in model.parameters()] == places


def test_what_is_changed_meanwhile_belongs_to_the_role() -> None:
    model = torch.nn.Linear(2, 2)
    held = HeldWeights([model])
    fill(model, 1)
    held.keep("ref")
    fill(model, 2)
    policy = state(model)
    with held.using("ref"):
        fill(model, 3)
        changed = state(model)
    seen = []

    def failing_pass() -> None:
        with held.using("ref"):
            seen.append(same(state(model), changed))
            raise RuntimeError("the pass failed")

    with pytest.raises(RuntimeError, match="the pass failed"):
        failing_pass()
    assert seen == [True]
    assert same(state(model), policy)


def test_only_the_weights_that_are_chosen_are_held() -> None:
    """With adapters a version of the policy is its adapters, and a reference is what they stand on."""
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 2), "layer_adapter": torch.nn.Linear(2, 2)})
    adapters, base = HeldWeights([model], is_adapter), HeldWeights([model], lambda name: not is_adapter(name))
    fill(model, 1)
    adapters.keep("version 1")
    base.keep("ref")
    first = state(model)
    fill(model, 2)
    second = state(model)
    with adapters.using("version 1"):
        assert same(state(model), second[:2] + first[2:])
    with base.using("ref"):
        assert same(state(model), first[:2] + second[2:])
    assert same(state(model), second)


def packed_with(versions: list[int], engine: bool = True) -> PackedBatch:
    """One sample whose tokens were sampled under `versions`; the engine said -9 everywhere."""
    count = len(versions)
    sample = TrainSample(
        tokens=np.arange(count + 1), response_length=count, loss_mask=np.ones(count, np.float32), reward=0.0, raw_reward=0.0, sample_id=7,
        group_id=0, rollout_id=0, rollout_mask_sum=float(count), weight_versions=np.array(versions, np.float32),
        rollout_log_probs=np.full(count, -9.0, np.float32) if engine else None,
    )  # fmt: skip
    return pack([sample], StepPlan(micro_batches=((0,),), num_rollouts=1, num_tokens=float(count)))


def old_log_probs(versions: list[int], *, engine: bool = True) -> list[float]:
    """Weights of versions 1, 2 and 3 were sent, and each gives minus its number as log-prob."""
    model = torch.nn.Linear(1, 1, bias=False)
    sent = SentVersions(HeldWeights([model]))
    for version in (1, 2, 3, 4):  # 4 was not sent
        torch.nn.init.constant_(model.weight, -float(version))
        if version < 4:
            sent.keep(version)
    packed = packed_with(versions, engine)

    def compute() -> list[list[PackedBatch]]:
        return [[packed.with_token_values(old_log_probs=torch.full((packed.num_tokens,), model.weight.item()))]]

    ((out,),) = sent.old_log_probs([[packed]], compute, lambda flags: flags)
    assert model.weight.item() == -4.0
    assert out.old_log_probs is not None
    return out.old_log_probs[: len(versions)].tolist()


def test_each_token_is_judged_by_the_weights_that_sampled_it() -> None:
    assert old_log_probs([3, 2, 2, 3]) == [-3.0, -2.0, -2.0, -3.0]


def test_where_the_weights_are_gone_the_engines_word_counts() -> None:
    assert old_log_probs([1, 3, -1]) == [-9.0, -3.0, -9.0]


def test_without_either_the_samples_are_named() -> None:
    with pytest.raises(DataError, match=r"holds the weight versions \[2, 3\], and samples \[7\]... have tokens of \[1, 3\]"):
        old_log_probs([1, 3], engine=False)


def test_the_critic_sees_its_own_folder_rate_and_warm_up() -> None:
    config = RunConfig(
        model=s.ModelConfig(hf_checkpoint="policy", ref_load="reference", ref_update_interval=3),
        training=s.TrainingConfig(lr=1e-6),
        algorithm=s.AlgorithmConfig(advantage_estimator="ppo", kl_coef=0.1, loss_aggregation="token", use_tis=True),
        critic=s.CriticConfig(critic_load="critic", critic_lr=1e-5, critic_lr_warmup_iters=7),
        megatron_tokens=("--lr-warmup-iters", "100", "--weight-decay", "0.1", "--lr-warmup-fraction=0.1"),
    )
    own = critic_config(config)
    assert (own.model.hf_checkpoint, own.training.lr) == ("critic", 1e-5)
    assert own.megatron_tokens == ("--weight-decay", "0.1", "--lr-warmup-iters", "7")
    assert own.algorithm == s.AlgorithmConfig(loss_type="value_loss", advantage_estimator="ppo", loss_aggregation="token")
    assert own.model.ref_update_interval is None
    plain = critic_config(RunConfig(model=s.ModelConfig(hf_checkpoint="policy"), training=s.TrainingConfig(lr=2e-6)))
    assert (plain.model.hf_checkpoint, plain.training.lr) == ("policy", 2e-6)


@pytest.mark.parametrize(
    ("changes", "steps", "needed"),
    [
        ({}, 1, False),
        ({}, 2, True),
        ({"use_rollout_logprobs": True}, 2, False),
        ({"use_tis": True}, 1, False),
        ({"use_rollout_entropy": True}, 1, True),
        ({"kl_coef": 0.1, "advantage_estimator": "ppo"}, 1, True),
        ({"use_opd": True, "opd_type": "megatron"}, 1, True),
        ({"loss_type": "sft_loss"}, 2, False),
    ],
)
def test_old_log_probs_are_computed_where_something_reads_them(changes: dict[str, object], steps: int, needed: bool) -> None:
    assert needs_old_log_probs(s.AlgorithmConfig(**changes), num_steps=steps) == needed  # type: ignore[arg-type]
