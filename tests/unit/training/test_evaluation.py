"""Evaluations inside training: when, with which settings and agents, what is kept of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swerl.core.episode import REFILLS, Episode
from swerl.core.errors import RunError
from swerl.core.events import EvalEnded, Event, Progress
from swerl.core.grade import Grade, Verdict
from swerl.core.task import Task
from swerl.recipe.schema import EvalSection, Recipe, RolloutSection
from swerl.rollout import group
from swerl.rollout.parts import MixedAgent, Parts
from swerl.runs.evaluation import compare, find
from swerl.runs.layout import Best, RunFolder, open_run
from swerl.training.evaluation import evaluate, is_due
from tests.unit import made

SPLITS = {"heldout": [made.task("a")], "empty": []}
TWO = {"heldout": [made.task("a"), made.task("b")]}
ODD = "a\0\udc80"
"""A patch with bytes that are no text."""
Answer = Callable[[str, Parts], str]
"""An Episode's verdict, from its id and the parts that it runs with."""


def half(name: str, parts: Parts) -> str:
    """Solve the first of two attempts; after four steps both."""
    return "solved" if name.endswith(".0") or "00004" in name else "unsolved"


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[str]]:
    """Give Episodes verdicts without agents; the result lists the attempts that were made."""

    def use(verdict: Answer) -> list[str]:
        attempts: list[str] = []

        async def run(task: Task, name: str, parts: Parts, **_: object) -> Episode:
            attempts.append(name)
            grade = Grade(Verdict(verdict(name, parts)), "the machine failed")
            turn = made.turn(version="000003")
            return made.episode(name, turn, task_id=task.id, grade=grade, patch=ODD)

        monkeypatch.setattr(group.episode, "run", run)
        return attempts

    return use


def parts_of(events: list[Event], **fields: Any) -> Parts:
    pool: Any = SimpleNamespace(slot=asyncio.Semaphore(8))
    defaults = {"sandboxes": pool, "emit": events.append, "agent": "builtin"}
    return made.parts(**{**defaults, **fields})


class Settled:
    """Stands for a Schedule, whose newest weights serve already."""

    async def settle(self) -> None: ...


async def run_at(
    folder: RunFolder,
    step: int,
    parts: Parts | None = None,
    splits: dict[str, list[Task]] = SPLITS,
    **section: Any,
) -> None:
    schedule: Any = Settled()
    recipe = Recipe.model_validate({"name": "run", "eval": {"attempts": 2, **section}})
    parts = parts or parts_of([])
    await evaluate(splits, step, parts, folder, recipe=recipe, schedule=schedule)


async def test_an_evaluation_is_emitted_written_and_done_once(answer, tmp_path: Path) -> None:
    answer(half)
    events: list[Event] = []
    with open_run(tmp_path / "run", {}) as folder:
        for _ in range(2):
            await run_at(folder, 3, parts_of(events))
        assert folder.read_state().evals_done == ("eval-heldout-00003",)
        written = json.loads(folder.evaluation("eval-heldout-00003").read_text())
    begun, event = events
    assert begun == Progress("evaluating heldout", 0, 2)
    assert isinstance(event, EvalEnded)
    assert (event.solve_rate, event.pass_at_k, event.k, event.num_episodes) == (0.5, 1.0, 2, 2)
    assert event.low < 0.5 < event.high
    assert (written["step"], written["split"], written["versions"]) == (3, "heldout", ["000003"])
    assert written["tasks"][0]["verdicts"] == ["solved", "unsolved"]
    assert (written["agent"], written["num_planned"], written["missing"]) == ("builtin", 2, [])


async def test_its_files_are_those_of_swerl_eval_and_two_steps_are_compared(
    answer, tmp_path: Path
) -> None:
    answer(half)
    with open_run(tmp_path / "run", {}) as folder:
        for step in (3, 4):
            await run_at(folder, step)
    top = tmp_path / "run" / "swebench" / "eval-heldout-00003"
    [prediction] = map(json.loads, (top / "predictions.1.jsonl").read_text().splitlines())
    assert prediction["model_patch"] == "a\0\N{REPLACEMENT CHARACTER}"
    report = json.loads((top / "run-eval-heldout-00003.attempt-1.json").read_text())
    assert (report["resolved_ids"], report["unresolved_ids"]) == ([], ["a"])
    assert (tmp_path / "run" / "evals" / "eval-heldout-00003.parquet").exists()
    found = compare(find("run@3", tmp_path), find("run@heldout-4", tmp_path))
    assert (found["num_tasks"], found["difference"]["mean"]) == (1, 0.5)


