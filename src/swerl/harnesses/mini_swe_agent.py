"""mini-swe-agent, offline in the sandbox; its model calls go to the gateway.

Its packages are one bundle from PyPI. A small driver (`_mini_swe_agent/driver.py`) runs the agent's
own loop, prompts and formats, and replaces LiteLLM. Images have an old Python, another one, or
none; so swerl's own interpreter, its standard library, all shared libraries and the C library's
loader are a second bundle, which needs nothing of the image.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import ssl
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from swerl.core.changes import FileEdit
from swerl.core.chat import Message
from swerl.core.contracts import Endpoint, Exit, Sandbox
from swerl.core.errors import ImageError
from swerl.core.sandbox import Mount
from swerl.core.task import Task
from swerl.harnesses import _bundles
from swerl.harnesses._cli import BundledAgent, call, edit_command, exit_of

DEFAULT_VERSION = "2.4.6"

_PACKAGE = "mini-swe-agent"
_PINNED = {"2.4.6": "a35463c553ac825c7773b03cfa69cd44958e3af20155dcc5711fdf9e4c67cd54"}
"""sha256 of known wheels; other versions are checked against the index's hash."""
_FIRST_WITH_TOOLS = 2
"""First major version with tool calls."""
_INSIDE = Path(__file__).with_name("_mini_swe_agent")
_REQUIREMENTS = _INSIDE / "requirements.txt"
_HOME = "/opt/swerl/agents/mini-swe-agent"
_DRIVER = "/opt/swerl/agents/mini-swe-agent-driver"
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_SETTINGS = "swebench"
"""The agent's own settings file of its SWE-bench results."""
_LIMITS = {"LimitsExceeded", "TimeExceeded"}


class Options(BaseModel):
    """Settings of mini-swe-agent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str = Field(DEFAULT_VERSION, pattern=r"^\d+\.\d+\.\d+$")
    """Release on PyPI."""
    tool_timeout_s: int | None = Field(None, ge=1)
    """Time limit of one command in seconds. None: the settings file's, 60."""

    @field_validator("version")
    @classmethod
    def _calls_tools(cls, version: str) -> str:
        if int(version.split(".")[0]) < _FIRST_WITH_TOOLS:
            raise ValueError(f"{version} has no tool calls; use 2.0.0 or newer")
        return version


def build(options: Options) -> MiniSweAgent:
    """Fetch the bundle and return the harness. Raises ImageError if the bundle is unavailable."""
    return MiniSweAgent(options, fetch(options.version))


def fetch(version: str) -> tuple[Mount, ...]:
    """Return the mounts of this release; download missing files."""

    def fill(folder: Path) -> str:
        return _install(version, folder)

    # compiled packages belong to one Python and one set of pins
    pins = hashlib.sha256(_REQUIREMENTS.read_bytes()).hexdigest()[:8]
    release = f"{version}-{sys.implementation.cache_tag}-{pins}"
    bundle = _bundles.bundle(_PACKAGE, release, fill)
    return (Mount(bundle, _HOME), mount(), Mount(_INSIDE, _DRIVER))


@dataclass(frozen=True, slots=True)
class MiniSweAgent(BundledAgent[Options]):
    """Runs mini-swe-agent on a Task."""

    async def install(self, sandbox: Sandbox) -> None:
        """Do nothing: the agent stores nothing in the sandbox."""

    async def run(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, budget_s: float) -> Exit:
        """Run the agent on the Task for at most `budget_s` seconds."""
        result = await sandbox.run(
            command(f"{_DRIVER}/driver.py"),
            cwd=task.workdir,
            timeout_s=budget_s,
            stdin=self._job(task, endpoint),
        )
        return exit_of(result, limit=_exit_status(result.stdout) in _LIMITS)

    def script(self, edits: Sequence[FileEdit], workdir: str) -> Sequence[Message]:
        """Return replies that make each edit with one command, then submit."""
        commands = [edit_command(edit, workdir.rstrip("/")) for edit in edits]
        return [call("bash", command=command) for command in [*commands, _SUBMIT]]

    def _job(self, task: Task, endpoint: Endpoint) -> bytes:
        job = {
            "prompt": task.prompt,
            "workdir": task.workdir,
            "url": endpoint.url,
            "key": endpoint.key,
            "model": endpoint.model,
            "packages": _HOME,
            "config": _SETTINGS,
            "tool_timeout_s": self.options.tool_timeout_s,
        }
        return json.dumps(job).encode()


def _exit_status(log: bytes) -> str:
    """Return the agent's own exit status; empty if it reports none."""
    try:
        last = json.loads(log.rstrip().rpartition(b"\n")[2])
    except ValueError:
        return ""
    return str(last.get("exit_status", "")) if isinstance(last, dict) else ""


