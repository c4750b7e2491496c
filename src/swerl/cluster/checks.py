"""Checks of one machine: GPUs, PyTorch, ports, disk, versions. These functions run on it."""

from __future__ import annotations

import csv
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("swerl", "torch", "megatron-core", "ray", "fla-core", "triton")
TORCH_S = 180.0
NVIDIA_SMI_S = 60.0
FIELDS = "index,uuid,name,driver_version,memory.total,memory.used"
FREE_SHARE = 0.95
"""Fraction of a GPU's memory that must be free: the driver alone takes a hundredth."""
_TORCH = (
    "import torch; c = torch.cuda; "
    "print(torch.__version__, torch.version.cuda, c.is_available(), c.device_count())"
)


class FindingState(StrEnum):
    OK = "ok"
    WARN = "warn"
    """The run can start, but may fail later."""
    FAIL = "fail"
    """The run cannot work."""


@dataclass(frozen=True, slots=True)
class MachineFinding:
    node: str
    check: str
    state: FindingState
    found: str
    """The observation, in a few words."""
    fix: str = ""
    """A remedy; empty if the check passed."""


def check_result(node: str, check: str, found: str, *, good: bool, fix: str) -> MachineFinding:
    """Return a finding that passed or failed."""
    state = FindingState.OK if good else FindingState.FAIL
    return MachineFinding(node, check, state, found, "" if good else fix)


@dataclass(frozen=True, slots=True)
class GpuNeed:
    """The GPUs that a run needs on each machine."""

    num_gpus: int
    kind: str
    """Part of the GPU's name, in lower case."""
    given: tuple[str, ...] = ()
    """Numbers or identifiers of the run's GPUs; empty means all of the machine's."""


@dataclass(frozen=True, slots=True)
class MachineNeed:
    """Everything that a run needs on one machine."""

    node: str
    address: str
    gpus: GpuNeed
    disk: Path
    disk_bytes: int
    """Bytes that must be free there."""
    modules: tuple[str, ...] = ()
    """Kernels that must be installed there."""


@dataclass(frozen=True, slots=True)
class InstalledGpu:
    """One GPU as nvidia-smi lists it."""

    index: str
    uuid: str
    name: str
    driver: str
    total_mib: int
    used_mib: int


def examine(need: MachineNeed) -> list[MachineFinding]:
    """Run every check that concerns this machine alone."""
    return [
        *check_gpus(need.node, need.gpus),
        _check_torch(need.node, need.gpus.num_gpus),
        *check_kernels(need.node, need.modules, need.gpus.kind),
        *check_ports(need.node, need.address, (0,)),
        _check_disk(need),
    ]


def check_gpus(node: str, need: GpuNeed) -> Iterator[MachineFinding]:
    """Check this machine's GPUs with nvidia-smi."""
    if not need.num_gpus:
        yield MachineFinding(node, "GPUs", FindingState.OK, "none needed: the run is on CPU")
        return
    try:
        gpus = read_gpus(_nvidia_smi("gpu", FIELDS))
        users = read_users(_nvidia_smi("compute-apps", "gpu_uuid,pid,process_name,used_memory"))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        fix = "install NVIDIA's driver, or choose machines with GPUs"
        yield check_result(node, "GPUs", f"nvidia-smi: {error}", good=False, fix=fix)
        return
    yield from judge_gpus(node, need, gpus, users)


def judge_gpus(
    node: str, need: GpuNeed, gpus: list[InstalledGpu], users: dict[str, list[str]]
) -> Iterator[MachineFinding]:
    """Judge number and kind, free memory (naming the processes that use it), and the driver.

    GPUs that are not the run's are ignored.
    """
    # Other GPUs of the machine may be busy with other runs.
    if need.given:
        gpus = [gpu for gpu in gpus if gpu.index in need.given or gpu.uuid in need.given]
    names = sorted({gpu.name for gpu in gpus})
    good = len(gpus) >= need.num_gpus and all(need.kind in name.lower() for name in names)
    fix = f"the recipe asks for {need.num_gpus} x {need.kind}: change cluster.gpus_per_node or gpu"
    yield check_result(node, "GPUs", f"{len(gpus)} x {', '.join(names)}", good=good, fix=fix)
    busy = [gpu for gpu in gpus if gpu.total_mib - gpu.used_mib < FREE_SHARE * gpu.total_mib]
    holders = [each for gpu in busy for each in users.get(gpu.uuid, ["a process outside"])]
    found = f"{len(gpus) - len(busy)} of {len(gpus)} free"
    if busy:
        found += f"; in use by {', '.join(holders[:4])}"
    fix = "end those processes if they are yours; swerl never does"
    yield check_result(node, "GPU memory", found, good=not busy, fix=fix)
    if gpus:
        yield MachineFinding(node, "driver", FindingState.OK, gpus[0].driver)


