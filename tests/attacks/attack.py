"""The parts of an attack: its declaration, its sandbox and targets, and its finding."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from swerl.core.chat import Json
from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.errors import SwerlError
from swerl.core.liveness import boot_id
from swerl.core.sandbox import Exec, Limits, Mount

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_PACKAGES = ("swerl", "docker", "e2b")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts of this machine, read from this process."""

    boot_id: str
    hostname: str
    namespaces: Mapping[str, str]
    """Kind of namespace -> identity of this process's namespace."""


def host_facts() -> HostFacts:
    """Return the facts that an attack compares with those inside."""
    namespaces = {}
    for kind in NAMESPACES:
        with suppress(OSError):
            namespaces[kind] = str(Path("/proc/self/ns", kind).readlink())
    return HostFacts(boot_id(), socket.gethostname(), namespaces)


def machine_facts() -> dict[str, Json]:
    return {
        "kernel": platform.release(),
        "system": platform.platform(),
        "num_cpus": os.cpu_count() or 0,
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "root": os.geteuid() == 0,
    }


def versions() -> dict[str, Json]:
    """Return the versions of the packages and programs that create sandboxes."""
    found: dict[str, Json] = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if shutil.which("bwrap"):
        done = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=False)
        found["bubblewrap"] = done.stdout.strip().removeprefix("bubblewrap ")
    return found


def processes_with(word: str) -> list[int]:
    """Return the pids of host processes with this word in their command line or name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if word.encode() in command or word[:15] == (folder / "comm").read_text().strip():
                found.append(int(folder.name))
    return found


_MOST_SHOWN = 4


class AttackOutcome(StrEnum):
    PASS = "PASS"
    """The attack was tried and failed."""
    FAIL = "FAIL"
    """The attack succeeded."""
    CANNOT = "CANNOT"
    """The attack could not be tried. This is no evidence about the sandbox."""


@dataclass(frozen=True, slots=True)
class AttackFinding:
    """Result of one attack, with its evidence."""

    result: AttackOutcome
    seen: str
    """Evidence, in a few words."""


class CannotError(SwerlError):
    """An attack cannot be tried. The message names the reason."""


def passed(seen: str) -> AttackFinding:
    """Return the finding that the attack failed."""
    return AttackFinding(AttackOutcome.PASS, seen)


def failed(seen: str) -> AttackFinding:
    """Return the finding that the attack succeeded."""
    return AttackFinding(AttackOutcome.FAIL, seen)


def cannot(seen: str) -> AttackFinding:
    """Return the finding that the attack could not be tried."""
    return AttackFinding(AttackOutcome.CANNOT, seen)


def judge(holes: Iterable[str], otherwise: str) -> AttackFinding:
    """Return FAIL with the holes if there are any, else PASS with the evidence `otherwise`."""
    found = list(dict.fromkeys(holes))
    if not found:
        return passed(otherwise)
    more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    return failed("; ".join(found[:_MOST_SHOWN]) + more)


def worked(outcomes: Mapping[str, str], *, by: str | None = None) -> list[str]:
    """Return the attempts that succeeded, from a program's report; `by` names the user."""
    who = f" as {by}" if by else ""
    return [
        f"{attempt}{who}{text.removeprefix('ok')}"
        for attempt, text in outcomes.items()
        if text.startswith("ok")
    ]


def refused(outcomes: Mapping[str, str]) -> str:
    """Return the reasons for refused attempts, in a few words."""
    kinds = list(dict.fromkeys(outcomes.values()))
    return ", ".join(kinds[:_MOST_SHOWN])


_RUN_TIMEOUT_S = 10.0
_NOT_STARTED, _NOT_FOUND = 126, 127
_PACKAGE = "tests.attacks.inside"
_START = """
import sys, types
given = eval(sys.stdin.read())
for name in given["packages"]:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, source in given["modules"]:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
print(repr(getattr(module, given["function"])(*given["arguments"])))
"""
"""Run a function of `checks/attacks/inside` without swerl installed; its source is on stdin."""


class DiedError(CannotError):
    """An attack program ended before it reported a result."""

    def __init__(self, done: Exec) -> None:
        super().__init__(f"the attack ended with exit code {done.exit_code}: {_last_line(done)}")
        self.exit_code = done.exit_code


@dataclass(frozen=True, slots=True)
class OpenSandbox:
    """An open sandbox, with the operations that attacks use."""

    sandbox: Sandbox

    async def run(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        timeout_s: float = _RUN_TIMEOUT_S,
        stdin: bytes | None = None,
    ) -> Exec:
        """Run a command and wait for its end."""
        return await self.sandbox.run(argv, user=user, timeout_s=timeout_s, stdin=stdin)

    async def sh(
        self,
        script: str,
        *arguments: str,
        user: str | None = None,
        timeout_s: float = _RUN_TIMEOUT_S,
    ) -> Exec:
        """Run a shell script with arguments from `$1`. Raises CannotError without `sh`."""
        done = await self.run(
            ["sh", "-c", script, "sh", *arguments], user=user, timeout_s=timeout_s
        )
        if done.exit_code == _NOT_FOUND and b"sh" in done.stderr and not done.stdout:
            raise CannotError(f"the sandbox lacks a program: {_last_line(done)}")
        return done

    async def text(self, path: str) -> str:
        """Return a file's text, read by a process inside. Raises CannotError if that fails."""
        done = await self.run(["cat", path])
        if done.exit_code != 0:
            raise CannotError(f"cannot read {path} inside: {_last_line(done)}")
        return done.stdout.decode(errors="replace")

    async def attack(
        self,
        function: str,
        *arguments: object,
        user: str | None = None,
        timeout_s: float = _RUN_TIMEOUT_S,
    ) -> dict[str, str]:
        """Run `module.function` of tests.attacks.inside and return attempt -> result.

        A result that begins with `ok` is a success. Raises CannotError without Python inside,
        DiedError if the program is killed.
        """
        module, _, name = function.partition(".")
        given = {
            "packages": ["tests", "tests.attacks", _PACKAGE],
            "modules": [(f"{_PACKAGE}.{part}", _source(part)) for part in ("calls", module)],
            "function": name,
            "arguments": arguments,
        }
        argv = ["python3", "-I", "-c", _START]
        stdin = repr(given).encode()
        done = await self.run(argv, user=user, timeout_s=timeout_s, stdin=stdin)
        if done.exit_code in (_NOT_STARTED, _NOT_FOUND):
            raise CannotError(f"there is no python3 in the sandbox: {_last_line(done)}")
        if done.timed_out:
            raise CannotError(f"the attack did not end within {timeout_s:.0f} s")
        if done.exit_code != 0:
            raise DiedError(done)
        return dict(ast.literal_eval(done.stdout.decode().splitlines()[-1]))


