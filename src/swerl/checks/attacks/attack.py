"""An attack, the sandbox and the facts that it gets, and its finding."""

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
    """This machine, as its own processes see it."""

    boot_id: str
    hostname: str
    namespaces: Mapping[str, str]
    """Kind -> identity of the namespace that this process is in."""


def look() -> HostFacts:
    """Return the facts of this machine."""
    namespaces = {}
    for kind in NAMESPACES:
        with suppress(OSError):
            namespaces[kind] = str(Path("/proc/self/ns", kind).readlink())
    return HostFacts(boot_id(), socket.gethostname(), namespaces)


def describe() -> dict[str, Json]:
    """Return the machine's facts for the report."""
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


_MOST_SHOWN = 4


class AttackOutcome(StrEnum):
    """How a probe ended."""

    PASS = "PASS"
    """The attack was tried and did not work."""
    FAIL = "FAIL"
    """The attack worked."""
    CANNOT = "CANNOT"
    """The attack could not be tried; this says nothing about the sandbox."""


@dataclass(frozen=True, slots=True)
class AttackFinding:
    """The end of one probe."""

    result: AttackOutcome
    seen: str
    """What was seen, in a few words."""


class CannotError(SwerlError):
    """A probe lacks what it needs; the message says what."""


def passed(seen: str) -> AttackFinding:
    """Return the finding that the attack did not work."""
    return AttackFinding(AttackOutcome.PASS, seen)


def failed(seen: str) -> AttackFinding:
    """Return the finding that the attack worked."""
    return AttackFinding(AttackOutcome.FAIL, seen)


def cannot(seen: str) -> AttackFinding:
    """Return the finding that the attack could not be tried."""
    return AttackFinding(AttackOutcome.CANNOT, seen)


def judge(holes: Iterable[str], otherwise: str) -> AttackFinding:
    """Return FAIL with the holes where there are any, else PASS with what was seen."""
    found = list(dict.fromkeys(holes))
    if not found:
        return passed(otherwise)
    more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    return failed("; ".join(found[:_MOST_SHOWN]) + more)


def worked(outcomes: Mapping[str, str], *, by: str | None = None) -> list[str]:
    """Return the attempts that worked, of what a program inside reports; `by` names the user."""
    who = f" as {by}" if by else ""
    return [
        f"{attempt}{who}{text.removeprefix('ok')}"
        for attempt, text in outcomes.items()
        if text.startswith("ok")
    ]


def refused(outcomes: Mapping[str, str]) -> str:
    """Return how attempts were refused, in a few words."""
    kinds = list(dict.fromkeys(outcomes.values()))
    return ", ".join(kinds[:_MOST_SHOWN])


_RUN_TIMEOUT_S = 10.0
_NOT_STARTED, _NOT_FOUND = 126, 127
_PACKAGE = "swerl.checks.attacks.inside"
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
"""Run a function of `checks/attacks/inside` where swerl is not installed: source on stdin."""


class DiedError(CannotError):
    """An attack ended before it could say what it met."""

    def __init__(self, done: Exec) -> None:
        super().__init__(f"the attack ended with exit code {done.exit_code}: {_last_line(done)}")
        self.exit_code = done.exit_code


