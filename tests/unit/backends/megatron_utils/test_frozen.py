"""Which parameters are trained, by regular expressions over Megatron's names."""

from __future__ import annotations

import pytest
import torch

from vime.backends.megatron_utils.frozen import freeze, trained_names
from vime.config.sections import TrainingConfig
from vime.errors import ConfigError

NAMES = ["embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc1.weight"]


def test_expressions_are_searched_for_anywhere_in_a_name() -> None:
    assert trained_names(NAMES, TrainingConfig(freeze_params_name_list=["embed", r"layers\.0\."])) == {NAMES[2]}
    assert trained_names(NAMES, TrainingConfig(only_train_params_name_list=["linear_fc1"])) == set(NAMES[1:])
    assert trained_names(NAMES, TrainingConfig()) == set(NAMES)


@pytest.mark.parametrize(
    ("expression", "message"),
    [("router", "'router' is found in no parameter's name. Names are like decoder"), ("(", "is no regular expression"), (".", "leaves no")],
)
def test_what_freezes_nothing_or_everything_is_refused(expression: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trained_names(NAMES, TrainingConfig(freeze_params_name_list=[expression]))


def test_a_tied_output_layer_goes_with_the_embedding() -> None:
    last_stage = {"output_layer.weight": torch.nn.Parameter(torch.zeros(2)), NAMES[2]: torch.nn.Parameter(torch.zeros(2))}
    freeze(last_stage, {NAMES[2]}, tied=True)
    assert [parameter.requires_grad for parameter in last_stage.values()] == [False, True]


def test_a_stage_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="none is in this pipeline stage"):
        freeze({NAMES[1]: torch.nn.Parameter(torch.zeros(2))}, {NAMES[2]}, tied=False)
