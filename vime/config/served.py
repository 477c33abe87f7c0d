"""What engines serve (--vllm-config FILE): models, and of each the groups of engines that are alike.

    vllm:
      - name: actor                  # the model that is trained: no model_path, update_weights true
        server_groups:
          - num_gpus: 1
          - num_gpus: 1
            overrides: {max_num_seqs: 16}   # vLLM's options for these engines, over --vllm-X
      - name: judge
        model_path: /models/judge    # frozen: it is sent no weights, and has a router of its own
        num_gpus_per_engine: 1
        server_groups: [{worker_type: regular, num_gpus: 1}]

The names are slime's; `engine_groups` is another word for `server_groups`. What is unknown or cannot be is refused.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.errors import ConfigError

__all__ = ["ACTOR", "ServedModel", "ServerGroup", "read_served_models"]

ACTOR = "actor"  # how the trained model is called when no file names it

_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")
_CONNECTOR = (
    "keys and values go from prefill to decode engines through a KV connector (vLLM documents NIXL, Mooncake and MoRIIO), which moves "
    "accelerator memory, and vLLM's CPU build has none"
)
_ROLES = {
    "prefill": _CONNECTOR,
    "decode": _CONNECTOR,
    "encoder": "multimodal models are not trained yet",
    "placeholder": "there are no GPUs to keep free",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerGroup:
    """Engines that are alike. `vllm_tokens` are vLLM's options over those of the command line, e.g. ("--max-num-seqs", "16")."""

    num_engines: int
    vllm_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model and its engines. `model_path` None: the model that is trained."""

    name: str
    model_path: str | None
    groups: tuple[ServerGroup, ...]

    @property
    def trained(self) -> bool:
        """Whether it is sent the trainer's weights."""
        return self.model_path is None

    @property
    def num_engines(self) -> int:
        """Of all groups."""
        return sum(group.num_engines for group in self.groups)

    def engine_tokens(self) -> list[tuple[str, ...]]:
        """Of each engine in order: its group's options."""
        return [group.vllm_tokens for group in self.groups for _ in range(group.num_engines)]


def read_served_models(path: str, hf_checkpoint: str | None) -> tuple[ServedModel, ...]:
    """The models of the file, the trained one first. ConfigError with every problem in it."""
    import yaml  # only runs with such a file need it

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--vllm-config '{path}' cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--vllm-config '{path}' is no YAML: {' '.join(str(error).split())}.") from error
    rows = data.get("vllm") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows) or set(data) != {"vllm"}:
        raise ConfigError(f"--vllm-config '{path}' must hold one key, 'vllm', with a list of models (name, model_path, server_groups).")
    reader = _Reader(path, hf_checkpoint)
    models = [reader.model(row, f"vllm[{index}]") for index, row in enumerate(rows)]
    names = [model.name for model in models]
    for name in sorted({name for name in names if names.count(name) > 1}):
        reader.problem(f"the name '{name}' is given twice")
    if (trained := sum(model.trained for model in models)) != 1:
        reader.problem(f"{trained} models are trained, one must be: leave out its model_path, and give the others theirs")
    if reader.problems:
        raise ConfigError(*reader.problems)
    return tuple(sorted(models, key=lambda model: not model.trained))


class _Reader:
    """Collects what is wrong with the file while it reads."""

    def __init__(self, path: str, hf_checkpoint: str | None) -> None:
        self._path, self._trained = path, hf_checkpoint
        self.problems: list[str] = []

    def problem(self, text: str) -> None:
        self.problems.append(f"--vllm-config '{self._path}': {text}.")

    def model(self, row: Mapping[str, Any], where: str) -> ServedModel:
        self._unknown(row, _MODEL_KEYS, where)
        name = row.get("name")
        if not isinstance(name, str) or not name:
            self.problem(f"{where} needs a name, got {name!r}")
            name = where
        path = self._model_path(row, name)
        if "server_groups" in row and "engine_groups" in row:
            self.problem(f"'{name}' has server_groups and engine_groups, which are the same: give one")
        groups = row.get("server_groups", row.get("engine_groups"))
        if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
            self.problem(f"'{name}' needs server_groups, a list of {{num_gpus: N}}, got {groups!r}")
            groups = []
        per_engine = self._count(row.get("num_gpus_per_engine", 1), f"num_gpus_per_engine of '{name}'")
        read = tuple(self._group(group, f"server_groups[{index}] of '{name}'", per_engine) for index, group in enumerate(groups))
        return ServedModel(name=name, model_path=path, groups=read)

    def _model_path(self, row: Mapping[str, Any], name: str) -> str | None:
        """None for the model that is trained."""
        path, update = row.get("model_path"), row.get("update_weights")
        if path is not None and not isinstance(path, str):
            self.problem(f"model_path of '{name}' must be a folder, got {path!r}")
            return None
        if update not in (None, True, False):
            self.problem(f"update_weights of '{name}' must be true or false, got {update!r}")
        same = path is None or (self._trained is not None and os.path.abspath(path) == os.path.abspath(self._trained))
        if update is None:
            update = same
        if update and not same:
            self.problem(f"'{name}' has update_weights, but its model_path '{path}' is not --hf-checkpoint: only one model is trained")
        if not update and path is None:
            self.problem(f"'{name}' is frozen (update_weights false) and needs a model_path")
        if not update and path is not None and not os.path.isfile(os.path.join(path, "config.json")):
            self.problem(f"model_path '{path}' of '{name}' is no folder with a config.json")
        return None if update or path is None else os.path.abspath(path)

    def _group(self, row: Mapping[str, Any], where: str, per_engine: int) -> ServerGroup:
        self._unknown(row, _GROUP_KEYS, where)
        role = row.get("worker_type", "regular")
        if role in _ROLES:
            self.problem(f"worker_type {role} in {where} is not available on the CPU: {_ROLES[role]}. Use regular")
        elif role != "regular":
            self.problem(f"worker_type of {where} must be regular, got {role!r}")
        per_engine = self._count(row.get("num_gpus_per_engine", per_engine), f"num_gpus_per_engine of {where}")
        if per_engine > 1:
            self.problem(f"num_gpus_per_engine {per_engine} in {where} is not available yet: on CPU an engine has one worker")
        gpus = self._count(row.get("num_gpus"), f"num_gpus of {where}")
        overrides = row.get("overrides") or {}
        if not isinstance(overrides, dict):
            self.problem(f"overrides of {where} must map vLLM's options to values, got {overrides!r}")
            overrides = {}
        return ServerGroup(num_engines=gpus // per_engine, vllm_tokens=tuple(word for item in overrides.items() for word in _tokens(*item)))

    def _count(self, value: Any, what: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.problem(f"{what} must be a whole number from 1 on, got {value!r}")
            return 1
        return value

    def _unknown(self, row: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
        for key in row:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                self.problem(
                    f"{where} has an unknown key '{key}'" + (f": is {near[0]} meant" if near else f": known are {', '.join(known)}")
                )


def _tokens(name: str, value: Any) -> Iterator[str]:
    """One of vLLM's options as its command line has it."""
    flag = "--" + str(name).replace("_", "-")
    if value is None:
        return
    if isinstance(value, bool):
        yield flag if value else f"--no-{flag[2:]}"
        return
    yield flag
    if isinstance(value, list):
        yield from map(str, value)
    else:
        yield json.dumps(value) if isinstance(value, dict) else str(value)
