"""Evaluate a policy: attempt each Task, write the results.

`swerl eval`, `tasks solve-rate` and the evaluations inside training run here. Attempts are kept in
a run folder, so a killed evaluation resumes, and more attempts add to fewer. Results go to
`evals/`, in SWE-bench's formats to `swebench/`, or as solve rates into the rows of a task file.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swerl.core.certificate import row_digest
from swerl.core.chat import Json
from swerl.core.episode import Episode
from swerl.core.files import disk_errors, write_bytes, write_json, write_text
from swerl.core.grade import LEARNABLE, Verdict
from swerl.core.jobs import run_jobs
from swerl.core.task import Task, write_tasks
from swerl.recipe.schema import Recipe
from swerl.rollout import group
from swerl.rollout.parts import Parts
from swerl.runs.evaluation import TaskResult, result_of, summary
from swerl.runs.layout import RunFolder
from swerl.tasks import select

_MISSING = ("token ids", "log-probabilities", "weight versions")
"""Facts that an engine without token ids does not give."""


@dataclass(slots=True)
class Evaluated:
    """The outcome of an evaluation."""

    results: dict[str, TaskResult] = field(default_factory=dict)
    """By Task id."""
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Of each Task, a row for each attempt."""
    num_planned: int = 0

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The rows of all attempts, lost ones included, in the order of Task ids."""
        return [row for _, rows in sorted(self.rows.items()) for row in rows]


async def evaluate(
    tasks: Sequence[Task],
    parts: Parts,
    folder: RunFolder,
    *,
    num_attempts: int,
    stage: str = "",
    on_done: Callable[[int], None] = lambda _: None,
) -> Evaluated:
    """Attempt every Task `num_attempts` times.

    Infrastructure failures are repeated and then excluded. `stage` names the folder of all
    attempts; by default each Task has its own, named by the digest of its row, so a changed Task is
    attempted again. `on_done` gets the number of Episodes that ended.
    """
    evaluated = Evaluated(num_planned=len(tasks) * num_attempts)

    async def attempt(task: Task) -> None:
        place = stage or row_digest(task)
        attempts = await group.run_one(task, place, parts, size=num_attempts, folder=folder)
        evaluated.results[task.id] = result_of(attempts, task.repo)
        name = group.id_prefix(task, place)
        evaluated.rows[task.id] = [
            _row(k, f"{name}{k}", episode, task) for k, episode in enumerate(attempts.episodes)
        ]
        on_done(num_attempts)

    # The slots of the sandbox pool bound the Episodes, and this limit bounds the Groups in memory.
    await run_jobs(tasks, attempt, limit=parts.rollout.concurrency)
    return evaluated


def _row(number: int, folder: str, episode: Episode, task: Task) -> dict[str, Any]:
    trajectory = episode.trajectory
    return {
        "task": task.id,
        "repo": task.repo,
        "attempt": number,
        "folder": folder,
        "verdict": str(episode.verdict),
        "counted": episode.learnable,
        "reason": episode.grade.reason or episode.error,
        "status": str(episode.status),
        "turns": len(trajectory.turns),
        "sampled_tokens": trajectory.num_sampled_tokens,
        "prompt_tokens": trajectory.num_prompt_tokens,
        "seconds": episode.timings.get("total", 0.0),
        "has_token_ids": all(turn.trainable for turn in trajectory.turns),
        "has_patch": bool(episode.patch),
        "versions": sorted(trajectory.versions),
    }


def report_of(
    evaluated: Evaluated,
    recipe: Recipe,
    *,
    k: int,
    engine: str = "",
    agent: str = "",
    price: tuple[float, float] = (0.0, 0.0),
) -> dict[str, Any]:
    """Return an evaluation's report as JSON; engine and agent are the recipe's by default.

    `price` is in dollars per million prompt and sampled tokens; if it is 0, dollars are unknown.
    """
    rows = evaluated.attempts
    result = summary([task_result for _, task_result in sorted(evaluated.results.items())], k)
    tokens = result["prompt_tokens"], result["sampled_tokens"]
    return {
        "name": recipe.name,
        "agent": agent or recipe.agents[0].title,
        "engine": engine or recipe.engine.type,
        "model": str(recipe.model.path or recipe.engine.options.get("model", "")),
        "missing": [] if all(row["has_token_ids"] for row in rows) else _MISSING,
        "versions": sorted({name for row in rows for name in row["versions"]}),
        **result,
        "dollars": sum(p * n for p, n in zip(price, tokens, strict=True)) / 1e6 or None,
        "num_planned": evaluated.num_planned,
    }


def write(folder: RunFolder, name: str, evaluated: Evaluated, report: Mapping[str, Any]) -> None:
    """Write `evals/NAME.json`, `evals/NAME.parquet` if pyarrow is here, and `swebench/NAME/`.

    The report's name is that of the policy in SWE-bench's files. Raises RunError.
    """
    path = folder.evaluation(name)
    if evaluated.rows and find_spec("pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        out = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(evaluated.attempts), out, compression="zstd")
        write_bytes(path.with_suffix(".parquet"), out.getvalue().to_pybytes())
    by_attempt = defaultdict(list)
    for row in evaluated.attempts:
        by_attempt[row["attempt"]].append(row)
    swebench, policy = folder.root / "swebench" / name, report["name"]
    with disk_errors(swebench):
        swebench.mkdir(parents=True, exist_ok=True)
    for k, some in by_attempt.items():
        # A lost attempt without a patch has submitted nothing.
        some = [row for row in some if row["counted"] or row["has_patch"]]
        lines = [json.dumps(_prediction(folder, row, policy)) + "\n" for row in some]
        write_text(swebench / f"predictions.{k}.jsonl", "".join(lines))
        title = f"{policy.replace('/', '__')}.attempt-{k}.json"
        write_json(swebench / title, swebench_report(list(evaluated.rows), some))
    write_json(path, report)


def _prediction(folder: RunFolder, row: Mapping[str, Any], policy: str) -> dict[str, str]:
    path = folder.root / "episodes" / row["folder"] / "patch.diff"
    with disk_errors(path):
        patch = path.read_bytes().decode("utf-8", "replace")
    return {"instance_id": row["task"], "model_name_or_path": policy, "model_patch": patch}


def swebench_report(tasks: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one attempt at each Task as `swebench.harness.reporting.make_run_report` writes it.

    An attempt that ran out of time or cheated is unresolved. One that the infrastructure lost is an
    error and an infrastructure failure. Takes the rows of attempts that submitted something.
    """
    submitted = {row["task"] for row in rows}
    empty = {row["task"] for row in rows if not row["has_patch"]}
    graded = [row for row in rows if row["task"] not in empty]
    resolved = {row["task"] for row in graded if row["verdict"] == Verdict.SOLVED}
    completed = {row["task"] for row in graded if row["verdict"] in LEARNABLE}
    lost = {row["task"]: row["reason"] for row in graded if row["task"] not in completed}
    ids = {
        "completed": completed,
        "incomplete": set(tasks) - submitted,
        "empty_patch": empty,
        "submitted": submitted,
        "resolved": resolved,
        "unresolved": completed - resolved,
        "infra_failure": set(lost),
        "ambiguous_failure": set(),
        "error": set(lost),
    }
    counts = {f"{name}_instances": len(ids[name]) for name in ids if name != "incomplete"}
    return {
        "total_instances": len(tasks),
        **counts,
        **{f"{name}_ids": sorted(names) for name, names in ids.items()},
        "failure_reasons": lost,
        "schema_version": 2,
    }


def write_rates(
    tasks: Path, out: Path, results: Mapping[str, TaskResult], policy: Mapping[str, str]
) -> int:
    """Copy a task file with the solve rates added; return the number of Tasks that have one.

    `policy` names agent, engine and model. Rates are metadata, so a Certificate stays valid.
    """
    rated = {name: result for name, result in results.items() if result.attempts}

    def added(task: Task) -> Task:
        if task.id not in rated:
            return task
        probe: dict[str, Json] = {**rated[task.id].solve_rate, **policy}
        new: dict[str, Json] = {"solve_rate": probe["solve_rate"], "probe": probe}
        return replace(task, metadata={**task.metadata, **new})

    write_tasks(out, (added(task) for _, task in select.lines(tasks)))
    return len(rated)