def _install(version: str, folder: Path) -> str:
    """Install the agent and its dependencies into `folder`; return the agent's pin."""
    pinned = _PINNED.get(version, "")
    agent = folder / "agent.txt"
    agent.write_text(f"{_PACKAGE}=={version}" + (f" --hash=sha256:{pinned}" if pinned else ""))
    for requirements in (agent, _REQUIREMENTS):
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-input"),
            *("--only-binary=:all:", "--no-user", "--target", str(folder)),
            *("--requirement", str(requirements)),
        ]
        _bundles.call(command, f"{_PACKAGE} {version} for Python {platform.python_version()}")
    agent.unlink()
    return f"sha256-{pinned}" if pinned else "as the index states"


HOME = "/opt/swerl/agents/python"
_LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "tkinter",
    "turtledemo", "lib2to3", "ensurepip", "distutils", "pydoc_data", "lib-dynload", "sqlite3",
    "curses", "dbm",
}  # fmt: skip
"""Folders of the standard library that no agent imports."""
_LEFT_OUT_MODULES = re.compile(
    r"_tkinter|_test|_?xx|_ctypes_test|_curses|readline|_sqlite3|_g?dbm|nis|_crypt|ossaudio|spwd"
)
"""Compiled modules that need other libraries, or that no agent needs."""
_CHECK = "import asyncio, ctypes, decimal, json, socket, ssl, subprocess, zlib"
_TIMEOUT_S = 120.0


def mount() -> Mount:
    """Return the bundle's mount, created on the first call. Raises ImageError if that fails."""
    version = f"{platform.python_version()}-{platform.machine()}"
    return Mount(_bundles.bundle("python", version, _fill), HOME)


def command(*arguments: str, home: str = HOME) -> list[str]:
    """Return the command that runs the bundle's Python, isolated from any environment."""
    loader = [f"{home}/lib/ld.so", "--library-path", f"{home}/lib", f"{home}/bin/python3"]
    return [*loader, "-I", "-S", "-B", "-X", "utf8", *arguments]


def _fill(folder: Path) -> str:
    if not sys.platform.startswith("linux"):
        raise ImageError(
            f"a Python for sandboxes cannot be built on {sys.platform}", hint="run swerl on Linux"
        )
    program = Path(sys.executable).resolve()
    stdlib = Path(sysconfig.get_path("stdlib"))
    _copy(program, folder / "bin" / "python3")
    library = folder / "lib" / stdlib.name
    shutil.copytree(stdlib, library, ignore=_unwanted)
    compiled = library / "lib-dynload"
    for module in _compiled_modules(stdlib.name):
        _copy(module, compiled / module.name)
    for source in _needed([program, *compiled.glob("*.so")]):
        name = "ld.so" if source.name.startswith("ld-") else source.name
        _copy(source, folder / "lib" / name)
    if roots := ssl.get_default_verify_paths().cafile:
        _copy(Path(roots), folder / "etc" / "cert.pem")
    _try_out(folder)
    return f"host python {platform.python_version()}"


def _unwanted(_: str, names: list[str]) -> set[str]:
    endings = (".py", ".pyc")
    return {
        name
        for name in names
        if name in _LEFT_OUT
        or name.startswith("config-")
        or name.endswith((".opt-1.pyc", ".opt-2.pyc"))
        or (Path(name).suffix and not name.endswith(endings))
    }


def _compiled_modules(library: str) -> Iterator[Path]:
    folder = Path(sys.base_exec_prefix, sys.platlibdir, library, "lib-dynload")
    for module in sorted(folder.glob("*.so")):
        if not _LEFT_OUT_MODULES.match(module.name):
            yield module


def _needed(programs: Sequence[Path]) -> Iterator[Path]:
    """Yield every shared library that these programs load, and the loader."""
    if not shutil.which("ldd"):
        raise ImageError(
            "ldd is not installed, so the libraries of this Python cannot be found",
            hint="install the C library's programs (libc-bin)",
        )
    listed = subprocess.run(
        ["ldd", *map(str, programs)], capture_output=True, text=True, timeout=_TIMEOUT_S
    ).stdout
    libraries = set(re.findall(r"(?:=> )?(/\S+) \(0x", listed))
    yield from map(Path, sorted(libraries))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _try_out(folder: Path) -> None:
    process = subprocess.run(
        command("-c", _CHECK, home=str(folder)), capture_output=True, text=True, env={}
    )
    if process.returncode:
        raise ImageError(
            f"this Python does not run from a bundle: {process.stderr.strip()[-300:]}",
            hint="run swerl with a glibc build of CPython",
        )
