"""One trainer process of the layout tests: runs a list of cases one after the other and stores what came out.

    python worker.py FOLDER WORLD RANK PORT...     (one port a case)

FOLDER holds `cases_WORLD.json`: a list of {name, model, tokens, actions, ...}. Results go to FOLDER/NAME.RANK.pt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from tests.limits import small_files
from vime.backends.megatron_utils import bootstrap
from vime.backends.megatron_utils.actor import MegatronTrainer
from vime.backends.megatron_utils.state_writer import StateWriter
from vime.config import sections as s
from vime.config.run import RunConfig
from vime.errors import VimeError
from vime.packing.build import _filler
from vime.types import StepPlan, TrainBatch, TrainSample

from megatron.core import parallel_state  # isort: skip  # after vime's package has prepared it

VOCAB = 90
UNEVEN = 3  # micro-batches of all ranks together


def make_samples(count: int = 12, seed: int = 0, *, nan_at: int | None = None) -> list[TrainSample]:
    """Groups of four with one prompt, responses of uneven length, some tokens untrained."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, int(rng.integers(2, 24))) for _ in range(-(-count // 4))]
    out = []
    for i in range(count):
        response = int(rng.integers(2, 8))
        mask = (rng.random(response) > 0.2).astype(np.float32)
        out.append(
            TrainSample(
                tokens=np.concatenate([prompts[i // 4], rng.integers(0, VOCAB, response)]), response_length=response, loss_mask=mask,
                reward=float("nan") if i == nan_at else float(rng.normal()), raw_reward=0.0, sample_id=100 + i, group_id=i // 4,
                rollout_id=i, rollout_mask_sum=float(mask.sum()), rollout_log_probs=-np.ones(response, np.float32),
            )
        )  # fmt: skip
    return out


def make_batch(samples: list[TrainSample], *, rank: int, size: int, micro: int, steps: int, rollout_id: int) -> TrainBatch:
    """This data-parallel rank's share: samples dealt in turn, `micro` micro-batches a step."""
    parts = [samples[i::steps] for i in range(steps)]
    mine, plans = [], []
    for part in parts:
        own = part[rank::size]
        first = len(mine)
        mine += own
        ids = list(range(first, first + len(own)))
        plans.append(
            StepPlan(
                micro_batches=tuple(tuple(ids[i::micro]) for i in range(micro)),
                num_rollouts=len(part),
                num_tokens=float(sum(x.loss_mask.sum() for x in part)),
            )
        )
    return TrainBatch(rollout_id=rollout_id, samples=tuple(mine), steps=tuple(plans))


def weights(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """As the engines get them: with the adapters merged."""
    return {name: tensor for bucket in trainer.hf_weights(30_000, prediction=True) for name, tensor in bucket}


def gradients(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """The step's gradients under Hugging Face names: exported as if they were weights or adapters. Ends the trainer's use."""
    of_dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    of_experts = parallel_state.get_expert_data_parallel_group()
    for model in trainer._model:
        for buffer, group in [(b, of_dense) for b in model.buffers] + [(b, of_experts) for b in model.expert_parallel_buffers]:
            for bucket in buffer.buckets:  # with the distributed optimizer each rank holds the sum for its own shard only
                shard = bucket.grad_data.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter))
    return weights(trainer) if trainer.adapters is None else trainer.adapters.tensors()


def make_uneven_batch(samples: list[TrainSample], *, rank: int, size: int, rollout_id: int) -> TrainBatch:
    """UNEVEN micro-batches dealt in turn; a rank that has fewer than another gets a filler."""
    (plan,) = make_batch(samples, rank=0, size=1, micro=UNEVEN, steps=1, rollout_id=rollout_id).steps
    contents = [[samples[i] for i in micro] for micro in plan.micro_batches[rank::size]]
    contents += [[_filler(samples[0])]] * (-(-UNEVEN // size) - len(contents))
    mine, micros = [], []
    for content in contents:
        micros.append(tuple(range(len(mine), len(mine) + len(content))))
        mine += content
    return TrainBatch(rollout_id=rollout_id, samples=tuple(mine), steps=(dataclasses.replace(plan, micro_batches=tuple(micros)),))


def with_engine_routing(samples: list[TrainSample], folder: str) -> list[TrainSample]:
    """The samples with the experts that transformers chooses under the weights in `folder`, as an engine tells them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    for sample in samples:
        with torch.no_grad():
            layers = model(torch.tensor(sample.tokens)[None], output_router_logits=True).router_logits
        chosen = torch.stack([logits.topk(model.config.num_experts_per_tok).indices for logits in layers], 1)
        out.append(dataclasses.replace(sample, routed_experts=chosen[:-1].to(torch.int16).numpy()))
    return out


def config_of(case: dict[str, Any]) -> RunConfig:
    base = RunConfig(
        model=s.ModelConfig(hf_checkpoint=case["model"], ref_load=case.get("ref")),
        training=s.TrainingConfig(lr=case.get("lr", 1e-3), clip_grad=case.get("clip", 1e9), train_threads=1, **case.get("training", {})),
        data=s.DataConfig(num_rollout=case.get("num_rollout", 10), rollout_batch_size=12),
        cluster=s.ClusterConfig(actor_num_gpus_per_node=2, actor_deadline=120.0),
        rollout=s.RolloutConfig(rollout_temperature=case.get("temperature", 1.0)),
        checkpoint=s.CheckpointConfig(no_load_optim=case.get("no_load_optim", False)),
        megatron_tokens=tuple(case.get("tokens", ())),
        lora=s.LoraConfig(**case.get("lora", {})),
    )
    return dataclasses.replace(base, algorithm=s.AlgorithmConfig(**case.get("algorithm", {})))


def refused_save(save: Callable[[str], None], folder: str, *, rank: int) -> str:
    """What a save says of which rank 0 may write files of 20 kB only."""
    try:
        with small_files(20_000) if rank == 0 else contextlib.nullcontext():
            save(folder)
    except VimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        gc.collect()
    return "none"


def tear(state: Path, folder: Path) -> None:
    """A copy of a saved state of which half of each file of tensors is gone."""
    shutil.copytree(state, folder)
    for file in folder.glob("*.distcp"):
        os.truncate(file, file.stat().st_size // 2)


class SaveBehind:
    """A save that is written only after the training that goes on beside it."""

    def __init__(self, trainer: MegatronTrainer, folder: str) -> None:
        self._trainer, self._folder = trainer, Path(folder)
        self._gate = threading.Event()
        write = StateWriter._write

        def write_later(saving: StateWriter) -> None:
            assert self._gate.wait(120)
            write(saving)

        StateWriter._write = write_later  # type: ignore[method-assign]
        try:
            trainer.start_save(folder)
        finally:
            StateWriter._write = write  # type: ignore[method-assign]

    def finish(self) -> list[str]:
        """What was in the folder before."""
        early = [path.name for path in self._folder.rglob("*")]
        dist.barrier()
        self._gate.set()
        self._trainer.finish_save()
        return early


def refusal_of(case: dict[str, Any], *, world: int, rank: int, port: int) -> dict[str, Any]:
    """What the trainer says to a configuration that it does not take."""
    try:
        MegatronTrainer(config_of(case), rank=rank, world_size=world, master_addr="127.0.0.1", master_port=port).shutdown()
    except VimeError as error:
        bootstrap.shutdown()
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "none"}


def run_case(case: dict[str, Any], *, world: int, rank: int, port: int) -> dict[str, Any]:
    out: dict[str, Any] = {"metrics": []}
    if case.get("refused"):
        return refusal_of(case, world=world, rank=rank, port=port)
    trainer = MegatronTrainer(config_of(case), rank=rank, world_size=world, master_addr="127.0.0.1", master_port=port)
    try:
        size = parallel_state.get_data_parallel_world_size()
        if case.get("tear"):
            tear(Path(case["load"]), Path(case["tear"]))
        if case.get("load"):
            trainer.load(case.get("tear", case["load"]), resume=case.get("resume", True))
        if case.get("dies") == rank:
            os._exit(0)
        out["probe"] = trainer.log_probs(list(range(3, 25)))
        behind = None
        for number in range(case.get("first", 0), case.get("first", 0) + case.get("count", 1)):
            samples = make_samples(seed=number, nan_at=case.get("nan_at"))
            if case.get("engine_routing"):
                samples = with_engine_routing(samples, case["model"])
            where = {"rank": trainer.data_parallel_rank, "size": size, "rollout_id": number}
            if case.get("uneven"):
                batch = make_uneven_batch(samples, **where)
            else:
                batch = make_batch(samples, **where, micro=case.get("micro", 2), steps=case.get("steps", 1))
            out["metrics"].append(trainer.train(batch))
            if case.get("save_behind") and trainer.step == 2:
                behind = SaveBehind(trainer, case["save_behind"])
        if behind is not None:
            out["early"] = behind.finish()
        if case.get("refused_save"):
            out["refused_save"] = [refused_save(trainer.save, case["refused_save"], rank=rank) for _ in range(2)]
            out["refused_export"] = refused_save(trainer.save_hf, case["refused_save"] + "_hf", rank=rank)
        if case.get("save"):
            trainer.save(case["save"])
            out["saved_keys"] = sorted(FileSystemReader(case["save"]).read_metadata().state_dict_metadata)
            out["children"] = [child.name() for child in psutil.Process().children(recursive=True)]
        if case.get("save_hf"):
            trainer.save_hf(case["save_hf"])
            out["probe_then"] = trainer.log_probs(list(range(3, 25)))
        out["step"] = trainer.step
        out["master"] = {parameter.dtype for group in trainer._optimizer.param_groups for parameter in group["params"]}
        out["trained"] = sum(parameter.numel() for group in trainer._optimizer.param_groups for parameter in group["params"])
        out["sums"] = {buffer.grad_dtype for chunk in trainer._model for buffer in chunk.buffers}
        out["weights"] = weights(trainer)
        if case.get("gradients"):
            out["gradients"] = gradients(trainer)
    except VimeError as error:
        out["error"] = f"{type(error).__name__}: {error}"
        out["weights"] = weights(trainer)
    finally:
        trainer.shutdown()
    return out


def main() -> int:
    folder, world, rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    cases = json.loads((folder / f"cases_{world}.json").read_text())
    for case, port in zip(cases, map(int, sys.argv[4:]), strict=True):
        try:
            result = run_case(case, world=world, rank=rank, port=port)
        except Exception:  # noqa: BLE001 - whatever it is, the test shows it
            result = {"failed": traceback.format_exc()}
        torch.save(result, folder / f"{case['name']}.{rank}.pt")
        if "failed" in result:
            print(result["failed"], file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
