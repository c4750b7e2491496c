"""Check that the image of every Task boots and can be worked in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from swerl.errors import SandboxError, SwerlError
from swerl.interfaces import Sandbox, SandboxBackend
from swerl.sandbox import Limits
from swerl.task import Task

_STEP_TIMEOUT_S = 60.0
_VERSION = """
for name in python python3; do command -v $name >/dev/null && exec $name --version; done
exit 1
"""
_WORK_TREE = """
if [ "$(git rev-parse --show-toplevel 2>/dev/null)" = "$(pwd -P)" ]
then echo yes
else git init -q . && git add -A && git commit -q --allow-empty -m base && echo made
fi && git status --porcelain >/dev/null
"""


@dataclass(frozen=True, slots=True)
class Smoke:
    """What a check of one image found."""

    image: str
    workdir: str
    num_tasks: int
    """Tasks that use the image with this workdir."""
    failure: str = ""
    """What went wrong and what to do, or nothing."""
    interpreter: str = ""
    """Version of the Python that the image puts first."""
    work_tree: str = ""
    """`yes` where the workdir is a git work tree, `made` where it could be turned into one."""
    boot_s: float = 0.0
    """Seconds from the order to the first command's end."""
    exec_s: float = 0.0
    """Seconds for one empty command."""

    @property
    def ok(self) -> bool:
        """Whether Episodes can run in the image."""
        return not self.failure


async def check(
    backend: SandboxBackend,
    tasks: Iterable[Task],
    *,
    num_workers: int = 4,
    limits: Limits | None = None,
    tell: Callable[[Smoke], None] = lambda _: None,
) -> list[Smoke]:
    """Check every image with its workdir once, `num_workers` at a time, in the Tasks' order.

    `tell` hears each result as it comes.
    """
    counts: dict[tuple[str, str], int] = {}
    for task in tasks:
        place = (task.image, task.workdir)
        counts[place] = counts.get(place, 0) + 1
    free = asyncio.Semaphore(num_workers)

    async def one(image: str, workdir: str) -> Smoke:
        async with free:
            result = await _check(backend, limits or Limits(), image, workdir)
        result = replace(result, num_tasks=counts[image, workdir])
        tell(result)
        return result

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(*place)) for place in counts]
    return [task.result() for task in running]


async def _check(backend: SandboxBackend, limits: Limits, image: str, workdir: str) -> Smoke:
    found = Smoke(image, workdir, 0)
    try:
        started = time.monotonic()
        async with backend.open(image, limits, workdir=workdir) as sandbox:
            await sandbox.run(["true"], timeout_s=_STEP_TIMEOUT_S)
            boot_s = time.monotonic() - started
            timed = await sandbox.run(["true"], timeout_s=_STEP_TIMEOUT_S)
            return replace(
                found,
                boot_s=boot_s,
                exec_s=timed.duration_s,
                interpreter=await _ask(sandbox, "no interpreter runs", _VERSION),
                work_tree=await _ask(sandbox, "the workdir is no git work tree", _WORK_TREE),
            )
    except SwerlError as error:
        return replace(found, failure=f"{error} ({error.hint})" if error.hint else str(error))


async def _ask(sandbox: Sandbox, problem: str, script: str) -> str:
    done = await sandbox.run(["sh", "-c", script], timeout_s=_STEP_TIMEOUT_S)
    if done.exit_code != 0:
        said = done.text.strip().splitlines()
        raise SandboxError(problem, hint=said[-1] if said else f"exit code {done.exit_code}")
    return " ".join(done.text.split())
