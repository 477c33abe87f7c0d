"""`RunRecord`: what a run leaves behind and shows while it runs: metrics, status line, samples, commits."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vime.checkpoint import OpenCommit, begin_commit
from vime.config import RunConfig
from vime.errors import CheckpointError, VimeError
from vime.observability.metrics import MetricsLog
from vime.observability.status import Status
from vime.types import WeightSyncReport

__all__ = ["RunRecord"]


class RunRecord:
    """The loop reports here; `log_dir` gets metrics.jsonl, samples.jsonl, tensorboard/ and logs/."""

    def __init__(self, config: RunConfig, log_dir: Path, *, first_step: int, num_steps: int) -> None:
        self._config = config
        self._first, self._num_steps = first_step, num_steps
        tensorboard = None
        if config.logging.use_tensorboard:
            tensorboard = Path(config.logging.tb_project_name) if config.logging.tb_project_name else log_dir / "tensorboard"
        self._metrics = MetricsLog(log_dir, first_step=first_step, tensorboard_dir=tensorboard)
        self.status = Status(num_steps, first_step=first_step)
        self._pending: dict[str, float] = {}
        self._open: tuple[OpenCommit, float] | None = None  # a commit that is written in the background, and since when

    def phase(self, step: int | None, text: str) -> None:
        """What runs now."""
        self.status.phase(step, text)

    def finish_step(self, step: int, metrics: dict[str, float], phases: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Write one finished step to every sink."""
        seconds = sum(phases.values())
        tokens = metrics.get("rollout/total_tokens", 0.0)
        timing = {f"perf/{name}_time": value for name, value in phases.items()} | {"perf/step_time": seconds}
        if "train" in phases:
            timing["perf/trainer_idle_time"] = seconds - phases["train"]
        if tokens and seconds > 0:
            timing["perf/tokens_per_second"] = tokens / seconds
        metrics = metrics | timing | self._pending
        self._pending = {}
        self._metrics.log(step, "step", metrics)
        self._metrics.log_samples(step, "train", samples)
        self.status.step(step, metrics, phases)
        if self.commit_is_written:
            self.finish_commit()

    def finish_eval(self, steps_done: int, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Write an evaluation; it belongs to the weights after `steps_done` steps, and is filed under the last of them."""
        self._metrics.log(steps_done - 1, "eval", metrics)
        self._metrics.log_samples(steps_done - 1, "eval", samples)
        shown = {name: value for name, value in metrics.items() if name.startswith("eval/") and "/" not in name[5:]}
        self.status.say(f"eval after {steps_done} steps  " + "  ".join(f"{name[5:]} {value:.3f}" for name, value in sorted(shown.items())))

    def finish_sync(self, version: int, report: WeightSyncReport) -> None:
        """Keep a sync's figures for the step's line; the first one, before any step, is said at once."""
        self._pending |= {
            "perf/update_weights_time": report.seconds,
            "perf/update_weights_bytes": float(report.num_bytes),
            "perf/update_weights_gb_per_s": report.gigabytes_per_second,
            "perf/update_weights_proof_max_abs_diff": report.proof_max_abs_diff,
        } | {f"perf/update_weights_{name}_time": seconds for name, seconds in report.phases.items()}
        if version == self._first:
            self.status.say(
                f"weights sent: {report.num_tensors} tensors, {report.num_bytes / 1e6:.1f} MB in {report.seconds:.2f} s "
                f"({report.gigabytes_per_second * 1e3:.0f} MB/s); "
                f"proof: engines and trainer differ by {report.proof_max_abs_diff:.1e} at most"
            )

    def commit_due(self, step: int) -> bool:
        """Whether to commit after this step: every --save-interval, and after the last one."""
        save = self._config.checkpoint
        if save.save is None:
            return False
        last = step + 1 == self._num_steps
        return last or (save.save_interval is not None and (step + 1) % save.save_interval == 0)

    def eval_due(self, steps_done: int) -> bool:
        """Whether to evaluate after `steps_done` steps: before the first, every --eval-interval, after the last."""
        ev = self._config.eval
        if not ev.eval_prompt_data:
            return False
        if self._num_steps == 0:  # evaluate only
            return True
        if steps_done == self._first:  # at the start; after a resume the evaluation of that step stands in the log already
            return steps_done == 0 and not ev.skip_eval_before_train
        return steps_done == self._num_steps or (ev.eval_interval is not None and steps_done % ev.eval_interval == 0)

    def sync_due(self, steps_done: int) -> bool:
        """Whether engines get the weights after `steps_done` steps: every --update-weights-interval, and where somebody looks at them.

        An evaluation is of the newest weights; a run that resumes from a commit sends its weights, too.
        """
        every = self._config.weight_update.update_weights_interval
        return steps_done % every == 0 or steps_done == self._num_steps or self.eval_due(steps_done) or self.commit_due(steps_done - 1)

    def commit(self, step: int, train: Any, rollout: Any) -> None:
        """Write one commit, and the Hugging Face folder when asked. With --async-save it is complete some steps later, at the latest
        before the next one or the end of the run.
        """
        begun = time.perf_counter()
        if self._open is not None:
            if not self._open[0].is_written():
                self.status.say(f"the commit of step {self._open[0].rollout_id + 1} is still being written: waiting for it")
            self.finish_commit()
        save = self._config.checkpoint
        assert save.save is not None
        failed: Exception | None = None
        if save.save_hf is not None and train is not None:  # first: what is committed has its folder, too
            try:
                train.save_hf(save.save_hf.format(rollout_id=step))
            except (VimeError, OSError) as error:  # an export that fails must not cost the commit
                failed = error
        writers: dict[str, Any] = {"rollout": functools.partial(rollout.save, step=step)}
        if train is not None:
            writers |= train.writers()
        opened = begin_commit(Path(save.save), step, weight_version=step + 1, writers=writers, keep=save.keep_checkpoints)
        self._open = opened, begun
        if not save.async_save or failed is not None or step + 1 == self._num_steps:
            self.finish_commit()
        self._pending["perf/save_time"] = time.perf_counter() - begun  # of which the loop was held up; stands in the next step's line
        if failed is not None:
            raise CheckpointError(f"the commit of step {step + 1} is complete, but --save-hf could not be written: {failed}") from failed

    def finish_commit(self) -> None:
        """Complete the commit that is written in the background, if there is one; it is waited for."""
        if self._open is not None:
            (opened, begun), self._open = self._open, None
            commit = opened.finish()
            self.status.say(f"saved {commit.path} ({time.perf_counter() - begun:.1f} s)")

    @property
    def commit_is_written(self) -> bool:
        """Whether a commit is open whose files are all there, so that nothing of them is waited for."""
        return self._open is not None and self._open[0].is_written()

    @contextlib.contextmanager
    def commit_kept(self) -> Iterator[None]:
        """Whatever ends what is inside, what was saved before is kept: the open commit is completed.

        One that is still being written is waited for if the run's own error ends it, and given up on Ctrl-C and errors in the code.
        """
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(VimeError, OSError):  # the first failure is the one to tell
                if self._open is not None and (isinstance(error, VimeError | OSError) or self.commit_is_written):
                    self.status.say(f"completing the commit of step {self._open[0].rollout_id + 1} first")
                    self.finish_commit()
            raise

    def close(self) -> None:
        """Flush every sink."""
        self._metrics.close()
