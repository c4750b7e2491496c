"""What a probe gets: a sandbox to attack, more of them, and what is known of both sides."""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from swerl.checks.attacks._machine import Machine
from swerl.checks.attacks.finding import CannotError, worked
from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.sandbox import Exec, Limits, Mount

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
class Box:
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
class Ground:
    """What all probes of one sheet share."""

    backend: SandboxBackend
    image: str
    workdir: str
    machine: Machine
    secret: str
    """A word that stands in the controller's environment and in no sandbox."""
    own_kernel: bool = False
    """Whether sandboxes run under another kernel than this machine's, as in a virtual machine."""
    namespaces: Mapping[str, str] | None = None
    """Namespaces of a command inside: kind -> identity; None where it cannot tell."""
    external: bool = False
    """Whether packets may leave the machine."""


@dataclass(frozen=True, slots=True)
class Lab:
    """One probe's place to work."""

    ground: Ground
    box: Box
    limits: Limits

    @property
    def machine(self) -> Machine:
        """The machine that this process runs on."""
        return self.ground.machine

    @property
    def workdir(self) -> str:
        """The folder inside that commands run in."""
        return self.ground.workdir

    @property
    def users(self) -> tuple[str | None, ...]:
        """Users to attack as; root of a kernel of its own is no attacker."""
        return (None,) if self.ground.own_kernel else (None, "root")

    def shares(self, kind: str) -> bool:
        """Say whether a command inside is in the same namespace as this process.

        Raises CannotError where the sandbox does not tell.
        """
        if self.ground.own_kernel:
            return False
        inside = (self.ground.namespaces or {}).get(kind)
        if inside is None:
            raise CannotError(f"the sandbox does not tell which {kind} namespace it is in")
        return inside == self.machine.namespaces.get(kind)

    def need_shared_kernel(self) -> None:
        """Raise CannotError where the sandbox runs under another kernel."""
        if self.ground.own_kernel:
            raise CannotError(
                "it runs under a kernel of its own, not this machine's: nothing to win here"
            )

    @asynccontextmanager
    async def open(
        self, limits: Limits | None = None, mounts: Sequence[Mount] = ()
    ) -> AsyncIterator[Box]:
        """Open one more sandbox."""
        ground = self.ground
        chosen = limits or self.limits
        async with ground.backend.open(
            ground.image, chosen, workdir=ground.workdir, mounts=mounts
        ) as sandbox:
            yield Box(sandbox)

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
