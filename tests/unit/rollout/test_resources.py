"""What steps share: one loop and its connections, used again and closed; hooks loaded once."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.plugins import HERE
from tests.unit.rollout.support import WireServer, make_args, reply_of, serving
from vime.rollout import generate_state
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.resources import KeptLoop, RolloutResources
from vime.rollout.rm_hub import scoring
from vime.rollout.vllm_rollout import generate_rollout, generate_rollout_async


@pytest.fixture
def server(tokenizer: Any) -> Iterator[WireServer]:
    """A server in a thread of its own, as engines are elsewhere, too."""
    ready: list[Any] = []
    started = threading.Event()

    async def serve() -> None:
        stop = asyncio.Event()
        async with serving(lambda body, n: reply_of("4", tokenizer)) as one:
            ready.extend([one, asyncio.get_running_loop(), stop])
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(10)
    one, loop, stop = ready
    yield one
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def args(model_dir: Path, tmp_path: Path, server: WireServer) -> Any:
    """Two groups of two a step."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"input": f"{n}+0=", "label": "4"}) + "\n" for n in range(4)))
    sizes = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 8}
    rewards = {"custom_rm_path": f"{HERE}.parity_reward"}
    return make_args(server.runtime, hf_checkpoint=str(model_dir), prompt_data=str(file), label_key="label", **sizes, **rewards)


def test_steps_use_the_connections_of_the_step_before_and_close_ends_them(args: Any, server: WireServer) -> None:
    source = RolloutDataSourceWithBuffer(args)
    for step in range(3):
        output = generate_rollout(args, step, source)
        assert [sample.reward for group in output.samples for sample in group] == [1.0, 0.0, 1.0, 0.0]
    assert len(server.clients) == 6
    assert len(set(server.clients)) == 2
    session = source.resources.loop._session
    assert session is not None
    assert not session.closed
    source.close()
    assert session.closed
    generate_rollout(args, 3, source)  # after a close a step opens anew
    assert len(set(server.clients)) == 4
    source.close()


def test_a_rollout_awaited_in_the_users_own_loop_leaves_nothing_open(args: Any, server: WireServer) -> None:
    source = RolloutDataSourceWithBuffer(args)
    generate_rollout(args, 0, source)

    async def own() -> Any:
        return await generate_rollout_async(args, 1, source)

    assert len(asyncio.run(own()).samples) == 2
    assert len(set(server.clients)) == 4  # the kept connections belong to another loop
    source.close()


def test_what_nobody_closes_is_closed_with_the_data_source(args: Any, recwarn: pytest.WarningsRecorder) -> None:
    source = RolloutDataSourceWithBuffer(args)
    generate_rollout(args, 0, source)
    kept = source.resources.loop
    session = kept._session
    del source
    gc.collect()
    assert session is not None
    assert session.closed
    assert kept._runner._state.name == "CLOSED"
    del kept, session
    gc.collect()
    assert [str(warning.message) for warning in recwarn if issubclass(warning.category, ResourceWarning)] == []


def test_hooks_are_loaded_once_a_run(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    real = scoring.load_hook

    def counting(path: str, *rest: Any) -> Any:
        loaded.append(path)
        return real(path, *rest)

    monkeypatch.setattr(scoring, "load_hook", counting)
    monkeypatch.setattr(generate_state, "load_hook", counting)
    source = RolloutDataSourceWithBuffer(args)
    generate_rollout(args, 0, source)
    generate_rollout(args, 1, source)
    source.close()
    assert loaded == [f"{HERE}.parity_reward"]


def test_tasks_that_a_step_leaves_behind_are_cancelled() -> None:
    ended: list[bool] = []

    async def forgotten() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def step() -> asyncio.Task[None]:
        task = asyncio.create_task(forgotten())
        await asyncio.sleep(0)
        return task

    loop = KeptLoop()
    assert loop.run(step()).cancelled()
    assert ended == [True]
    loop.close()


def test_each_run_of_a_kept_loop_has_a_context_of_its_own() -> None:
    seen: ContextVar[int] = ContextVar("seen", default=0)

    async def step() -> int:
        before = seen.get()
        seen.set(before + 1)
        return before

    loop = KeptLoop()
    assert [loop.run(step()), loop.run(step())] == [0, 0]
    loop.close()


def test_an_error_of_a_step_leaves_the_loop_of_use() -> None:
    async def fails() -> None:
        raise ValueError("no")

    async def works() -> int:
        return 3

    loop = KeptLoop()
    with pytest.raises(ValueError, match="no"):
        loop.run(fails())
    assert loop.run(works()) == 3
    loop.close()


def test_two_threads_may_run_at_once_and_only_one_has_the_kept_session() -> None:
    loop = KeptLoop()
    both = threading.Barrier(2)

    async def step() -> bool:
        await asyncio.to_thread(both.wait, 10)
        found = loop.session() is not None
        await asyncio.to_thread(both.wait, 10)
        return found

    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(loop.run(step()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == [False, True]
    loop.close()


def test_resources_may_be_closed_from_inside_another_loop(model_dir: Path) -> None:
    resources = RolloutResources(str(model_dir))

    async def nothing() -> None:
        assert resources.session() is not None

    resources.loop.run(nothing())
    kept = resources.loop

    async def closing() -> None:
        resources.close()

    asyncio.run(closing())
    assert kept._session is None
