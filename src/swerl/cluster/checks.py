"""Check the machines of a run before anything loads: one by one, then together.

`check_nodes` is the whole; `examine` and the functions below it run on the machine they check.
"""

from __future__ import annotations

import asyncio
import csv
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from swerl.cluster.node import Node
from swerl.cluster.open import Nodes
from swerl.core.errors import ClusterError, install_command
from swerl.recipe.schema import Recipe

PACKAGES = ("swerl-rl", "torch", "megatron-core", "ray", "fla-core", "triton")
PROGRAM_S = 180.0
"""Time limit of a program: an import of torch from a slow disk takes minutes."""
FREE_SHARE = 0.95
"""Fraction of a GPU's memory that must be free: the driver itself takes a hundredth."""
_TORCH = (
    "import torch; c = torch.cuda; "
    "print(torch.__version__, torch.version.cuda, c.is_available(), c.device_count())"
)
_GPU_FIELDS = "index,uuid,name,driver_version,memory.total,memory.used"
_USER_FIELDS = "gpu_uuid,pid,process_name,used_memory"


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
    detail: str
    """The observation, in a few words."""
    fix: str = ""
    """A remedy; empty if the check passed."""


def check_result(node: str, check: str, detail: str, *, good: bool, fix: str) -> MachineFinding:
    """Return a finding that passed or failed."""
    state = FindingState.OK if good else FindingState.FAIL
    return MachineFinding(node, check, state, detail, "" if good else fix)


@dataclass(frozen=True, slots=True)
class MachineNeed:
    """Everything that a run needs on one machine."""

    node: str
    disk: Path
    disk_bytes: int = 0
    """Bytes that must be free there."""
    num_gpus: int = 0
    gpu: str = ""
    """Part of the GPUs' name, in lower case."""
    gpus: tuple[str, ...] = ()
    """Numbers or identifiers of the run's GPUs; empty means all of the machine's."""
    num_processes: int = 0
    """Ranks and engines on the machine."""
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


async def check_nodes(
    recipe: Recipe, nodes: Nodes, folder: Path, *, disk_bytes: int, modules: tuple[str, ...] = ()
) -> AsyncIterator[MachineFinding]:
    """Yield the findings machine by machine, then those about all of them together.

    `folder` is the run's; it exists, and all machines share it. `modules` are kernels that each
    machine must have.
    """
    need = MachineNeed(
        node="",
        disk=folder.resolve(),
        disk_bytes=disk_bytes,
        num_gpus=recipe.cluster.gpus_per_node,
        gpu=recipe.cluster.gpu,
        modules=modules,
    )
    ranks = recipe.trainer.ranks // len(nodes.trainer)
    for findings in await asyncio.gather(*(_examine(node, need, ranks) for node in nodes.all)):
        for finding in findings:
            yield finding
    for finding in (*await _check_versions(nodes.all), *await _check_shared(nodes.all, folder)):
        yield finding


async def require_fit(
    recipe: Recipe, nodes: Nodes, folder: Path, *, disk_bytes: int, modules: tuple[str, ...] = ()
) -> None:
    """Raise ClusterError if a check failed, naming the first ones; see `check_nodes`."""
    findings = check_nodes(recipe, nodes, folder, disk_bytes=disk_bytes, modules=modules)
    failed = [finding async for finding in findings if finding.state is FindingState.FAIL]
    if failed:
        details = [f"{finding.node}: {finding.check}: {finding.detail}" for finding in failed[:3]]
        message = f"{len(failed)} checks of the machines failed: {'; '.join(details)}"
        hint = f"{failed[0].fix}; `swerl doctor RECIPE` shows all checks"
        raise ClusterError(message, hint=hint)


async def _examine(node: Node, need: MachineNeed, ranks: int) -> Sequence[MachineFinding]:
    need = replace(need, node=node.name, gpus=node.gpus, num_processes=ranks)
    try:
        return await node.call(examine, need)
    except (ClusterError, OSError) as error:
        fix = getattr(error, "hint", "") or f"{need.disk} must exist there: share it"
        return [check_result(node.name, "machine", str(error), good=False, fix=fix)]


async def _check_versions(nodes: Sequence[Node]) -> list[MachineFinding]:
    """Compare installed versions with those of the first machine."""
    installed = await asyncio.gather(*(node.call(versions) for node in nodes))
    first, findings = installed[0], []
    for node, here in zip(nodes, installed, strict=True):
        names = {name for name in here.keys() | first.keys() if here.get(name) != first.get(name)}
        text = ", ".join(f"{name} {number}" for name, number in here.items())
        fix = f"install the versions of {nodes[0].name}: {', '.join(sorted(names))} differ"
        findings.append(check_result(node.name, "versions", text, good=not names, fix=fix))
    return findings


