"""A run that trains adapters and hands the engine those alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from whole_runs import Run, metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_an_engine_samples_from_the_adapters_of_the_trainer(flags: Callable[..., list[str]], tmp_path: Path) -> None:
    save = tmp_path / "run"
    kl = {"use_kl_loss": True, "kl_loss_coef": "0.01", "kl_loss_type": "k3"}
    lora = {"lora_rank": 4, "lora_target_modules": ["q_proj", "v_proj", "down_proj"], "lora_sync": "adapter", "lr": "1e-2"}
    run = Run(flags(num_rollout=2, **lora, **kl), tmp_path / "log")
    assert run.wait(540) == 0, run.output[-3000:]
    first, second = [row for row in metrics(save) if row["source"] == "step"]
    for row in (first, second):
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert first["train/kl_loss"] == pytest.approx(0.0, abs=1e-12), "adapters begin as the model"
    assert second["train/kl_loss"] > 1e-10, "and the engine sampled from what they have become"
    (commit,) = [path.parent for path in save.rglob("adapter_config.json") if "trainer" in path.parts]
    config = json.loads((commit / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    run.assert_nothing_left(ports=False)
