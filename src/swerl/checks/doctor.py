"""Check this machine, and name the command that fixes each failed check.

A check tries the real part if that is harmless: it opens a sandbox, imports torch, connects to
the Docker daemon. No check uses the network or prints a secret.
"""

from __future__ import annotations

import asyncio
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from swerl.core import plugins
from swerl.core.errors import SwerlError, install_command
from swerl.core.sandbox import Limits
from swerl.core.secrets import cache_dir, secret
from swerl.images.http import default_config, logged_in
from swerl.sandboxes._docker_daemon import Daemon
from swerl.sandboxes._local import limits
from swerl.sandboxes.ledger import tracked
from swerl.tasks.datasets import built_in_names

_TIMEOUT_S = 10.0
_IMPORT_TIMEOUT_S = 120.0
_DISK_GIB = 2.0
_MEMORY_GIB = 3.0
_SHM_MIB = 256.0
_TWIN_PACKAGES = ("numpy", "psutil", "pyarrow", "safetensors")
_CORE_PACKAGES = ("aiohttp", "jinja2", "orjson", "pydantic", "rich", "tokenizers", "typer")
_TORCH = "import torch; print('torch', torch.__version__)"


class State(StrEnum):
    OK = "ok"
    WARN = "warn"
    """The part is absent; everything else works."""
    MISSING = "missing"
    """The part is absent, and the twin cannot run without it."""


@dataclass(frozen=True, slots=True)
class Check:
    """One part that this machine has or lacks."""

    name: str
    state: State
    detail: str
    """The observation, in a few words."""
    enables: str
    """Features that require this part."""
    fix: str = ""
    """The command that installs or repairs the part; empty if the check passed."""


@dataclass(frozen=True, slots=True)
class _Need:
    """A part to check, before the result is known."""

    name: str
    enables: str
    fix: str = ""
    for_twin: bool = False

    def present(self, detail: str, *, absent: str = "not installed") -> Check:
        return self.judged(detail or absent, good=bool(detail))

    def judged(self, detail: str, *, good: bool) -> Check:
        if good:
            return Check(self.name, State.OK, detail, self.enables)
        state = State.MISSING if self.for_twin else State.WARN
        return Check(self.name, state, detail, self.enables, self.fix)


async def examine(folder: Path) -> list[Check]:
    """Run every check. `folder` is the folder of all run folders; it need not exist."""
    slow = await asyncio.gather(
        _git(), _sandbox(), _bwrap(), _trainer(), _node(), _docker(), _gpus()
    )
    here = (_cgroups(), _disk(folder), _memory(), _shared_memory())
    return [_python(), _core(), *slow, *here, *_packages(), *_keys(), *_plugins()]


def twin_runs(checks: Sequence[Check]) -> bool:
    """Return True if the twin can run on this machine."""
    return all(check.state is not State.MISSING for check in checks)


def _python() -> Check:
    need = _Need("python", "everything", "uv python install 3.11", for_twin=True)
    detail = platform.python_version()
    if is_new := sys.version_info >= (3, 14):
        detail += ": Megatron-Core and SGLang have no wheels for it"
    return need.judged(detail, good=not is_new)


def _core() -> Check:
    need = _Need("core packages", "every command", install_command(), for_twin=True)
    absent = [name for name in _CORE_PACKAGES if not _version(name)]
    text = f"not installed: {', '.join(absent)}" if absent else f"all {len(_CORE_PACKAGES)}"
    return need.judged(text, good=not absent)


async def _git() -> Check:
    need = _Need("git", "work trees and patches", "apt-get install -y git", for_twin=True)
    return need.present(await _first_line("git", "--version"))


async def _sandbox() -> Check:
    enables = "sandboxes on this machine, without network"
    fix = "run it again; a busy machine may need longer"
    try:
        module = plugins.load("sandboxes", "local")
        backend = tracked("local", module.Options(), run="doctor")
        async with (
            asyncio.timeout(_TIMEOUT_S),
            backend.open("host", Limits(memory_mib=256), workdir="/tmp") as sandbox,
        ):
            git = await sandbox.run(["git", "--version"], cwd="/")
    except (SwerlError, OSError, TimeoutError) as error:
        fix = getattr(error, "hint", "") or fix
        need = _Need("local sandbox", enables, fix, for_twin=True)
        return need.judged(str(error) or "no answer", good=False)
    need = _Need("local sandbox", enables, "apt-get install -y git", for_twin=True)
    good = git.exit_code == 0
    detail = "opened, git ran in it" if good else git.text[:80]
    if "syscalls" not in getattr(sandbox, "limits", {"syscalls"}):
        detail += f"; no system call filter for {platform.machine()}"
    return need.judged(detail, good=good)


async def _bwrap() -> Check:
    need = _Need("bubblewrap", "swerl images build", "apt-get install -y bubblewrap")
    return need.present(await _first_line("bwrap", "--version"))


async def _trainer() -> Check:
    need = _Need("trainer", "training and the CPU engine", install_command("twin"), for_twin=True)
    absent = [name for name in ("torch", "megatron-core", *_TWIN_PACKAGES) if not _version(name)]
    if absent:
        return need.judged(f"not installed: {', '.join(absent)}", good=False)
    # Megatron-Core takes three times as long, and what fails to load is torch's libraries.
    torch = await _first_line(sys.executable, "-c", _TORCH, timeout_s=_IMPORT_TIMEOUT_S)
    detail = f"{torch} megatron-core {_version('megatron-core')}" if torch else ""
    return need.present(detail, absent="torch is installed but cannot be imported")


