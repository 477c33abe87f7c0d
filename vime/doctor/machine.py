"""What the machine gives a run: system, cores, memory, disk, shared memory, limits, ports, clock, GPUs.

Each check takes what it judges as arguments that default to the machine's own, so that tests can show it a poor machine.
"""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vime.doctor.findings import Finding, ok, warning, wrong
from vime.doctor.matrix import DRIVER, GLIBC, numbers

__all__ = [
    "PART", "check_clock", "check_compiler", "check_cores", "check_disk", "check_files", "check_gpu", "check_machine", "check_memory",
    "check_ports", "check_ray_address", "check_shared_memory", "check_system", "read_gpus",
]  # fmt: skip

PART = "machine"
GIB = 2**30
MEMORY_WANTED, MEMORY_NEEDED = 10 * GIB, 4 * GIB  # a quickstart; the smallest run there is
DISK_WANTED, DISK_NEEDED = 10 * GIB, 1 * GIB
SHM_WANTED, SHM_NEEDED = 2 * GIB, 1 * GIB  # Ray's object store and one bucket of weights take 0.75 GiB
FILES_WANTED, FILES_NEEDED = 65536, 4096
PORTS_WANTED = 1000
BORN = 1_790_000_000.0  # seconds since 1970: a clock before this program was written is wrong
CLOCK_SKEW = 5.0  # seconds between this clock and the file system's
GPU_DEADLINE = 30.0


def check_machine() -> Iterator[Finding]:
    """Everything but the GPUs. A check that this machine is too strange for is a finding, too, and hides no other one."""
    checks: dict[str, Callable[[], Finding | Iterator[Finding]]] = {
        "system": check_system,
        "C compiler": check_compiler,
        "cores": check_cores,
        "memory": check_memory,
        "disk": check_disk,
        "shared memory": check_shared_memory,
        "file limit": check_files,
        "ports": check_ports,
        "clock": check_clock,
        "Ray cluster": check_ray_address,
    }
    for name, check in checks.items():
        try:
            found = check()
            yield from [found] if isinstance(found, Finding) else list(found)
        except Exception as error:  # noqa: BLE001 - whatever a strange machine raises is the finding
            told = f"could not be looked at: {type(error).__name__}: {error}"
            yield warning(PART, name, told, expected="an ordinary Linux system", cure="mend what the error names")


def check_system(system: str | None = None, machine: str | None = None, libc: tuple[str, str] | None = None) -> Finding:
    """Operating system, processor and C library: what the wheels of the lock are built for."""
    system, machine = system or platform.system(), machine or platform.machine()
    name, version = libc or platform.libc_ver()
    found = f"{system} on {machine}, {name} {version}".strip(", ")
    expected = f"Linux on x86_64, glibc {GLIBC} or newer"
    if (system, machine) != ("Linux", "x86_64") or (name == "glibc" and numbers(version) < numbers(GLIBC)):
        return wrong(PART, "system", found, expected=expected, cure="use a machine or a container of that kind (docs/install.md)")
    return ok(PART, "system", found)


