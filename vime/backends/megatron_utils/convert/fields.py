"""config.json, read so that no value which changes the computation can be overlooked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.config.model_file import malformed
from vime.errors import CheckpointError

__all__ = ["Fields", "read_config"]

MISSING = object()
IRRELEVANT = frozenset(  # keys that change nothing in what the trained model computes from given weights
    "architectures model_type transformers_version torch_dtype dtype use_cache bos_token_id eos_token_id pad_token_id unk_token_id "
    "initializer_range pretraining_tp output_router_logits router_aux_loss_coef auto_map _name_or_path tokenizer_class "
    "return_dict output_attentions output_hidden_states torchscript chunk_size_feed_forward is_decoder is_encoder_decoder "
    "id2label label2id problem_type language finetuning_task task_specific_params _attn_implementation_autoset "
    "base_model_tp_plan max_window_layers keys_to_ignore_at_inference image_token_id video_token_id vision_start_token_id "
    "vision_end_token_id".split()
)


class Fields:
    """The keys of one config.json. What a family reads is understood; `check_all_read` refuses the rest."""

    def __init__(self, config: Mapping[str, Any], path: str) -> None:
        self._config, self._read = config, set[str]()
        self.path = path

    @property
    def architecture(self) -> str:
        """The first of `architectures`; "(none named)" when there is none."""
        names = self._config.get("architectures") or ["(none named)"]
        return str(names[0])

    def __contains__(self, key: str) -> bool:
        return key in self._config

    def get(self, key: str, default: Any = MISSING) -> Any:
        """A key's value; null counts as absent. Raises CheckpointError when it is absent and there is no default."""
        self._read.add(key)
        value = self._config.get(key)
        if value is None:
            value = default
        if value is MISSING:
            raise CheckpointError(f"{self.path} lacks '{key}', which {self.architecture} needs. Copy or download the folder again.")
        return value

    def only(self, key: str, *allowed: Any, why: str = "") -> Any:
        """A key that may be absent, or one of these values. Returns it (the first, when it is absent)."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            listed = " or ".join(map(repr, allowed))
            raise CheckpointError(f"{self.path}: {key} {value!r} is not supported (only {listed}). {why}".rstrip())
        return value

    def inner(self, key: str) -> Fields:
        """The keys of the object under `key`."""
        return Fields({"architectures": [self.architecture]} | dict(self.get(key)), f"{self.path}, {key}")

    def ignore(self, *keys: str) -> None:
        """Keys that change nothing in this family."""
        self._read.update(keys)

    def check_all_read(self) -> None:
        """Raise CheckpointError for every key that nobody read and that is set to something."""
        rest = {key: value for key, value in self._config.items() if key not in self._read | IRRELEVANT and value}
        if rest:
            listed = ", ".join(f"{key} = {value!r}" for key, value in sorted(rest.items()))
            raise CheckpointError(
                f"{self.path} sets what vime does not know for {self.architecture}, and what may change the computation: {listed[:500]}. "
                "Remove a key only if you know that the weights were trained without it; else this model needs a family of its own "
                "(docs/add_a_model.md)."
            )


def read_config(folder: str | Path) -> Fields:
    """The parsed config.json. Raises CheckpointError when it is missing or no JSON object."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise CheckpointError(
            f"model folder {folder} does not exist. --hf-checkpoint takes a local folder with config.json and *.safetensors."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the folder is no complete Hugging Face model. Copy or download it again.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}). Copy or download the folder again.") from None
    if problem := malformed(config):
        raise CheckpointError(f"{path}: {problem}. Copy or download the folder again.")
    return Fields(config, str(path))
