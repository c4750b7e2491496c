"""Which trials a lab makes, and making them a few at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swerl.checks.compat import trial
from swerl.checks.compat.agents import Agent
from swerl.checks.compat.cases import Case
from swerl.checks.compat.row import Outcome, Row
from swerl.checks.compat.trial import Trial
from swerl.core import plugins
from swerl.core.contracts import Family, SandboxBackend
from swerl.core.errors import InputError, SwerlError

WITHOUT_MODEL = "tiny"
"""The family that needs no model folder."""


@dataclass(frozen=True, slots=True)
class Lab:
    """What a lab tries."""

    trials: tuple[Trial, ...]
    models: Path | None = None
    """Folder with a model folder (tokenizer and chat template) for each family, by its name."""
    jobs: int = 1


@dataclass(frozen=True, slots=True)
class Found:
    """What a lab found."""

    rows: tuple[Row, ...]
    seconds: float

    @property
    def failed(self) -> list[Row]:
        """Return the trials that failed."""
        return [row for row in self.rows if row.outcome is Outcome.FAILED]


def plan(
    agents: Sequence[Agent], cases: Sequence[Case], families: Sequence[str], *, full: bool = False
) -> tuple[Trial, ...]:
    """Return every agent in every case with the first family, and each further one with one agent.

    With `full` each further family meets every agent, too. Raises InputError on an empty list.
    """
    if not agents or not cases or not families:
        raise InputError(
            "there is nothing to try", hint="name an agent, a case and a family at least"
        )
    first, *others = families
    pairs = [(agent, first) for agent in agents]
    pairs += [(agent, name) for name in others for agent in (agents if full else agents[:1])]
    return tuple(Trial(agent, case, name) for agent, name in pairs for case in cases)


async def run(lab: Lab, backend: SandboxBackend, tell: Callable[[Row], None]) -> Found:
    """Make the trials, `jobs` at a time, and tell of each as it ends; rows keep their order."""
    started = time.monotonic()
    families = _Families(lab.models)
    places = asyncio.Semaphore(lab.jobs)

    async def one(each: Trial) -> Row:
        async with places:
            row = await _run(each, families, backend)
        tell(row)
        return row

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(each)) for each in lab.trials]
    rows = tuple(task.result() for task in tasks)
    return Found(rows, time.monotonic() - started)


async def _run(each: Trial, families: _Families, backend: SandboxBackend) -> Row:
    try:
        family = families.get(each.family)
    except SwerlError as error:
        reason = f"the family cannot be had: {error}"
        return Row(each.agent.name, each.case.name, each.family, Outcome.CANNOT, reason)
    return await trial.run(each, family, backend)


class _Families:
    """Families by name, each loaded once: a tokenizer takes a second."""

    def __init__(self, models: Path | None) -> None:
        self._models = models
        self._built: dict[str, Family] = {}

    def get(self, name: str) -> Family:
        """Return a family. Raises InputError where its model folder is absent."""
        if name not in self._built:
            self._built[name] = plugins.load("families", name).build(self._folder(name))
        return self._built[name]

    def _folder(self, name: str) -> Path | None:
        if name == WITHOUT_MODEL:
            return None
        folder = self._models / name if self._models else None
        if folder is None or not folder.is_dir():
            raise InputError(
                f"no model folder for the family {name}", hint="give a folder of them with --models"
            )
        return folder
