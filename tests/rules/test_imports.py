"""Import borders: which part may know of which, and who may import the heavy third parties (docs/concepts.md)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.rules.source import ROOT, imported_modules, inside, module_name, python_files, relative

# Each part may import the parts on lines above its own, and itself. The longest matching name decides.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("vime", "vime.types", "vime.errors", "vime.utils", "vime.utils.types"),
    ("vime.config",),
    ("vime.observability", "vime.hooks", "vime.plan", "vime.utils.http_utils"),
    ("vime.data", "vime.rollout.rm_hub", "vime.rollout.filter_hub", "vime.algorithms"),
    ("vime.packing", "vime.capsule"),
    ("vime.rollout", "vime.agent", "vime.backends"),
    ("vime.checkpoint",),
    ("vime.ray",),
    ("vime.loop", "vime.utils.arguments"),
    ("vime.migrate", "vime.doctor", "vime.audit"),
    ("vime.cli",),
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}

OWNERS = {  # third party: the only packages that may import it
    "ray": ("vime.ray",),
    "megatron": ("vime.backends.megatron_utils",),
    "vllm": ("vime.backends.vllm_utils",),
    "vllm_router": ("vime.backends.vllm_utils",),
    "wandb": ("vime.observability",),
    "tensorboard": ("vime.observability",),
    "torch.utils.tensorboard": ("vime.observability",),
}
HEAVY = ("torch", "ray", "vllm", "megatron", "transformers", "numpy")


def part_of(module: str) -> str | None:
    """The part (a name of LAYERS) that a module belongs to; None for a module that no line names."""
    names = [name for name in RANKS if inside(module, name) and name != "vime"]
    if names:
        return max(names, key=len)
    return "vime" if module == "vime" else None


def part_of_import(module: str) -> str | None:
    """The same for an imported name, whose last component may be a class: `vime.errors.ConfigError`."""
    return part_of(module) or part_of(module.rpartition(".")[0])


def loaded_by(code: str) -> list[str]:
    """Which of HEAVY a fresh interpreter holds after it ran `code`."""
    script = f"import sys\n{code}\nprint('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOADED")]
    assert lines, f"the interpreter failed:\n{done.stderr}"
    return lines[-1].split()[1:]


def test_every_module_belongs_to_a_part() -> None:
    homeless = [relative(path) for path in python_files("vime") if part_of(module_name(path)) is None]
    assert not homeless, f"give these a line in LAYERS: {homeless}"


def test_imports_point_one_way() -> None:
    wrong = []
    for path in python_files("vime"):
        part = part_of(module_name(path))
        for module, line in imported_modules(path):
            if not inside(module, "vime"):
                continue
            other = part_of_import(module)
            if part and other and other != part and RANKS[other] >= RANKS[part]:
                wrong.append(f"{relative(path)}:{line}: {part} may not import {other} ({module})")
    assert not wrong, "\n".join(wrong)


def test_heavy_third_parties_are_imported_by_their_owners_only() -> None:
    wrong = []
    for path in python_files("vime", "examples"):
        for module, line in imported_modules(path):
            for third_party, owners in OWNERS.items():
                if inside(module, third_party) and not any(inside(module_name(path), owner) for owner in owners):
                    wrong.append(f"{relative(path)}:{line} imports {module}: only {', '.join(owners)} may")
    assert not wrong, "\n".join(wrong)


def test_the_megatron_and_vllm_backends_do_not_know_each_other() -> None:
    pairs = (("vime.backends.megatron_utils", "vime.backends.vllm_utils"), ("vime.backends.vllm_utils", "vime.backends.megatron_utils"))
    wrong = []
    for path in python_files("vime/backends"):
        for module, line in imported_modules(path):
            wrong += [
                f"{relative(path)}:{line} imports {module}"
                for here, there in pairs
                if inside(module_name(path), here) and inside(module, there)
            ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["vime", "vime.config", "vime.errors", "vime.hooks", "vime.cli.main"])
def test_light_modules_load_nothing_heavy(module: str) -> None:
    allowed = {"vime.hooks": {"numpy"}, "vime.cli.main": {"numpy"}}.get(module, set())
    assert set(loaded_by(f"import {module}")) <= allowed


def test_help_loads_nothing_heavy() -> None:
    code = "from vime.cli.main import main\nassert main(['--help']) == 0\nassert main(['train', '--help']) == 0"
    assert set(loaded_by(code)) <= {"numpy"}
