"""Each rule names its fault and is silent on a healthy run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.chat import Finish
from swerl.core.episode import Episode, Status
from swerl.core.errors import RunError
from swerl.core.grade import TestStatus, Verdict
from swerl.core.sample import Sample
from swerl.core.turn import RoutedExperts, Turn
from swerl.runs import why
from tests.runs._why_records import (
    CALL,
    RECIPE,
    healthy_episode,
    ids,
    make_run,
    turn,
    write_episode,
)


def first(root: Path) -> why.Finding:
    found = why.diagnose(root)
    assert not found.problems
    return found.findings[0]


def with_turns(episode: Episode, turns: Sequence[Turn]) -> Episode:
    return replace(episode, trajectory=replace(episode.trajectory, turns=tuple(turns)))


def graded(episode: Episode, verdict: Verdict, reason: str = "", **facts: object) -> Episode:
    solved = verdict is Verdict.SOLVED
    grade = replace(episode.grade, verdict=verdict, reason=reason, **facts)
    return replace(episode, grade=grade, reward=float(solved))


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    found = why.diagnose(make_run(tmp_path / "run"))
    assert found == why.Diagnosis("run", (), (0, 1, 2), ())
    assert list(found.lines()) == ["no fault found in the records of steps 0, 1, 2"]


def test_calls_that_are_not_read_name_the_parser(tmp_path: Path) -> None:
    def unread(episode: Episode) -> Episode:
        return with_turns(episode, [replace(episode.trajectory.turns[0], finish=Finish.STOP)])

    found = first(make_run(tmp_path / "run", episode=unread))
    assert (found.cause, found.key) == ("wrong-parser", "model.parser")
    assert found.evidence[0].startswith("16 of 16 replies")


def test_a_call_without_an_end_is_the_model_s_own_mistake(tmp_path: Path) -> None:
    def torn(episode: Episode) -> Episode:
        reply = turn(0, None, "<|im_start|>user\nRepair.", f"{CALL.format(1)}<|im_end|>")
        return with_turns(episode, [reply])

    assert not why.diagnose(make_run(tmp_path / "run", episode=torn)).findings


def test_replies_after_an_end_of_turn_name_the_stop_id(tmp_path: Path) -> None:
    def endless(episode: Episode) -> Episode:
        first, last = episode.trajectory.turns
        said = (*last.output_ids, *ids("<|im_start|>user\nMore."))
        return with_turns(
            episode,
            [first, replace(last, output_ids=said, logprobs=(-0.3,) * len(said))],
        )

    assert first(make_run(tmp_path / "run", episode=endless)).cause == "stop-id-missing"


def test_better_attempts_with_lower_advantages(tmp_path: Path) -> None:
    def turned(row: Sample) -> Sample:
        return replace(row, advantage=-row.advantage)

    assert first(make_run(tmp_path / "run", sample=turned)).cause == "advantage-sign"


@pytest.mark.parametrize("is_shuffled", [True, False])
def test_experts_of_other_tokens(tmp_path: Path, is_shuffled: bool) -> None:
    rng = random.Random(0)

    def routed(row: Sample) -> Sample:
        places = [[token % 16, (token + 5) % 16] for token in row.ids[:-1]]
        if is_shuffled:
            rng.shuffle(places)
        data = bytes(expert for place in places for expert in place)
        return replace(row, routed=(RoutedExperts(0, 1, 2, 1, data),))

    found = why.diagnose(
        make_run(tmp_path / "run", sample=routed, metrics=lambda step: {"mismatch": 0.05})
    )
    assert ("experts-shuffled" in [each.cause for each in found.findings]) is is_shuffled


@pytest.mark.parametrize("has_change", [True, False])
def test_solved_without_a_change_or_with_a_failed_test(tmp_path: Path, has_change: bool) -> None:
    def accepted(episode: Episode) -> Episode:
        passed = dict.fromkeys(episode.grade.tests, TestStatus.PASSED)
        tests = episode.grade.tests if has_change else passed
        solved = graded(episode, Verdict.SOLVED, tests=tests)
        is_odd = episode.id.endswith(".1")
        return solved if has_change else replace(solved, patch="" if is_odd else episode.patch)

    assert first(make_run(tmp_path / "run", episode=accepted)).cause == "grader-accepts-all"


def test_a_learning_rate_of_nothing(tmp_path: Path) -> None:
    found = first(make_run(tmp_path / "run", metrics=lambda step: {"lr": 0.0}))
    assert (found.cause, found.key) == ("lr-zero", "trainer.lr")
    fading = make_run(tmp_path / "fading", metrics=lambda step: {"lr": 0.0 if step else 1e-4})
    assert not why.diagnose(fading).findings


def test_no_attempt_solves_its_task(tmp_path: Path) -> None:
    def unsolved(episode: Episode) -> Episode:
        tests = {"test_new": TestStatus.FAILED, "test_old": TestStatus.PASSED}
        return graded(episode, Verdict.UNSOLVED, tests=tests)

    found = first(make_run(tmp_path / "run", episode=unsolved))
    assert (found.cause, found.key) == ("tasks-too-hard", "tasks.solve_rate")


def test_a_budget_of_time(tmp_path: Path) -> None:
    def late(episode: Episode) -> Episode:
        if episode.id.endswith(".0"):
            return episode
        return graded(episode, Verdict.TIMEOUT, "budgets.grading_s = 2 s ran out")

    found = first(make_run(tmp_path / "run", episode=late))
    assert (found.cause, found.key) == ("budget-too-small", "budgets.grading_s")


def test_a_budget_of_replies_and_of_tokens(tmp_path: Path) -> None:
    def capped(episode: Episode) -> Episode:
        return replace(episode, status=Status.LIMIT)

    recipe = {**RECIPE, "rollout": {"max_turns": 2}}
    found = first(make_run(tmp_path / "turns", episode=capped, recipe=recipe))
    assert found.key == "rollout.max_turns"

    def cut(episode: Episode) -> Episode:
        begun = turn(0, None, "Repair.", "I look" * 9, finish=Finish.LENGTH)
        return with_turns(episode, [begun])

    recipe = {**RECIPE, "rollout": {"max_new_tokens": len(ids("I look" * 9))}}
    found = first(make_run(tmp_path / "tokens", episode=cut, recipe=recipe))
    assert found.key == "rollout.max_new_tokens"


def test_failures_of_the_machine_that_count_as_unsolved(tmp_path: Path) -> None:
    def lost(episode: Episode) -> Episode:
        if not episode.id.endswith(".1"):
            return episode
        return graded(episode, Verdict.UNSOLVED, "SandboxLostError: its machine is gone")

    assert first(make_run(tmp_path / "run", episode=lost)).cause == "infra-as-failure"


def test_prompts_that_begin_otherwise_from_a_step_on(tmp_path: Path) -> None:
    def changed(episode: Episode) -> Episode:
        if episode.id.startswith("00000"):
            return episode
        begin, *rest = episode.trajectory.turns
        ids_ = (*ids("<|im_start|>system\nNew tools.<|im_end|>\n"), *begin.prompt_ids)
        return with_turns(episode, [replace(begin, prompt_ids=ids_), *rest])

    found = first(make_run(tmp_path / "run", episode=changed))
    assert (found.cause, found.step) == ("prompt-changed", 1)


@pytest.mark.parametrize("is_same_name", [True, False])
def test_a_trained_task_that_is_evaluated(tmp_path: Path, is_same_name: bool) -> None:
    root = make_run(tmp_path / "run")
    trained = healthy_episode(1, 2, 0)
    name = trained.task_id if is_same_name else "other"
    copied = replace(trained, id=f"eval-heldout-00000/{name}.0", task_id=name)
    write_episode(root, copied)
    assert first(root).cause == "train-in-eval"


def test_entropy_that_collapses(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", metrics=lambda step: {"entropy": 0.3 / 4**step})
    found = first(root)
    assert (found.cause, found.step) == ("entropy-collapse", 1)
    high = make_run(tmp_path / "high", metrics=lambda step: {"entropy": 3.0 / 4**step})
    assert why.diagnose(high).findings[0].step == 2


def test_damaged_records_cost_their_own_part(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    (root / "turns" / "00001.parquet").write_bytes(b"PAR1")
    (root / "samples" / "00002.parquet").write_bytes(b"")
    (root / "episodes" / "00000" / "task-0-0.0" / "grade.json").write_text('{"verdict": ')
    (root / "episodes" / "00000" / "task-0-0.1" / "episode.json").write_text("[]")
    (root / "episodes" / "00000" / "task-0-0.2" / "episode.json").unlink()
    found = why.diagnose(root)
    assert not found.findings
    assert len(found.problems) == 4
    assert any("00001.parquet" in problem for problem in found.problems)


def test_an_old_run_without_turns_and_a_new_one_without_steps(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", metrics=lambda step: {"lr": 0.0})
    for path in (*old.glob("turns/*"), *old.glob("samples/*"), *old.glob("initial_model/*")):
        path.unlink()
    assert why.diagnose(old).findings[0].cause == "lr-zero"
    new = tmp_path / "new"
    new.mkdir()
    (new / "recipe.resolved.json").write_text("{}")
    assert list(why.diagnose(new).lines()) == ["no fault found in the records of no step"]
    with pytest.raises(RunError):
        why.diagnose(tmp_path / "nothing")
