"""A trainer process that records steps, spoils copies of what it recorded, and replays them.

    python -m tests.integration.capsule.worker JOBS.json

JOBS.json is a list, taken in order:
    {"kind": "record", "flags", "port", "weights"}         train two steps; the weights at the end go to the file `weights`
    {"kind": "spoil", "capsule", "copy", "how", "port"}    a copy of a capsule, changed by the function `how` of `spoiling`
    {"kind": "replay", "argv", "port", "out", "code"}      `vime replay` with its trainer in this process; what it says goes to `out`.
                                                           `code`: a function of `spoiling` that changes the code meanwhile
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from tests.integration.capsule import spoiling
from vime.backends.megatron_utils.actor import MegatronTrainer
from vime.cli import main as command_line
from vime.cli import trainers
from vime.data.tokenizer import encode_prompt, load_tokenizer
from vime.errors import TrainerError
from vime.rollout.batches import flat_samples, train_batches
from vime.rollout.recorded import record_samples
from vime.utils import arguments
from vime.utils.types import Sample

VOCABULARY = 128


def make_groups(tokenizer: Any, number: int) -> list[list[Sample]]:
    """Three groups of four: uneven responses, an untrained token at the end of each, kept sets in one group."""
    rng = random.Random(number)
    groups = []
    for group in range(3):
        prompt = f"{rng.randrange(900)}+{rng.randrange(90)}="
        members = []
        for member in range(4):
            sample = Sample(index=12 * number + 4 * group + member, group_index=3 * number + group, prompt=prompt)
            sample.tokens = encode_prompt(tokenizer, prompt)
            tokens = [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(3, 9))]
            kept = [[token, 1, 2] if i else [] for i, token in enumerate(tokens)] if group == 2 else None
            sample.append_response_tokens(
                tokens=tokens, log_probs=[-rng.random() - 4 for _ in tokens], weight_versions=[str(number)] * len(tokens), kept=kept,
                text=tokenizer.decode(tokens), status=Sample.Status.COMPLETED,
            )  # fmt: skip
            sample.append_response_tokens(tokens=[7], trainable=False, kept=None if kept is None else [[]])
            sample.reward = rng.random()
            members.append(sample)
        groups.append(members)
    return groups


def critic_values(trainer: MegatronTrainer, batch: Any) -> Any:
    """Values as a critic gives them."""
    generator = torch.Generator().manual_seed(3)
    return trainer.packed_values(batch, [torch.randn(s.response_length, generator=generator) for s in batch.samples])


def record(job: dict[str, Any]) -> None:
    """Two steps of one process, recorded as the flags say."""
    config = arguments.parse_args(job["flags"])
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    trainer = MegatronTrainer(config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=job["port"])
    try:
        for number in range(2):
            groups = make_groups(tokenizer, number)
            if number in config.debug.capsule_steps:
                record_samples(config, number, groups)
            (batch,) = train_batches(config, config.args, list(flat_samples(groups)), number)
            with contextlib.suppress(TrainerError):  # one of the jobs is there to fail; the others' weights would tell
                trainer.train(batch, critic_values(trainer, batch) if config.algorithm.advantage_estimator == "ppo" else None)
        torch.save({name: value for bucket in trainer.hf_weights(10**6) for name, value in bucket}, job["weights"])
    finally:
        trainer.shutdown()


def replay(job: dict[str, Any]) -> None:
    """The command in this process: importing torch and Megatron takes longer than all else."""
    command_here = trainers.train_once
    trainers.train_once = lambda task, logs: trainers._train(task, 0, 1, job["port"])
    said = io.StringIO()
    changed = getattr(spoiling, job["code"])() if job.get("code") else contextlib.nullcontext()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), changed:
            code = command_line.main(["replay", *job["argv"]])
    finally:
        trainers.train_once = command_here
    Path(job["out"]).write_text(json.dumps({"code": code, "said": said.getvalue().splitlines()}))


def answer_once() -> None:
    """Ask Megatron's parser each question once: it is a process of its own, and takes seconds."""
    answers: dict[str, Any] = {}
    ask = arguments.ask

    def remembered(questions: Any) -> Any:
        key = json.dumps(questions)
        if key not in answers:
            answers[key] = ask(questions)
        return answers[key]

    arguments.ask = remembered


def main() -> None:
    answer_once()
    for job in json.loads(Path(sys.argv[1]).read_text()):
        {"record": record, "spoil": spoiling.spoil, "replay": replay}[job["kind"]](job)


if __name__ == "__main__":
    main()
