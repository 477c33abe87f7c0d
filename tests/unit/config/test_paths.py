"""Paths come out absolute, so that processes with other working directories mean the same files."""

from pathlib import Path

from tests.unit.config.configs import change
from vime.config import SECTIONS, RunConfig
from vime.config.fields import flag_specs
from vime.config.paths import with_absolute_paths


def test_every_path_is_read_relative_to_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [spec.name for section in SECTIONS.values() for spec in flag_specs(section) if spec.path]
    assert {"hf_checkpoint", "ref_load", "save", "load", "save_hf", "log_dir", "tb_project_name", "prompt_data"} <= set(names)
    args = with_absolute_paths(change(RunConfig(), **{name: f"x/../{name}" for name in names})).args
    assert {name: getattr(args, name) for name in names} == {name: str(Path.cwd() / name) for name in names}


def test_slices_placeholders_and_names_of_held_out_files_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = change(
        RunConfig(), prompt_data="p.jsonl@[0:3]", save_hf="hf/{rollout_id}", eval_prompt_data=["a", "a.jsonl", "b", "b.jsonl@[:2]"]
    )
    here, absolute = Path.cwd(), with_absolute_paths(config)
    assert absolute.data.prompt_data == str(here / "p.jsonl@[0:3]")
    assert absolute.checkpoint.save_hf == str(here / "hf" / "{rollout_id}")
    assert absolute.eval.eval_prompt_data == ["a", str(here / "a.jsonl"), "b", str(here / "b.jsonl@[:2]")]


def test_absolute_and_missing_paths_stay_as_they_are():
    config = change(RunConfig(), hf_checkpoint="/models/m")
    assert with_absolute_paths(config) == config
