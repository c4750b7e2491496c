"""Checks beyond the records: known solutions graded again, trained rows scored again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.checks import why
from swerl.cli.main import typer_app
from swerl.core.episode import Episode
from swerl.core.grade import Grade, TestStatus, Verdict
from swerl.grading.flow import FlowGrader
from swerl.recipe.schema import ModelShape, Recipe
from swerl.runs.why import Diagnosis, diagnose
from swerl.tasks import twin
from swerl.training.warm_start import make_tiny_model
from tests.unit.runs._why_records import make_run

RECIPE = {"name": "run", "tasks": {"num_train": 4, "num_heldout": 0, "num_unseen": 0}}


def unsolved(episode: Episode) -> Episode:
    """Make it an unsolved attempt at one of the twin's tasks, with a wrong change."""
    names = list(twin.solutions(split="train", count=4, seed=0))
    task = names[int(episode.task_id[-1])]
    step, _, rest = episode.id.partition("/")
    tests = {"test": TestStatus.FAILED}
    return replace(
        episode,
        id=f"{step}/{task}.{rest[-1]}",
        task_id=task,
        grade=replace(episode.grade, verdict=Verdict.UNSOLVED, tests=tests),
        reward=0.0,
    )


@pytest.fixture
def unsolved_run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", steps=1, episode=unsolved, recipe=RECIPE)


async def checked(root: Path) -> Diagnosis:
    return await why.check(
        root, Recipe.model_validate(RECIPE), diagnose(root), scratch=root / "scratch"
    )


async def test_a_sound_grader_leaves_the_tasks_too_hard(unsolved_run: Path) -> None:
    found = await checked(unsolved_run)
    assert [each.cause for each in found.findings] == ["tasks-too-hard"]
    assert found.checks == (
        "graded 3 tasks again: 3 known solutions are solved, 0 without a change are",
        "scored nothing again: the weights of the rows that were read are not kept",
    )


@pytest.mark.parametrize(
    ("verdict", "cause"),
    [(Verdict.UNSOLVED, "grader-rejects-all"), (Verdict.SOLVED, "grader-accepts-all")],
)
async def test_a_grader_with_one_answer_is_named_before_its_effects(
    unsolved_run: Path, monkeypatch: pytest.MonkeyPatch, verdict: Verdict, cause: str
) -> None:
    async def grade(*_: object) -> Grade:
        return Grade(verdict, "always the same")

    monkeypatch.setattr(FlowGrader, "grade", grade)
    found = await checked(unsolved_run)
    assert (found.findings[0].cause, found.findings[0].confidence) == (cause, 0.99)
    assert "always the same" in found.findings[0].evidence[0]


async def test_tasks_that_are_gone_cost_their_check_alone(unsolved_run: Path) -> None:
    recipe = Recipe.model_validate({"name": "run", "tasks": {"source": "gone.jsonl"}})
    found = await why.check(unsolved_run, recipe, diagnose(unsolved_run), scratch=unsolved_run)
    assert found.findings[0].cause == "tasks-too-hard"
    assert found.checks[0].startswith("grade again: ")


async def test_rows_that_the_trainer_scores_otherwise(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")
    root = make_run(tmp_path / "run", steps=1)
    shape = ModelShape(num_layers=1, hidden_size=16, ffn_hidden_size=16, num_heads=2, head_dim=8)
    weights = root / "weights" / "000000"
    make_tiny_model(weights, shape, seed=0, tokenizer=root / "initial_model", eos_id=2)
    found = await checked(root)
    assert found.findings[0].cause == "engine-trainer-mismatch"
    assert found.checks[1].startswith("scored 4 rows of step 0 again: mean difference ")


def test_the_command_prints_the_checks(unsolved_run: Path) -> None:
    from typer.testing import CliRunner

    done = CliRunner().invoke(typer_app, ["why", str(unsolved_run), "--check", "--json"])
    assert len(json.loads(done.stdout)["checks"]) == 2
