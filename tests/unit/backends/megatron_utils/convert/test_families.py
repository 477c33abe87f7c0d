"""Each family against transformers: the same names, the same weights bit for bit, the same log-probabilities."""

from __future__ import annotations

import contextlib
import random
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_models import MODELS, SIZE, write_model
from vime.backends.megatron_utils.actor import MegatronTrainer
from vime.backends.megatron_utils.convert import registry
from vime.config import sections as s
from vime.config.run import RunConfig
from vime.errors import CheckpointError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compares in float32 on the CPU")
TOLERANCE = 1e-4  # natural log-probabilities; reached are 3e-6


def free_port() -> int:
    rng = random.SystemRandom()
    while True:
        port = rng.randrange(15_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.mark.parametrize("name", MODELS)
def test_a_family_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    compare(write_model(name, tmp_path / name))


def test_the_family_in_the_documents_is_all_that_mistral_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[5] / "docs" / "add_a_model.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + code, "add_a_model.md", "exec"), names)
    monkeypatch.setattr(registry, "FAMILIES", {**registry.FAMILIES, names["FAMILY"].architecture: names["FAMILY"]})
    monkeypatch.setitem(MODELS, "mistral", ("Mistral", {"sliding_window": None, "head_dim": 16}))
    compare(write_model("mistral", tmp_path / "new"))
    monkeypatch.setitem(MODELS, "mistral", ("Mistral", {"sliding_window": 16}))
    with pytest.raises(CheckpointError, match="sliding_window = 16"):
        registry.model_shape(write_model("mistral", tmp_path / "first"))


def compare(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = RunConfig(
        model=s.ModelConfig(hf_checkpoint=str(folder)),
        training=s.TrainingConfig(train_threads=1),
        data=s.DataConfig(num_rollout=1),
        cluster=s.ClusterConfig(actor_num_gpus_per_node=1, actor_deadline=120.0),
    )
    tokens = torch.randint(0, SIZE["vocab_size"], (40,), generator=torch.Generator().manual_seed(3))
    trainer = MegatronTrainer(config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port())
    try:
        ours = torch.tensor(trainer.log_probs(tokens.tolist()))
        weights = {name: tensor for bucket in trainer.hf_weights(10_000) for name, tensor in bucket}
    finally:
        trainer.shutdown()
    carried = registry.model_shape(folder).carried
    stored = {key: value for key, value in load_file(folder / "model.safetensors").items() if not key.startswith(carried or (" ",))}
    assert set(weights) == set(stored)
    assert all(torch.equal(weights[key], stored[key]) for key in stored)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder).eval()(tokens[None]).logits[0, :-1]
    theirs = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
    assert float((ours - theirs).abs().max()) <= TOLERANCE
