"""A weight sync with a real engine: what arrives, what is generated afterwards, and how each fault is named."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from vime.backends.megatron_utils.update_weight.carriers import Carrier, SegmentCarrier
from vime.backends.megatron_utils.update_weight.sync import WeightUpdater
from vime.backends.vllm_utils.router import RouterServer
from vime.backends.weight_transfer.control import EngineControl
from vime.backends.weight_transfer.segment import SHM_DIR, Segment, TensorSpec
from vime.config.sections import WeightUpdateConfig
from vime.errors import DeadlineError, EngineError, WeightSyncError

pytestmark = pytest.mark.integration

PROMPT = [10, 20, 30, 40]
Q, OTHER_Q = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"


def generate(control: EngineControl, max_tokens: int, seed: int = 7) -> dict[str, Any]:
    params = {"max_tokens": max_tokens, "temperature": 1.0, "logprobs": 0, "seed": seed, "ignore_eos": True}
    answer = control.call("POST", "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params}, seconds=60.0)
    return answer["choices"][0]


def weight_segments(run_id: str = "tests") -> list[str]:
    return [path.name for path in SHM_DIR.glob(f"vime-weights-{run_id}-*")]


def test_new_weights_are_what_the_engine_samples_with(trainer: Any, router: RouterServer) -> None:
    trainer.draw(1)
    report = trainer.send()
    choice = generate(EngineControl(router.url, "none", name="the router"), 12)
    expected = trainer.log_probs(PROMPT + choice["token_ids"])[len(PROMPT) - 1 :]
    got = [row["logprob"] for row in choice["logprobs"]["content"]]
    assert choice["weight_versions"] == [{"version": str(trainer.version), "start": 0, "end": 12}]
    assert max(abs(a - b) for a, b in zip(expected, got, strict=True)) < 1e-4
    assert report.proof_max_abs_diff < 1e-4
    assert report.num_bytes == sum(tensor.nbytes for bucket in trainer.buckets() for _, tensor in bucket)
    assert set(report.phases) == {"pause", "start", "transfer", "finish", "resume", "proof"}
    assert weight_segments() == []


def test_a_request_in_flight_goes_on_under_the_new_version(trainer: Any) -> None:
    control = trainer.engine.control
    trainer.draw(2)
    trainer.send()
    for seed in range(3, 13):  # a request may be over before the sync has begun: another is sent then
        before = trainer.version
        trainer.draw(seed)
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda found=answers: found.append(generate(control, 450)))
        thread.start()
        while thread.is_alive() and not control.metric("vllm:num_requests_running"):
            thread.join(0.01)
        trainer.send()
        thread.join(60.0)
        spans = answers[0]["weight_versions"]
        if len(spans) > 1:
            break
    assert [span["version"] for span in spans] == [str(before), str(trainer.version)]
    assert spans[0]["start"] == 0
    assert spans[0]["end"] == spans[1]["start"]
    assert spans[1]["end"] == len(answers[0]["token_ids"]) == 450


class FlipOneByte(SegmentCarrier):
    """A transfer that damages one byte of one tensor."""

    def fill(self, segment: Segment, specs: list[TensorSpec], data: list[torch.Tensor]) -> list[TensorSpec]:
        specs = super().fill(segment, specs, data)
        for spec in specs:
            if spec.name == Q:
                segment.memory[spec.offset + 100] ^= 1
        return specs


class DropOneTensor(SegmentCarrier):
    """A transfer that loses a tensor."""

    def fill(self, segment: Segment, specs: list[TensorSpec], data: list[torch.Tensor]) -> list[TensorSpec]:
        return [spec for spec in super().fill(segment, specs, data) if spec.name != Q]


class SwapTwoTensors(SegmentCarrier):
    """A transfer that gives two tensors of one shape to one another's names."""

    def fill(self, segment: Segment, specs: list[TensorSpec], data: list[torch.Tensor]) -> list[TensorSpec]:
        order = {spec.name: number for number, spec in enumerate(specs)}
        first, second = order[Q], order[OTHER_Q]
        data = list(data)
        data[first], data[second] = data[second], data[first]
        return super().fill(segment, specs, data)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (FlipOneByte, f"1 tensor with other content: {Q}"),
        (DropOneTensor, f"1 tensor missing: {Q}"),
        (SwapTwoTensors, f"2 tensors with other content: {Q}, {OTHER_Q}"),
    ],
)
def test_a_damaged_transfer_is_named_and_nothing_is_served(trainer: Any, fault: type[SegmentCarrier], said: str) -> None:
    class Damaging(WeightUpdater):
        def _carrier(self) -> Carrier:
            return fault("damaging")

    trainer.draw(4)
    trainer.send()
    good = str(trainer.version)
    trainer.draw(5)
    with pytest.raises(WeightSyncError, match="stay paused") as caught:
        trainer.send(Damaging, bucket_size=100)
    assert said in str(caught.value)
    control = trainer.engine.control
    assert control.is_paused()
    assert control.weight_version() == good
    assert weight_segments() == []


