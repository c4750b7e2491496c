"""When a step counts: only once its checkpoint is whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import TrainerError
from swerl.core.events import Event, Notice
from swerl.core.learning import CheckpointRef
from swerl.runs.layout import Best, State, open_run
from swerl.training.loop import Commits


class Saves:
    """A trainer that writes checkpoints as slowly as a test wants; it does nothing else."""

    def __init__(self, *, warning: str = "", error: Exception | None = None) -> None:
        self.begun: list[tuple[int, tuple[int, ...]]] = []
        self.is_whole = asyncio.Event()
        self._warning = warning
        self._error = error

    async def save(self, step: int, *, kept: Any = ()) -> None:
        self.begun.append((step, tuple(kept)))

    async def saved(self) -> CheckpointRef | None:
        await self.is_whole.wait()
        if self._error:
            raise self._error
        step = self.begun[-1][0]
        return CheckpointRef(step, 1, 0.1, self._warning)


async def test_the_state_moves_when_the_checkpoint_is_whole_and_keeps_what_came_since(
    tmp_path: Path,
) -> None:
    trainer, told = Saves(warning="the disk is almost full"), list[Event]()
    with open_run(tmp_path / "run", {}) as folder:
        async with Commits(trainer, folder, told.append) as commits:  # type: ignore[arg-type]  # a part of a Trainer
            await commits.begin(State(step=1, versions=("a",)))
            await asyncio.sleep(0)
            assert folder.read_state().step == 0
            evaluated = replace(
                folder.read_state(), evals_done=("e",), best=Best(1, "heldout", 0.5)
            )
            folder.write_state(evaluated)
            trainer.is_whole.set()
        assert folder.read_state() == replace(evaluated, step=1, versions=("a",))
    assert told == [Notice("the disk is almost full")]


async def test_one_checkpoint_follows_the_other_and_the_best_one_is_spared(tmp_path: Path) -> None:
    trainer = Saves()
    with open_run(tmp_path / "run", {}) as folder:
        async with Commits(trainer, folder, print) as commits:  # type: ignore[arg-type]  # a part of a Trainer
            await commits.begin(State(step=1))
            second = asyncio.create_task(commits.begin(State(step=2)))
            await asyncio.sleep(0)
            assert trainer.begun == [(1, ())]
            folder.write_state(State(best=Best(1, "heldout", 0.5)))
            trainer.is_whole.set()
            await second
        assert trainer.begun == [(1, ()), (2, (1,))]
        assert folder.read_state().step == 2


async def test_a_checkpoint_that_cannot_be_written_commits_nothing(tmp_path: Path) -> None:
    trainer = Saves(error=TrainerError("no space left"))
    trainer.is_whole.set()
    with open_run(tmp_path / "run", {}) as folder:
        with pytest.raises(TrainerError, match="no space left"):
            async with Commits(trainer, folder, print) as commits:  # type: ignore[arg-type]  # a part of a Trainer
                await commits.begin(State(step=1))
        assert folder.read_state().step == 0
