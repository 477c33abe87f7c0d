"""The measured process of trl_step.py; runs in TRL's environment. Reads one JSON object from its command line, writes one to a file.

python -m benchmarks.trl_worker '{"workload": {...}, "settings": {...}, "model": ..., "prompts": ..., "out": ...}'
"""

from __future__ import annotations

import importlib.metadata
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

__all__ = ["main"]


class Clock:
    """Seconds by phase, sizes, and the times at which rollout steps ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.tokens: list[tuple[int, int, int]] = []  # a rollout step's prompt tokens, response tokens, samples
        self.rewards: list[float] = []  # mean reward of a rollout step
        self.marks: list[tuple[float, dict[str, float]]] = []

    def timed(self, phase: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call, adding its seconds to `phase`."""
        begun = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begun

    def mark(self) -> None:
        """A rollout step ends now."""
        self.marks.append((time.perf_counter(), dict(self.seconds)))


class TimedTrainer(GRPOTrainer):
    """TRL's trainer as it is; its methods are only timed."""

    clock: Clock

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        found = self.clock.timed("generate", super()._generate_single_turn, prompt_ids, *args, **kwargs)
        self.clock.tokens.append((sum(map(len, prompt_ids)), sum(map(len, found[0])), len(found[0])))
        return found

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        rewards = self.clock.timed("reward", super()._calculate_rewards, *args, **kwargs)
        self.clock.rewards.append(float(rewards.mean()))
        return rewards

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return self.clock.timed("rollout", super()._prepare_inputs, generation_batch)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.clock.timed("training_step", super().training_step, *args, **kwargs)


class Marks(TrainerCallback):
    """Marks the begin of the training and the end of each rollout step."""

    def __init__(self, clock: Clock, optimizer_steps: int) -> None:
        self._clock, self._optimizer_steps = clock, optimizer_steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Transformers' event."""
        self._clock.mark()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Transformers' event."""
        if state.global_step % self._optimizer_steps == 0:
            self._clock.mark()


def verified(completions: list[Any], task: list[str], **kwargs: Any) -> list[float]:
    """Full marks of the dataset's verifier only: the quickstart's reward (examples/quickstart/reward.py)."""
    scores = []
    for completion, text in zip(completions, task, strict=True):
        known = json.loads(text)
        score = reasoning_gym.get_score_answer_fn(known["dataset"])(completion[-1]["content"].strip(), known["entry"])
        scores.append(float(score == 1.0))
    return scores


def grpo_config(workload: dict[str, Any], settings: dict[str, Any], out: Path) -> GRPOConfig:
    """The workload in TRL's words. `settings` are what was tuned (see trl_step.py)."""
    samples = workload["prompts"] * workload["group"]
    per_device = settings["per_device"]
    return GRPOConfig(
        output_dir=str(out.parent / "trl"),
        max_steps=(samples // workload["minibatch"]) * (workload["warmup"] + workload["measured"]),
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=workload["minibatch"] // per_device,
        steps_per_generation=samples // per_device,
        num_generations=workload["group"],
        max_completion_length=workload["max_new_tokens"],
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        num_iterations=1,
        loss_type="grpo",
        scale_rewards="group",
        learning_rate=workload["learning_rate"],
        adam_beta2=workload["adam_beta2"],
        weight_decay=workload["weight_decay"],
        max_grad_norm=workload["clip_grad"],
        lr_scheduler_type="constant",
        seed=workload["seed"],
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        optim=settings["optim"],
        torch_compile=settings["torch_compile"],
        cache_implementation=settings["cache"],
        use_transformers_continuous_batching=settings["continuous_batching"],
        transformers_continuous_batching_config=continuous_batching(samples) if settings["continuous_batching"] else None,
    )


def continuous_batching(samples: int) -> dict[str, Any]:
    """Room for all samples at once. Left to itself, transformers takes half of the machine's memory for the cache on a CPU."""
    return {
        "page_size": 128,
        "num_blocks": samples + 64,
        "max_batch_tokens": 16 * samples,
        "max_requests_per_batch": samples,
        "use_cuda_graph": False,
        "use_async_batching": False,
    }


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train, and give the marks as seconds per rollout step and phase."""
    workload, settings = job["workload"], job["settings"]
    torch.set_num_threads(settings["threads"])
    clock = Clock()
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation=settings["attention"])
    rows = [json.loads(line) for line in Path(job["prompts"]).read_text(encoding="utf-8").splitlines()]
    dataset = Dataset.from_list([{"prompt": row["input"], "task": json.dumps(row["metadata"]["reasoning_gym"])} for row in rows])
    trainer = TimedTrainer(
        model=model,
        reward_funcs=verified,
        args=grpo_config(workload, settings, Path(job["out"])),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Marks(clock, workload["prompts"] * workload["group"] // workload["minibatch"])],
    )
    trainer.clock = clock
    trainer.train()
    seconds, phases = [], []
    for (before, old), (after, new) in zip(clock.marks, clock.marks[1:], strict=False):
        spent = {name: new[name] - old.get(name, 0.0) for name in new}
        seconds.append(after - before)
        phases.append(
            {
                "generate": spent["generate"],
                "reward": spent["reward"],
                "rest of rollout": spent["rollout"] - spent["generate"] - spent["reward"],  # tokenise, old log-probs, advantages
                "train": after - before - spent["rollout"],
            }
        )
    return {
        "seconds": seconds,
        "phases": phases,
        "tokens": clock.tokens,
        "rewards": clock.rewards,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "torch_threads": torch.get_num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch", "accelerate", "datasets")},
        "licence": importlib.metadata.metadata("trl").get("License-Expression"),
    }


def main() -> None:
    """Command line: one JSON object."""
    transformers.logging.set_verbosity_error()
    job = json.loads(sys.argv[1])
    Path(job["out"]).write_text(json.dumps(measure(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
