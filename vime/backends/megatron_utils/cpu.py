"""Lets Megatron-Core run on a machine without CUDA. Active only there; the one place that knows of it.

Megatron names the CUDA device in about fifty places that no flag reaches (`torch.cuda.current_device()` as a device,
the literal "cuda", the type names that its optimizer compares, `.cuda()`, pinned memory, CUDA generator states). An
import hook rewrites the syntax tree of `megatron.core` and `megatron.training` while they are loaded, as pytest does to
assertions; torch itself is not touched. `torch.cuda` becomes `CpuAccelerator` inside those modules.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["CpuAccelerator", "CpuLoader", "enable_without_cuda", "rewrite"]

PACKAGES = ("megatron.core", "megatron.training")
ACCELERATOR_NAME = "__vime_cpu_accelerator__"
REWRITER = Path(__file__).read_bytes()  # rewritten code is cached as long as this file and Megatron's stay as they are
LITERALS = {
    "cuda": "cpu",
    "cuda:0": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


class _Ready:
    """A stream or an event whose work is always done."""

    device = torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    def __enter__(self) -> _Ready:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def record_event(self, *args: Any) -> _Ready:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ready)

    def __hash__(self) -> int:
        return 0


class CpuAccelerator:
    """What Megatron finds under the name `torch.cuda` on a machine without it: one device, "cpu", always in step."""

    nvtx = types.SimpleNamespace(
        range_push=lambda *args, **kwargs: None,
        range_pop=lambda *args, **kwargs: None,
        range=lambda *args, **kwargs: contextlib.nullcontext(),
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def set_device(self, *args: Any) -> None:
        return None

    def get_device_properties(self, *args: Any) -> types.SimpleNamespace:
        return types.SimpleNamespace(name="cpu", major=0, minor=0, multi_processor_count=1, total_memory=0)

    def get_device_capability(self, *args: Any) -> tuple[int, int]:
        return (0, 0)

    def synchronize(self, *args: Any) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def current_stream(self, *args: Any) -> _Ready:
        return _Ready()

    def default_stream(self, *args: Any) -> _Ready:
        return _Ready()

    def Stream(self, *args: Any, **kwargs: Any) -> _Ready:  # noqa: N802 - torch's name
        return _Ready()

    def Event(self, *args: Any, **kwargs: Any) -> _Ready:  # noqa: N802 - torch's name
        return _Ready()

    def stream(self, *args: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_current_stream_capturing(self) -> bool:
        return False

    def memory_allocated(self, *args: Any) -> int:
        return 0

    def memory_reserved(self, *args: Any) -> int:
        return 0

    def max_memory_allocated(self, *args: Any) -> int:
        return 0

    def memory_stats(self, *args: Any) -> dict[str, int]:
        return {}

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)


class _Rewriter(ast.NodeTransformer):
    """Replaces the CUDA device by the CPU in expressions; leaves docstrings, annotations and dict keys alone."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        inner = node.value
        if (
            isinstance(node.ctx, ast.Load)
            and isinstance(inner, ast.Attribute)
            and isinstance(inner.value, ast.Name)
            and (inner.value.id, inner.attr) == ("torch", "cuda")
        ):
            stand_in = ast.copy_location(ast.Name(ACCELERATOR_NAME, ast.Load()), inner)
            return ast.copy_location(ast.Attribute(stand_in, node.attr, ast.Load()), node)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and node.value in LITERALS:
            return ast.copy_location(ast.Constant(LITERALS[node.value]), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr == "cuda" and not (isinstance(func.value, ast.Name) and func.value.id == "torch"):
            return self.visit(func.value)  # x.cuda(...) is x
        for keyword in node.keywords:
            if keyword.arg == "pin_memory" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True:
                keyword.value = ast.copy_location(ast.Constant(False), keyword.value)
        return self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        node.values = [self.visit(value) for value in node.values]
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        node.defaults = [self.visit(default) for default in node.defaults]
        node.kw_defaults = [default and self.visit(default) for default in node.kw_defaults]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node


def rewrite(source: str | bytes, path: str = "<source>") -> types.CodeType:
    """Compile Python source with every CUDA device in it replaced by the CPU.

    The names that the code then needs (`ACCELERATOR_NAME`) are put into the module by the hook.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # Megatron's own invalid escapes
        tree = _Rewriter().visit(ast.parse(source, path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file so that no other process sees a part of it."""
    path.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


class CpuLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from its rewritten source, through a cache beside Python's own."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = Path(self.get_filename(fullname))
        cache = path.parent / "__pycache__" / f"{path.stem}.vime-cpu-{sys.implementation.cache_tag}.pyc"
        source = path.read_bytes()
        stamp = importlib.util.MAGIC_NUMBER + hashlib.sha256(REWRITER + source).digest()
        with contextlib.suppress(OSError):
            stored = cache.read_bytes()
            if stored.startswith(stamp):
                return marshal.loads(stored[len(stamp) :])
        code = rewrite(source, str(path))
        with contextlib.suppress(OSError):  # a read-only installation is rewritten in each process: 3 s
            _write_whole(cache, stamp + marshal.dumps(code))
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__[ACCELERATOR_NAME] = CpuAccelerator()
        super().exec_module(module)
        adjust = _AFTER_IMPORT.get(module.__name__)
        if adjust is not None:
            adjust(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname == package or fullname.startswith(package + ".") for package in PACKAGES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return spec
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=CpuLoader(fullname, spec.origin), submodule_search_locations=spec.submodule_search_locations
        )


def _plain_functions(module: Any) -> None:
    """`megatron.core.jit`: torch.compile would need a C++ compiler and gain nothing here."""
    module.disable_jit_fuser()


def _cpu_generators(module: Any) -> None:
    """`megatron.core.tensor_parallel.random`: hold the states of the CPU generator instead of CUDA's."""
    module._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)

    class CpuStatesTracker(module.CudaRNGStatesTracker):  # type: ignore[misc]
        _current_state_name: str

        @contextlib.contextmanager
        def fork(self, name: str = module._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise KeyError(f"random state '{name}' was not added (known: {sorted(self.states_)})")
            outer_state, outer_name = torch.get_rng_state(), self._current_state_name
            torch.set_rng_state(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer_state)
                self._current_state_name = outer_name

    module.CudaRNGStatesTracker = CpuStatesTracker


def _numbers_of_tokens(module: Any) -> None:
    """`megatron.core.transformer.moe.moe_utils`: what is on the CPU already is made numpy, too; all-to-all takes no tensors as sizes."""

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _uneven_collectives(module: Any) -> None:
    """`megatron.core.tensor_parallel.mappings`: gloo gathers and scatters parts of one size only; experts have parts of several."""
    gather, scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_along_first_dim(
        x: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(x, group, None, use_global_buffer)
        padded = x.new_zeros(max(output_split_sizes), *x.shape[1:])
        padded[: len(x)] = x
        parts = gather(padded, group).split(max(output_split_sizes))
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    def reduce_scatter_along_first_dim(
        x: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(x, group, None, use_global_buffer)
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()]

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather_along_first_dim, reduce_scatter_along_first_dim


_AFTER_IMPORT = types.MappingProxyType(
    {
        "megatron.core.tensor_parallel.mappings": _uneven_collectives,
        "megatron.core.jit": _plain_functions,
        "megatron.core.tensor_parallel.random": _cpu_generators,
        "megatron.core.transformer.moe.moe_utils": _numbers_of_tokens,
    }
)


def enable_without_cuda() -> bool:
    """Install the hook when torch sees no CUDA device; True when it is in place. Must run before megatron is imported."""
    if torch.cuda.is_available():
        return False
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    early = sorted(name for name in sys.modules if name.startswith(PACKAGES))
    if early:
        raise ImportError(f"{early[0]} was imported before vime.backends.megatron_utils; import the latter first.")
    sys.meta_path.insert(0, _Finder())
    return True