@dataclass(frozen=True, slots=True)
class OpenSandbox:
    """A sandbox, with what probes do in it."""

    sandbox: Sandbox

    async def run(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        timeout_s: float = _RUN_TIMEOUT_S,
        stdin: bytes | None = None,
    ) -> Exec:
        """Run a command to its end."""
        return await self.sandbox.run(argv, user=user, timeout_s=timeout_s, stdin=stdin)

    async def sh(
        self,
        script: str,
        *arguments: str,
        user: str | None = None,
        timeout_s: float = _RUN_TIMEOUT_S,
    ) -> Exec:
        """Run a shell script with `$1` and on. Raises CannotError where there is no sh."""
        done = await self.run(
            ["sh", "-c", script, "sh", *arguments], user=user, timeout_s=timeout_s
        )
        if done.exit_code == _NOT_FOUND and b"sh" in done.stderr and not done.stdout:
            raise CannotError(f"a program is missing in the sandbox: {_last_line(done)}")
        return done

    async def text(self, path: str) -> str:
        """Return what a process inside reads in a file. Raises CannotError where it cannot."""
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
        """Run `module.function` of swerl.checks.attacks.inside and return attempt -> how it went.

        What worked begins with `ok`. Raises CannotError where no Python can run it, DiedError
        where the program was killed.
        """
        module, _, name = function.partition(".")
        given = {
            "packages": ["swerl", "swerl.checks", "swerl.checks.attacks", _PACKAGE],
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
    """A word that stands in the controller's environment and in no sandbox."""
    own_kernel: bool = False
    """Whether sandboxes run under another kernel than this machine's, as in a virtual machine."""
    namespaces: Mapping[str, str] | None = None
    """Namespaces of a command inside: kind -> identity; None where it cannot tell."""
    external: bool = False
    """Whether packets may leave the machine."""


@dataclass(frozen=True, slots=True)
class AttackContext:
    """One probe's place to work."""

    target: Target
    box: OpenSandbox
    limits: Limits

    @property
    def machine(self) -> HostFacts:
        """The machine that this process runs on."""
        return self.target.machine

    @property
    def workdir(self) -> str:
        """The folder inside that commands run in."""
        return self.target.workdir

    @property
    def users(self) -> tuple[str | None, ...]:
        """Users to attack as; root of a kernel of its own is no attacker."""
        return (None,) if self.target.own_kernel else (None, "root")

    def shares(self, kind: str) -> bool:
        """Say whether a command inside is in the same namespace as this process.

        Raises CannotError where the sandbox does not tell.
        """
        if self.target.own_kernel:
            return False
        inside = (self.target.namespaces or {}).get(kind)
        if inside is None:
            raise CannotError(f"the sandbox does not tell which {kind} namespace it is in")
        return inside == self.machine.namespaces.get(kind)

    def need_shared_kernel(self) -> None:
        """Raise CannotError where the sandbox runs under another kernel."""
        if self.target.own_kernel:
            raise CannotError(
                "it runs under a kernel of its own, not this machine's: nothing to win here"
            )

    @asynccontextmanager
    async def open(
        self, limits: Limits | None = None, mounts: Sequence[Mount] = ()
    ) -> AsyncIterator[OpenSandbox]:
        """Open one more sandbox."""
        target = self.target
        chosen = limits or self.limits
        async with target.backend.open(
            target.image, chosen, workdir=target.workdir, mounts=mounts
        ) as sandbox:
            yield OpenSandbox(sandbox)

    async def as_users(self, function: str, *arguments: object) -> tuple[list[str], str]:
        """Attack as each user; return what worked, and how the rest was refused."""
        holes: list[str] = []
        answers: dict[str, str] = {}
        for user in self.users:
            outcomes = await self.box.attack(function, *arguments, user=user)
            holes += worked(outcomes, by=user or "agent")
            answers.update(outcomes)
        return holes, ", ".join(dict.fromkeys(answers.values()))


@cache
def _source(module: str) -> str:
    return (Path(__file__).parent / "inside" / f"{module}.py").read_text(encoding="utf-8")


def _last_line(done: Exec) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else f"exit code {done.exit_code}, and not a word"


LIMITS = Limits(memory_mib=256, num_processes=64, num_cpus=1.0, disk_mib=64, lifetime_s=120)
"""What the sandboxes of probes may use: little, so that bombs meet their limit soon."""
_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack."""

    name: str
    sentence: str
    """What it tries."""
    attack: Callable[[AttackContext], Awaitable[AttackFinding]]
    timeout_s: float
    limits: Limits
    """Limits of the sandbox that it gets."""
    alone: bool = False
    """Whether it measures, and so runs when no other probe does."""


def probe(
    sentence: str, *, timeout_s: float = _TIMEOUT_S, limits: Limits = LIMITS, alone: bool = False
) -> Callable[[Callable[[AttackContext], Awaitable[AttackFinding]]], Attack]:
    """Make a probe of a function; its name is the function's, with dashes."""

    def make(attack: Callable[[AttackContext], Awaitable[AttackFinding]]) -> Attack:
        name = attack.__name__.replace("_", "-")
        return Attack(name, sentence, attack, timeout_s, limits, alone)

    return make
