"""One small engine with a router in front, shared by all tests of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from vime.backends.vllm_utils.router import RouterServer
from vime.backends.vllm_utils.server import EngineServer
from vime.config import RunConfig
from vime.config import sections as s

START_SECONDS = 240.0
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)

# A plug-in of the tests' own, loaded by vLLM as it loads any other: while the file FLAG exists, the transport forgets to pack
# the tied output layer anew, which is the fault that vLLM's reload has on CPU.
FAULT_PLUGIN = """
import pathlib

FLAG = pathlib.Path({flag!r})

def register():
    from vime.backends.vllm_utils.shm_transport import ShmWeightTransferEngine as Engine
    mend = Engine._redispatch_packed_layers
    Engine._redispatch_packed_layers = lambda self: None if FLAG.exists() else mend(self)
"""


def make_tiny_model(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3 with tied embeddings and a character-level tokenizer: 128 ids, 2 layers, float32."""
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<bos>", *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def engine_config(model: Path, **changes: object) -> RunConfig:
    """The configuration of a run on that model, as far as engines look at it; `changes` replace whole sections."""
    sections = {"model": s.ModelConfig(hf_checkpoint=str(model)), "rollout": s.RolloutConfig(rollout_max_context_len=512)}
    return RunConfig(**(sections | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def stale_output_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path; while a file stands there, the shared engine's output layer stays stale after a weight update."""
    folder = tmp_path_factory.mktemp("fault_plugin")
    flag = folder / "stale_output_layer"
    (folder / "vime_test_faults.py").write_text(FAULT_PLUGIN.format(flag=str(flag)))
    info = folder / "vime_test_faults-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vime-test-faults\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nvime_test_faults = vime_test_faults:register\n")
    return flag


@pytest.fixture(scope="session")
def engine(tiny_model: Path, stale_output_layer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """The shared engine, healthy."""
    log = tmp_path_factory.mktemp("engine") / "engine_0.log"
    environment = {"PYTHONPATH": str(stale_output_layer.parent)}
    server = EngineServer(engine_config(tiny_model), index=0, log_path=log, run_id="tests", extra_env=environment)
    try:
        server.wait_healthy(START_SECONDS)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def router(engine: EngineServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterServer]:
    """vllm-router in front of the shared engine."""
    server = RouterServer([engine.endpoint.url], log_path=tmp_path_factory.mktemp("router") / "router.log")
    try:
        server.wait_ready(60.0)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def next_version() -> Callable[[], int]:
    """Weight versions for the shared engine: 1, 2, 3, ... over the whole session."""
    versions = iter(range(1, 1_000_000))
    return lambda: next(versions)
