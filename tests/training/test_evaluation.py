"""Evaluations: which attempts count, the intervals, the committed result, the sampling settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.core.chat import Finish
from swerl.core.episode import Episode, Group, Status
from swerl.core.events import EvalEnded, Event, Notice, Progress
from swerl.core.grade import Grade, Verdict
from swerl.core.task import GradingSpec, Task
from swerl.core.turn import Trajectory, Turn
from swerl.recipe.schema import BudgetsSection, EvalSection, RolloutSection
from swerl.rollout import step as rollout_step
from swerl.rollout.parts import MixedAgent, Parts
from swerl.rollout.reward import reward_of
from swerl.runs.layout import Best, RunFolder, open_run
from swerl.training.evaluation import evaluate, is_due

SPLITS = {"heldout": [Task("a", "r", "host", "/w", "p", GradingSpec("command"))], "empty": []}


def group(task: str, *verdicts: str, version: str = "000003") -> Group:
    turn = Turn(0, None, (1,), (2,), (0.0,), Finish.STOP, version)
    return Group(
        task,
        tuple(
            Episode(
                f"eval/{task}.{k}", task, Status.COMPLETED, Grade(Verdict(verdict)), 0.0,
                Trajectory("s", (turn,)),
            )
            for k, verdict in enumerate(verdicts)
        ),
    )  # fmt: skip


class Settled:
    """Counts how often the newest weights were asked for; the rest of a Schedule is not used."""

    num_settled = 0

    async def settle(self) -> None:
        self.num_settled += 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RolloutSection, int]]:
    """Answer rollouts from a table, and keep their settings and sizes.

    A fake: it answers what `group.run` would, without agents.
    """
    found: list[tuple[RolloutSection, int]] = []

    async def run(tasks: Sequence[Task], stage: str, parts: Parts, *, size, folder) -> list[Group]:
        found.append((parts.rollout, size))
        is_late = stage.endswith("00004")
        return [group(task.id, "solved", "solved" if is_late else "unsolved") for task in tasks]

    monkeypatch.setattr(rollout_step.group, "run", run)
    return found


def parts_of(events: list[Event]) -> Parts:
    absent: Any = None
    return Parts(
        gateway=absent, provisioner=absent, harness=absent, reward=reward_of("solved"),
        rollout=RolloutSection(temperature=1.0), budgets=BudgetsSection(), seed=0,
        emit=events.append,
    )  # fmt: skip


async def run_at(folder: RunFolder, step: int, events: list[Event], **section: Any) -> None:
    schedule: Any = Settled()
    settings = EvalSection(attempts=2, **section)
    await evaluate(SPLITS, step, parts_of(events), folder, section=settings, schedule=schedule)


async def test_an_evaluation_is_emitted_written_and_done_once(asked, tmp_path: Path) -> None:
    events: list[Event] = []
    with open_run(tmp_path / "run", {}) as folder:
        for _ in range(2):
            await run_at(folder, 3, events)
        assert folder.read_state().evals_done == ("eval-heldout-00003",)
        written = json.loads(folder.evaluation("eval-heldout-00003").read_text())
    begun, event = events
    assert begun == Progress("evaluating heldout", 0, 2)
    assert isinstance(event, EvalEnded)
    assert (event.solve_rate, event.pass_at_k, event.k, event.num_episodes) == (0.5, 1.0, 2, 2)
    assert event.low < 0.5 < event.high
    assert (written["step"], written["split"], written["versions"]) == (3, "heldout", ["000003"])
    assert written["tasks"][0]["verdicts"] == ["solved", "unsolved"]


async def test_the_best_step_of_the_named_split_is_kept_and_ties_do_not_replace_it(
    asked, tmp_path: Path
) -> None:
    with open_run(tmp_path / "run", {}) as folder:
        for step in (2, 3):
            await run_at(folder, step, [])
        assert folder.read_state().best == Best(2, "heldout", 0.5)
        await run_at(folder, 4, [])
        assert folder.read_state().best == Best(4, "heldout", 1.0)
        await run_at(folder, 5, [])
        assert folder.read_state().best == Best(4, "heldout", 1.0)
    with open_run(tmp_path / "other", {}) as folder:
        await run_at(folder, 2, [], best="unseen")
        assert folder.read_state().best is None


async def test_an_evaluation_samples_with_its_own_settings(asked, tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {}) as folder:
        await run_at(folder, 0, [], temperature=0.5, max_new_tokens=7)
        await run_at(folder, 1, [])
    (own, size), (rollouts, _) = asked
    assert (own.temperature, own.max_new_tokens, size) == (0.5, 7, 2)
    assert (rollouts.temperature, rollouts.max_new_tokens) == (1.0, 96)


async def test_mixed_weights_are_reported(monkeypatch, tmp_path: Path) -> None:
    async def run(tasks, stage, parts, *, size, folder) -> list[Group]:
        return [group("a", "solved", version="000001"), group("b", "solved", version="000002")]

    monkeypatch.setattr(rollout_step.group, "run", run)
    events: list[Event] = []
    with open_run(tmp_path / "run", {}) as folder:
        await run_at(folder, 0, events)
    text = "the evaluation of heldout mixes the weights 000001, 000002"
    assert Notice(text) in events


def test_evaluations_come_first_and_at_every_nth_step() -> None:
    assert [step for step in range(7) if is_due(step, EvalSection(every=3))] == [0, 3, 6]
    assert [step for step in range(7) if is_due(step, EvalSection())] == [0]


async def test_each_agent_attempts_every_task_and_trained_ones_select_the_best_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rates = {"half": "unsolved", "all": "solved", "held": "unsolved"}

    async def run(tasks, stage, parts, *, size, folder) -> list[Group]:
        assert not parts.mix
        assert stage == f"eval-heldout-{parts.agent}-00003"
        return [group(task.id, "solved", rates[parts.agent]) for task in tasks]

    monkeypatch.setattr(rollout_step.group, "run", run)
    events: list[Event] = []
    absent: Any = None
    shares = {"half": 0.25, "all": 0.75, "held": 0.0}
    mix = tuple(MixedAgent(name, absent, share) for name, share in shares.items())
    parts = replace(parts_of(events), mix=mix)
    schedule: Any = Settled()
    with open_run(tmp_path / "run", {}) as folder:
        for _ in range(2):
            settings = EvalSection(attempts=2)
            await evaluate(SPLITS, 3, parts, folder, section=settings, schedule=schedule)
        state = folder.read_state()
        written = json.loads(folder.evaluation("eval-heldout-held-00003").read_text())
    assert state.evals_done == tuple(f"eval-heldout-{name}-00003" for name in shares)
    assert state.best == Best(3, "heldout", 0.25 * 0.5 + 0.75 * 1.0)
    ended = [event for event in events if isinstance(event, EvalEnded)]
    assert {event.name: event.solve_rate for event in ended} == {
        "heldout/half": 0.5, "heldout/all": 1.0, "heldout/held": 0.5,
    }  # fmt: skip
    assert (written["agent"], written["split"]) == ("held", "heldout")
