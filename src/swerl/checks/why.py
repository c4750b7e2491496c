"""Cheap checks that support the diagnosis of a run, where its records are not enough.

Known solutions of a few Tasks are graded again, and the Tasks without a change; a few trained rows
are scored again by a trainer with the weights that sampled them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from swerl.checks._vet_runs import Runs
from swerl.core.errors import SwerlError
from swerl.core.events import ignore
from swerl.core.grade import Verdict
from swerl.core.learning import Batch
from swerl.core.sample import Sample
from swerl.core.sandbox import Limits
from swerl.core.task import Task
from swerl.recipe.schema import Recipe
from swerl.rollout.wiring import sandbox_backend, tasks_of
from swerl.runs import why
from swerl.runs.evidence import Evidence, SeenStep, Symptom, read
from swerl.runs.index import DAMAGE
from swerl.runs.layout import RunFolder
from swerl.runs.why import Diagnosis, Finding
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer

_TASKS = 3
_ROWS = 4
_GAP = 0.05
"""Nats a token; other kernels and number formats stay below."""


async def check(root: Path, recipe: Recipe, found: Diagnosis, *, scratch: Path) -> Diagnosis:
    """Add the results of checks to a run's diagnosis by its records; they come first.

    `scratch` gets generated repositories and the trainer's logs. Raises RunError without a recipe.
    """
    run = read(root)
    findings, notes = list(found.findings), []
    for each in (_grade_again, _score_again):
        try:
            seen, note = await each(run, recipe, scratch)
        except (SwerlError, *DAMAGE) as error:
            told = error.explained() if isinstance(error, SwerlError) else repr(error)
            seen, note = [], f"{each.__name__.strip('_').replace('_', ' ')}: {told}"
        # A check decides more than the records.
        findings = [f for f in findings if f.cause not in {new.cause for new in seen}]
        findings[:0] = seen
        notes.append(note)
    return replace(found, findings=tuple(findings), checks=tuple(notes))


async def _grade_again(run: Evidence, recipe: Recipe, scratch: Path) -> tuple[list[Finding], str]:
    """Grade known solutions, which must solve their Tasks, and no change, which must not."""
    train, _ = tasks_of(recipe, scratch)
    names = {each.task for step in run.steps[-1:] for each in step.episodes}
    tasks = [task for task in train if task.id in names and task.gold_patch][:_TASKS]
    if not tasks:
        return [], "graded nothing again: no task of the last step has a known solution"
    limits = Limits(**recipe.limits.model_dump(), lifetime_s=recipe.budgets.sandbox_s)
    runs = Runs(sandbox_backend(recipe, ignore), limits)
    refused = await _with(runs, tasks, "gold", Verdict.SOLVED)
    accepted = await _with(runs, tasks, "empty", Verdict.UNSOLVED)
    note = (
        f"graded {len(tasks)} tasks again: {len(tasks) - len(refused)} known solutions are solved, "
        f"{len(accepted)} without a change are"
    )
    step = run.steps[-1].number
    found = [
        why.finding(cause, Symptom(step, (f"{title}: {'; '.join(odd)}",)))
        for cause, title, odd in (
            ("grader-rejects-all", "known solutions are not solved", refused),
            ("grader-accepts-all", "solved without a change", accepted),
        )
        if odd
    ]
    return found, note


async def _with(runs: Runs, tasks: Sequence[Task], patch: str, wanted: Verdict) -> list[str]:
    """Return the Tasks whose grading has another Verdict than the wanted one, with its reason."""
    odd = []
    for task in tasks:
        done = await runs.grade(task, task.gold_patch if patch == "gold" else "")
        if done.grade.verdict is not wanted:
            odd.append(f"{task.id} is {done.grade.verdict}: {done.grade.reason[:120]}")
    return odd


async def _score_again(run: Evidence, recipe: Recipe, scratch: Path) -> tuple[list[Finding], str]:
    """Score trained rows by a trainer with the weights that sampled them."""
    chosen = next(filter(None, (_rows(run, step) for step in reversed(run.steps))), None)
    if chosen is None:
        return [], "scored nothing again: the weights of the rows that were read are not kept"
    step, model, rows = chosen
    trainer = MegatronTrainer(
        model=model,
        family=recipe.model.family,
        algorithm="sft",
        options=TrainerOptions(
            checkpoint_dir=scratch / "checkpoints",
            publish_dir=scratch / "published",
            log_dir=scratch / "logs",
            temperature=recipe.rollout.temperature,
            dtype=recipe.trainer.dtype,
            require_kernels=recipe.trainer.require_kernels,
        ),
    )
    shares = [replace(row, share=1.0, episode=f"row-{n}") for n, row in enumerate(rows)]
    async with trainer:
        scored = await trainer.logprobs(Batch(step, tuple(shares), len(rows)))
    gaps = [_gap(row, again) for row, again in zip(rows, scored, strict=True)]
    note = f"scored {len(rows)} rows of step {step} again: mean difference {fmean(gaps):.2g} nats"
    if fmean(gaps) < _GAP:
        return [], note
    return [why.finding("engine-trainer-mismatch", Symptom(step, (note,)))], note


def _rows(run: Evidence, step: SeenStep) -> tuple[int, Path, list[Sample]] | None:
    """Return the shortest rows of a step that one kept version of the weights sampled."""
    for version in {name for row in step.samples for name in row.weight_versions}:
        model = RunFolder(run.root).weights / version
        rows = [row for row in step.samples if row.weight_versions == (version,)]
        if rows and (model / "config.json").is_file():
            short = sorted(rows, key=lambda row: len(row.ids))[:_ROWS]
            return step.number, model, [replace(row, routed=()) for row in short]
    return None


def _gap(row: Sample, scored: Sequence[float]) -> float:
    pairs = zip(row.logprobs, scored, row.mask, strict=True)
    return fmean(abs(old - new) for old, new, is_trained in pairs if is_trained)
