"""--vllm-config: what the file may say, and how what it must not say is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from vime.config import RunConfig
from vime.config import sections as s
from vime.config.served import ServedModel, ServerGroup, read_served_models
from vime.errors import ConfigError


def read(folder: Path, *models: dict[str, object], trained: str | None = None) -> tuple[ServedModel, ...]:
    """The file with these models."""
    file = folder / "served.yaml"
    file.write_text(yaml.safe_dump({"vllm": list(models)}))
    return read_served_models(str(file), trained)


@pytest.fixture
def judge(tmp_path: Path) -> str:
    """A model folder, as far as the file's reader looks at it."""
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


ACTOR = {"name": "policy", "server_groups": [{"num_gpus": 1}, {"num_gpus": 2, "overrides": {"max_num_seqs": 16}}]}


def test_the_trained_model_comes_first_and_each_engine_has_its_groups_options(tmp_path: Path, judge: str) -> None:
    frozen = {"name": "judge", "model_path": judge, "engine_groups": [{"worker_type": "regular", "num_gpus": 1}]}
    policy, other = read(tmp_path, frozen, ACTOR)
    assert (policy.name, policy.trained, policy.num_engines) == ("policy", True, 3)
    assert policy.engine_tokens() == [(), ("--max-num-seqs", "16"), ("--max-num-seqs", "16")]
    assert other == ServedModel(name="judge", model_path=judge, groups=(ServerGroup(num_engines=1),))


def test_options_are_written_as_on_vllms_command_line(tmp_path: Path) -> None:
    options = {"enforce_eager": False, "enable_chunked_prefill": True, "seed": None, "hf_overrides": {"a": 1}, "middleware": ["x", "y"]}
    [model] = read(tmp_path, {"name": "a", "server_groups": [{"num_gpus": 1, "overrides": options}]})
    words = ["--enable-chunked-prefill", "--no-enforce-eager", "--hf-overrides", '{"a": 1}', "--middleware", "x", "y"]
    assert sorted(model.groups[0].vllm_tokens) == sorted(words)


def test_the_trained_model_may_name_its_own_folder(tmp_path: Path, judge: str) -> None:
    [model] = read(tmp_path, {"name": "a", "model_path": judge, "server_groups": [{"num_gpus": 1}]}, trained=judge)
    assert model.trained


def test_the_trained_folder_can_be_served_frozen_as_well(tmp_path: Path, judge: str) -> None:
    frozen = {"name": "reference", "model_path": judge, "update_weights": False, "server_groups": [{"num_gpus": 1}]}
    models = read(tmp_path, frozen, ACTOR, trained=judge)
    assert [model.trained for model in models] == [True, False]


ONE = [{"num_gpus": 1}]
WRONG = [
    ([{**ACTOR, "modelpath": "x"}], r"vllm\[0\] has an unknown key 'modelpath': is model_path meant\."),
    ([{"name": "a", "server_groups": [{"num_gpus": 1, "workers": 2}]}], r"server_groups\[0\] of 'a' has an unknown key 'workers'"),
    ([{"server_groups": ONE}], r"vllm\[0\] needs a name, got None\."),
    ([{"name": "a", "server_groups": []}], r"'a' needs server_groups, a list of \{num_gpus: N\}, got \[\]\."),
    ([{"name": "a", "server_groups": ONE, "engine_groups": ONE}], "which are the same: give one"),
    ([{"name": "a", "server_groups": [{"num_gpus": 0}]}], r"num_gpus of server_groups\[0\] of 'a' must be a whole number from 1 on, got 0"),
    ([{"name": "a", "server_groups": [{"num_gpus": 2, "num_gpus_per_engine": 2}]}], "num_gpus_per_engine 2 in .* is not available yet"),
    ([{"name": "a", "server_groups": [{"num_gpus": 1, "worker_type": "prefill"}]}], "worker_type prefill .* KV connector .* Use regular"),
    ([{"name": "a", "server_groups": [{"num_gpus": 1, "worker_type": "cook"}]}], "must be regular, got 'cook'"),
    ([{"name": "a", "server_groups": [{"num_gpus": 1, "overrides": "x"}]}], "must map vLLM's options to values, got 'x'"),
    ([ACTOR, {**ACTOR, "name": "other"}], "2 models are trained, one must be"),
    ([ACTOR, {"name": "policy", "model_path": "JUDGE", "server_groups": ONE}], "the name 'policy' is given twice"),
    ([{"name": "a", "model_path": "JUDGE", "server_groups": ONE}], "0 models are trained, one must be"),
    (
        [{"name": "a", "model_path": "JUDGE", "update_weights": True, "server_groups": ONE}],
        "is not --hf-checkpoint: only one model is trained",
    ),
    ([ACTOR, {"name": "b", "update_weights": False, "server_groups": ONE}], "'b' is frozen .* and needs a model_path"),
    ([ACTOR, {"name": "b", "model_path": "/nowhere", "server_groups": ONE}], "'/nowhere' of 'b' is no folder with a config.json"),
    ([ACTOR, {"name": "b", "model_path": 3, "server_groups": ONE}], "model_path of 'b' must be a folder, got 3"),
    ([{**ACTOR, "update_weights": "yes"}], "update_weights of 'policy' must be true or false, got 'yes'"),
]


@pytest.mark.parametrize(("models", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_what_cannot_be_is_refused_with_the_place(tmp_path: Path, judge: str, models: list[dict[str, object]], said: str) -> None:
    models = [{key: judge if value == "JUDGE" else value for key, value in model.items()} for model in models]
    with pytest.raises(ConfigError, match=said) as caught:
        read(tmp_path, *models)
    assert str(tmp_path / "served.yaml") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vllm: [", "is no YAML"),
        ("[]", "must hold one key, 'vllm'"),
        ("vllm: 3", "must hold one key"),
        ("vllm: []\nx: 1", "must hold one key"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "served.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_served_models(str(file), None)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_served_models(str(tmp_path / "absent.yaml"), None)


def test_an_engine_of_a_frozen_model_sees_its_own_folder_and_no_lengths_of_the_rollout(judge: str) -> None:
    config = RunConfig(
        model=s.ModelConfig(hf_checkpoint="/trained"),
        rollout=s.RolloutConfig(rollout_max_context_len=64),
        vllm_tokens=("--max-num-seqs", "8"),
    )
    frozen = ServedModel(name="judge", model_path=judge, groups=(ServerGroup(num_engines=1),))
    seen = config.for_engine(frozen, ("--max-num-seqs", "2"))
    assert (seen.model.hf_checkpoint, seen.rollout.rollout_max_context_len) == (judge, None)
    assert seen.vllm_tokens == ("--max-num-seqs", "8", "--max-num-seqs", "2")
    own = config.for_engine(config.models[0])
    assert own == config


def test_engines_are_counted_by_who_starts_them(judge: str) -> None:
    served = (
        ServedModel(name="policy", model_path=None, groups=(ServerGroup(num_engines=2),)),
        ServedModel(name="judge", model_path=judge, groups=(ServerGroup(num_engines=1),)),
    )
    config = RunConfig(served=served)
    assert (config.num_engines, config.num_own_engines) == (2, 3)
    elsewhere = RunConfig(engine=s.EngineConfig(rollout_external_engine_addrs=["127.0.0.1:1", "127.0.0.1:2"]))
    assert (elsewhere.num_engines, elsewhere.num_own_engines) == (2, 0)
    alone = RunConfig(debug=s.DebugConfig(debug_train_only=True))
    assert (alone.num_engines, alone.num_own_engines, alone.models) == (0, 0, ())