async def _check_shared(nodes: Sequence[Node], folder: Path) -> list[MachineFinding]:
    """Every machine writes a token into the run folder, and every machine reads all of them."""
    mark, shared, findings = secrets.token_hex(4), folder.resolve(), []
    files = [f".check-{mark}-{number}" for number in range(len(nodes))]
    try:
        # All machines write before the first one reads.
        for node, file in zip(nodes, files, strict=True):
            await node.call(write_token, shared, file, mark)
        for node in nodes:
            texts = await node.call(read_tokens, shared, files)
            lost = [other.name for other, text in zip(nodes, texts, strict=True) if text != mark]
            detail = f"reads the files of all {len(nodes)}"
            if lost:
                detail = f"does not see the files of {', '.join(lost)}"
            fix = f"{shared} must be one folder on all machines: give --runs a shared one"
            findings.append(
                check_result(node.name, "shared folder", detail, good=not lost, fix=fix)
            )
    except (ClusterError, OSError) as error:
        fix = f"{shared} must be writable on all machines: give --runs a shared one"
        findings.append(check_result("all", "shared folder", str(error), good=False, fix=fix))
    finally:
        for file in files:
            (shared / file).unlink(missing_ok=True)
    return findings


def examine(need: MachineNeed) -> list[MachineFinding]:
    """Run every check that concerns only this machine."""
    return [
        *check_gpus(need),
        _check_torch(need.node, need.num_gpus),
        *check_kernels(need.node, need.modules, need.gpu),
        check_cores(need.node, need.num_processes),
        check_disk(need),
    ]


def check_gpus(need: MachineNeed) -> Iterator[MachineFinding]:
    """Check this machine's GPUs with nvidia-smi."""
    if not need.num_gpus:
        detail = "none needed: the run is on CPU"
        yield MachineFinding(need.node, "GPUs", FindingState.OK, detail)
        return
    try:
        gpus = read_gpus(_nvidia_smi("gpu", _GPU_FIELDS))
        users = read_users(_nvidia_smi("compute-apps", _USER_FIELDS))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        fix = "install NVIDIA's driver, or choose machines with GPUs"
        yield check_result(need.node, "GPUs", f"nvidia-smi: {error}", good=False, fix=fix)
        return
    yield from judge_gpus(need, gpus, users)


def judge_gpus(
    need: MachineNeed, gpus: list[InstalledGpu], users: dict[str, list[str]]
) -> Iterator[MachineFinding]:
    """Judge number and kind, and free memory, naming the processes that use it.

    GPUs that are not the run's are ignored: other runs may use them.
    """
    if need.gpus:
        gpus = [gpu for gpu in gpus if gpu.index in need.gpus or gpu.uuid in need.gpus]
    names = sorted({gpu.name for gpu in gpus})
    drivers = sorted({gpu.driver for gpu in gpus})
    good = len(gpus) >= need.num_gpus and all(need.gpu in name.lower() for name in names)
    detail = f"{len(gpus)} x {', '.join(names)}, driver {', '.join(drivers)}"
    fix = f"the recipe asks for {need.num_gpus} x {need.gpu}: change cluster.gpus_per_node or gpu"
    yield check_result(need.node, "GPUs", detail, good=good, fix=fix)
    busy = [gpu for gpu in gpus if gpu.total_mib - gpu.used_mib < FREE_SHARE * gpu.total_mib]
    programs = [name for gpu in busy for name in users.get(gpu.uuid, ["a process outside"])]
    detail = f"{len(gpus) - len(busy)} of {len(gpus)} free"
    if busy:
        detail += f"; in use by {', '.join(programs[:4])}"
    fix = "end those processes if they are yours; swerl never does"
    yield check_result(need.node, "GPU memory", detail, good=not busy, fix=fix)


def gpu_uuids(gpus: Sequence[str]) -> tuple[str, ...]:
    """Return the uuids of these GPUs of this machine, as torch writes them; empty if unknown."""
    try:
        installed = read_gpus(_nvidia_smi("gpu", _GPU_FIELDS)) if gpus else []
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
    by_name = {name: gpu.uuid for gpu in installed for name in (gpu.index, gpu.uuid)}
    if not set(gpus) <= by_name.keys():
        return ()
    return tuple(by_name[gpu].removeprefix("GPU-") for gpu in gpus)


