"""A small model and task, made once, and the flags of a short run on them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3]))

from examples.quickstart.make_assets import AssetSpec, make_assets


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    spec = AssetSpec(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=128, num_train=64, num_heldout=16)
    return {name: str(path) for name, path in make_assets(tmp_path_factory.mktemp("assets"), spec).items()}


@pytest.fixture(scope="session")
def session_flags(assets):
    """The flags of a run of 4 steps that saves after each second one."""

    def build(*, save, **changes):
        values = {
            "hf-checkpoint": assets["model"],
            "prompt-data": assets["train"],
            "label-key": "label",
            "apply-chat-template": True,
            "custom-rm-path": "varied.reward",
            "rollout-batch-size": 4,
            "n-samples-per-prompt": 4,
            "num-rollout": 4,
            "rollout-max-response-len": 6,
            "use-dynamic-batch-size": True,
            "max-tokens-per-gpu": 1024,
            "advantage-estimator": "grpo",
            "lr": "1e-3",
            "save": save,
            "save-interval": 2,
            "save-hf": None if save is None else save / "hf",
            "vllm-enable-deterministic-inference": True,
        } | {name.replace("_", "-"): value for name, value in changes.items()}
        out = []
        for name, value in values.items():
            if value is None or value is False:
                continue
            out += [f"--{name}"] if value is True else [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        return out

    return build


@pytest.fixture
def flags(session_flags, tmp_path):
    """The same, saving into this test's own folder."""
    return lambda **changes: session_flags(**{"save": tmp_path / "run", **changes})
