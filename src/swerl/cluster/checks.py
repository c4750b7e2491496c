"""What a preflight asks of one machine; these functions run there."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from swerl.cluster.finding import Finding, State, judged
from swerl.cluster.gpus import Wanted, check_gpus

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