def read_gpus(text: str) -> list[InstalledGpu]:
    """Parse nvidia-smi's table of GPUs. Raises ValueError."""
    return [
        InstalledGpu(index, uuid, name, driver, int(total), int(used_mib))
        for index, uuid, name, driver, total, used_mib in _rows(text)
    ]


def read_users(text: str) -> dict[str, list[str]]:
    """Parse nvidia-smi's table of processes: GPU → `name (pid, MiB)`."""
    users: dict[str, list[str]] = {}
    for uuid, pid, name, used_mib in _rows(text):
        users.setdefault(uuid, []).append(f"{name} (pid {pid}, {used_mib} MiB)")
    return users


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]


def _nvidia_smi(table: str, fields: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("not installed")
    command = [program, f"--query-{table}={fields}", "--format=csv,noheader,nounits"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PROGRAM_S, check=True
    ).stdout


def last_output(command: Sequence[str]) -> tuple[bool, str]:
    """Run a program; return its success, and the last line of its output or of its errors."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S)
    except subprocess.TimeoutExpired:
        return False, f"no answer in {PROGRAM_S:g} s: is the disk of Python's packages slow?"
    except OSError as error:
        return False, f"{command[0]}: {error.strerror}"
    # Libraries may print warnings before the last line.
    text = (ended.stderr if ended.returncode else ended.stdout).strip()
    return not ended.returncode, (text.splitlines() or ["no message"])[-1]


def _check_torch(node: str, num_gpus: int) -> MachineFinding:
    works, line = last_output([sys.executable, "-c", _TORCH])
    if not works:
        return check_result(node, "torch", line, good=False, fix=install_command("twin"))
    torch, cuda, is_up, count = line.split()
    detail = f"{torch}, CUDA {cuda if is_up == 'True' else 'not in use'}, {count} devices"
    good = not num_gpus or (is_up == "True" and int(count) >= num_gpus)
    fix = "this torch needs a driver of its CUDA version or newer: install one"
    return check_result(node, "torch", detail, good=good, fix=fix)


def check_kernels(node: str, modules: Sequence[str], gpu: str) -> Iterator[MachineFinding]:
    """Check that the modules of GPU kernels are installed, and that Triton compiles them right.

    On Hopper, Triton 3.4 to 3.7.0 computes wrong gradients of the gated delta rule, and fla-core
    0.6 refuses it at the first backward pass (`fla.ops.common.chunk_o: chunk_bwd_dqkwg`).
    """
    if not modules:
        return
    absent = [name for name in modules if find_spec(name) is None]
    detail = f"not installed: {', '.join(absent)}" if absent else ", ".join(modules)
    fix = install_command("gpu")
    yield check_result(node, "kernels", detail, good=not absent, fix=fix)
    if not gpu.startswith(("h100", "h200")) or find_spec("tilelang"):
        return
    triton = versions().get("triton", "")
    numbers = tuple(int(part) for part in triton.split("+")[0].split(".") if part.isdecimal())
    good = bool(numbers) and not (3, 4) <= numbers < (3, 7, 1)
    fix = "pip install 'triton>=3.7.1', or tilelang: its gradients are wrong on this GPU"
    yield check_result(node, "triton", triton or "not installed", good=good, fix=fix)


def check_cores(node: str, num_processes: int) -> MachineFinding:
    """Check that each rank of this machine can have a core."""
    cores = len(os.sched_getaffinity(0))
    detail = f"{cores} for {num_processes} ranks"
    fix = "choose machines with more cores, or lower trainer.ranks"
    return check_result(node, "cores", detail, good=cores >= num_processes, fix=fix)


def check_disk(need: MachineNeed) -> MachineFinding:
    free = shutil.disk_usage(need.disk).free
    detail = f"{free / 2**30:,.1f} GiB free, {need.disk_bytes / 2**30:,.1f} GiB needed"
    fix = f"make room in {need.disk}, or keep runs elsewhere with --runs"
    return check_result(need.node, "disk", detail, good=free >= need.disk_bytes, fix=fix)


def versions() -> dict[str, str]:
    """Return the installed versions by name, without absent packages."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def write_token(folder: Path, name: str, token: str) -> None:
    """Write a small file for another machine to read."""
    (folder / name).write_text(token)


def read_tokens(folder: Path, names: list[str]) -> list[str]:
    """Read small files that other machines wrote; an absent one reads as empty."""
    return [path.read_text() if (path := folder / name).exists() else "" for name in names]