async def test_an_interrupted_evaluation_keeps_its_attempts(answer, tmp_path: Path) -> None:
    def breaks(name: str, parts: Parts) -> str:
        if name == "eval-heldout-00003/b.1":
            raise KeyError("the controller dies")
        return "solved"

    with open_run(tmp_path / "run", {}) as folder:
        answer(breaks)
        one = parts_of([], rollout=RolloutSection(concurrency=1))
        one.sandboxes.slot = asyncio.Semaphore(1)
        with pytest.raises(ExceptionGroup):
            await run_at(folder, 3, one, TWO)
        assert not folder.read_state().evals_done
        again = answer(lambda *_: "solved")
        await run_at(folder, 3, splits=TWO)
        assert again == ["eval-heldout-00003/b.1"]
        # An Episode that infrastructure loses runs again, and then it is counted as lost.
        lost = answer(lambda name, _: "infra" if "/b.1" in name else "solved")
        await run_at(folder, 4, splits=TWO)
        written = json.loads(folder.evaluation("eval-heldout-00004").read_text())
    assert len(lost) == 4 + REFILLS
    assert (written["num_lost"], written["num_attempts"]) == (1, 3)
    assert written["pass_at_1"]["mean"] == 1.0


async def test_too_many_lost_episodes_end_the_run_and_are_attempted_again(
    answer, tmp_path: Path
) -> None:
    with open_run(tmp_path / "run", {}) as folder:
        answer(lambda *_: "infra")
        with pytest.raises(RunError, match="2 of 2 episodes were lost: the machine failed"):
            await run_at(folder, 3)
        assert not folder.evaluation("eval-heldout-00003").exists()
        answer(half)
        await run_at(folder, 3)
        assert folder.read_state().evals_done == ("eval-heldout-00003",)


async def test_the_best_held_out_step_is_kept_and_ties_do_not_replace_it(
    answer, tmp_path: Path
) -> None:
    answer(half)
    with open_run(tmp_path / "run", {}) as folder:
        for step in (2, 3):
            await run_at(folder, step)
        assert folder.read_state().best == Best(2, "heldout", 0.5)
        await run_at(folder, 4)
        assert folder.read_state().best == Best(4, "heldout", 1.0)
        await run_at(folder, 5)
        assert folder.read_state().best == Best(4, "heldout", 1.0)
    with open_run(tmp_path / "other", {}) as folder:
        await run_at(folder, 2, splits={"unseen": SPLITS["heldout"]})
        assert folder.read_state().best is None


def test_evaluations_come_first_and_at_every_nth_step() -> None:
    assert [step for step in range(7) if is_due(step, EvalSection(every=3))] == [0, 3, 6]
    assert [step for step in range(7) if is_due(step, EvalSection())] == [0]


async def test_each_agent_attempts_every_task_and_trained_ones_select_the_best_step(
    answer, tmp_path: Path
) -> None:
    def by_agent(name: str, parts: Parts) -> str:
        assert not parts.mix
        assert name.startswith(f"eval-heldout-{parts.agent}-00003/")
        return "solved" if parts.agent == "all" else half(name, parts)

    answer(by_agent)
    events: list[Event] = []
    absent: Any = None
    shares = {"half": 0.25, "all": 0.75, "held": 0.0}
    mix = tuple(MixedAgent(name, absent, share) for name, share in shares.items())
    with open_run(tmp_path / "run", {}) as folder:
        for _ in range(2):
            await run_at(folder, 3, parts_of(events, mix=mix))
        state = folder.read_state()
        written = json.loads(folder.evaluation("eval-heldout-held-00003").read_text())
    assert state.evals_done == tuple(f"eval-heldout-{name}-00003" for name in shares)
    assert state.best == Best(3, "heldout", 0.25 * 0.5 + 0.75 * 1.0)
    ended = [event for event in events if isinstance(event, EvalEnded)]
    assert {event.name: event.solve_rate for event in ended} == {
        "heldout/half": 0.5, "heldout/all": 1.0, "heldout/held": 0.5,
    }  # fmt: skip
    assert (written["agent"], written["split"]) == ("held", "heldout")
