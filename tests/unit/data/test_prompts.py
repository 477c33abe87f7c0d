"""Rows become samples: rendering, labels, metadata, tools, length limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.support import make_args, make_tokenizer
from vime.data.prompts import PromptFormat, fresh_copy, load_prompts
from vime.data.tokenizer import load_tokenizer
from vime.errors import CheckpointError, DataError
from vime.utils.types import Sample

CHAT = [{"role": "user", "content": "hi"}]
NEEDS = frozenset({"math", "exact"})


def nested(depth: int) -> list[Any]:
    """Lists in lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """ChatML, one token a character."""
    return make_tokenizer(tmp_path_factory.mktemp("model"))


def loaded(tmp_path: Path, tokenizer: Any, rows: list[Any], **form: Any) -> Any:
    """The prompts of a file with these rows."""
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(str(file), PromptFormat(**form), tokenizer)


def test_text_stays_text_and_messages_stay_messages(tmp_path: Path, tokenizer: Any) -> None:
    prompts = loaded(tmp_path, tokenizer, [{"input": "a"}, {"input": CHAT}])
    assert [sample.prompt for sample in prompts.samples] == ["a", CHAT]
    assert prompts.num_dropped == 0


def test_the_chat_template_renders_messages_and_wraps_text(tmp_path: Path, tokenizer: Any) -> None:
    prompts = loaded(tmp_path, tokenizer, [{"input": "hi"}, {"input": CHAT}], apply_chat_template=True)
    assert [sample.prompt for sample in prompts.samples] == ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"] * 2


def test_label_metadata_and_tools_are_taken_along(tmp_path: Path, tokenizer: Any) -> None:
    row = {"input": "a", "answer": 4, "metadata": '{"level": 2}', "tools": [{"name": "calc"}]}
    (sample,) = loaded(tmp_path, tokenizer, [row], label_key="answer").samples
    assert sample.label == 4
    assert sample.metadata == {"level": 2, "tools": [{"name": "calc"}]}


def test_long_prompts_are_dropped_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    prompts = loaded(tmp_path, tokenizer, [{"input": "short"}, {"input": "x" * 50}, {"input": "y" * 10}], max_prompt_len=10)
    assert [len(sample.prompt) for sample in prompts.samples] == [5, 10]
    assert prompts.num_dropped == 1


def test_when_every_prompt_is_too_long_the_run_does_not_start(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"all 1 prompts are longer than 3 tokens.*--rollout-max-prompt-len"):
        loaded(tmp_path, tokenizer, [{"input": "longer"}], max_prompt_len=3)


@pytest.mark.parametrize(
    ("row", "form", "said"),
    [
        ({"prompt": "a"}, {}, r"p\.jsonl:1: no column 'input' \(the prompt\); the row has 'prompt'.*--input-key"),
        ({"input": "a", "answer": 1}, {"label_key": "label"}, r"no column 'label'.*'input', 'answer'.*--label-key"),
        ({"input": "a", "answer": 1}, {"rm_type": "math"}, r":1: reward 'math' compares with a label, but --label-key is not given"),
        ({"input": "a", "label": None}, {"rm_type": "boxed_math", "label_key": "label"}, "is null, but reward 'math'"),
        ({"input": "a", "metadata": {"rm_type": "exact"}}, {"rm_type": "random"}, "reward 'exact' compares with a label"),
        ({"input": 5}, {}, "neither text nor a list of chat messages"),
        ({"input": []}, {}, "neither text nor a list of chat messages"),
        ({"input": "a", "metadata": [1]}, {}, "'metadata' must hold an object"),
        ({"input": "a", "metadata": "{broken"}, {}, "the text in column 'metadata' is not valid JSON"),
        ({"input": ""}, {}, r"p\.jsonl:1: the prompt is empty"),
        ({"input": "a", "label": " "}, {"rm_type": "exact", "label_key": "label"}, r":1: the label under 'label' is empty \(' '\)"),
        ({"input": "a", "label": []}, {"rm_type": "math", "label_key": "label"}, r":1: the label under 'label' is empty \(\[\]\)"),
        ({"input": "cut \ud83d"}, {}, r"p\.jsonl:1: column 'input' holds \\ud83d, half of a surrogate pair"),
        ({"input": [{"role": "user", "content": "\udc00"}]}, {}, r"column 'input' holds \\udc00"),
        ({"input": "a", "label": ["\ud83d"]}, {"label_key": "label"}, r":1: column 'label' holds \\ud83d"),
        ({"input": "a", "metadata": json.dumps({"x": "\ud83d"})}, {}, r":1: column 'metadata' holds \\ud83d"),
        ({"input": "a", "metadata": "[" * 100_000}, {}, r":1: the text in column 'metadata' is nested too deep"),
        ({"input": "a", "metadata": {"x": nested(200)}}, {}, r":1: column 'metadata' is nested too deep \(at most 100"),
    ],
)
def test_a_faulty_row_is_named(tmp_path: Path, tokenizer: Any, row: dict[str, Any], form: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        loaded(tmp_path, tokenizer, [row], needs_label=NEEDS, **form)


def test_zero_and_false_are_labels_and_columns_that_are_not_used_may_hold_anything(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"input": "a", "label": 0, "other": "\ud83d"}, {"input": "a \U0001f600", "label": False}]
    kept = loaded(tmp_path, tokenizer, rows, needs_label=NEEDS, rm_type="exact", label_key="label").samples
    assert [sample.label for sample in kept] == [0, False]