def check_compiler() -> Finding:
    """torch compiles small kernels at run time."""
    names = [os.environ.get("CC") or "cc", "gcc", "clang"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        return wrong(PART, "C compiler", "none", expected="cc, gcc or clang on PATH", cure="apt-get install gcc g++")
    return ok(PART, "C compiler", found)


def check_cores(count: int | None = None) -> Finding:
    """Cores that this process may use."""
    count = len(os.sched_getaffinity(0)) if count is None else count
    if count < 2:
        cure = "give the container or the job two cores"
        return warning(PART, "cores", str(count), expected="two: an engine and a trainer", cure=cure)
    return ok(PART, "cores", str(count))


def check_memory(available: int | None = None) -> Finding:
    """Bytes that can still be used: the system's, or less where a control group limits this process."""
    available = available_memory() if available is None else available
    found, cure = f"{available / GIB:.1f} GiB available", "end what else runs here, or give the container or the job more memory"
    if available < MEMORY_NEEDED:
        return wrong(PART, "memory", found, expected=f"{MEMORY_NEEDED / GIB:.0f} GiB", cure=cure)
    if available < MEMORY_WANTED:
        return warning(PART, "memory", found, expected=f"{MEMORY_WANTED / GIB:.0f} GiB for the quickstart", cure=cure)
    return ok(PART, "memory", found)


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory available to this process; its control group's limit counts (version 2 and 1)."""
    text = (proc / "meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    free = int(found[1]) * 1024 if found else 0
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            bound = (cgroup / limit).read_text().strip()
            if bound.isdigit():
                free = min(free, int(bound) - int((cgroup / used).read_text()))
        except (OSError, ValueError):
            continue
    return free


def check_disk(folders: tuple[Path, ...] = (), free: Mapping[Path, int] | None = None) -> Iterator[Finding]:
    """Free space where runs and temporary files go; folders on one file system are one finding."""
    seen = set()
    for folder in folders or (Path.cwd(), Path(tempfile.gettempdir())):
        if free is None and (device := folder.stat().st_dev) in seen:
            continue
        if free is None:
            seen.add(device)
        bytes_free = shutil.disk_usage(folder).free if free is None else free[folder]
        found, cure = f"{bytes_free / GIB:.1f} GiB free in {folder}", f"free some in {folder}, or set --save and TMPDIR to a larger disk"
        if bytes_free < DISK_NEEDED:
            yield wrong(PART, "disk", found, expected=f"{DISK_NEEDED / GIB:.0f} GiB", cure=cure)
        elif bytes_free < DISK_WANTED:
            yield warning(PART, "disk", found, expected=f"{DISK_WANTED / GIB:.0f} GiB for checkpoints", cure=cure)
        else:
            yield ok(PART, "disk", found)


def check_shared_memory(folder: Path = Path("/dev/shm"), usage: Any = shutil.disk_usage) -> Finding:
    """Weights travel and Ray keeps its objects there; containers often give 64 MiB."""
    cure = f"mount -o remount,size=8G {folder} (of a container: docker run --shm-size=8g)"
    try:
        space = usage(folder)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        return wrong(
            PART, "shared memory", f"{folder}: {error.strerror}", expected="a tmpfs", cure=f"mount -t tmpfs -o size=8G tmpfs {folder}"
        )
    found = f"{folder}: {space.free / GIB:.2f} of {space.total / GIB:.2f} GiB free"
    if not writable:
        return wrong(PART, "shared memory", f"{found}, not writable", expected="that it can be written", cure=f"chmod 1777 {folder}")
    if space.free < SHM_NEEDED:
        if space.total >= SHM_WANTED:
            cure = f"remove what other programs left in {folder}: ls -lS {folder}"
        return wrong(PART, "shared memory", found, expected=f"{SHM_NEEDED / GIB:.0f} GiB free", cure=cure)
    if space.free < SHM_WANTED:
        return warning(PART, "shared memory", found, expected=f"{SHM_WANTED / GIB:.0f} GiB free", cure=cure)
    return ok(PART, "shared memory", found)


def check_files(limits: tuple[int, int] | None = None) -> Finding:
    """Open files: a run raises its own limit as far as the hard one allows."""
    soft, hard = (math.inf if each == resource.RLIM_INFINITY else each for each in limits or resource.getrlimit(resource.RLIMIT_NOFILE))
    found, cure = (
        f"{soft:g} open files, at most {hard:g}",
        f"ulimit -n {FILES_WANTED} (of a container: docker run --ulimit nofile={FILES_WANTED})",
    )
    if hard < FILES_NEEDED:
        return wrong(PART, "file limit", found, expected=f"at least {FILES_NEEDED}", cure=cure)
    if hard < FILES_WANTED:
        return warning(PART, "file limit", found, expected=f"{FILES_WANTED} for many engines and workers", cure=cure)
    return ok(PART, "file limit", found)


def check_ports(address: str = "127.0.0.1", span: tuple[int, int] | None = None) -> Finding:
    """Servers of a run listen on free ports of loopback."""
    try:
        with socket.socket() as first, socket.socket() as second:
            first.bind((address, 0))
            first.listen()
            second.settimeout(5.0)
            second.connect(first.getsockname())
    except OSError as error:
        found = f"no port of {address} can be listened on and reached: {error}"
        return wrong(PART, "ports", found, expected="that loopback works", cure="ip link set lo up")
    if span is None:
        try:
            low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
            span = int(low), int(high)
        except (OSError, ValueError):
            return ok(PART, "ports", f"{address} works")
    count = span[1] - span[0] + 1
    found = f"{address} works; free ports are taken from {span[0]} to {span[1]}"
    if count < PORTS_WANTED:
        cure = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
        return warning(PART, "ports", found, expected=f"a range of {PORTS_WANTED}", cure=cure)
    return ok(PART, "ports", found)


def check_clock(now: float | None = None) -> Finding:
    """The clock is not absurd and agrees with the file system's, which decides what of a run is newer."""
    now = time.time() if now is None else now
    with tempfile.NamedTemporaryFile() as file:
        skew = os.stat(file.name).st_mtime - now
    found, cure = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)), "timedatectl set-ntp true"
    if now < BORN:
        return wrong(PART, "clock", found, expected="today", cure=cure)
    if abs(skew) > CLOCK_SKEW:
        return warning(PART, "clock", f"{found}; files are stamped {skew:+.0f} s", expected="the same time", cure=cure)
    return ok(PART, "clock", found)


