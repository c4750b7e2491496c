"""What the trainer takes from a task file: certified Tasks, of the difficulty asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from swerl.core.certificate import Certificate, Measured, certified, row_digest, settled
from swerl.core.errors import RecipeError
from swerl.core.events import ignore
from swerl.core.task import (
    Edit,
    GradingSpec,
    MutatedTests,
    Strength,
    Task,
    from_row,
    to_row,
    write_tasks,
)
from swerl.recipe.schema import Recipe, TasksSection
from swerl.rollout import wiring
from swerl.tasks.admission import require_unchanged
from swerl.training import train as training_run
from swerl.training.train import train

PLAIN = Task("a-1", "r", "host", "/w", "p", GradingSpec("command", timeout_s=60.0))


def with_certificate(task: Task, **found: Any) -> Task:
    """Return the Task with a certificate as vetting writes it."""
    found.setdefault("strength", Strength.SOME)
    draft = Certificate(row_digest(task), "", (), "", "local", "0", 3, **found)
    return certified(task, replace(draft, row=row_digest(settled(task, draft))))


def tasks_of(folder: Path, tasks: list[Task], **section: object) -> list[Task]:
    path = folder / "tasks.jsonl"
    write_tasks(path, tasks)
    chosen = TasksSection(source=str(path), **section)  # type: ignore[arg-type]
    return wiring.tasks_of(Recipe(name="a", tasks=chosen), folder)[0]


def test_uncertified_tasks_are_refused_with_what_to_do(tmp_path: Path) -> None:
    good = with_certificate(PLAIN)
    stale = replace(with_certificate(replace(PLAIN, id="a-2")), prompt="other")
    assert tasks_of(tmp_path, [good]) == [good]
    for bad, why in ((replace(PLAIN, id="a-3"), "never vetted"), (stale, "changed after")):
        with pytest.raises(RecipeError, match=f"1 of 2 tasks .*{why}") as raised:
            tasks_of(tmp_path, [good, bad])
        assert "--allow-uncertified" in raised.value.hint
        assert tasks_of(tmp_path, [good, bad], uncertified=True) == [good, bad]


async def test_a_refusal_leaves_no_run_that_would_refuse_the_next_try(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", [PLAIN])
    chosen = TasksSection(source=str(tmp_path / "tasks.jsonl"))
    with pytest.raises(RecipeError, match="not certified"):
        await train(Recipe(name="a", tasks=chosen), tmp_path / "run", ignore)
    assert not (tmp_path / "run").exists()


def test_generated_tasks_and_evaluation_need_no_certificate(tmp_path: Path) -> None:
    write_tasks(tmp_path / "evaluation.jsonl", [PLAIN])
    trained = with_certificate(replace(PLAIN, id="a-2", prompt="q"))
    write_tasks(tmp_path / "train.jsonl", [trained])
    files = TasksSection(
        source=str(tmp_path / "train.jsonl"), heldout=str(tmp_path / "evaluation.jsonl")
    )
    assert wiring.tasks_of(Recipe(name="a", tasks=files), tmp_path)[1] == {"heldout": [PLAIN]}
    for known in (replace(trained, prompt="r"), replace(trained, id="b-1", certificate={})):
        write_tasks(tmp_path / "evaluation.jsonl", [PLAIN, known])
        with pytest.raises(RecipeError, match=f"1 tasks of tasks.heldout .*: {known.id}$"):
            wiring.tasks_of(Recipe(name="a", tasks=files), tmp_path)
    generated = TasksSection(num_train=1, num_heldout=0, num_unseen=0)
    assert len(wiring.tasks_of(Recipe(name="a", tasks=generated), tmp_path)[0]) == 1


def test_a_run_resumes_only_on_the_tasks_that_it_began_with(tmp_path: Path) -> None:
    path, second = tmp_path / "digests.json", replace(PLAIN, id="a-2")
    for tasks in ([PLAIN, second], [second, replace(PLAIN, metadata={"solve_rate": 0.5})]):
        require_unchanged(path, tasks)
    for tasks in ([PLAIN], [PLAIN, replace(second, prompt="q")]):
        with pytest.raises(RecipeError, match=r"1 tasks differ .* began with: a-2$"):
            require_unchanged(path, tasks)


def test_tasks_of_the_wrong_difficulty_stay_out(tmp_path: Path) -> None:
    rates = {"a": 0.0, "b": 0.1, "c": 0.5, "d": 1.0, "e": None}
    tasks = [
        with_certificate(replace(PLAIN, id=name, metadata={} if r is None else {"solve_rate": r}))
        for name, r in rates.items()
    ]
    kept = tasks_of(tmp_path, tasks, solve_rate=(0.1, 0.9))
    assert [task.id for task in kept] == ["b", "c"]
    with pytest.raises(RecipeError, match="4 have one"):
        tasks_of(tmp_path, tasks, solve_rate=(0.6, 0.9))


def test_a_budget_leaves_certified_tests_their_time(tmp_path: Path) -> None:
    slow = with_certificate(replace(PLAIN, grading=replace(PLAIN.grading, timeout_s=151.0)))
    with pytest.raises(RecipeError, match="a-1 may take 151 s") as raised:
        tasks_of(tmp_path, [slow])
    assert "grading_s above 151" in raised.value.hint


def test_the_budget_includes_the_confirming_runs(tmp_path: Path) -> None:
    mutated = (MutatedTests((Edit("/w/t.py", 0, 1, "2"),), {"/w/t.py": "0" * 64}, ("t",)),)
    task = replace(PLAIN, grading=replace(PLAIN.grading, timeout_s=100.0))
    final = with_certificate(task, mutated=mutated, measured=Measured(test_s=20.0))
    with pytest.raises(RecipeError, match="may take 200 s"):
        tasks_of(tmp_path, [final])


def test_weakly_tested_tasks_stay_out_if_a_recipe_asks_for_it(tmp_path: Path) -> None:
    levels = {"a": Strength.NONE, "b": Strength.SOME, "c": Strength.STRONG}
    tasks = [with_certificate(replace(PLAIN, id=i), strength=s) for i, s in levels.items()]
    for least, ids in (("none", "abc"), ("some", "bc"), ("strong", "c")):
        assert "".join(task.id for task in tasks_of(tmp_path, tasks, strength=least)) == ids
    with pytest.raises(RecipeError, match=r"no task of .* strength strong \(1 none, 1 some\)"):
        tasks_of(tmp_path, tasks[:2], strength="strong")


def test_a_certificate_of_an_older_release_is_refused_with_the_command(tmp_path: Path) -> None:
    row = to_row(with_certificate(PLAIN))
    fields: Any = row["metadata"]
    del fields["swerl"]["grading"]["mutated"], fields["swerl"]["certificate"]["strength"]
    fields["swerl"]["grading"] |= {"swaps": [{"path": "/w/t.py"}], "blind_runs": 3}
    fields["swerl"]["certificate"] |= {"bits": 4.9}
    with pytest.raises(RecipeError, match="an older release vetted it") as raised:
        tasks_of(tmp_path, [from_row(row)])
    assert "swerl tasks vet" in raised.value.hint


@pytest.mark.parametrize("flag", [(), ("--allow-uncertified",)])
def test_the_command_line_can_allow_uncertified_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: tuple[str, ...]
) -> None:
    asked: list[bool] = []

    async def stop(recipe: Recipe, *_: object) -> None:
        asked.append(recipe.tasks.uncertified)
        raise RecipeError("far enough")

    monkeypatch.setattr(training_run, "train", stop)
    (tmp_path / "a.toml").write_text('name = "a"\n')
    CliRunner().invoke(typer_app, ["train", str(tmp_path / "a.toml"), *flag])
    assert asked == [bool(flag)]
