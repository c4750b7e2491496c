"""Check that sandboxes of a backend are isolated: no network, no host, limits hold, nothing left.

Secrets are planted on this machine: a listener, a file, a process and a variable. A Python program
inside the first sandbox looks for them. Further commands exceed each limit.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from swerl.checks.smoke import reach_from
from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.errors import SandboxError, SwerlError
from swerl.core.sandbox import Limits
from swerl.core.secrets import lent

LIMITS = Limits(memory_mib=256, num_processes=64, num_cpus=1.0, disk_mib=64, lifetime_s=300)
"""Low, so that a check reaches them soon."""
_EXCESS = 3
"""A check takes so many times the limit at most."""
_STEP_S = 60.0
_SLOW_S = 15.0
"""Longest time between the end of a command's time limit and its return."""
_OUTSIDE = (("1.1.1.1", 443), ("8.8.8.8", 53))
_METADATA = (("169.254.169.254", 80), ("100.100.100.200", 80))
"""Addresses at which clouds serve a machine's keys."""
_INSIDE = """
import ctypes, errno, glob, json, os, socket, stat, sys
facts = json.load(sys.stdin)

def read(path):
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError:
        return b""

def reached(addresses):
    for host, port in addresses:
        with socket.socket() as sock:
            sock.settimeout(2)
            if sock.connect_ex((host, port)) == 0:
                return "%s port %d is reachable" % (host, port)

def opened(paths, flags):
    for path in paths:
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK))
            return path + " can be opened"
        except OSError:
            pass

def holding(paths, word):
    for path in paths:
        if word.encode() in read(path):
            return path + " shows a secret of the host"

def is_disk(path):
    try:
        return stat.S_ISBLK(os.stat(path).st_mode)
    except OSError:
        return False

def abstract():
    with socket.socket(socket.AF_UNIX) as sock:
        if sock.connect_ex("\\0" + facts["word"]) == 0:
            return "an abstract socket of the host is reachable"

powers = int(read("/proc/self/status").split(b"CapEff:")[1].split()[0], 16)
libc = ctypes.CDLL(None, use_errno=True)
libc.mount(b"none", b"/", b"no-such-type", 0, None)
mounts = ctypes.get_errno() not in (errno.EPERM, errno.EACCES, errno.ENOSYS)
devices = ["/dev/" + name for name in ("kmsg", "mem", "kvm", "port")]
devices += filter(is_disk, glob.glob("/dev/*"))
settings = ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/power/state"]
processes = glob.glob("/proc/[0-9]*/")
print(json.dumps({
    "internet": reached(facts["outside"]),
    "cloud metadata": reached(facts["metadata"]),
    "host network": reached(facts["host"]) or abstract(),
    "host files": holding(facts["files"], facts["word"]),
    "host processes": holding([path + "cmdline" for path in processes], facts["word"]),
    "host variables": holding([path + "environ" for path in processes], facts["word"]),
    "devices": opened(devices, os.O_RDONLY),
    "kernel settings": opened(settings, os.O_WRONLY),
    "privileges": "it has capabilities %x" % powers if powers else "it may mount" * mounts,
}))
"""
_MEMORY = "import sys; bytearray(b'x') * (int(sys.argv[1]) << 20)"
_PROCESSES = """
import os, signal, sys, time
pids = []
try:
    for _ in range(int(sys.argv[1])):
        pids.append(os.fork())
        if not pids[-1]:
            time.sleep(60)
            os._exit(0)
except OSError:
    sys.exit("refused")
finally:
    for pid in filter(None, pids):
        os.kill(pid, signal.SIGKILL)
"""
_DISK = """
import os, sys
with open("filler", "wb", 0) as file:
    os.unlink("filler")
    for _ in range(int(sys.argv[1])):
        file.write(os.urandom(1 << 20))
"""
_LEAVE = 'echo x >/tmp/$0; setsid sh -c "sleep 300; true" $0 </dev/null >/dev/null 2>&1 &'
_FIND = 'ls /tmp; cat /proc/[0-9]*/cmdline 2>/dev/null | tr "\\0" " "; true'


@dataclass(frozen=True, slots=True)
class IsolationFinding:
    check: str
    ok: bool | None
    """None: not tried, so nothing is known about the sandbox."""
    detail: str = ""
    """The problem, or the reason why the check was not tried."""


async def check_isolation(
    backend: SandboxBackend, image: str, workdir: str
) -> list[IsolationFinding]:
    """Run every check in sandboxes of this image, which needs `python3`.

    Raises SandboxError or ImageError if no sandbox opens.
    """
    word = f"swp{secrets.token_hex(10)}"
    async with backend.open(image, LIMITS, workdir=workdir) as sandbox:
        has_python = await sandbox.run(["python3", "--version"], timeout_s=_STEP_S)
        if has_python.exit_code:
            return [IsolationFinding("all", None, f"image {image} has no python3")]
        findings = await _look(sandbox, word)
        findings.append(await _gateway(sandbox))
        findings.append(await _time_limit(sandbox, word))
        findings += await _limits(sandbox, is_ours=backend.price(LIMITS) == 0)
        with suppress(SandboxError):
            await sandbox.run(["sh", "-c", _LEAVE, word], timeout_s=_STEP_S)
    async with backend.open(image, LIMITS, workdir=workdir) as sandbox:
        remains = await sandbox.run(["sh", "-c", _FIND], timeout_s=_STEP_S)
    problem = "the next sandbox shows a file or process" if word in remains.text else ""
    problem = problem or ("a process is alive on the host" if await _lives(word) else "")
    return [*findings, IsolationFinding("nothing left", not problem, problem)]


