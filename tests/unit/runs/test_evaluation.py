"""Which attempts count, what is paired, and what a comparison says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swerl.core.episode import Group
from swerl.core.errors import InputError, RunError
from swerl.runs.evaluation import TaskResult, compare, find, read, result_of, summary
from tests.unit import made


def group(task: str, *verdicts: str) -> Group:
    turns = (made.turn(prompt=(1, 1, 1), version="000003"), made.turn(1, 0, output=(2, 2)))
    return made.group(task, *verdicts, turns=turns, timings={"total": 2.0})


def result(task: str, solved: int, attempts: int = 4, **fields: Any) -> TaskResult:
    return TaskResult(task, attempts, solved, ("solved",) * attempts, **fields)


def written(path: Path, *results: TaskResult, dollars: float | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**summary(results, 4), "dollars": dollars}))
    return path


def test_lost_attempts_are_in_no_mean_and_are_counted() -> None:
    groups = map(result_of, [
        group("a", "solved", "unsolved"),
        group("b", "infra", "solved"),
        group("c", "infra", "infra"),
        group("d", "timeout", "cheat"),
    ])  # fmt: skip
    found = summary(list(groups), 2)
    assert found["pass_at_1"]["mean"] == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert found["pass_at_1"]["num_tasks"] == 3
    assert (found["pass_at_k"]["mean"], found["pass_at_k"]["num_tasks"]) == (0.5, 2)
    assert (found["num_attempts"], found["num_lost"]) == (5, 3)
    assert found["verdicts"]["infra"] == 3


def test_the_tokens_of_counted_attempts_are_summed() -> None:
    found = result_of(group("a", "solved", "unsolved", "infra"), "r")
    # Each attempt: prompts of 3 and of 3 + 1 + 1 tokens.
    assert (found.sampled_tokens, found.prompt_tokens, found.seconds) == (6, 16, 4.0)
    assert (found.repo, found.value) == ("r", 0.5)


def test_tasks_are_paired_by_id_and_the_others_are_counted(tmp_path: Path) -> None:
    a = written(
        tmp_path / "a.json", result("x", 1, repo="r"), result("y", 4, repo="r"), result("only", 4)
    )
    b = written(
        tmp_path / "b.json",
        *(result("x", 3, repo="r"), result("y", 4, repo="r"), result("new", 0)),
        result("lost", 0, 0),
    )
    found = compare(read(a), read(b))
    assert (found["num_tasks"], found["num_only_a"], found["num_only_b"]) == (2, 1, 1)
    assert found["num_lost_tasks"] == [0, 1]
    assert found["difference"]["mean"] == 0.25
    assert (found["num_b_better"], found["num_a_better"], found["p_value"]) == (1, 0, 1.0)
    assert [(each["repo"], each["num_tasks"]) for each in found["repos"]] == [("r", 2)]
    assert found["noise_floor"] > 0


def test_the_cost_of_a_point_is_the_increase_for_each_point_gained(tmp_path: Path) -> None:
    a = written(tmp_path / "a.json", result("x", 2, sampled_tokens=400), dollars=0.4)
    b = written(tmp_path / "b.json", result("x", 3, sampled_tokens=900), dollars=1.4)
    cost = compare(read(a), read(b))["cost"]
    assert cost["sampled_tokens"] == {"a": 100.0, "b": 225.0, "per_point": 5.0}
    assert cost["dollars"]["per_point"] == pytest.approx(0.01)
    same = compare(read(a), read(a))["cost"]
    assert same["dollars"]["per_point"] is None


def test_what_is_no_evaluation_is_one_clear_error(tmp_path: Path) -> None:
    a = written(tmp_path / "a.json", result("x", 2))
    b = written(tmp_path / "b.json", result("y", 2))
    with pytest.raises(InputError, match="no task in common"):
        compare(read(a), read(b))
    with pytest.raises(InputError, match="there is no evaluation"):
        read(tmp_path / "absent")
    texts = ["{", "[]", '{"tasks": [{"task": 1}]}', '{"tasks": 3}']
    for odd in ({"attempts": "2"}, {"solved": None}, {"seconds": []}):
        report = json.loads(a.read_text())
        texts.append(json.dumps({**report, "tasks": [report["tasks"][0] | odd]}))
    for text in texts:
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(RunError):
            read(tmp_path / "bad.json")


def test_an_evaluation_is_named_by_run_step_and_split(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(InputError, match="run names 0 finished evaluations"):
        find("run", tmp_path)
    names = ("heldout-00000", "heldout-00010", "unseen-00010", "heldout-codex-00020")
    paths = {name: written(run / "evals" / f"eval-{name}.json", result("x", 2)) for name in names}
    for text, name in (
        ("run@0", "heldout-00000"),
        ("run@unseen-10", "unseen-00010"),
        ("run@20", "heldout-codex-00020"),
        (f"{run}@heldout-10", "heldout-00010"),
        (str(paths["unseen-00010"]), "unseen-00010"),
    ):
        assert find(text, tmp_path).path == paths[name]
    with pytest.raises(InputError, match="run@10 names 2 finished") as error:
        find("run@10", tmp_path)
    assert error.value.hint == "name one: run@heldout-10, run@unseen-10"
    with pytest.raises(InputError, match="run@7 names 0 finished") as error:
        find("run@7", tmp_path)
    assert "run@heldout-codex-20" in error.value.hint
    own = written(tmp_path / "own@home" / "evals" / "eval.json", result("x", 2))
    assert find("own@home", tmp_path).path == own
