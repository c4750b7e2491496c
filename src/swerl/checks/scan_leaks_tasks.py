"""Sweep the image of every Task of a file, as it is and as an agent would get it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from swerl.checks.scan_leaks import Kind, Leak, Sweep, sweep
from swerl.core.contracts import SandboxBackend
from swerl.core.errors import InputError, SandboxUnavailableError, SwerlError
from swerl.core.files import disk_errors
from swerl.core.sandbox import Limits
from swerl.core.task import Task, to_row
from swerl.tasks.hide_future import History, scrub


@dataclass(frozen=True, slots=True)
class Swept:
    """What the sweeps of one Task found."""

    task: str
    image: str
    digest: str
    """Names the Task as it was swept; another one is swept anew."""
    raw: Sweep | None = None
    """The image as it is; None where nobody asked."""
    scrubbed: Sweep | None = None
    """The image as an agent gets it; None where nobody asked."""
    history: str = ""
    """What the scrub left of the past: `full` or `none`."""
    scrub_s: float = 0.0
    failure: str = ""
    """What went wrong and what to do, or nothing."""

    @property
    def ok(self) -> bool:
        """Whether the Task was swept and an agent finds nothing."""
        return not self.failure and not (self.scrubbed and self.scrubbed.leaks)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to sweep."""

    raw: bool = True
    """Whether to sweep the image as it is."""
    scrubbed: bool = True
    """Whether to scrub it and sweep again."""
    history: History = History.AUTO
    num_workers: int = 4
    """Sandboxes at once."""
    limits: Limits = field(default_factory=Limits)
    done: Mapping[str, Swept] = field(default_factory=dict)
    """What is known, by Task id."""


async def sweep_tasks(
    backend: SandboxBackend,
    tasks: Iterable[Task],
    settings: Settings,
    *,
    tell: Callable[[Swept, bool], None] = lambda _, __: None,
) -> list[Swept]:
    """Sweep every Task in a sandbox of its own, and return the results in the Tasks' order.

    `tell` hears each result, and whether it is new. Raises SandboxUnavailableError where the
    backend cannot run at all.
    """
    free = asyncio.Semaphore(settings.num_workers)

    async def one(task: Task) -> Swept:
        async with free:
            known = settings.done.get(task.id)
            if known and not _answers(known, task, settings):
                known = None
            result = known or await _sweep_one(backend, task, settings)
        tell(result, known is None)
        return result

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(task)) for task in tasks]
    return [each.result() for each in running]


def read(path: Path) -> dict[str, Swept]:
    """Return the results of a file; a line that was cut short is passed over. Raises InputError."""
    if not path.exists():
        return {}
    found = {}
    with disk_errors(path), path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                result = _from_row(json.loads(line))
            except ValueError:
                continue
            except (KeyError, TypeError) as error:
                raise InputError(
                    f"{path} holds a line that is no result of a sweep",
                    hint="name another file with --out",
                ) from error
            found[result.task] = result
    return found


def append(path: Path, result: Swept) -> None:
    """Add a result as one line, on its own even where the last one was cut. Raises RunError."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as out:
            begun = out.tell() > 0 and path.read_bytes()[-1:] != b"\n"
            os.write(out.fileno(), ("\n" * begun + json.dumps(as_row(result)) + "\n").encode())


def as_row(result: Swept) -> dict[str, Any]:
    """Return a result as JSON types."""
    return {**asdict(result), "ok": result.ok}


async def _sweep_one(backend: SandboxBackend, task: Task, settings: Settings) -> Swept:
    raw = scrubbed = None
    history, scrub_s, failure = "", 0.0, ""
    try:
        async with backend.open(task.image, settings.limits, workdir=task.workdir) as sandbox:
            if settings.raw:
                raw = await sweep(sandbox, task)
            if settings.scrubbed:
                done = await scrub(sandbox, task, history=settings.history)
                history, scrub_s = done.history, done.duration_s
                scrubbed = await sweep(sandbox, task)
    except SandboxUnavailableError:
        raise
    except SwerlError as error:
        failure = f"{error} ({error.hint})" if error.hint else str(error)
    return Swept(task.id, task.image, _digest(task), raw, scrubbed, history, scrub_s, failure)


def _answers(known: Swept, task: Task, settings: Settings) -> bool:
    """Whether an earlier result is of this Task and says what is asked."""
    has_all = not (settings.raw and known.raw is None) and not (
        settings.scrubbed and known.scrubbed is None
    )
    return known.digest == _digest(task) and has_all and not known.failure


def _digest(task: Task) -> str:
    return hashlib.sha256(json.dumps(to_row(task), sort_keys=True).encode()).hexdigest()[:16]


def _from_row(row: Mapping[str, Any]) -> Swept:
    plain = {key: row[key] for key in ("task", "image", "digest", "history", "scrub_s", "failure")}
    return Swept(**plain, raw=_sweep_of(row["raw"]), scrubbed=_sweep_of(row["scrubbed"]))


def _sweep_of(row: Mapping[str, Any] | None) -> Sweep | None:
    if row is None:
        return None
    leaks: Sequence[Mapping[str, str]] = row["leaks"]
    found = (Leak(Kind(x["kind"]), x["name"], x["reason"], x["evidence"]) for x in leaks)
    return Sweep(tuple(found), tuple(row["unchecked"]))