def check_ray_address(address: str | None = None) -> Finding:
    """Whether runs start a Ray cluster of their own or join one."""
    address = os.environ.get("RAY_ADDRESS") if address is None else address
    if not address:
        return ok(PART, "Ray cluster", "each run starts its own (RAY_ADDRESS is not set)")
    found = f"RAY_ADDRESS={address}: runs join that cluster"
    return warning(PART, "Ray cluster", found, expected="that this is meant", cure="unset RAY_ADDRESS to let each run start its own")


def read_gpus(command: tuple[str, ...] = ("nvidia-smi",)) -> tuple[list[dict[str, str]], str]:
    """(name, driver and memory of each NVIDIA GPU, why there is none)."""
    query = [*command, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=GPU_DEADLINE, check=False)
    except FileNotFoundError:
        return [], "no NVIDIA driver"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer: {error}"
    if done.returncode != 0:
        return [], f"nvidia-smi fails: {(done.stdout + done.stderr).strip()[:200]}"
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(("name", "driver", "memory"), row, strict=True)) for row in rows if len(row) == 3], ""


def check_gpu(gpus: list[dict[str, str]], why_none: str, torch: Mapping[str, Any]) -> Iterator[Finding]:
    """GPUs and driver, and whether torch (what its import told) sees them and has its collectives."""
    part = "GPU"
    if not gpus:
        if why_none == "no NVIDIA driver":
            yield ok(part, "driver", f"{why_none}: runs compute on the CPU")
        else:
            yield warning(part, "driver", why_none, expected="that it lists the GPUs", cure="reinstall the NVIDIA driver, or reboot")
    else:
        names = ", ".join(sorted({gpu["name"] for gpu in gpus}))
        found = f"{len(gpus)} x {names}, driver {gpus[0]['driver']}"
        if numbers(gpus[0]["driver"]) < numbers(DRIVER):
            cure = f"install the NVIDIA driver {DRIVER} or newer"
            yield wrong(part, "driver", found, expected=f"{DRIVER} or newer (CUDA 13)", cure=cure)
        else:
            yield ok(part, "driver", found)
    if not torch:
        return
    if gpus and not torch.get("devices"):
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        cure = "unset CUDA_VISIBLE_DEVICES" if hidden == "" else "install a torch with CUDA (docs/install.md)"
        yield warning(part, "torch", f"sees none of them (CUDA {torch.get('cuda')})", expected="that it does", cure=cure)
    if not torch.get("gloo"):
        yield wrong(part, "gloo", "torch has none", expected="collectives on the CPU", cure="install torch from PyPI (docs/install.md)")
    if torch.get("devices"):
        yield ok(part, "NCCL", str(torch.get("nccl")))
