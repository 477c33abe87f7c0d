"""Each obstacle that Megatron puts in the way of a machine without CUDA, and that it is out of the way."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from vime.backends.megatron_utils.cpu import ACCELERATOR_NAME, CpuAccelerator, CpuLoader, rewrite

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU layer is inactive where CUDA is there")


def run(source: str) -> dict[str, Any]:
    """Execute rewritten source; its names."""
    names: dict[str, Any] = {ACCELERATOR_NAME: CpuAccelerator(), "torch": torch}
    exec(rewrite(source), names)
    return names


@pytest.fixture(scope="module")
def group() -> Iterator[torch.distributed.ProcessGroup]:
    """One process in a group of its own, with Megatron's parallel state."""
    from megatron.core import parallel_state

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield torch.distributed.group.WORLD
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = torch.zeros(1, device=torch.cuda.current_device()).device.type", "cpu"),
        ("x = torch.zeros(1, device='cuda').device.type", "cpu"),
        ("x = torch.zeros(2).cuda().device.type", "cpu"),
        ("x = torch.empty(1, pin_memory=True).is_pinned()", False),
        ("x = torch.zeros(1).type() == 'torch.cuda.FloatTensor'", True),
        ("x = torch.zeros(1, dtype=torch.bfloat16).type() in ['torch.cuda.HalfTensor', 'torch.cuda.BFloat16Tensor']", True),
        ("x = torch.cuda.is_available()", False),
        ("x = torch.cuda.Event().record_event().query()", True),
        ("x = torch.cuda.get_device_properties(torch.device('cuda:0')).major", 0),
    ],
)
def test_the_device_becomes_the_cpu(source: str, expected: object) -> None:
    assert run(source)["x"] == expected


def test_docstrings_annotations_and_keys_stay() -> None:
    names = run('def f(device: "cuda" = "cuda"):\n    "cuda"\n    return {"cuda": device}\nx: "cuda" = 1')
    assert names["f"]() == {"cuda": "cpu"}
    assert names["f"].__doc__ == "cuda"
    assert names["f"].__annotations__["device"] == "cuda"


def test_torch_itself_is_not_touched() -> None:
    importlib.import_module("megatron.core")
    assert isinstance(torch.cuda, ModuleType)
    assert torch.device("cuda").type == "cuda"


def test_rotary_frequencies_live_on_the_cpu(group: object) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    assert RotaryEmbedding(kv_channels=8, rotary_percent=1.0)(5).device.type == "cpu"


def test_parallel_linear_layers_are_built_on_the_cpu(group: object) -> None:
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    config = ModelParallelConfig(perform_initialization=False)
    layer = ColumnParallelLinear(4, 6, config=config, init_method=torch.nn.init.zeros_, bias=False)
    assert layer.weight.device.type == "cpu"


def test_generator_states_are_the_cpus_and_forks_are_independent(group: object) -> None:
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    before = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with tracker.fork():
        second = torch.rand(3)
    assert not torch.equal(first, second)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(3), first)


def test_an_unknown_fork_is_an_error(group: object) -> None:
    from megatron.core import tensor_parallel

    with pytest.raises(KeyError, match="'nobody' was not added"), tensor_parallel.get_cuda_rng_tracker().fork("nobody"):
        pass


def test_gradient_norm_and_clipping_work_on_cpu_tensors(group: object) -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32

    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    norm = get_grad_norm_fp32([parameter.grad], grad_stats_parallel_group=group)
    assert norm == pytest.approx(5.0)
    clip_grad_by_total_norm_fp32([parameter], 1.0, norm)
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8], abs=1e-5)


def test_functions_are_not_compiled() -> None:
    jit = importlib.import_module("megatron.core.jit")

    def plain(x: int) -> int:
        return x

    assert jit.jit_fuser(plain) is plain


def test_rewritten_code_is_cached_until_the_source_changes(tmp_path: Path) -> None:
    source = tmp_path / "module.py"

    def load() -> dict[str, Any]:
        names: dict[str, Any] = {}
        exec(CpuLoader("module", str(source)).get_code("module"), names)
        return names

    source.write_text("x = 'cuda'")
    assert load()["x"] == "cpu"
    (cache,) = (tmp_path / "__pycache__").glob("*.pyc")
    written = cache.stat().st_mtime_ns
    assert load()["x"] == "cpu"
    assert cache.stat().st_mtime_ns == written
    source.write_text("x = 'cuda', 2")
    assert load()["x"] == ("cpu", 2)


def test_megatron_imported_too_early_is_refused() -> None:
    code = "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core'); import vime.backends.megatron_utils"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "megatron.core was imported before vime.backends.megatron_utils" in done.stderr
