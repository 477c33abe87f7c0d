"""What --custom-model-provider-path may return."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from vime.backends.megatron_utils.model import PackedGPTModel, build_model
from vime.errors import HookError

from megatron.core import parallel_state  # isort: skip  # after vime's package has prepared it


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Arguments of one process whose model's configuration stands for itself."""
    for name in ("is_pipeline_first_stage", "is_pipeline_last_stage"):
        monkeypatch.setattr(parallel_state, name, lambda **where: True)
    return argparse.Namespace(transformer_config=argparse.Namespace(virtual_pipeline_model_parallel_size=None))


class Model(PackedGPTModel):
    """Of another configuration."""

    def __init__(self, config: Any) -> None:
        torch.nn.Module.__init__(self)
        self.config = config


def other_model(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    return torch.nn.Linear(2, 2)


def other_configuration(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    return Model(argparse.Namespace())


def raises(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    raise ValueError("no layers")


@pytest.mark.parametrize(
    ("provider", "said"),
    [
        (other_model, "--custom-model-provider-path a.b returned a Linear; expected a vime.backends.megatron_utils.model.PackedGPTModel"),
        (other_configuration, "--custom-model-provider-path a.b built its model from a configuration of its own: take vime.backends."),
        (raises, "--custom-model-provider-path a.b raised ValueError: no layers at "),
    ],
)
def test_a_model_that_cannot_be_trained_here_is_refused(args: argparse.Namespace, provider: Any, said: str) -> None:
    with pytest.raises(HookError) as caught:
        build_model(args, provider, "a.b")
    assert str(caught.value).startswith(said)