@dataclass(frozen=True, slots=True)
class Target:
    """Facts that all attacks of one report share."""

    backend: SandboxBackend
    image: str
    workdir: str
    machine: HostFacts
    secret: str
    """A random word in the controller's environment that no sandbox may contain."""
    own_kernel: bool = False
    """True if sandboxes run under another kernel than this machine's, as in a virtual machine."""
    namespaces: Mapping[str, str] | None = None
    """Namespaces of a command inside: kind -> identity. None: unknown."""
    external: bool = False
    """True: packets may leave the machine."""


@dataclass(frozen=True, slots=True)
class AttackContext:
    target: Target
    box: OpenSandbox
    limits: Limits

    @property
    def machine(self) -> HostFacts:
        """Facts of the machine that this process runs on."""
        return self.target.machine

    @property
    def workdir(self) -> str:
        """Folder in the sandbox in which commands run."""
        return self.target.workdir

    @property
    def users(self) -> tuple[str | None, ...]:
        """Users to attack as. Root of a separate kernel is no attacker: it owns that kernel."""
        return (None,) if self.target.own_kernel else (None, "root")

    def shares(self, kind: str) -> bool:
        """Return True if commands inside are in the same namespace as this process.

        Raises CannotError if the namespace is unknown.
        """
        if self.target.own_kernel:
            return False
        inside = (self.target.namespaces or {}).get(kind)
        if inside is None:
            raise CannotError(f"the sandbox's {kind} namespace is unknown")
        return inside == self.machine.namespaces.get(kind)

    def need_shared_kernel(self) -> None:
        """Raise CannotError if the sandbox runs under another kernel."""
        if self.target.own_kernel:
            raise CannotError(
                "the sandbox has a kernel of its own: the attack cannot reach this machine's kernel"
            )

    @asynccontextmanager
    async def open(
        self, limits: Limits | None = None, mounts: Sequence[Mount] = ()
    ) -> AsyncIterator[OpenSandbox]:
        """Open another sandbox."""
        target = self.target
        chosen = limits or self.limits
        async with target.backend.open(
            target.image, chosen, workdir=target.workdir, mounts=mounts
        ) as sandbox:
            yield OpenSandbox(sandbox)

    async def as_users(self, function: str, *arguments: object) -> tuple[list[str], str]:
        """Attack as each user. Return the successes, and the reasons for refusals."""
        holes: list[str] = []
        answers: dict[str, str] = {}
        for user in self.users:
            outcomes = await self.box.attack(function, *arguments, user=user)
            holes += worked(outcomes, by=user or "agent")
            answers.update(outcomes)
        return holes, ", ".join(dict.fromkeys(answers.values()))

    async def judge_as_users(
        self, function: str, *arguments: object, otherwise: str = ""
    ) -> AttackFinding:
        """Attack as each user and judge; `otherwise` is the evidence if nothing was refused."""
        holes, answers = await self.as_users(function, *arguments)
        return judge(holes, answers or otherwise)


@cache
def _source(module: str) -> str:
    return (Path(__file__).parent / "inside" / f"{module}.py").read_text(encoding="utf-8")


def _last_line(done: Exec) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else f"exit code {done.exit_code} without output"


LIMITS = Limits(memory_mib=256, num_processes=64, num_cpus=1.0, disk_mib=64, lifetime_s=120)
"""Limits of attacked sandboxes: low, so that bombs reach them soon."""
_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack that `swerl sandbox attacks` can run."""

    name: str
    sentence: str
    """Description of the attempt, in one sentence."""
    run: Callable[[AttackContext], Awaitable[AttackFinding]]
    timeout_s: float
    limits: Limits
    """Limits of the attacked sandbox."""
    alone: bool = False
    """True: run it alone, because it measures the machine."""


def attack(
    sentence: str, *, timeout_s: float = _TIMEOUT_S, limits: Limits = LIMITS, alone: bool = False
) -> Callable[[Callable[[AttackContext], Awaitable[AttackFinding]]], Attack]:
    """Turn a function into an Attack, which is named like the function, with dashes."""

    def make(run: Callable[[AttackContext], Awaitable[AttackFinding]]) -> Attack:
        name = run.__name__.replace("_", "-")
        return Attack(name, sentence, run, timeout_s, limits, alone)

    return make
