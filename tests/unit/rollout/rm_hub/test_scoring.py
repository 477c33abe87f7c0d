"""Which reward scores, the check of its value, and the processes that heavy rewards run in."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.unit.rollout.plugins import HERE
from tests.unit.rollout.support import make_args, run, serving
from vime.errors import ConfigError, DataError, GenerationError, HookError, RewardError
from vime.rollout.rm_hub import async_rm, batched_async_rm
from vime.rollout.rm_hub.registry import REWARDS, find_reward
from vime.rollout.rm_hub.workers import RewardWorkers
from vime.utils.types import Sample


def scored(sample: Sample, evaluation: bool = False, **flags: Any) -> Any:
    """The sample's reward."""
    return run(async_rm(make_args(**flags), sample, evaluation))


def answered(**fields: Any) -> Sample:
    """A sample that answered "4"."""
    return Sample(**{"index": 8, "group_index": 2, "response": "4<|im_end|>", "response_length": 2, "label": "4", **fields})


def test_the_samples_own_function_goes_first_then_the_flags_then_metadata_then_rm_type() -> None:
    length, parity = f"{HERE}.length_reward", f"{HERE}.parity_reward"
    metadata = {"rm_type": "f1"}
    assert scored(answered(custom_rm_path=length, metadata=metadata), custom_rm_path=parity, rm_type="exact") == 2.0
    assert scored(answered(metadata=metadata), custom_rm_path=parity, rm_type="exact") == 1.0
    assert scored(answered(metadata=metadata, label="4 5"), rm_type="exact") == pytest.approx(2 / 3)
    assert scored(answered(label="4 5"), rm_type="exact") == 0.0


def test_boxed_scores_the_content_of_the_box() -> None:
    assert scored(answered(response=r"so \boxed{4}!"), rm_type="boxed_exact") == 1.0
    assert scored(answered(response="4"), rm_type="boxed_exact") == 0.0


def test_no_reward_and_an_unknown_reward_are_named() -> None:
    with pytest.raises(ConfigError, match="neither --rm-type nor --custom-rm-path"):
        scored(answered())
    with pytest.raises(ConfigError, match=r"--rm-type mat: there is no such reward; did you mean math"):
        find_reward("mat")


def test_a_missing_label_is_a_data_error() -> None:
    with pytest.raises(DataError, match="sample 8: reward 'exact' compares with a label"):
        scored(answered(label=None), rm_type="exact")


def test_the_coin_is_the_same_in_the_next_run() -> None:
    coins = [scored(answered(index=index), rm_type="random") for index in range(40)]
    assert coins == [scored(answered(index=index), rm_type="random") for index in range(40)]
    assert set(coins) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("function", "flags", "said"),
    [
        ("nan_reward", {}, r"sample 8 \(group 2\): reward '.*nan_reward' gave nan, which is not a finite number"),
        ("none_reward", {}, "gave None"),
        ("dict_reward", {}, r"gave a dict \(score, format\); say with --reward-key"),
        ("dict_reward", {"reward_key": "points"}, r"without the key 'points' \(it has score, format\)"),
    ],
)
def test_what_is_no_reward_is_refused(function: str, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(RewardError, match=said):
        scored(answered(), custom_rm_path=f"{HERE}.{function}", **flags)


def test_evaluation_may_read_another_entry() -> None:
    flags = {"custom_rm_path": f"{HERE}.dict_reward", "eval_reward_key": "format"}
    assert scored(answered(), evaluation=True, **flags)["format"] == 1.0
    with pytest.raises(RewardError, match="--reward-key"):
        scored(answered(), **flags)


def test_a_custom_reward_that_raises_is_a_hook_error_with_its_line() -> None:
    with pytest.raises(HookError, match=r"ZeroDivisionError: .* at .*plugins\.py:\d+"):
        scored(answered(), custom_rm_path=f"{HERE}.raising_reward")


def test_a_group_is_scored_in_one_call_in_order() -> None:
    group = [answered(index=index) for index in range(3)]
    assert run(batched_async_rm(make_args(custom_rm_path=f"{HERE}.group_reward", group_rm=True), group)) == [0.0, 1.0, 2.0]
    assert run(batched_async_rm(make_args(rm_type="exact"), group)) == [1.0, 1.0, 1.0]


def test_a_group_reward_must_give_one_number_each() -> None:
    with pytest.raises(HookError, match=r"must return a list of 2 rewards.*got float"):
        run(batched_async_rm(make_args(custom_rm_path=f"{HERE}.one_number"), [answered(), answered()]))


def test_a_remote_reward_is_posted_prompt_response_and_label() -> None:
    async def work() -> tuple[Any, Any]:
        async with serving(lambda body, n: 0.75) as server:
            sample = answered(prompt="2+2=", metadata={"rm_url": server.url + "/score"})
            return await async_rm(make_args(rm_type="remote_rm"), sample), server.requests

    assert run(work()) == (0.75, [{"prompt": "2+2=", "response": "4<|im_end|>", "label": "4"}])


def test_a_remote_reward_without_an_address_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="needs an address"):
        scored(answered(), rm_type="remote_rm")


