"""examples/plugins and examples/multi_agent against the shared engine: what was sampled is what is trained on, token by token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.rollout.support import make_args
from vime.backends.vllm_utils.router import RouterServer
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.vllm_rollout import generate_rollout
from vime.utils.types import Sample

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PLUGINS = "examples.plugins"
DIGITS = [str(digit) for digit in range(10)]


class SearchServer(BaseHTTPRequestHandler):
    """Answers every query with itself."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"result": [f"about {body['query']}"]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Silent."""


@pytest.fixture
def search_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SearchServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/search"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def rolled(router: RouterServer, tiny_model: Path, tmp_path: Path) -> Any:
    """A function that runs one rollout step of four groups on rows with some metadata; gives (groups, tokenizer)."""

    def work(metadata: dict[str, Any], **flags: Any) -> tuple[list[Any], Any]:
        rows = [{"input": f"{n}+{n}=", "label": str(2 * n), "metadata": metadata} for n in range(4)]
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        chosen = {
            "hf_checkpoint": str(tiny_model),
            "prompt_data": str(tmp_path / "prompts.jsonl"),
            "label_key": "label",
            "metadata_key": "metadata",
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 3,
            "rollout_max_response_len": 120,
            "rollout_max_context_len": 250,
            "rm_type": "f1",
        }
        args = make_args({"vllm_router_ip": router.host, "vllm_router_port": router.port}, **(chosen | flags))
        source = RolloutDataSourceWithBuffer(args)
        try:
            return generate_rollout(args, 0, source, False).samples, source.resources.tokenizer
        finally:
            source.close()

    return work


def assert_as_the_model_says(sample: Sample, model: Any) -> None:
    """The engine's log-probs of trained tokens are those given all before them, observations too; 1e-4: float32 sums in another order."""
    tokens = torch.tensor(sample.tokens)
    with torch.no_grad():
        log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[-sample.response_length :, 0]
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    trained = torch.tensor(sample.loss_mask, dtype=torch.bool)
    assert torch.tensor(sample.rollout_log_probs)[trained].tolist() == pytest.approx(log_probs[trained].tolist(), abs=1e-4)
    assert not torch.tensor(sample.rollout_log_probs)[~trained].any()


def test_a_tools_observations_are_between_the_tokens_that_the_engine_sampled(rolled: Any, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    calls = {"tool_pattern": "([0-9])", "tool_stop": DIGITS}  # a random model calls the tool with every digit
    groups, tokenizer = rolled(calls, custom_generate_function_path=f"{PLUGINS}.tool_use.generate_with_tool")
    samples = [sample for group in groups for sample in group]
    called = [sample for sample in samples if sample.metadata["calls"]]
    assert called
    for sample in called:
        assert_as_the_model_says(sample, model)
        assert 0 < sample.effective_response_length < sample.response_length
        masked = [t for t, flag in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if not flag]
        assert tokenizer.decode(masked).count(" = ") == sample.metadata["calls"]


def test_a_function_with_requests_of_its_own_searches_and_goes_on(rolled: Any, tiny_model: Path, search_url: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    searches = {"search_url": search_url, "search_pattern": "([0-9])", "search_stop": DIGITS}
    flags = {"custom_generate_function_path": f"{PLUGINS}.search.generate_with_search", "custom_rm_path": f"{PLUGINS}.search.found"}
    groups, _ = rolled(searches, **flags)
    searched = [sample for group in groups for sample in group if sample.metadata.get("queries")]
    assert searched
    for sample in searched:
        assert_as_the_model_says(sample, model)
        assert all(f"<information>about {query}</information>" in sample.response for query in sample.metadata["queries"])


def test_the_best_of_each_group_gets_the_reward(rolled: Any) -> None:
    flags = {"group_rm": True, "dynamic_sampling_filter_path": f"{PLUGINS}.best_of_n.has_a_winner", "rollout_batch_size": 2}
    groups, _ = rolled({}, custom_rm_path=f"{PLUGINS}.best_of_n.best_of_n", **flags)
    assert len(groups) == 2
    assert all(sorted(sample.reward for sample in group) == [0.0, 0.0, 1.0] for group in groups)
