"""Check that the image of every Task boots, and that git and the tests' interpreter work in it."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import shlex
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from pydantic import BaseModel

from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.errors import SandboxError, SandboxLostError, SandboxUnavailableError, SwerlError
from swerl.core.image_reference import is_local, parse
from swerl.core.jobs import run_jobs
from swerl.core.sandbox import Limits
from swerl.core.task import Task
from swerl.images.local import image_folder
from swerl.images.store import default_store
from swerl.sandboxes._docker_daemon import Daemon

_STEP_TIMEOUT_S = 60.0
_BOOT_TIMEOUT_S = 1800.0
"""Seconds until the first command ends; pulling a large image takes most of it."""
_WORK_TREE = r"""
command -v git >/dev/null || { echo "the image has no git"; exit 2; }
g() { git -c safe.directory='*' "$@" 2>&1; }
top=$(g rev-parse --show-toplevel) || { echo no; exit; }
[ "$top" = "$(pwd -P)" ] || { echo no; exit; }
status=$(g status --porcelain --untracked-files=no) || { echo "$status"; exit 3; }
for commit
do g cat-file -e "$commit^{commit}" >/dev/null && continue
echo "the repository lacks the base commit $commit"; exit 4
done
echo yes
"""
_NO_TREE = "the workdir is not the top of a git work tree"
_NO_TREE_HINT = "give the folder of the repository as the Task's workdir"
_ACTIVATING = ("source ", ". ", "conda activate", "export PATH=")
_PYTHON = re.compile(r"(?:^|[\s;&|(])((?:[\w.@+-]*/)*python[\d.]*)(?=[\s;]|$)", re.MULTILINE)
_PYTEST = re.compile(r"(?:^|[\s;&|(/])(py\.?test|tox|nosetests)(?=[\s;]|$)", re.MULTILINE)
_ANY_PYTHON = """
for name in python python3; do command -v $name >/dev/null && exec $name --version; done
echo "neither python nor python3 is on the path"; exit 127
"""
_FETCH = (
    'curl -fsS -m 20 "$0" 2>/dev/null || wget -qO- -T 20 "$0" 2>/dev/null || python3 -c '
    "'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())' "
    '"$0"'
)

ReadDigest: TypeAlias = Callable[[str], Awaitable[str]]
"""Image -> its digest; empty if unknown."""


async def no_digest(image: str) -> str:
    """Return no digest: for images that no store or daemon here keeps."""
    return ""


@dataclass(frozen=True, slots=True)
class SmokeResult:
    """The check of one image with one workdir."""

    image: str
    workdir: str
    num_tasks: int = 0
    """Tasks that use the image with this workdir."""
    failure: str = ""
    """The problem and its remedy; empty if the image is good."""
    interpreter: str = ""
    """Version of the Python that the Task's tests use, else of the first one on the path; `none`
    if the image has none and no Task needs one."""
    work_tree: str = ""
    """`yes` if the workdir is a git work tree; `no` if an Episode has to make it one."""
    boot_s: float = 0.0
    """Seconds from the request to the end of the first command."""
    exec_s: float = 0.0
    """Seconds for one empty command."""

    @property
    def ok(self) -> bool:
        return not self.failure


async def check(
    backend: SandboxBackend,
    tasks: Iterable[Task],
    *,
    num_workers: int = 4,
    on_done: Callable[[SmokeResult], None] = lambda _: None,
) -> list[SmokeResult]:
    """Check every image with its workdir once, and return the results in the Tasks' order.

    Raises SandboxUnavailableError if the backend cannot run at all.
    """
    users: dict[tuple[str, str], list[Task]] = {}
    for task in tasks:
        users.setdefault((task.image, task.workdir), []).append(task)

    async def check_one(place: tuple[str, str]) -> SmokeResult:
        result = replace(await _check(backend, users[place]), num_tasks=len(users[place]))
        on_done(result)
        return result

    return await run_jobs(users, check_one, limit=num_workers)


async def _check(backend: SandboxBackend, tasks: Sequence[Task]) -> SmokeResult:
    """Check one image for the Tasks that use it with one workdir."""
    result = SmokeResult(tasks[0].image, tasks[0].workdir)
    try:
        result = await _boot(backend, tasks)
    except SandboxUnavailableError:
        raise
    except SwerlError as error:
        result = replace(result, failure=error.explained())
    except TimeoutError:
        result = replace(
            result, failure=f"no command ended within {_BOOT_TIMEOUT_S:g} s of the boot"
        )
    except OSError as error:
        result = replace(result, failure=f"{error} (`swerl doctor` checks this machine)")
    return replace(result, failure=" ".join(result.failure.split()))


async def _boot(backend: SandboxBackend, tasks: Sequence[Task]) -> SmokeResult:
    """Open a sandbox and make every check in it. Raises SwerlError, OSError and TimeoutError."""
    task, started = tasks[0], time.monotonic()
    async with asyncio.timeout(_BOOT_TIMEOUT_S) as patience:
        async with backend.open(task.image, Limits(), workdir=task.workdir) as sandbox:
            await sandbox.run(["true"], timeout_s=_STEP_TIMEOUT_S)
            boot_s = time.monotonic() - started
            patience.reschedule(None)
            timed = await sandbox.run(["true"], timeout_s=_STEP_TIMEOUT_S)
            problems: list[str] = []
            return SmokeResult(
                task.image,
                task.workdir,
                boot_s=boot_s,
                exec_s=timed.duration_s,
                interpreter=await _or_problem(_version(sandbox, interpreter_of(task)), problems),
                work_tree=await _or_problem(_work_tree(sandbox, tasks), problems),
                failure="; ".join(problems),
            )


async def _or_problem(check: Coroutine[None, None, str], problems: list[str]) -> str:
    """Return the result; note a failure, so that one problem does not hide the next."""
    try:
        return await check
    except (SandboxLostError, SandboxUnavailableError):
        raise
    except SandboxError as error:
        problems.append(error.explained())
        return ""


async def _version(sandbox: Sandbox, interpreter: Interpreter) -> str:
    output = await sandbox.run(interpreter.argv, env=interpreter.env, timeout_s=_STEP_TIMEOUT_S)
    lines = output.text.strip().splitlines()
    if output.exit_code == 0 and lines:
        return lines[-1].strip()
    if not interpreter.is_declared:
        return "none"
    problem = f"the interpreter of the tests does not run: {interpreter.name}"
    raise SandboxError(problem, hint=lines[-1] if lines else f"exit code {output.exit_code}")


async def _work_tree(sandbox: Sandbox, tasks: Sequence[Task]) -> str:
    commits = dict.fromkeys(task.base_commit for task in tasks if task.base_commit)
    argv = ["sh", "-c", _WORK_TREE, "sh", *commits]
    output = await sandbox.run(argv, timeout_s=_STEP_TIMEOUT_S)
    answer = " ".join(output.text.split())
    if output.exit_code != 0:
        problem = "git does not work in the workdir"
        raise SandboxError(problem, hint=answer or f"exit code {output.exit_code}")
    if answer != "yes" and (commits or not is_local(tasks[0].image)):
        raise SandboxError(_NO_TREE, hint=_NO_TREE_HINT)
    return answer


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The command that prints an interpreter's version, run in the workdir."""

    name: str
    argv: tuple[str, ...]
    is_declared: bool
    """True if the Task needs it."""
    env: Mapping[str, str] = field(default_factory=dict)