def test_every_reward_of_the_registry_loads() -> None:
    assert all(callable(spec.function()) for spec in REWARDS.values())


def with_workers(work: Any, **kwargs: Any) -> Any:
    """Run `work(workers)` and end the workers."""

    async def bounded() -> Any:
        workers = RewardWorkers(count=1, **kwargs)
        try:
            return await work(workers)
        finally:
            workers.close()

    return run(bounded())


def test_many_answers_are_judged_in_order_while_the_event_loop_runs() -> None:
    labels = [random.Random(n).randrange(3) for n in range(50)]

    async def work(workers: RewardWorkers) -> tuple[list[Any], int]:
        turns = 0

        async def ticking() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        ticker = asyncio.create_task(ticking())
        rewards = await asyncio.gather(*(workers.score("math", r"\boxed{1}", label, {}) for label in labels))
        ticker.cancel()
        return list(rewards), turns

    rewards, turns = with_workers(work)
    assert rewards == [float(label == 1) for label in labels]
    assert turns > 100


def test_a_label_without_mathematics_is_a_data_error() -> None:
    with pytest.raises(DataError, match="holds no mathematical expression"):
        with_workers(lambda workers: workers.score("math", r"\boxed{1}", "", {}))


def test_a_verifier_that_hangs_is_ended_counted_and_replaced() -> None:
    async def work(workers: RewardWorkers) -> Any:
        await workers.score("math", r"\boxed{1}", "1", {})  # started and imported
        children = _children()
        os.kill(children[0], signal.SIGSTOP)  # a process that no longer answers
        with pytest.raises(GenerationError, match=r"its worker did not judge within 6 s on an answer"):
            await workers.score("math", r"\boxed{1}", "1", {})
        assert children[0] not in _children()
        return await workers.score("math", r"\boxed{1}", "1", {})

    assert with_workers(work, timeout=6.0) == 1.0


def test_answers_behind_one_that_hangs_are_judged_by_the_next_worker() -> None:
    async def work(workers: RewardWorkers) -> list[Any]:
        await workers.score("math", r"\boxed{1}", "1", {})
        os.kill(_children()[0], signal.SIGSTOP)
        asked = (workers.score("math", r"\boxed{1}", label, {}) for label in (1, 2, 1, 2))
        return list(await asyncio.gather(*asked, return_exceptions=True))

    hung, *others = with_workers(work, timeout=6.0)
    assert isinstance(hung, GenerationError)
    assert others == [0.0, 1.0, 0.0]


def test_answers_longer_than_a_pipe_holds_are_judged() -> None:
    long = "x = 1, " * 30_000 + r"\boxed{1}"
    work = lambda workers: asyncio.gather(*(workers.score("math", long, "1", {}) for _ in range(3)))  # noqa: E731
    assert with_workers(work) == [1.0, 1.0, 1.0]


def test_a_verifier_that_dies_is_a_failure_and_the_next_answer_is_judged() -> None:
    async def work(workers: RewardWorkers) -> Any:
        await workers.score("math", r"\boxed{1}", "1", {})
        os.kill(_children()[0], signal.SIGKILL)
        with pytest.raises(GenerationError, match="its worker died"):
            await workers.score("math", r"\boxed{1}", "1", {})
        return await workers.score("math", r"\boxed{1}", "1", {})

    assert with_workers(work) == 1.0


def test_no_process_is_left_after_close() -> None:
    with_workers(lambda workers: workers.score("math", r"\boxed{1}", "1", {}))
    assert _children() == []


def test_a_killed_parent_leaves_no_worker() -> None:
    code = (
        "import asyncio, sys; from vime.rollout.rm_hub.workers import RewardWorkers; workers = RewardWorkers(count=1)\n"
        "print(asyncio.run(workers.score('math', r'\\boxed{1}', '1', {})), flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"1.0\n"
    (worker,) = _children(parent.pid)
    watched = os.pidfd_open(worker)
    parent.kill()
    parent.wait()
    ended, _, _ = select.select([watched], [], [], 10.0)  # readable when the process is gone
    os.close(watched)
    for pipe in (parent.stdin, parent.stdout):
        assert pipe is not None
        pipe.close()
    assert ended


def _children(of: int | None = None) -> list[int]:
    """Reward workers of a process; default: this one."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat, open(f"/proc/{name}/cmdline") as command:
                parent = int(stat.read().rpartition(")")[2].split()[1])
                if parent == (of or os.getpid()) and "worker_main" in command.read():
                    found.append(int(name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_quick_rules_give_the_entries_that_the_table_says() -> None:
    for name, spec in REWARDS.items():
        if spec.runs == "here":
            value = spec.function()("Answer: A", "A", {})
            assert (tuple(value) if isinstance(value, dict) else ()) == spec.entries, name
