"""Multi-token prediction: its layers learn, the model is trained bit for bit as without them, and folders keep their form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_models import add_prediction, write_model
from tests.unit.backends.megatron_utils.convert.test_families import free_port
from vime.backends.megatron_utils.actor import MegatronTrainer
from vime.backends.megatron_utils.convert.checkpoint import megatron_to_hf
from vime.backends.megatron_utils.convert.registry import model_ops, model_shape
from vime.backends.megatron_utils.convert.shape import with_prediction
from vime.backends.megatron_utils.convert.transfer import check_hf_weights
from vime.capsule.folder import SAMPLES, capsule_path, partial_path, read_capsule, write_prompts
from vime.config import sections as s
from vime.config.run import RunConfig
from vime.errors import CheckpointError, ConfigError
from vime.types import StepPlan, TrainBatch, TrainSample

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compares in float32 on the CPU")
FAMILIES = ("qwen3_5", "qwen3_next", "deepseek_v3")
LENGTHS = ((7, 3), (5, 4), (9, 6))  # (tokens, of which the last so many are trained)
CLIP = 0.01  # below every gradient norm here, so that one norm for all would show


def batch_of(number: int) -> TrainBatch:
    """One micro-batch of three sequences."""
    rng = np.random.default_rng(number)
    samples = [
        TrainSample(
            tokens=rng.integers(0, 90, length), response_length=trained, loss_mask=np.ones(trained, np.float32), reward=float(rng.normal()),
            raw_reward=0.0, sample_id=i, group_id=0, rollout_id=i, rollout_mask_sum=float(trained),
        )
        for i, (length, trained) in enumerate(LENGTHS)
    ]  # fmt: skip
    plan = StepPlan(micro_batches=((0, 1, 2),), num_rollouts=3, num_tokens=float(sum(trained for _, trained in LENGTHS)))
    return TrainBatch(rollout_id=number, samples=tuple(samples), steps=(plan,))


def trainer_of(folder: Path, debug: s.DebugConfig | None = None, **training: Any) -> MegatronTrainer:
    config = RunConfig(
        model=s.ModelConfig(hf_checkpoint=str(folder)),
        training=s.TrainingConfig(train_threads=1, lr=1e-3, clip_grad=CLIP, **training),
        data=s.DataConfig(num_rollout=10, rollout_batch_size=1),
        algorithm=s.AlgorithmConfig(loss_type="sft_loss", calculate_per_token_loss=True),
        debug=debug or s.DebugConfig(),
    )
    return MegatronTrainer(config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port())


def model_weights(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket in trainer.hf_weights(10_000) for name, tensor in bucket}


def of_layers(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    named = trainer._model[0].module.named_parameters()
    return {name: parameter.detach().clone() for name, parameter in named if name.startswith("mtp.")}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return add_prediction(write_model(request.param, tmp_path / request.param))


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_its_layers_learn_beside_a_model_that_is_trained_as_without_them(folder: Path, tmp_path: Path) -> None:
    before = load_file(folder / "model.safetensors")
    plain = trainer_of(folder)
    losses = [plain.train(batch_of(number))["train/loss"] for number in range(2)]
    expected = model_weights(plain)
    plain.shutdown()

    trainer = trainer_of(folder, enable_mtp_training=True)
    try:
        trainer.save_hf(str(tmp_path / "unchanged"))
        start = of_layers(trainer)
        metrics = [trainer.train(batch_of(number)) for number in range(2)]
        assert [m["train/loss"] for m in metrics] == losses
        assert all(m["train/mtp_loss"] > 0 for m in metrics)
        found = model_weights(trainer)
        moved = {name: float((value - start[name]).abs().max()) for name, value in of_layers(trainer).items()}
        trainer.save(str(tmp_path / "state"))
        trainer.save_hf(str(tmp_path / "trained"))
    finally:
        trainer.shutdown()
    unchanged, trained = (load_file(tmp_path / name / "model.safetensors") for name in ("unchanged", "trained"))
    assert set(unchanged) == set(before) == set(trained)
    assert all(torch.equal(unchanged[name], before[name]) for name in before)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert min(moved.values()) > 0
    assert {name for name in before if not torch.equal(before[name], trained[name])} == set(before)

    megatron_to_hf(tmp_path / "state", tmp_path / "converted", hf_folder=tmp_path / "state" / "hf", shard_bytes=10**9)
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert set(converted) == set(trained)
    assert all(torch.equal(converted[name], trained[name]) for name in trained)


@pytest.mark.parametrize("folder", ["deepseek_v3"], indirect=True)
def test_a_record_of_a_step_is_of_the_model_whose_layers_have_experts_as_theirs_have(folder: Path, tmp_path: Path) -> None:
    """Its own router runs in training alone, and not in the pass that a record looks at."""
    (partial := partial_path(tmp_path, 1)).mkdir()
    (partial / SAMPLES).touch()  # what the rollout writes
    write_prompts(partial, [], [])
    dump = str(tmp_path / "dump_{rollout_id}.pt")
    debug = s.DebugConfig(save_debug_train_data=dump, capsule_steps=[1], capsule_dir=str(tmp_path), capsule_state="stored")
    trainer = trainer_of(folder, debug, enable_mtp_training=True)
    trainer.train(batch_of(0))  # a dump alone
    trainer.train(batch_of(1))
    trainer.shutdown()
    for number in range(2):
        data = torch.load(dump.format(rollout_id=number), weights_only=True)["rollout_data"]
        assert [len(tokens) for tokens in data["tokens"]] == [length for length, _ in LENGTHS]
    items = {(item.stage, item.name): item for item in read_capsule(capsule_path(tmp_path, 1))[1]}
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"] - config["first_k_dense_replace"]
    assert {row.shape[1] for row in items["forward", "routing"].rows} == {layers}
    assert all((row >= 0).all() for row in items["forward", "routing"].rows)


@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_the_loss_is_the_cross_entropy_of_the_token_after_the_next(folder: Path) -> None:
    """Against the parts of transformers' own model, one sequence at a time."""
    trainer = trainer_of(folder, enable_mtp_training=True)
    found = trainer.train(batch_of(0))["train/mtp_loss"]
    trainer.shutdown()
    assert found == pytest.approx(plain_loss(folder, batch_of(0)), abs=1e-5)  # reached: 1e-6, of about 4.7


