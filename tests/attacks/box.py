"""An open sandbox under attack, and its targets on this machine."""

from __future__ import annotations

import ast
import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.sandbox import Exec, Limits

LIMITS = Limits(memory_mib=256, num_processes=64, num_cpus=1.0, disk_mib=64, lifetime_s=120)
"""Low, so that bombs reach them soon."""
USERS = (None, "root")
_RUN_S = 15.0
_PACKAGE = "tests.attacks.inside"
_START = """
import sys, types
request = eval(sys.stdin.read())
for name in request["packages"]:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, source in request["modules"]:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
print(repr(getattr(module, request["function"])(*request["arguments"])))
"""
"""Run a function of `tests/attacks/inside` from its source on stdin."""


@dataclass(frozen=True, slots=True)
class Box:
    """An open sandbox, with the operations that attacks use."""

    sandbox: Sandbox
    backend: SandboxBackend
    workdir: str

    async def sh(self, script: str, *arguments: str, user: str | None = None) -> Exec:
        """Run a shell script with arguments from `$1`."""
        argv = ["sh", "-c", script, "sh", *arguments]
        return await self.sandbox.run(argv, user=user, timeout_s=_RUN_S)

    async def attack(
        self, function: str, *arguments: object, user: str | None = None
    ) -> dict[str, str]:
        """Run `module.function` of tests.attacks.inside and return attempt -> result.

        A result that begins with `ok` is a success. A killed program returns `{"killed": code}`.
        """
        module, _, name = function.partition(".")
        folder = Path(__file__).parent / "inside"
        sources = [
            (f"{_PACKAGE}.{part}", (folder / f"{part}.py").read_text())
            for part in ("calls", module)
        ]
        request = {
            "packages": ["tests", "tests.attacks", _PACKAGE],
            "modules": sources,
            "function": name,
            "arguments": arguments,
        }
        argv = ["python3", "-I", "-c", _START]
        done = await self.sandbox.run(argv, user=user, timeout_s=30, stdin=repr(request).encode())
        assert not done.timed_out, f"{function} did not end"
        if done.exit_code > 128 or done.exit_code < 0:
            return {"killed": str(done.exit_code)}
        assert done.exit_code == 0, done.text[-500:]
        return dict(ast.literal_eval(done.stdout.decode().splitlines()[-1]))

    @asynccontextmanager
    async def other(self, limits: Limits = LIMITS) -> AsyncIterator[Box]:
        """Open another sandbox of the same backend."""
        async with self.backend.open("host", limits, workdir=self.workdir) as sandbox:
            yield Box(sandbox, self.backend, self.workdir)


def worked(outcomes: Mapping[str, str]) -> list[str]:
    """Return the attempts that succeeded."""
    return [f"{attempt}{text[2:]}" for attempt, text in outcomes.items() if text.startswith("ok")]


def new_word() -> str:
    """Return a unique word; its prefix contains this process's id."""
    return f"swp{os.getpid():x}x{secrets.token_hex(10)}"


@asynccontextmanager
async def victim(word: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a host process with a word in its environment and command line."""
    argv = [sys.executable, "-I", "-S", "-c", "import time; print(flush=True); time.sleep(120)"]
    process = await asyncio.create_subprocess_exec(
        *argv, word, stdout=asyncio.subprocess.PIPE, env={"PROBE": word}
    )
    assert process.stdout
    await process.stdout.readline()
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextmanager
def planted(word: str) -> Iterator[list[str]]:
    """Write a file with this word into each private folder of the host; yield the paths."""
    home = Path.home()
    folders = {home, home / ".ssh", Path.cwd(), Path(tempfile.gettempdir())}
    folders |= {Path(name) for name in ("/root", "/var/tmp", "/dev/shm", "/run", "/srv", "/opt")}
    paths: list[Path] = []
    try:
        for folder in folders:
            path = folder / f".swerl-probe-{secrets.token_hex(6)}"
            with suppress(OSError):
                path.write_text(word)
                path.chmod(0o644)
                paths.append(path)
        yield [str(path) for path in paths]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