def interpreter_of(task: Task) -> Interpreter:
    """Return the interpreter in `metadata.interpreter`, or the one that the tests call.

    The lines of the test command that activate an environment run first. If the tests name no
    interpreter, any Python will do, and none is no failure.
    """
    declared = task.metadata.get("interpreter")
    command = task.grading.test_command
    activating = [
        line.strip() for line in command.splitlines() if line.strip().startswith(_ACTIVATING)
    ]
    called = _PYTHON.search(command)
    if isinstance(declared, str) and declared:
        name, ask = declared, f"{shlex.quote(declared)} --version"
    elif called:
        name, ask = called[1], f"{called[1]} --version"
    else:
        name, ask = "python", _ANY_PYTHON
    is_declared = bool(declared or called or _PYTEST.search(command))
    shell = "bash" if activating else "sh"
    script = "\n".join([*activating, ask])
    return Interpreter(name, (shell, "-c", script), is_declared, dict(task.grading.env))


def digests_for(backend: str, options: BaseModel | None) -> ReadDigest:
    """Return the function that reads an image's digest: from the store, a daemon, or its name."""
    if backend == "local":
        return _digest_in_store
    if backend == "docker":
        return _digest_in_daemon(getattr(options, "base_url", ""))
    return _digest_in_name


async def _digest_in_name(image: str) -> str:
    try:
        return "" if is_local(image) else parse(image).digest
    except SwerlError:
        return ""


async def _digest_in_store(image: str) -> str:
    if is_local(image):
        kind, _, name = image.partition(":")
        return _built_digest(name) if kind == "built" else ""
    try:
        return (await asyncio.to_thread(default_store().find, image)).digest
    except (SwerlError, OSError):
        return await _digest_in_name(image)


def _built_digest(name: str) -> str:
    """Return a digest of the description that a `built:` image was made from; empty if absent."""
    try:
        description = (image_folder(name) / "image.json").read_bytes()
    except (SwerlError, OSError):
        return ""
    return f"sha256:{hashlib.sha256(description).hexdigest()}"


def _digest_in_daemon(base_url: str) -> ReadDigest:
    daemon = Daemon(base_url)

    async def read_digest(image: str) -> str:
        try:
            await daemon.connect()
            facts: dict[str, Any] = await daemon.call(lambda client: client.inspect_image(image))
        except SwerlError:
            return await _digest_in_name(image)
        return str(facts.get("Id", ""))

    return read_digest


async def reach_from(sandbox: Sandbox) -> str:
    """Fetch a page of this process from inside, as an agent reaches the gateway; return its URL.

    Raises SandboxError if the page does not arrive.
    """
    word = secrets.token_hex(8)
    page = f"HTTP/1.1 200 OK\r\nContent-Length: {len(word)}\r\nConnection: close\r\n\r\n{word}"
    listener = WordServer(page)
    try:
        url = await sandbox.expose(listener)
        argv = ["sh", "-c", _FETCH, f"{url}/"]
        output = await sandbox.run(argv, cwd="/", timeout_s=_STEP_TIMEOUT_S)
    finally:
        listener.close()
    if word not in output.text:
        raise SandboxError(
            f"{url} is not reached from inside: {output.text.strip()[-80:]}",
            hint="`swerl sandbox smoke --isolation` checks the sandbox",
        )
    return url


class WordServer:
    """Send a word to every client. Implements Listener."""

    def __init__(self, word: str) -> None:
        self.word = word
        self._servers: list[asyncio.Server] = []

    async def attach(self, sock: socket.socket) -> None:
        """Serve a listening socket."""
        sock.setblocking(False)
        is_unix = sock.family == socket.AF_UNIX
        start = asyncio.start_unix_server if is_unix else asyncio.start_server
        self._servers.append(await start(self._greet, sock=sock))

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def _greet(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.write(self.word.encode())
            await writer.drain()
        writer.close()
