"""Poor machines are told as such, each with a cure; this one passes."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vime.doctor import machine
from vime.doctor.findings import Finding, State

GIB = 2**30


def states(findings: Iterable[Finding]) -> list[State]:
    return [finding.state for finding in findings]


def space(total: float, free: float) -> Any:
    return lambda folder: SimpleNamespace(total=total * GIB, free=free * GIB)


def test_every_check_of_this_machine_says_something() -> None:
    findings = list(machine.check_machine())
    assert len({finding.name for finding in findings}) >= 10
    for finding in findings:
        assert finding.found
        assert (finding.state is State.OK) == (finding.cure == "")


def test_a_check_that_fails_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_folder() -> str:
        raise FileNotFoundError("no usable temporary directory")

    names = {finding.name for finding in machine.check_machine()}
    monkeypatch.setattr(machine.tempfile, "gettempdir", no_folder)
    findings = {finding.name: finding for finding in machine.check_machine()}
    assert set(findings) == names
    assert findings["disk"].state is State.WARNING
    assert "no usable temporary directory" in findings["disk"].found


@pytest.mark.parametrize(
    ("total", "free", "state", "cure"),
    [
        (0.0625, 0.0625, State.WRONG, "docker run --shm-size"),
        (16, 0.5, State.WRONG, "remove what other programs left"),
        (1.5, 1.5, State.WARNING, "remount"),
        (16, 16, State.OK, ""),
    ],
)
def test_shared_memory(total: float, free: float, state: State, cure: str, tmp_path: Path) -> None:
    finding = machine.check_shared_memory(tmp_path, space(total, free))
    assert finding.state is state
    assert cure in finding.cure


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    finding = machine.check_shared_memory(tmp_path / "none")
    assert finding.state is State.WRONG
    assert "No such file" in finding.found
    assert "mount -t tmpfs" in finding.cure


@pytest.mark.parametrize(
    ("limits", "state"),
    [((256, 1024), State.WRONG), ((1024, 20000), State.WARNING), ((1024, 2**20), State.OK), ((1024, resource.RLIM_INFINITY), State.OK)],
)
def test_file_limit(limits: tuple[int, int], state: State) -> None:
    finding = machine.check_files(limits)
    assert finding.state is state
    assert (state is State.OK) or "ulimit -n 65536" in finding.cure


@pytest.mark.parametrize(("gib", "state"), [(2, State.WRONG), (6, State.WARNING), (64, State.OK)])
def test_memory(gib: int, state: State) -> None:
    assert machine.check_memory(gib * GIB).state is state


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 8 * GIB),
        ({"memory.max": "max", "memory.current": "5"}, 8 * GIB),
        ({"memory.max": str(3 * GIB), "memory.current": str(GIB)}, 2 * GIB),
        ({"memory/memory.limit_in_bytes": str(4 * GIB), "memory/memory.usage_in_bytes": str(GIB)}, 3 * GIB),
    ],
    ids=["none", "unlimited", "version 2", "version 1"],
)
def test_a_control_groups_limit_counts(files: dict[str, str], available: int, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {8 * 2**20} kB\n")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert machine.available_memory(tmp_path, tmp_path / "cgroup") == available


def test_disk(tmp_path: Path) -> None:
    folders = (tmp_path / "a", tmp_path / "b", tmp_path / "c")
    free = dict(zip(folders, (GIB // 2, 4 * GIB, 40 * GIB), strict=True))
    assert states(machine.check_disk(folders, free)) == [State.WRONG, State.WARNING, State.OK]


def test_folders_on_one_file_system_are_one_finding(tmp_path: Path) -> None:
    assert len(list(machine.check_disk((tmp_path, tmp_path)))) == 1


def test_ports() -> None:
    assert machine.check_ports().state is State.OK
    assert machine.check_ports(span=(40000, 40100)).state is State.WARNING
    nobody = machine.check_ports("192.0.2.1")  # set aside for documents: no machine has it
    assert nobody.state is State.WRONG
    assert "192.0.2.1" in nobody.found


def test_the_clock() -> None:
    assert machine.check_clock().state is State.OK
    assert machine.check_clock(0.0).state is State.WRONG
    assert machine.check_clock(machine.BORN + 1).state is State.WARNING  # files are stamped much later


@pytest.mark.parametrize(
    ("system", "processor", "libc", "state"),
    [
        ("Linux", "x86_64", ("glibc", "2.36"), State.OK),
        ("Linux", "x86_64", ("glibc", "2.17"), State.WRONG),
        ("Linux", "aarch64", ("glibc", "2.36"), State.WRONG),
        ("Darwin", "x86_64", ("", ""), State.WRONG),
    ],
)
def test_system(system: str, processor: str, libc: tuple[str, str], state: State) -> None:
    assert machine.check_system(system, processor, libc).state is state


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.check_compiler().state is State.WRONG


def test_one_core_is_few() -> None:
    assert states([machine.check_cores(1), machine.check_cores(2)]) == [State.WARNING, State.OK]


def test_a_cluster_that_runs_would_join_is_told() -> None:
    assert machine.check_ray_address("").state is State.OK
    assert "RAY_ADDRESS=10.0.0.1:6379" in machine.check_ray_address("10.0.0.1:6379").found


def driver_script(folder: Path, text: str) -> tuple[str]:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return (str(path),)


def test_gpus_are_read_from_the_driver(tmp_path: Path) -> None:
    gpus, why = machine.read_gpus(
        driver_script(tmp_path, "echo 'NVIDIA H200, 580.65.06, 143771 MiB'; echo 'NVIDIA H200, 580.65.06, 143771 MiB'")
    )
    assert (gpus, why) == ([{"name": "NVIDIA H200", "driver": "580.65.06", "memory": "143771 MiB"}] * 2, "")
    torch = {"devices": ["NVIDIA H200"] * 2, "gloo": True, "nccl": "2.29.7", "cuda": "13.0"}
    assert states(machine.check_gpu(gpus, why, torch)) == [State.OK, State.OK]


def test_an_old_driver_is_wrong_and_a_torch_that_sees_nothing_doubtful() -> None:
    gpus = [{"name": "NVIDIA A100", "driver": "535.54", "memory": "81920 MiB"}]
    torch = {"devices": [], "gloo": True, "cuda": "None"}
    assert states(machine.check_gpu(gpus, "", torch)) == [State.WRONG, State.WARNING]


def test_no_driver_is_well_and_one_that_fails_is_not(tmp_path: Path) -> None:
    torch = {"devices": [], "gloo": True}
    assert states(machine.check_gpu(*machine.read_gpus(("no-such-program",)), torch)) == [State.OK]
    broken = machine.read_gpus(driver_script(tmp_path, "echo 'Driver/library version mismatch' >&2; exit 18"))
    (finding,) = machine.check_gpu(*broken, torch)
    assert finding.state is State.WARNING
    assert "mismatch" in finding.found


def test_a_torch_without_gloo_is_wrong() -> None:
    assert states(machine.check_gpu([], "no NVIDIA driver", {"devices": [], "gloo": False})) == [State.OK, State.WRONG]
