"""One small change each: to a capsule's samples, to the state that it holds, to the code that replays it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from vime.backends.megatron_utils import optimizer
from vime.backends.megatron_utils.actor import MegatronTrainer
from vime.backends.megatron_utils.convert.transfer import parameters_by_name
from vime.utils.arguments import parse_args

WEIGHT = "decoder.layers.1.self_attention.linear_proj.weight"
HF_WEIGHT = "model.layers.1.self_attn.o_proj.weight"
ELEMENT = 6  # one of those whose values are kept, of 8192
SAMPLE = 14  # in the first group of step 1


def spoil(job: dict[str, Any]) -> None:
    """The copy of a capsule with one change, its record of sizes set right."""
    copy = Path(job["copy"])
    shutil.copytree(job["capsule"], copy)
    globals()[job["how"]](copy, job)
    facts = json.loads((copy / "capsule.json").read_text())
    facts["files"] = {str(f.relative_to(copy)): f.stat().st_size for f in copy.rglob("*") if f.is_file() and f.name != "capsule.json"}
    (copy / "capsule.json").write_text(json.dumps(facts))


def _change_sample(copy: Path, change: Callable[[dict[str, Any]], None]) -> None:
    head, *rows = [json.loads(line) for line in (copy / "samples.jsonl").read_text().splitlines()]
    (found,) = [sample for row in rows for sample in row if sample["index"] == SAMPLE]
    change(found)
    (copy / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (head, *rows)))


def token(copy: Path, job: dict[str, Any]) -> None:
    """The second response token is another."""

    def change(sample: dict[str, Any]) -> None:
        at = len(sample["tokens"]) - sample["response_length"] + 1
        sample["tokens"][at] = 3 if sample["tokens"][at] != 3 else 4

    _change_sample(copy, change)


def prompt(copy: Path, job: dict[str, Any]) -> None:
    """The prompt's text, which its tokens then are not of."""
    _change_sample(copy, lambda sample: sample.update(prompt=sample["prompt"] + "?"))


def mask(copy: Path, job: dict[str, Any]) -> None:
    """The second response token is not trained."""
    _change_sample(copy, lambda sample: sample["loss_mask"].__setitem__(1, 0))


def log_prob(copy: Path, job: dict[str, Any]) -> None:
    """The engine gave the third token another log-prob, in the last bit of float32."""

    def change(sample: dict[str, Any]) -> None:
        was = torch.tensor(sample["rollout_log_probs"][2])
        sample["rollout_log_probs"][2] = float(torch.nextafter(was, torch.tensor(0.0)))

    _change_sample(copy, change)


def reward(copy: Path, job: dict[str, Any]) -> None:
    """A reward is larger by a ten-thousandth."""
    _change_sample(copy, lambda sample: sample.update(reward=sample["reward"] + 1e-4))


def weight(copy: Path, job: dict[str, Any]) -> None:
    """One weight before the step is larger by a ten-thousandth."""

    def change(trainer: MegatronTrainer) -> None:
        parameters_by_name([chunk.module for chunk in trainer._model])[WEIGHT].view(-1)[ELEMENT] += 1e-4
        trainer._optimizer.reload_model_params()

    _change_state(copy, job, change)


def moment(copy: Path, job: dict[str, Any]) -> None:
    """One entry of Adam's first moments is larger by a thousandth."""

    def change(trainer: MegatronTrainer) -> None:
        adam = getattr(trainer._optimizer, "chained_optimizers", [trainer._optimizer])[0].optimizer
        first = next(p for group in adam.param_groups for p in group["params"])
        adam.state[first]["exp_avg"].view(-1)[ELEMENT] += 1e-3

    _change_state(copy, job, change)


def _change_state(copy: Path, job: dict[str, Any], change: Callable[[MegatronTrainer], None]) -> None:
    config = parse_args(["--config", str(copy / "config.yaml")])
    trainer = MegatronTrainer(config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=job["port"])
    try:
        trainer.load(str(copy / "state"))
        with torch.no_grad():
            change(trainer)
        shutil.rmtree(copy / "state")
        trainer.save(str(copy / "state"))
    finally:
        trainer.shutdown()


@contextlib.contextmanager
def one_gradient() -> Iterator[None]:
    """The code: after the sum over ranks one entry of one gradient is larger by a thousandth."""
    before = optimizer._sum_gradients

    def wrong(model: list[Any], num_tokens: Any = None, **groups: Any) -> None:
        before(model, num_tokens, **groups)
        parameters_by_name([chunk.module for chunk in model])[WEIGHT].main_grad.view(-1)[ELEMENT] += 1e-3

    optimizer._sum_gradients = wrong
    try:
        yield
    finally:
        optimizer._sum_gradients = before