def plain_loss(folder: Path, batch: TrainBatch) -> float:
    """Mean over all trained tokens of minus the log-probability that the layer gives those of them that have two before them."""
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    config = model.config
    full = config.layer_types.index("full_attention")
    layer = Qwen3_5DecoderLayer(config, full)
    layer.load_state_dict({n.removeprefix("mtp.layers.0."): w for n, w in weights.items() if n.startswith("mtp.layers.0.")})

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        module.load_state_dict({"weight": weights[name]})
        return module(x)

    total = 0.0
    for sample in batch.samples:
        tokens = torch.from_numpy(sample.tokens)[None]
        count = tokens.shape[1] - 2  # positions that have a token after the next
        state = model.model(tokens).last_hidden_state[:, :count]
        embedded = model.model.embed_tokens(tokens[:, 1 : count + 1])
        joined = [norm("mtp.pre_fc_norm_embedding.weight", embedded), norm("mtp.pre_fc_norm_hidden.weight", state)]
        x = torch.cat(joined, -1) @ weights["mtp.fc.weight"].T
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        x = layer(x, position_embeddings=model.model.rotary_emb(x, positions), attention_mask=mask, position_ids=positions)
        x = norm("mtp.norm.weight", x[0] if isinstance(x, tuple) else x)
        log_probs = torch.log_softmax(model.lm_head(x)[0], -1).gather(-1, tokens[0, 2:, None])[:, 0]
        first = tokens.shape[1] - sample.response_length  # the first trained token
        total -= float(log_probs.detach()[max(0, first - 2) :].sum())
    return total / batch.steps[0].num_tokens


@pytest.mark.parametrize("folder", ["deepseek_v3"], indirect=True)
def test_without_weight_its_layers_do_not_move(folder: Path) -> None:
    trainer = trainer_of(folder, enable_mtp_training=True, mtp_loss_scaling_factor=0.0)
    start = of_layers(trainer)
    trainer.train(batch_of(0))
    after = of_layers(trainer)
    trainer.shutdown()
    decayed = {name for name, value in after.items() if not torch.equal(value, start[name])}
    assert all(torch.allclose(after[name], start[name] * (1 - 1e-3 * 0.01), rtol=1e-6, atol=0) for name in decayed)  # weight decay alone


def test_a_model_without_such_layers_and_another_number_of_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--enable-mtp-training: .* Leave it out"):
        with_prediction(model_shape(write_model("qwen3", tmp_path / "qwen3")), None)
    shape = model_shape(write_model("qwen3_next", tmp_path / "next"))
    with pytest.raises(ConfigError, match=r"--mtp-num-layers 2 contradicts .* which says 1"):
        with_prediction(shape, 2)


def test_a_folder_without_their_weights_or_with_an_embedding_of_their_own_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    def check(folder: Path) -> None:
        shape = with_prediction(model_shape(folder), None)
        check_hf_weights(folder, model_ops(shape, 128), shape)

    with pytest.raises(CheckpointError, match=r"'mtp\.pre_fc_norm_embedding\.weight' is missing"):
        check(write_model("qwen3_next", tmp_path / "next"))
    folder = add_prediction(write_model("deepseek_v3", tmp_path / "v3"))
    weights = load_file(folder / "model.safetensors")
    check(folder)
    weights["model.layers.2.embed_tokens.weight"] += 1.0
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight' differs from .* leave --enable-mtp-training out"):
        check(folder)
