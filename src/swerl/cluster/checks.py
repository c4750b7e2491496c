"""What a preflight asks of one machine; these functions run there."""

from __future__ import annotations

import csv
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ASK_S = 60.0
FREE_SHARE = 0.95
"""Share of a GPU's memory that must be free: a driver alone takes a hundredth."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a run needs of each machine."""

    num_gpus: int
    kind: str
    """Part of the GPU's name, in small letters."""
    given: tuple[str, ...] = ()
    """Numbers or identifiers of the GPUs that are the run's; none says that all are."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Memory in MiB."""

    index: str
    uuid: str
    name: str
    driver: str
    total_mib: int
    used_mib: int


def check_gpus(node: str, wanted: Wanted) -> Iterator[Finding]:
    """Yield what is to say about this machine's GPUs."""
    if not wanted.num_gpus:
        yield Finding(node, "GPUs", State.OK, "none wanted: the run is on CPU")
        return
    try:
        gpus = read_gpus(_ask("gpu", "index,uuid,name,driver_version,memory.total,memory.used"))
        tenants = read_tenants(_ask("compute-apps", "gpu_uuid,pid,process_name,used_memory"))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        mend = "install NVIDIA's driver, or choose machines with GPUs"
        yield judged(node, "GPUs", f"nvidia-smi: {error}", good=False, mend=mend)
        return
    yield from judge_gpus(node, wanted, gpus, tenants)


def judge_gpus(
    node: str, wanted: Wanted, gpus: list[Gpu], tenants: dict[str, list[str]]
) -> Iterator[Finding]:
    """Yield number and kind, free memory with the names of others' processes, and the driver.

    GPUs of the machine that are somebody else's are not looked at.
    """
    if wanted.given:
        gpus = [gpu for gpu in gpus if gpu.index in wanted.given or gpu.uuid in wanted.given]
    names = sorted({gpu.name for gpu in gpus})
    good = len(gpus) >= wanted.num_gpus and all(wanted.kind in name.lower() for name in names)
    mend = (
        f"the recipe wants {wanted.num_gpus} x {wanted.kind}: change cluster.gpus_per_node or gpu"
    )
    yield judged(node, "GPUs", f"{len(gpus)} x {', '.join(names)}", good=good, mend=mend)
    busy = [gpu for gpu in gpus if gpu.total_mib - gpu.used_mib < FREE_SHARE * gpu.total_mib]
    who = [each for gpu in busy for each in tenants.get(gpu.uuid, ["somebody outside"])]
    found = f"{len(gpus) - len(busy)} of {len(gpus)} free"
    if busy:
        found += f"; in use by {', '.join(who[:4])}"
    mend = "end those processes if they are yours; swerl never does"
    yield judged(node, "GPU memory", found, good=not busy, mend=mend)
    if gpus:
        yield Finding(node, "driver", State.OK, gpus[0].driver)


def read_gpus(text: str) -> list[Gpu]:
    """Read nvidia-smi's table of GPUs. Raises ValueError."""
    return [
        Gpu(index, uuid, name, driver, int(total), int(used))
        for index, uuid, name, driver, total, used in _rows(text)
    ]


def read_tenants(text: str) -> dict[str, list[str]]:
    """Read nvidia-smi's table of processes: GPU -> `name (pid, MiB)`."""
    found: dict[str, list[str]] = {}
    for uuid, pid, name, used in _rows(text):
        found.setdefault(uuid, []).append(f"{name} (pid {pid}, {used} MiB)")
    return found


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]


def _ask(what: str, fields: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("not installed")
    command = [program, f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True).stdout


PACKAGES = ("swerl", "torch", "megatron-core", "ray")
TORCH_S = 180.0
_TORCH = (
    "import torch; c = torch.cuda; "
    "print(torch.__version__, torch.version.cuda, c.is_available(), c.device_count())"
)


@dataclass(frozen=True, slots=True)
class Questions:
    """What to look at."""

    node: str
    address: str
    wanted: Wanted
    disk: Path
    disk_bytes: int
    """Bytes that must be free there."""


def examine(asked: Questions) -> list[Finding]:
    """Run every check that concerns this machine alone."""
    return [
        *check_gpus(asked.node, asked.wanted),
        _torch(asked),
        *check_ports(asked.node, asked.address, (0,)),
        _disk(asked),
    ]


def versions() -> dict[str, str]:
    """Return what is installed here, by name; absent packages are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def leave_word(folder: Path, name: str, word: str) -> None:
    """Write a small file for another machine to read."""
    (folder / name).write_text(word)


def read_words(folder: Path, names: list[str]) -> list[str]:
    """Read small files that other machines wrote; an absent one is empty."""
    return [path.read_text() if (path := folder / name).exists() else "" for name in names]


def _torch(asked: Questions) -> Finding:
    wanted, name = asked.wanted, "torch"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=TORCH_S
        )
    except subprocess.TimeoutExpired:
        mend = "is the file system of Python's packages slow?"
        return judged(asked.node, name, f"no import in {TORCH_S:g} s", good=False, mend=mend)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        mend = "pip install 'swerl[twin]'"
        return judged(asked.node, name, last, good=False, mend=mend)
    torch, cuda, is_up, count = done.stdout.split()[-4:]
    found = f"{torch}, CUDA {cuda if is_up == 'True' else 'not in use'}, {count} devices"
    good = not wanted.num_gpus or (is_up == "True" and int(count) >= wanted.num_gpus)
    mend = "this torch needs a driver of its CUDA version or newer: install one that fits"
    return judged(asked.node, name, found, good=good, mend=mend)


def check_ports(node: str, address: str, ports: Iterable[int]) -> Iterator[Finding]:
    """Yield whether ports of an address of this machine are free; 0 stands for any."""
    for port in ports:
        what = f"port {port}" if port else "ports"
        try:
            with socket.socket() as probe:
                probe.bind((address, port))
        except OSError as error:
            found = f"{address}: {error.strerror}"
            mend = "end what listens there, or name another port in the recipe"
            yield judged(node, what, found, good=False, mend=mend)
        else:
            yield Finding(node, what, State.OK, f"free on {address}")


def _disk(asked: Questions) -> Finding:
    free = shutil.disk_usage(asked.disk).free
    found = f"{free / 2**30:,.1f} GiB free, {asked.disk_bytes / 2**30:,.1f} GiB wanted"
    mend = f"make room in {asked.disk}, or keep runs elsewhere with --runs"
    return judged(asked.node, "disk", found, good=free >= asked.disk_bytes, mend=mend)


class State(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    """The run can start, and something may go wrong later."""
    FAIL = "fail"
    """The run cannot work like this."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    node: str
    check: str
    state: State
    found: str
    """What was seen, in a few words."""
    mend: str = ""
    """What to do; empty where all is well."""


def judged(node: str, check: str, found: str, *, good: bool, mend: str) -> Finding:
    """Return a finding that is well or fatal."""
    return Finding(node, check, State.OK if good else State.FAIL, found, "" if good else mend)