async def _node() -> Check:
    need = _Need("node and npm", "the agent Claude Code", "apt-get install -y nodejs npm")
    node, npm = await asyncio.gather(
        _first_line("node", "--version"), _first_line("npm", "--version")
    )
    return need.present(f"node {node}, npm {npm}" if node and npm else "")


async def _docker() -> Check:
    enables, daemon = 'sandbox.type = "docker"', Daemon()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await daemon.connect()
    except (SwerlError, TimeoutError) as error:
        fix = "apt-get install -y docker.io && dockerd &"
        fix = fix if _version("docker") else install_command("docker")
        return _Need("docker", enables, fix).judged(str(error) or "no answer", good=False)
    info = daemon.info
    missing = sorted({"memory", "pids", "cpu"} - daemon.limits)
    detail = f"{info.get('ServerVersion', '?')}, {info.get('Driver', '?')}"
    detail += f", without limits on {', '.join(missing)}" if missing else ""
    need = _Need("docker", enables, "start the daemon on a machine with writable cgroups")
    return need.judged(detail, good=not missing)


async def _gpus() -> Check:
    need = _Need("GPUs", "models larger than the twin's")
    output = await _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    names = output.splitlines()
    return need.present(f"{len(names)} x {names[0].strip()}" if names else "", absent="none")


def _cgroups() -> Check:
    fix = "run as root, or below `systemd-run --user --scope -p Delegate=yes`"
    need = _Need("cgroups", "limits for a whole sandbox instead of each process", fix)
    try:
        limited = set(limits.find())
    except OSError:
        limited = set()
    missing = sorted({"memory", "pids", "cpu"} - limited)
    detail = ", ".join(sorted(limited)) + (f"; unbounded: {', '.join(missing)}" if missing else "")
    return need.present(detail if limited else "", absent="none is writable for this user")


def _disk(folder: Path) -> Check:
    free_gib = shutil.disk_usage(_existing(folder)).free / 2**30
    enables = f"runs and images; the twin needs {_DISK_GIB:g} GiB"
    need = _Need("disk", enables, f"rm -r {cache_dir()}", for_twin=True)
    return need.judged(f"{free_gib:,.1f} GiB free", good=free_gib >= _DISK_GIB)


def _memory() -> Check:
    enables = f"the twin needs {_MEMORY_GIB:g} GiB"
    need = _Need("memory", enables, "swerl train … --set rollout.concurrency=4")
    free_gib = _available_gib(Path("/proc/meminfo"))
    return need.judged(f"{free_gib:,.1f} GiB free", good=free_gib >= _MEMORY_GIB)


def _shared_memory() -> Check:
    folder = Path("/dev/shm")
    enables = "weights for an SGLang engine"
    if not folder.is_dir():
        return _Need("/dev/shm", enables, "mount -t tmpfs shm /dev/shm").present(
            "", absent="absent"
        )
    free_mib = shutil.disk_usage(folder).free / 2**20
    need = _Need("/dev/shm", enables, "mount -o remount,size=1G /dev/shm")
    return need.judged(f"{free_mib:,.0f} MiB free", good=free_mib >= _SHM_MIB)


def _packages() -> Iterator[Check]:
    for name, enables, fix in (
        ("sglang", 'engine.type = "sglang"', install_command("sglang")),
        ("vllm", 'engine.type = "vllm"', install_command("vllm")),
        ("fla-core", "fast Qwen3.5 and Qwen3.6 training on GPUs", install_command("gpu")),
        ("e2b", 'sandbox.type = "e2b"', install_command("e2b")),
        ("kubernetes-asyncio", 'sandbox.type = "kubernetes"', install_command("kubernetes")),
        ("ray", "runs on more than one machine", install_command("cluster")),
        ("datasets", "datasets from a hub", install_command("datasets")),
        ("zstandard", "zstd layers and request bodies", install_command("zstd")),
        ("trackio", "metrics in Trackio", install_command("trackio")),
        ("wandb", "metrics at Weights & Biases", install_command("wandb")),
    ):
        yield _Need(name, enables, fix).present(_version(name))
    need = _Need(
        "docker-registry", "a local mirror of task images", "apt-get install -y docker-registry"
    )
    yield need.present(shutil.which("docker-registry") or "")
    need = _Need("registry logins", "private images and higher pull limits", "docker login")
    yield need.present(", ".join(logged_in(default_config())), absent="none")


def _keys() -> Iterator[Check]:
    for name, enables in (
        ("OPENAI_API_KEY", "a model behind an API: --set engine.api_key=OPENAI_API_KEY"),
        ("WANDB_API_KEY", "metrics at Weights & Biases"),
        ("HF_TOKEN", "gated models and data sets"),
    ):
        need = _Need(name, enables, f"export {name}=…")
        yield need.present("set" if secret(name) else "", absent="not set")


def _plugins() -> Iterator[Check]:
    """Yield the parts that other packages add to swerl."""
    for plugin in plugins.found_plugins({"converters": built_in_names()}):
        need = _Need(f"plug-in {plugin.name}", plugin.kind, "docs/guides/plug-ins.md")
        detail = f"{plugin.package} {plugin.version}: {plugin.value}"
        yield need.judged(plugin.problem or detail, good=not plugin.problem)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


async def _first_line(*command: str, timeout_s: float = _TIMEOUT_S) -> str:
    return (await _output(*command, timeout_s=timeout_s)).partition("\n")[0].strip()


async def _output(*command: str, timeout_s: float = _TIMEOUT_S) -> str:
    """Return the output of a program; empty if it is absent, fails or hangs."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=null, stdout=pipe, stderr=null
        )
    except OSError:
        return ""
    try:
        out, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        process.kill()
        await process.wait()
        return ""
    return out.decode("utf-8", "replace") if process.returncode == 0 else ""


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _available_gib(meminfo: Path) -> float:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    return 0.0
