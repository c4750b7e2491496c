"""The GPUs of the machine that this runs on, as nvidia-smi tells; others' processes are named."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from swerl.cluster.finding import Finding, State, judged

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
