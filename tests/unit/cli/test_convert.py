"""`vime convert`: its command line, and which folder it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vime.cli.convert import _model_folder, _size, _state_folder, main
from vime.errors import CheckpointError, ConfigError


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--to", "hf", "a"], "required: OUT"),
        (["a", "b"], "required: --to"),
        (["--to", "gguf", "a", "b"], "invalid choice: 'gguf'"),
        (["--to", "hf", "a", "b", "--shard-size", "big"], "'big' is no size: say 500MB or 5GB"),
        (["--to", "megatron", "a", "b", "--hf-checkpoint", "c"], "no effect with --to megatron"),
        (["--to", "megatron", "a", "b", "--shard-size", "1GB"], "no effect with --to megatron"),
    ],
)
def test_a_wrong_command_line_is_told(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(argv)


@pytest.mark.parametrize(("text", "size"), [("500MB", 500 * 10**6), ("5GB", 5 * 10**9), ("1.5G", 1_500_000_000), ("40 kb", 40_000)])
def test_sizes(text: str, size: int) -> None:
    assert _size(text) == size


def commit(path: Path) -> None:
    (path / "trainer").mkdir(parents=True)
    (path / "trainer" / "metadata.json").write_text("{}")
    record = {"rollout_id": 4, "weight_version": 5, "files": {"trainer/metadata.json": 2}}
    (path / "commit.json").write_text(json.dumps(record))


def test_a_run_a_commit_and_a_bare_checkpoint_are_found(tmp_path: Path) -> None:
    run = tmp_path / "run"
    commit(run / "iter_0000004")
    (run / "latest_checkpointed_iteration.txt").write_text("iter_0000004")
    for source in (run, run / "iter_0000004", run / "iter_0000004" / "trainer"):
        assert _state_folder(source) == run / "iter_0000004" / "trainer"


def test_a_torn_commit_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    commit(tmp_path / "iter_0000004")
    (tmp_path / "iter_0000004" / "trainer" / "metadata.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"trainer/metadata\.json has 1 bytes instead of 2"):
        _state_folder(tmp_path / "iter_0000004")
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        _state_folder(tmp_path / "nowhere")


def test_the_model_is_the_one_kept_unless_another_is_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not say which model it is of: give --hf-checkpoint"):
        _model_folder(None, tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert _model_folder(None, tmp_path) == tmp_path / "hf"
    assert _model_folder(Path("other"), tmp_path) == Path("other")