def test_a_stale_tied_output_layer_is_found_by_the_proof(trainer: Any, stale_output_layer: Path) -> None:
    stale_output_layer.touch()
    trainer.draw(6)
    with pytest.raises(WeightSyncError, match="Every tensor arrived at engine 0 unchanged, but it computes with other weights") as caught:
        trainer.send()
    assert "output layer tied to the embedding" in str(caught.value)
    assert trainer.engine.control.is_paused()


def test_a_stale_layer_is_found_even_when_the_step_hides_in_the_tolerance(trainer: Any, stale_output_layer: Path) -> None:
    updater = trainer.updater()
    trainer.draw(8)
    trainer.send(updater=updater)
    assert trainer.nudge(3e-5) < 1e-4  # the tolerance
    trainer.send(updater=updater)  # a step that arrives passes
    stale_output_layer.touch()
    assert trainer.nudge(4e-5) < 1e-4
    with pytest.raises(WeightSyncError, match="it still computes with the weights of the sync before"):
        trainer.send(updater=updater)


def test_a_tensor_that_the_trainer_never_sends_is_named(trainer: Any) -> None:
    trainer.draw(7)
    whole = trainer.buckets
    trainer.buckets = lambda size: [[pair for pair in bucket if pair[0] != "model.norm.weight"] for bucket in whole(size)]
    with pytest.raises(WeightSyncError, match=r"no tensor was loaded into 1 parameters of its model: model\.norm\.weight"):
        trainer.send()
    trainer.buckets = whole


def test_a_trainer_that_fails_half_way_leaves_the_engine_paused_under_the_old_version(trainer: Any) -> None:
    trainer.send()
    good = str(trainer.version)
    whole = trainer.buckets

    def broken(size: int) -> Any:
        yield next(iter(whole(size)))
        raise RuntimeError("gradient exploded")

    trainer.buckets = broken
    with pytest.raises(RuntimeError, match="gradient exploded"):
        trainer.send()
    trainer.buckets = whole
    assert trainer.engine.control.is_paused()
    with pytest.raises(EngineError, match="answered 409: the weights are half loaded"):
        trainer.engine.control.resume()
    assert trainer.engine.control.weight_version() == good
    assert weight_segments() == []


def test_a_deadline_names_engine_phase_and_progress(trainer: Any) -> None:
    with pytest.raises(DeadlineError, match=r"engine 0 .*weight update \d+, /.*0 tensors"):
        trainer.send(config=WeightUpdateConfig(update_weight_deadline=1e-6))


def test_an_old_keys_and_values_cache_is_not_used_under_new_weights(trainer: Any) -> None:
    control = trainer.engine.control
    trainer.draw(8)
    trainer.send()
    generate(control, 8)  # fills the prefix cache for PROMPT
    trainer.draw(9)
    trainer.send()
    choice = generate(control, 8)
    expected = trainer.log_probs(PROMPT + choice["token_ids"])[len(PROMPT) - 1 :]
    assert max(abs(a - b["logprob"]) for a, b in zip(expected, choice["logprobs"]["content"], strict=True)) < 1e-4


KILLED_SENDER = """
import os, signal, sys, torch
from vime.backends.megatron_utils.update_weight.carriers import SegmentCarrier
from vime.backends.megatron_utils.update_weight.sync import WeightUpdater
from vime.backends.weight_transfer.control import EngineEndpoint
from vime.config.sections import WeightUpdateConfig

class Carrier(SegmentCarrier):
    def fill(self, segment, specs, data):
        if sys.argv[3] == "while filling":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fill(segment, specs, data)

class Killed(WeightUpdater):
    def _carrier(self):
        return Carrier("killed")

def buckets():
    yield [("model.norm.weight", torch.ones(64))]
    os.kill(os.getpid(), signal.SIGKILL)

engine = EngineEndpoint(name="engine 0", url=sys.argv[1], secret=sys.argv[2])
Killed(WeightUpdateConfig(), run_id="killed").update([engine], 99, buckets(), [1, 2], lambda tokens: [0.0])
"""


@pytest.mark.parametrize(("moment", "left_at_once"), [("while filling", 1), ("after a bucket", 0)])
def test_a_killed_trainer_leaves_no_segment(trainer: Any, moment: str, left_at_once: int) -> None:
    endpoint = trainer.engine.endpoint
    sender = subprocess.run([sys.executable, "-c", KILLED_SENDER, endpoint.url, endpoint.secret, moment], timeout=60)
    assert sender.returncode == -9
    assert len(weight_segments("killed")) == left_at_once
    with pytest.raises(EngineError, match="answered 409: the weights are half loaded"):
        trainer.engine.control.resume()
    WeightUpdater(WeightUpdateConfig(), run_id="next")  # the next start of anything
    assert weight_segments("killed") == []
