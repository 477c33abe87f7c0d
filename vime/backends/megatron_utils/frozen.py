"""Which parameters are trained: --only-train-params-name-list and --freeze-params-name-list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from vime.config.sections import TrainingConfig
from vime.errors import ConfigError

__all__ = ["freeze", "trained_names"]

SHOWN = 3
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def trained_names(names: Iterable[str], config: TrainingConfig) -> set[str]:
    """Those of the whole model's parameters, by Megatron's names, that are trained.

    A regular expression counts where it is found anywhere in a name. Raises ConfigError for one that is malformed or found in
    none, and when nothing is left to train.
    """
    known = sorted(set(names))
    only = _found("--only-train-params-name-list", config.only_train_params_name_list, known)
    frozen = _found("--freeze-params-name-list", config.freeze_params_name_list, known)
    trained = (only if config.only_train_params_name_list else set(known)) - frozen
    if not trained:
        raise ConfigError("--freeze-params-name-list leaves no parameter to train.")
    return trained


def _found(flag: str, expressions: Sequence[str], names: Sequence[str]) -> set[str]:
    out: set[str] = set()
    for text in expressions:
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise ConfigError(f"{flag} '{text}' is no regular expression: {error}.") from None
        matched = [name for name in names if pattern.search(name)]
        if not matched:
            raise ConfigError(f"{flag} '{text}' is found in no parameter's name. Names are like {', '.join(names[:SHOWN])}.")
        out |= set(matched)
    return out


def freeze(parameters: Mapping[str, torch.Tensor], trained: set[str], *, tied: bool) -> None:
    """Take the gradients from this rank's `parameters`, by their names in the whole model, that are not `trained`.

    With `tied` embeddings the last pipeline stage's output layer is a copy of the embedding and goes with it. Raises ConfigError
    when nothing is left on this rank: Megatron's pipeline needs a gradient in each stage.
    """
    for name, parameter in parameters.items():
        if isinstance(parameter, torch.nn.Parameter):
            parameter.requires_grad_((EMBEDDING if tied and name == OUTPUT else name) in trained)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            f"of the parameters that are trained none is in this pipeline stage ({', '.join(sorted(parameters)[:SHOWN])}, ...): "
            "lower --pipeline-model-parallel-size, or train parameters in each stage."
        )