def gpu_uuids(gpus: Sequence[str]) -> tuple[str, ...]:
    """Return the uuids of these GPUs of this machine, as torch writes them; empty if unknown."""
    try:
        found = read_gpus(_nvidia_smi("gpu", FIELDS)) if gpus else []
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
    by_name = {name: gpu.uuid for gpu in found for name in (gpu.index, gpu.uuid)}
    if not set(gpus) <= by_name.keys():
        return ()
    return tuple(by_name[gpu].removeprefix("GPU-") for gpu in gpus)


def read_gpus(text: str) -> list[InstalledGpu]:
    """Parse nvidia-smi's table of GPUs. Raises ValueError."""
    return [
        InstalledGpu(index, uuid, name, driver, int(total), int(used))
        for index, uuid, name, driver, total, used in _rows(text)
    ]


def read_users(text: str) -> dict[str, list[str]]:
    """Parse nvidia-smi's table of processes: GPU → `name (pid, MiB)`."""
    found: dict[str, list[str]] = {}
    for uuid, pid, name, used in _rows(text):
        found.setdefault(uuid, []).append(f"{name} (pid {pid}, {used} MiB)")
    return found


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]


def _nvidia_smi(table: str, fields: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("not installed")
    command = [program, f"--query-{table}={fields}", "--format=csv,noheader,nounits"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True
    ).stdout


def _check_torch(node: str, num_gpus: int) -> MachineFinding:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=TORCH_S
        )
    except subprocess.TimeoutExpired:
        fix = "is the file system of Python's packages slow?"
        return check_result(node, "torch", f"no import in {TORCH_S:g} s", good=False, fix=fix)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return check_result(node, "torch", last, good=False, fix="pip install 'swerl[twin]'")
    # Libraries may print warnings before the last line.
    torch, cuda, is_up, count = done.stdout.split()[-4:]
    found = f"{torch}, CUDA {cuda if is_up == 'True' else 'not in use'}, {count} devices"
    good = not num_gpus or (is_up == "True" and int(count) >= num_gpus)
    fix = "this torch needs a driver of its CUDA version or newer: install one"
    return check_result(node, "torch", found, good=good, fix=fix)


def check_kernels(node: str, modules: Sequence[str], gpu: str) -> Iterator[MachineFinding]:
    """Check that the modules of GPU kernels are installed, and that Triton compiles them right.

    On Hopper, Triton 3.4 to 3.7.0 computes wrong gradients of the gated delta rule, and fla-core
    0.6 refuses it at the first backward pass (`fla.ops.common.chunk_o: chunk_bwd_dqkwg`).
    """
    if not modules:
        return
    absent = [name for name in modules if find_spec(name) is None]
    found = f"not installed: {', '.join(absent)}" if absent else ", ".join(modules)
    fix = "pip install 'swerl[gpu]'; or set trainer.require_kernels = false for a slow loop"
    yield check_result(node, "kernels", found, good=not absent, fix=fix)
    if not gpu.startswith(("h100", "h200")) or find_spec("tilelang"):
        return
    triton = versions().get("triton", "")
    numbers = tuple(int(part) for part in triton.split("+")[0].split(".") if part.isdecimal())
    good = bool(numbers) and not (3, 4) <= numbers < (3, 7, 1)
    fix = "pip install 'triton>=3.7.1', or tilelang: its gradients are wrong on this GPU"
    yield check_result(node, "triton", triton or "not installed", good=good, fix=fix)


def check_ports(node: str, address: str, ports: Iterable[int]) -> Iterator[MachineFinding]:
    """Check that ports of an address of this machine are free; 0 stands for any port."""
    for port in ports:
        name = f"port {port}" if port else "ports"
        try:
            with socket.socket() as probe:
                probe.bind((address, port))
        except OSError as error:
            fix = "end the process that listens there, or set another port in the recipe"
            yield check_result(node, name, f"{address}: {error.strerror}", good=False, fix=fix)
        else:
            yield MachineFinding(node, name, FindingState.OK, f"free on {address}")


def _check_disk(need: MachineNeed) -> MachineFinding:
    free = shutil.disk_usage(need.disk).free
    found = f"{free / 2**30:,.1f} GiB free, {need.disk_bytes / 2**30:,.1f} GiB needed"
    fix = f"make room in {need.disk}, or keep runs elsewhere with --runs"
    return check_result(need.node, "disk", found, good=free >= need.disk_bytes, fix=fix)


def versions() -> dict[str, str]:
    """Return the installed versions by name, without absent packages."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def write_token(folder: Path, name: str, token: str) -> None:
    """Write a small file for another machine to read."""
    (folder / name).write_text(token)


def read_tokens(folder: Path, names: list[str]) -> list[str]:
    """Read small files that other machines wrote; an absent one reads as empty."""
    return [path.read_text() if (path := folder / name).exists() else "" for name in names]