def test_a_reward_that_needs_no_label_asks_for_none(tmp_path: Path, tokenizer: Any) -> None:
    (sample,) = loaded(tmp_path, tokenizer, [{"input": "a", "label": None}], needs_label=NEEDS, rm_type="random", label_key="label").samples
    assert sample.label is None


def test_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    bare = make_tokenizer(tmp_path / "bare", template=None)
    with pytest.raises(DataError, match="no chat_template"):
        loaded(tmp_path, bare, [{"input": CHAT}], apply_chat_template=True)


def test_messages_that_the_template_refuses_are_named(tmp_path: Path) -> None:
    strict = make_tokenizer(tmp_path / "strict", template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"p\.jsonl:1: the chat template refuses.*roles must alternate"):
        loaded(tmp_path, strict, [{"input": CHAT}], apply_chat_template=True)


def test_evaluation_keys_go_before_the_rollouts(tmp_path: Path) -> None:
    args = make_args(input_key="q", label_key="a", eval_label_key="gold", rollout_max_context_len=32)
    form = PromptFormat.of(args, evaluation=True)
    assert (form.input_key, form.label_key, form.max_prompt_len) == ("q", "gold", 31)
    assert PromptFormat.of(args).label_key == "a"


def test_a_custom_reward_decides_itself_about_labels() -> None:
    args = make_args(custom_rm_path="a.b", rm_type="math")
    assert PromptFormat.of(args, needs_label=NEEDS).needs_label == frozenset()


@pytest.mark.parametrize("path", [None, "/no/such/folder"])
def test_a_missing_model_folder_is_named(path: str | None) -> None:
    with pytest.raises(CheckpointError, match="--hf-checkpoint"):
        load_tokenizer(path)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tokenizer does not load"):
        load_tokenizer(str(tmp_path))


def test_a_fresh_copy_is_equal_and_shares_nothing_that_can_change() -> None:
    whole = Sample(
        prompt=[{"role": "user", "content": "hi"}],
        tokens=[1],
        label={"answer": [1]},
        metadata={"deep": {"list": [{"x": 1}], "set": {3}}, "pair": ([1], "a")},
        apply_chat_template_kwargs={"thinking": False},
    )
    twin = fresh_copy(whole)
    assert twin == whole
    twin.prompt[0]["content"] = "changed"
    twin.tokens.append(2)
    twin.label["answer"].append(2)
    twin.metadata["deep"]["list"][0]["x"] = 2
    twin.metadata["deep"]["set"].add(4)
    twin.metadata["pair"][0].append(2)
    twin.apply_chat_template_kwargs["thinking"] = True
    assert whole.prompt[0]["content"] == "hi"
    assert whole.tokens == [1]
    assert whole.label == {"answer": [1]}
    assert whole.metadata == {"deep": {"list": [{"x": 1}], "set": {3}}, "pair": ([1], "a")}
    assert whole.apply_chat_template_kwargs == {"thinking": False}
