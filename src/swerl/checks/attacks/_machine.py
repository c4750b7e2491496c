"""Facts of the machine that the controller runs on, to compare a sandbox's view with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swerl.core.chat import Json
from swerl.core.liveness import boot_id

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_PACKAGES = ("swerl", "docker", "e2b")


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine, as its own processes see it."""

    boot_id: str
    hostname: str
    namespaces: Mapping[str, str]
    """Kind -> identity of the namespace that this process is in."""


def look() -> Machine:
    """Return the facts of this machine."""
    namespaces = {}
    for kind in NAMESPACES:
        with suppress(OSError):
            namespaces[kind] = str(Path("/proc/self/ns", kind).readlink())
    return Machine(boot_id(), socket.gethostname(), namespaces)


def describe() -> dict[str, Json]:
    """Return what a reader of an old sheet wants to know of the machine."""
    return {
        "kernel": platform.release(),
        "system": platform.platform(),
        "num_cpus": os.cpu_count() or 0,
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "root": os.geteuid() == 0,
    }


def versions() -> dict[str, Json]:
    """Return the versions of what makes sandboxes here."""
    found: dict[str, Json] = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if shutil.which("bwrap"):
        said = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=False)
        found["bubblewrap"] = said.stdout.strip().removeprefix("bubblewrap ")
    return found


def processes_with(word: str) -> list[int]:
    """Return this machine's processes with a word on their command line or as their name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if word.encode() in command or word[:15] == (folder / "comm").read_text().strip():
                found.append(int(folder.name))
    return found
