"""The order of the loop, with parts that only wait; `tests/test_train.py` runs the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swerl.core.errors import NotFiniteError, TrainerError
from swerl.core.events import Event, ignore
from swerl.core.learning import Batch, CheckpointRef, StepStats
from swerl.core.sample import Sample
from swerl.recipe.schema import Recipe
from swerl.rollout.schedules import Schedule
from swerl.runs import tables
from swerl.runs.layout import Best, RunState, open_run
from swerl.training import loop
from swerl.training.batch import CollectedBatch
from swerl.training.loop import Commits
from swerl.training.updates import SkipCounter, UpdateResult


class Trainer:
    """Writes checkpoints slowly."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    async def save(self, step: int, *, kept: Any = ()) -> None:
        self.steps.append(step)

    async def saved(self) -> CheckpointRef:
        await asyncio.sleep(0.05)
        return CheckpointRef(self.steps[-1], 1, 0.1)


class Waits:
    """Stands for the parts that take no part in the order."""

    async def take(self, step: int) -> Any:
        return SimpleNamespace(kept=())

    async def serve(self, transfer: object) -> None: ...

    async def settle(self) -> None: ...

    def cursor(self) -> None: ...

    def record(self, *_: object) -> dict[str, float]:
        return {}

    def state(self, step: int, _: object) -> RunState:
        return RunState(step=step, versions=tuple(map(str, range(step + 1))))


async def test_weights_are_committed_before_they_are_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash could leave an evaluation, and a best step, of weights that are gone."""
    recipe = Recipe.model_validate({"name": "r", "steps": 4, "eval": {"every": 2}})
    seen: list[tuple[int, int]] = []
    events: list[Event] = []

    @asynccontextmanager
    async def schedule(*_: object) -> AsyncIterator[Schedule]:
        yield Waits()  # type: ignore[misc]  # what the loop calls of a Schedule

    async def counters(_: object) -> Any:
        return SimpleNamespace(versions=None, record=Waits().record, state=Waits().state)

    async def learned(*_: object) -> UpdateResult:
        return UpdateResult(None)

    with open_run(tmp_path / "run", {}) as folder:

        async def evaluate(_: object, __: object, step: int) -> None:
            seen.append((step, folder.read_state().step))

        for name, fake in {
            "open_schedule": schedule,
            "_resume": counters,
            "_learn": learned,
            "_evaluate": evaluate,
            "_schedule_inputs": lambda *_: None,
            "_collected": lambda *_: None,
            "_write": lambda *_: None,
        }.items():
            monkeypatch.setattr(loop, name, fake)
        await loop.run(
            loop.Training(
                recipe=recipe,
                folder=folder,
                train=(),
                evals={},
                engine=None,
                trainer=Trainer(),  # type: ignore[arg-type]
                algorithm=None,  # type: ignore[arg-type]
                parts=None,
                emit=events.append,
                timer=loop.StepTimer(None),  # type: ignore[arg-type]
            )
        )
    assert seen == [(0, 0), (2, 2), (4, 4)]


class Steps:
    """A trainer whose steps are finite or not; it does nothing else."""

    def __init__(self) -> None:
        self.is_finite = True

    async def step(self, batch: Batch) -> StepStats:
        if not self.is_finite:
            raise NotFiniteError("loss nan")
        return StepStats(1.0, 1.0, 2, 0.0, 1.0, logprobs=await self.logprobs(batch))

    async def logprobs(self, batch: Batch) -> list[list[float]]:
        return [[-0.5] * sample.num_trained_tokens for sample in batch.samples]


async def test_a_step_leaves_its_own_log_probabilities_or_none(tmp_path: Path) -> None:
    rows = [Sample(f"e{n}", f"t{n}", (1, 2, 3), (0, 1, 1), (0, -1, -1)) for n in range(2)]
    collected = CollectedBatch(Batch(3, tuple(rows), 2), 4)
    counters = SimpleNamespace(skips=SkipCounter())
    with open_run(tmp_path / "run", {}) as folder:
        trainer = Steps()
        recipe = Recipe.model_validate({"name": "r", "trainer": {"updates_per_batch": 2}})
        training: Any = SimpleNamespace(
            trainer=trainer, folder=folder, recipe=recipe, engine=None, emit=ignore
        )
        for trainer.is_finite in (True, False):
            loop._write(folder, 3, SimpleNamespace(all=()), collected)  # type: ignore[arg-type]
            assert not folder.logprobs(3).exists()
            await loop._learn(training, counters, collected)  # type: ignore[arg-type]
            assert folder.logprobs(3).exists() == trainer.is_finite
            if trainer.is_finite:
                assert [[*row] for row in tables.read_logprobs(folder.logprobs(3), "e1")] == [
                    [-0.5, -0.5]
                ]


class Saves:
    """A trainer that writes checkpoints as slowly as a test wants; it does nothing else."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.begun: list[tuple[int, tuple[int, ...]]] = []
        self.is_whole = asyncio.Event()
        self._error = error

    async def save(self, step: int, *, kept: Any = ()) -> None:
        self.begun.append((step, tuple(kept)))

    async def saved(self) -> CheckpointRef | None:
        await self.is_whole.wait()
        if self._error:
            raise self._error
        step = self.begun[-1][0]
        return CheckpointRef(step, 1, 0.1)


async def test_the_state_moves_when_the_checkpoint_is_whole_and_keeps_later_evaluations(
    tmp_path: Path,
) -> None:
    trainer = Saves()
    with open_run(tmp_path / "run", {}) as folder:
        async with Commits(trainer, folder) as commits:  # type: ignore[arg-type]  # a part of a Trainer
            await commits.begin(RunState(step=1, versions=("a",)))
            await asyncio.sleep(0)
            assert folder.read_state().step == 0
            evaluated = replace(
                folder.read_state(), evals_done=("e",), best=Best(1, "heldout", 0.5)
            )
            folder.write_state(evaluated)
            trainer.is_whole.set()
        assert folder.read_state() == replace(evaluated, step=1, versions=("a",))


async def test_one_checkpoint_follows_the_other_and_the_best_one_is_spared(tmp_path: Path) -> None:
    trainer = Saves()
    with open_run(tmp_path / "run", {}) as folder:
        async with Commits(trainer, folder) as commits:  # type: ignore[arg-type]  # a part of a Trainer
            await commits.begin(RunState(step=1))
            second = asyncio.create_task(commits.begin(RunState(step=2)))
            await asyncio.sleep(0)
            assert trainer.begun == [(1, ())]
            folder.write_state(RunState(best=Best(1, "heldout", 0.5)))
            trainer.is_whole.set()
            await second
        assert trainer.begun == [(1, ()), (2, (1,))]
        assert folder.read_state().step == 2


async def test_a_checkpoint_that_cannot_be_written_commits_nothing(tmp_path: Path) -> None:
    trainer = Saves(error=TrainerError("no space left"))
    trainer.is_whole.set()
    with open_run(tmp_path / "run", {}) as folder:
        with pytest.raises(TrainerError, match="no space left"):
            async with Commits(trainer, folder) as commits:  # type: ignore[arg-type]  # a part of a Trainer
                await commits.begin(RunState(step=1))
        assert folder.read_state().step == 0
