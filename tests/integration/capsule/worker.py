"""A trainer process that takes two steps and records the second.

    python -m tests.integration.capsule.worker JOBS.json

JOBS.json is a list of {flags, port}: the flags of `vime train`, --capsule-steps 1 among them.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vime.backends.megatron_utils.actor import MegatronTrainer
from vime.config import RunConfig
from vime.data.tokenizer import encode_prompt, load_tokenizer
from vime.rollout.batches import flat_samples, train_batches
from vime.rollout.recorded import record_samples
from vime.utils.arguments import parse_args
from vime.utils.types import Sample

VOCABULARY = 128


def make_groups(tokenizer: Any, number: int) -> list[list[Sample]]:
    """Three groups of four: uneven responses, some tokens untrained, kept sets in one of them."""
    rng = random.Random(number)
    groups = []
    for group in range(3):
        prompt = f"{rng.randrange(900)}+{rng.randrange(90)}="
        members = []
        for member in range(4):
            sample = Sample(index=12 * number + 4 * group + member, group_index=3 * number + group, prompt=prompt)
            sample.tokens = encode_prompt(tokenizer, prompt)
            tokens = [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(3, 9))]
            kept = [[token, 5, 9] if i else [] for i, token in enumerate(tokens)] if group == 2 else None
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


def record(config: RunConfig, port: int) -> None:
    """Two steps of one process, the second recorded."""
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    trainer = MegatronTrainer(config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=port)
    try:
        for number in range(2):
            groups = make_groups(tokenizer, number)
            if number in config.debug.capsule_steps:
                record_samples(config, number, groups)
            (batch,) = train_batches(config, config.args, list(flat_samples(groups)), number)
            trainer.train(batch, critic_values(trainer, batch) if config.algorithm.advantage_estimator == "ppo" else None)
        torch.save({name: value for bucket in trainer.hf_weights(10**6) for name, value in bucket}, f"{config.capsule_folder}.weights.pt")
    finally:
        trainer.shutdown()


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text()):
        np.random.seed(0)
        record(parse_args(job["flags"]), job["port"])


if __name__ == "__main__":
    main()
