from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from swerl.core.episode import Group
from swerl.core.errors import RecipeError, UnknownNameError
from swerl.core.events import Event, Notice
from swerl.recipe.schema import RolloutSection
from swerl.rollout import step as rollout_step
from swerl.rollout.parts import Parts
from swerl.rollout.step import StepGroups, choose_tasks, group_filter, run_step
from tests.unit import made

TASKS = [made.task(str(i)) for i in range(7)]


def test_every_epoch_takes_every_task_in_a_new_order() -> None:
    steps = [[task.id for task in choose_tasks(TASKS, step, 3, seed=0)] for step in range(9)]
    epochs = [list(chain(*steps[i : i + 3])) for i in range(0, 9, 3)]
    assert all(set(epoch) == {task.id for task in TASKS} for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_fewer_tasks_than_a_step_takes_are_one_clear_error() -> None:
    with pytest.raises(RecipeError, match="a step takes 8 tasks, and there are 7"):
        choose_tasks(TASKS, 0, 8, seed=0)


def _parts(told: list[Event], **rollout: object) -> Parts:
    section = RolloutSection(groups_per_step=2, episodes_per_group=2, **rollout)
    return made.parts(rollout=section, emit=told.append)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Replace the rollouts by a table of verdicts, and keep which Tasks each round began.

    A fake: it answers what `group.run` would, without agents.
    """

    def play(verdicts: Callable[[str], Sequence[str]]) -> list[list[str]]:
        rounds: list[list[str]] = []

        async def run(tasks, stage, parts, *, size, folder) -> list[Group]:
            rounds.append([task.id for task in tasks])
            return [made.group(task.id, *verdicts(task.id)) for task in tasks]

        monkeypatch.setattr(rollout_step.group, "run", run)
        return rounds

    return play


MIXED = ("solved", "unsolved")


async def _step(parts: Parts) -> StepGroups:
    folder: Any = None
    return await run_step(TASKS, 0, parts, folder)


async def test_groups_without_signal_are_replaced_by_groups_of_other_tasks(played) -> None:
    first = choose_tasks(TASKS, 0, 2, seed=0)[0].id
    rounds = played(lambda task: ("solved", "solved") if task == first else MIXED)
    groups = await _step(_parts([], group_filter="zero-variance"))
    assert [len(each) for each in rounds] == [2, 1]
    assert rounds[1][0] not in rounds[0]
    assert [group.task_id for group in groups.kept] == [rounds[0][1], rounds[1][0]]
    assert [group.task_id for group in groups.left_out] == [first]


async def test_a_restart_tries_the_same_tasks_again(played) -> None:
    rounds = played(lambda task: MIXED if task in ("1", "5") else ("solved", "solved"))
    parts = _parts([], group_filter="zero-variance", refill_rounds=9)
    first = await _step(parts)
    before = [*rounds]
    rounds.clear()
    assert await _step(parts) == first
    assert rounds == before
    tried = [task for each in before for task in each]
    assert len(tried) == len(set(tried))


async def test_refills_end_and_the_step_continues_with_fewer_groups(played) -> None:
    good = choose_tasks(TASKS, 0, 2, seed=0)[1].id
    told: list[Event] = []
    rounds = played(lambda task: MIXED if task == good else ("unsolved", "unsolved"))
    groups = await _step(_parts(told, group_filter="zero-variance", refill_rounds=2))
    assert [len(each) for each in rounds] == [2, 1, 1]
    assert [group.task_id for group in groups.kept] == [good]
    assert Notice("1 of 2 groups pass rollout.group_filter") in told


async def test_if_no_group_passes_the_first_are_trained_without_an_advantage(played) -> None:
    rounds = played(lambda task: ("unsolved", "unsolved"))
    groups = await _step(_parts([], group_filter="zero-variance", refill_rounds=20))
    assert sum(len(each) for each in rounds) == len(TASKS)
    assert [group.task_id for group in groups.kept] == rounds[0]
    assert len(groups.all) == len(TASKS)


async def test_only_mixed_verdicts_looks_through_a_shaped_reward(played) -> None:
    long, short = made.group("a", "solved", "solved").episodes
    group = Group("a", (replace(long, reward=0.4), short))
    assert group_filter("zero-variance")(group)
    assert not group_filter("mixed-verdicts")(group)
    with pytest.raises(UnknownNameError):
        group_filter("zero-varianse")
