"""Committing steps: `state.json` moves to a step once the step's checkpoint is whole.

The checkpoint is written while the run goes on, so a crash costs at most what was done since the
last whole one; Episodes that were finished by then are read back.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import TracebackType

from swerl.core.contracts import Trainer
from swerl.core.events import Emit, Notice
from swerl.runs.layout import RunFolder, State


class Commits:
    """Begins checkpoints and commits their steps; leaving the context waits for the last one."""

    def __init__(self, trainer: Trainer, folder: RunFolder, emit: Emit) -> None:
        self._trainer = trainer
        self._folder = folder
        self._emit = emit
        self._under_way: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Commits:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error and self._under_way:
            self._under_way.cancel()
            await asyncio.wait({self._under_way})
        else:
            await self.finish()

    async def begin(self, state: State) -> None:
        """Begin the checkpoint of `state.step`, after the one before it; `state` is its commit.

        Raises TrainerError where the one before could not be written.
        """
        await self.finish()
        best = self._folder.read_state().best
        await self._trainer.save(state.step, kept=() if best is None else (best.step,))
        self._under_way = asyncio.create_task(self._commit(state))

    async def finish(self) -> None:
        """Wait until the checkpoint under way is whole and its step committed."""
        if self._under_way:
            await self._under_way
            self._under_way = None

    async def _commit(self, state: State) -> None:
        saved = await self._trainer.saved()
        if saved and saved.warning:
            self._emit(Notice(saved.warning))
        # Evaluations commit themselves, and one may have taken place since.
        held = self._folder.read_state()
        self._folder.write_state(replace(state, evals_done=held.evals_done, best=held.best))
