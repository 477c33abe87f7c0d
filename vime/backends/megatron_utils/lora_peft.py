"""Adapters as PEFT's folders: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vime.backends.megatron_utils.convert.ops import Op
from vime.backends.megatron_utils.lora_ops import FACTOR_A, FACTOR_B, AdapterOps, AdapterSettings, adapter_ops, layer_name, target_names
from vime.config.sections import LoraConfig
from vime.errors import CheckpointError, ConfigError, ResourceError, VimeError

__all__ = ["ADAPTER_FOLDER", "PeftFolder", "adapter_problems", "adapter_settings", "base_digest", "write_peft"]

ADAPTER_FOLDER = "adapter"  # beside the merged weights, and in the trainer's part of a commit
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PEFT's tensor names
PLAIN = {  # what an adapter may say of itself: anything else changes the formula
    "peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "rank_pattern": {},
    "alpha_pattern": {}, "modules_to_save": None, "layers_to_transform": None, "layer_replication": None, "target_parameters": None,
}  # fmt: skip
ADDED_TO_THE_BASE = ("gaussian", "eva", "orthogonal")  # the ways of PEFT to begin that leave the base's own weights as they are
BASE = "base_digest"  # in the metadata of the tensors' file
SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file, for the digest


def adapter_settings(lora: LoraConfig, ops: Iterable[Op]) -> AdapterSettings:
    """The settings of a run: its flags, completed by the PEFT folder of --lora-load where they say nothing.

    Raises ConfigError when flags and folder disagree, CheckpointError for a folder that is torn.
    """
    assert lora.lora_rank is not None
    rank, alpha, targets = lora.lora_rank, lora.lora_alpha, sorted(set(lora.lora_target_modules))
    if lora.lora_load is not None:
        folder = PeftFolder(lora.lora_load)
        found: list[tuple[str, Any, Any]] = [("--lora-rank", rank, folder.rank)]
        found += [("--lora-alpha", alpha, folder.alpha)] if alpha is not None else []
        found += [("--lora-target-modules", " ".join(targets), " ".join(folder.targets))] if targets else []
        if problems := [f"{flag} {mine}: the adapters in {lora.lora_load} have {its}." for flag, mine, its in found if mine != its]:
            raise ConfigError(*problems)
        alpha, targets = folder.alpha, folder.targets
    targets = targets or target_names(ops)
    return AdapterSettings(rank=rank, alpha=2.0 * rank if alpha is None else alpha, dropout=lora.lora_dropout, targets=tuple(targets))


def adapter_problems(lora: LoraConfig, ops: Sequence[Op], model: str | Path) -> list[str]:
    """What keeps these adapters from the model in the folder `model`, before anything is built."""
    try:
        settings = adapter_settings(lora, ops)
        found = adapter_ops(ops, rank=settings.rank, targets=settings.targets)
        if lora.lora_load is not None:
            folder = PeftFolder(lora.lora_load)
            folder.check(found)
            folder.check_base(model)
    except ConfigError as error:
        return error.problems
    except VimeError as error:
        return [f"--lora-load: {error}"]
    return []


class PeftFolder:
    """An adapter on disk. Raises CheckpointError for one that is torn or of another kind than ours."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        config = self._read_config()
        self.rank, self.alpha = int(config["r"]), float(config["lora_alpha"])
        try:
            self._file = safe_open(str(self._folder / WEIGHTS), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._folder / WEIGHTS} cannot be read ({error}). Only safetensors adapters are read.") from None
        self._names = set(self._file.keys())

    @property
    def targets(self) -> list[str]:
        """The names of the layers with adapters, sorted."""
        ends = (FACTOR_A, FACTOR_B)
        return sorted({layer_name(name.removesuffix(end)) for name in self._names for end in ends if name.endswith(end)})

    def check(self, found: Iterable[AdapterOps]) -> None:
        """Exactly these adapters are there."""
        wanted = {PREFIX + name: shape for one in found for name, shape in _shapes(one)}
        problems = [f"'{name}' is missing" for name in sorted(wanted.keys() - self._names)]
        problems += [f"'{name}' belongs to no layer that is adapted" for name in sorted(self._names - wanted.keys())]
        for name in sorted(wanted.keys() & self._names):
            if (shape := tuple(self._file.get_slice(name).get_shape())) != wanted[name]:
                problems.append(f"'{name}' has shape {list(shape)} instead of {list(wanted[name])}")
        if problems:
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise CheckpointError(f"{self._folder} holds other adapters than this model's: {'; '.join(problems[:5])}{more}.")

    def check_base(self, model: str | Path) -> None:
        """It was trained on the weights in the folder `model`; what others than we wrote does not say on which."""
        if (self._file.metadata() or {}).get(BASE) not in (None, base_digest(model)):
            raise CheckpointError(
                f"the adapters in {self._folder} were trained on other weights than those in {model}: give --hf-checkpoint the model that "
                "they are of."
            )

    def tensor(self, name: str, shape: tuple[int, ...] = ()) -> torch.Tensor | None:
        """One factor by its name without PEFT's prefix; None where it is not there."""
        return self._file.get_tensor(PREFIX + name) if PREFIX + name in self._names else None

    def _read_config(self) -> dict[str, Any]:
        path = self._folder / CONFIG
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            int(config["r"]), float(config["lora_alpha"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({type(error).__name__}: {error}): it is no folder of a PEFT LoRA adapter."
            ) from None
        for key, plain in PLAIN.items():
            if (value := config.get(key, plain)) not in (plain, None):
                raise CheckpointError(f"{path}: {key} {value!r} is not supported (only {plain!r}).")
        begun = config.get("init_lora_weights")
        if isinstance(begun, str) and begun.lower() not in ADDED_TO_THE_BASE:
            raise CheckpointError(
                f"{path}: init_lora_weights {begun!r} began by changing the base model's weights, which are not in the folder. Convert it "
                "to a plain adapter with PEFT (save_pretrained with path_initial_model_for_weight_conversion)."
            )
        return config


def _shapes(one: AdapterOps) -> list[tuple[str, tuple[int, ...]]]:
    """(name without PEFT's prefix, shape) of the factors of one Megatron layer."""
    return [*zip(one.a.hf, one.a.hf_shapes, strict=True), *((one.b.hf[i], one.b.hf_shapes[i]) for i in one.parts)]


def write_peft(
    folder: Path,
    settings: AdapterSettings,
    found: Iterable[AdapterOps],
    tensors: Mapping[str, torch.Tensor],
    *,
    base: str,
    digest: str | None = None,
) -> None:
    """Write all factors, under Hugging Face names, of adapters for the model `base` with that digest. Raises ResourceError otherwise."""
    named = {PREFIX + name: tensors[name].contiguous().cpu() for one in found for name, _ in _shapes(one)}
    config = {
        **PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha.is_integer() else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": list(settings.targets),
        "inference_mode": True,
        "init_lora_weights": True,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(named, str(folder / WEIGHTS), metadata={"format": "pt"} | ({} if digest is None else {BASE: digest}))
        (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ResourceError(f"the adapter folder {folder} could not be written ({error}). Check the space and the rights there.") from error


def base_digest(folder: str | Path) -> str:
    """What tells the weights in a Hugging Face folder from others: a digest of the sizes and of samples of its files."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(size * i // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