async def _look(sandbox: Sandbox, word: str) -> list[IsolationFinding]:
    """Run the program that looks for secrets of this machine."""
    with ExitStack() as stack:
        stack.enter_context(lent("SWERL_ISOLATION_SECRET", word))
        files = [_planted(stack, folder, word) for folder in _folders()]
        listener = stack.enter_context(socket.create_server(("", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{word}")
        abstract.listen()
        port = listener.getsockname()[1]
        facts: Mapping[str, object] = {
            "word": word,
            "files": files,
            "outside": _OUTSIDE,
            "metadata": _METADATA,
            "host": [("127.0.0.1", port), (socket.gethostbyname(socket.gethostname()), port)],
        }
        async with _victim(word):
            output = await sandbox.run(
                ["python3", "-I", "-c", _INSIDE],
                timeout_s=_STEP_S,
                stdin=json.dumps(facts).encode(),
            )
    if output.exit_code:
        raise SandboxError(f"the check inside failed: {output.text.strip()[-200:]}")
    problems: dict[str, str | None] = json.loads(output.stdout)
    return [IsolationFinding(name, not text, text or "") for name, text in problems.items()]


async def _gateway(sandbox: Sandbox) -> IsolationFinding:
    """Check that the one permitted connection works."""
    try:
        await reach_from(sandbox)
    except SwerlError as error:
        return IsolationFinding("gateway", False, str(error))
    return IsolationFinding("gateway", True)


async def _time_limit(sandbox: Sandbox, word: str) -> IsolationFinding:
    """Check that a command and its detached child end at the time limit."""
    child = 'setsid sh -c "sleep 100; true" $0 >/dev/null 2>&1 & sleep 100'
    try:
        async with asyncio.timeout(_SLOW_S):
            output = await sandbox.run(["sh", "-c", child, f"{word}t"], timeout_s=1.0)
    except TimeoutError:
        return IsolationFinding("time limit", False, f"no end {_SLOW_S:g} s after the limit")
    remains = await sandbox.run(["sh", "-c", _FIND], timeout_s=_STEP_S)
    problem = "" if output.timed_out else f"the command ended early: {output.text.strip()[-80:]}"
    if f"{word}t" in remains.text:
        problem = "a detached child outlives the limit"
    return IsolationFinding("time limit", not problem, problem)


async def _limits(sandbox: Sandbox, *, is_ours: bool) -> list[IsolationFinding]:
    """Exceed each limit; the sandbox may end the program but must answer afterwards."""
    findings = []
    for name, program, limit, unit in (
        ("memory limit", _MEMORY, LIMITS.memory_mib, "MiB"),
        ("process limit", _PROCESSES, LIMITS.num_processes, "processes"),
        ("disk limit", _DISK, LIMITS.disk_mib, "MiB"),
    ):
        most = limit * _EXCESS
        if not is_ours:
            findings.append(IsolationFinding(name, None, "the provider sets the machine's size"))
            continue
        try:
            argv = ["python3", "-c", program, str(most)]
            output = await sandbox.run(argv, timeout_s=_STEP_S)
            answer = await sandbox.run(["true"], timeout_s=_STEP_S)
        except SandboxError as error:
            findings.append(IsolationFinding(name, False, f"the sandbox is lost: {error}"))
            break
        problem = "" if output.exit_code else f"{most} {unit} were available, the limit is {limit}"
        problem = problem or ("no further command runs" if answer.exit_code else "")
        findings.append(IsolationFinding(name, not problem, problem))
    return findings


@asynccontextmanager
async def _victim(word: str) -> AsyncIterator[None]:
    """Run a host process with the word on its command line and in its environment."""
    argv = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(120)", word]
    process = await asyncio.create_subprocess_exec(*argv)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


def _folders() -> list[Path]:
    return [Path.home(), Path.cwd(), Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/srv")]


def _planted(stack: ExitStack, folder: Path, word: str) -> str:
    """Write a file with the word, where the folder permits it; remove it at the stack's end."""
    path = folder / f".{word}"
    with suppress(OSError):
        path.write_text(word)
        path.chmod(0o644)
        stack.callback(path.unlink, missing_ok=True)
    return str(path)


async def _lives(word: str) -> bool:
    """Return True if a host process with the word is alive after two seconds."""
    for _ in range(20):
        lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))
        with suppress(OSError):
            if not any(word.encode() in line for line in lines):
                return False
        await asyncio.sleep(0.1)
    return True
