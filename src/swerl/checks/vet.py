"""Vet Tasks: prove that each can be solved, is not solved already, and is graded the same twice.

Every run has a fresh sandbox. What the machinery loses is no verdict on a Task: it is vetted again
with the next call. See `_vet_task` for the runs that a Task takes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from swerl.checks._vet_runs import Runs
from swerl.checks._vet_task import Rigour, vet_task
from swerl.checks.smoke import ImageFacts, know_nothing
from swerl.core.certificate import Certificate, row_digest
from swerl.core.contracts import SandboxBackend
from swerl.core.errors import SandboxUnavailableError, SwerlError
from swerl.core.sandbox import Limits
from swerl.core.task import Task

__all__ = ["Rigour", "Settings", "Vetted", "fitting_workers", "vet"]

_MEMORY_SHARE = 0.9
"""Share of the free memory that sandboxes may be promised."""


@dataclass(frozen=True, slots=True)
class Vetted:
    """What vetting one Task came to."""

    task: str
    """Its id."""
    rigour: Rigour
    certificate: Certificate | None = None
    """None where the machinery failed."""
    failure: str = ""
    """What went wrong with the machinery and what to do, or nothing."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the Task is admitted."""
        return self.certificate is not None and self.certificate.ok


@dataclass(frozen=True, slots=True)
class Settings:
    """How to vet."""

    backend: str
    """Name of the kind of sandbox, for the certificate."""
    rigour: Rigour = field(default_factory=Rigour)
    num_workers: int = 1
    """Tasks at once, each in one sandbox at a time."""
    limits: Limits = field(default_factory=Limits)
    facts: Callable[[str], Awaitable[ImageFacts]] = know_nothing
    """Tells an image's digest."""
    done: Mapping[str, Vetted] = field(default_factory=dict)
    """What is known, by Task id; it stands while row, image, rigour and swerl are the same."""


async def vet(
    backend: SandboxBackend,
    tasks: Iterable[Task],
    settings: Settings,
    *,
    tell: Callable[[Vetted, bool], None],
) -> None:
    """Vet every Task that is not known already; `tell` hears each result, and whether it is new.

    Tasks are read as they are needed. Raises SandboxUnavailableError where the backend cannot run
    at all.
    """
    waiting = iter(tasks)
    runs = Runs(backend, settings.limits)

    async def work() -> None:
        for task in waiting:
            image = (await settings.facts(task.image)).digest
            known = settings.done.get(task.id)
            if known and _stands(known, task, image, settings.rigour):
                tell(known, False)
            else:
                tell(await _vet_one(task, runs, settings), True)

    async with asyncio.TaskGroup() as group:
        for _ in range(settings.num_workers):
            group.create_task(work())


def fitting_workers(limits: Limits) -> int:
    """Return how many sandboxes of this size this machine runs at once without sharing cores."""
    cores = len(os.sched_getaffinity(0)) / limits.num_cpus
    memory = _free_memory_mib() * _MEMORY_SHARE / limits.memory_mib
    return max(1, int(min(cores, memory)))


async def _vet_one(task: Task, runs: Runs, settings: Settings) -> Vetted:
    started = time.monotonic()
    certificate, failure = None, ""
    try:
        found = await vet_task(
            task, runs, settings.rigour, backend=settings.backend, version=version("swerl")
        )
        # An image that a run has pulled has a digest only after it.
        certificate = replace(found, image=(await settings.facts(task.image)).digest)
    except SandboxUnavailableError:
        raise
    except SwerlError as error:
        failure = f"{error} ({error.hint})" if error.hint else str(error)
    seconds = round(time.monotonic() - started, 3)
    return Vetted(task.id, settings.rigour, certificate, failure, seconds)


def _stands(known: Vetted, task: Task, image: str, rigour: Rigour) -> bool:
    """Whether an earlier result is of this very Task and says what is asked."""
    found = known.certificate
    return (
        found is not None
        and known.rigour == rigour
        and found.source == row_digest(task)
        and image in ("", found.image)
        and found.swerl == version("swerl")
    )


def _free_memory_mib() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    return 0.0
