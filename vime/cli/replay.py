"""`vime replay CAPSULE`: compute a recorded step again with the real trainer, and name the first stage that comes out differently."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vime.config import RunConfig
from vime.config import sections as s
from vime.errors import ConfigError, DataError, ResourceError, VimeError

__all__ = ["main"]

USAGE = """usage: vime replay CAPSULE [<flags of vime train>]

  Computes the step that --capsule-steps recorded in the folder CAPSULE again, and compares every stage: tokenize, pack, forward,
  log-prob, advantage, loss, gradient, update. Bit for bit under the recorded layout, within rounding under another.

  Flags replace those of the recorded run: another layout (--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2), or anything
  whose effect on the step is in question (--eps-clip 0.1).

  Exit code: 0 the same, 1 something differs, 2 the step cannot be replayed."""
SAME, DIFFERS, CANNOT = 0, 1, 2


def main(argv: Sequence[str]) -> int:
    """Replay; exit code 0 the same, 1 something differs, 2 it cannot be replayed."""
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE)
        return 0 if argv else CANNOT
    if argv[0].startswith("-"):
        raise ConfigError(f"vime replay takes the capsule's folder first, got '{argv[0]}'. `vime replay --help` shows how it is used.")
    try:
        with tempfile.TemporaryDirectory(prefix="vime-replay-") as folder:
            return _replay(argv[0], list(argv[1:]), Path(folder))
    except ConfigError:
        raise  # its exit code is that already
    except (VimeError, OSError) as error:
        print(f"vime replay: {type(error).__name__}: {error}", file=sys.stderr)
        return CANNOT


def _replay(given: str, flags: list[str], folder: Path) -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    from vime.capsule.compare import compare, stages_in_words
    from vime.capsule.folder import capsule_path, read_capsule

    capsule = Path(given).absolute()
    facts, recorded = read_capsule(capsule)
    config = _config(capsule, facts, flags, folder)
    said = _train(capsule, facts, config, recorded, folder)
    again = capsule_path(folder, facts["rollout_id"])
    if not again.is_dir():
        log = (folder / "trainer_0.log").read_text(errors="replace")[-2000:]
        raise ResourceError(f"the replay's own record could not be written into {folder}: free space, or set TMPDIR.\n{log}")
    mine, replayed = read_capsule(again)
    apart = _apart(facts, mine)
    differences = compare(recorded, replayed, same_layout=not apart, dtype=facts["platform"]["dtype"])
    how = f"{', '.join(apart)}: within rounding" if apart else "the recorded layout: bit for bit"
    print(f"rollout step {facts['rollout_id']} of {given}, recorded by vime {facts['vime']}\n{how}")
    for who, failure in (("the recorded step", facts["failure"]), ("the replay", said)):
        if failure is not None:
            print(f"{who} failed: {failure}")
    print("\n".join(stages_in_words(recorded, differences)))
    only = {(True, False): "the recorded step", (False, True): "the replay"}.get((facts["failure"] is not None, said is not None))
    if differences:
        print(f"first stage that differs: {differences[0].item.stage}")
    elif only is not None:
        print(f"what both computed is the same, but {only} alone failed")
    else:
        print("the same")
    return SAME if only is None and not differences else DIFFERS


def _config(capsule: Path, facts: dict[str, Any], flags: list[str], folder: Path) -> RunConfig:
    """The recorded run's configuration with `flags` in it; it records what it does in `folder`."""
    from vime.capsule.folder import CONFIG, SAMPLES, STATE
    from vime.utils.arguments import parse_args

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # users' hooks live where they started the run
    own = ["--prompt-data", str(capsule / SAMPLES)] if facts["prompt_data"] else []  # no prompts are read
    if facts["state"]["path"] == STATE and not facts["adapters"] and "--hf-checkpoint" not in flags:  # with adapters the base is elsewhere
        own += ["--hf-checkpoint", str(capsule / STATE / "hf")]
    config = parse_args(["--config", str(capsule / CONFIG), *own, *flags], planned=True)  # of the model config.json will do
    if config.cluster.device != "cpu":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(config.cluster.train_env_vars)
    data = config.data if config.data.num_rollout is not None else dataclasses.replace(config.data, num_rollout=facts["num_rollout"])
    debug = s.DebugConfig(capsule_steps=[facts["rollout_id"]], capsule_dir=str(folder), capsule_state="referenced")
    return dataclasses.replace(config, data=data, debug=debug)


def _train(capsule: Path, facts: dict[str, Any], config: RunConfig, recorded: Sequence[Any], folder: Path) -> str | None:
    """Compute the step; the record of it then is in `folder`."""
    from vime.capsule.folder import SAMPLES, STATE
    from vime.cli.trainers import Task, train_once
    from vime.rollout.batches import flat_samples, train_batches
    from vime.rollout.recorded import read_groups, record_samples

    groups = read_groups(capsule / SAMPLES, facts["rollout_id"])
    record_samples(config, facts["rollout_id"], groups)
    batches = train_batches(config, config.args, list(flat_samples(groups)), facts["rollout_id"])
    path = facts["state"]["path"]
    state = None if path is None else str(capsule / STATE) if path == STATE else path
    if state is not None and not Path(state).is_dir():
        raise DataError(
            f"the state before the step, {state}, is gone: the capsule refers to it (--capsule-state referenced). Bring it back, or record "
            "the step again with --capsule-state stored."
        )
    values = _values(recorded, batches)
    return train_once(Task(config=config, batches=batches, values=values, state=state, resume=facts["state"]["resume"]), folder)


def _values(recorded: Sequence[Any], batches: Sequence[Any]) -> Any:
    """The critic's values of each batch's samples; None without a critic."""
    from vime.capsule.results import SampleRows, in_order
    from vime.types import FILLER_ID

    item = next((item for item in recorded if (item.stage, item.name) == ("advantage", "values")), None)
    if item is None:
        return None
    rows = [SampleRows(sample=sample, origin=(d, i)) for d, batch in enumerate(batches) for i, sample in enumerate(batch.samples)]
    real = in_order(row for row in rows if row.sample.sample_id != FILLER_ID)
    if [row.sample.response_length for row in real] != [len(of_sample) for of_sample in item.rows]:
        raise DataError("the critic's values in the capsule are not of these samples. Record the step again.")
    found = {row.origin: of_sample.numpy() for row, of_sample in zip(real, item.rows, strict=True)}
    nothing = item.rows[0].numpy()[:0]
    return [
        [found.get((d, i), nothing if not sample.response_length else 0 * sample.loss_mask) for i, sample in enumerate(batch.samples)]
        for d, batch in enumerate(batches)
    ]


def _apart(recorded: dict[str, Any], mine: dict[str, Any]) -> list[str]:
    """In which sizes and versions the replay is not as the recorded step was."""
    both = ({**facts["layout"], **facts["platform"]} for facts in (recorded, mine))
    before, now = both
    return [f"{name} {now[name]} instead of {before[name]}" for name in before if before[name] != now.get(name)]
