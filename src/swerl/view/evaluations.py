"""Evaluations as pages: all of a folder, one Task by Task, two side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any
from urllib.parse import quote

from swerl.core.errors import InputError
from swerl.core.files import read_json
from swerl.runs import evaluation, index
from swerl.runs.evaluation import Evaluation, TaskResult, compare
from swerl.runs.index import FoundRun
from swerl.runs.layout import RunFolder
from swerl.runs.statistics import Rate, rate

OWN = "eval"
"""Name of the evaluation of a folder that `swerl eval` made."""


def slug_of(name: str) -> str:
    """Return the name of a run as one part of a path."""
    return name.replace("/", "~")


def state(run: FoundRun) -> str:
    """Return the state of a run that only evaluates."""
    return "evaluated" if OWN in run.evaluations() else "unfinished"


def score(run: FoundRun) -> Rate | None:
    """Return pass@1 of a run that only evaluates; None before its report."""
    report, _ = index.part(lambda: _report(run, OWN))
    return report["pass_at_1"] if report else None


def overview(runs: Iterable[FoundRun]) -> list[dict[str, Any]]:
    """Return a row for each finished evaluation of these runs."""
    return [_row(run, name) for run in runs for name in run.evaluations()]


def comparable(
    runs: Iterable[FoundRun], run: FoundRun, name: str
) -> list[tuple[FoundRun, str, int]]:
    """Return the other evaluations with a task in common and their number, most tasks first."""
    tasks = _read(run, name).results.keys()
    rows = []
    for other in runs:
        for title in other.evaluations():
            side, _ = index.part(partial(_read, other, title))
            num_shared = len(tasks & side.results.keys()) if side else 0
            if num_shared and (other, title) != (run, name):
                rows.append((other, title, num_shared))
    return sorted(rows, key=lambda row: -row[2])


def _row(run: FoundRun, name: str) -> dict[str, Any]:
    report, problem = index.part(lambda: _report(run, name))
    href = f"r/{quote(slug_of(run.name))}/v/{quote(name)}.html"
    return {"run": run.name, "name": name, "href": href, "report": report, "problem": problem}


def _report(run: FoundRun, name: str) -> dict[str, Any]:
    """Read an evaluation's file, with the means of an attempt. Raises SwerlError and KeyError."""
    path = RunFolder(run.root).evaluation(index.plain(name))
    if not path.is_file():
        raise InputError(f"{run.name} has no evaluation {name}", hint="its first page lists all")
    report = read_json(path)
    count = max(report["num_attempts"], 1)
    tokens = report["sampled_tokens"] / count, report["prompt_tokens"] / count
    # Another shape is an error here, and not in the middle of a page.
    rates = {key: Rate(**report[key]) for key in ("pass_at_1", "pass_at_k")}
    return {
        **{key: report.get(key) for key in ("agent", "engine", "model", "step", "dollars")},
        **{key: report[key] for key in ("k", "num_lost")},
        **rates,
        "verdicts": dict(report["verdicts"]),
        "num_attempts": report["num_attempts"],
        "num_tasks": rates["pass_at_1"].num_tasks,
        "noise_floor": report.get("noise_floor"),
        "versions": report.get("versions") or [],
        "missing": report.get("missing") or [],
        "sampled_each": tokens[0],
        "prompt_each": tokens[1],
        "seconds_each": report["seconds"] / count,
    }


def task_by_task(run: FoundRun, name: str) -> dict[str, Any]:
    """Return the values of an evaluation's page. Raises SwerlError on a damaged file."""
    evaluated, places = _read(run, name), _places(run, name)
    rows = [
        {"result": result, "cells": _cells(result, places)} for result in evaluated.results.values()
    ]
    values: dict[str, list[float]] = {}
    for result in evaluated.results.values():
        values.setdefault(result.repo or "none", []).append(result.value)
    return {
        "report": _report(run, name),
        "rows": rows,
        "repos": [(repo, rate(of_repo)) for repo, of_repo in sorted(values.items())],
        "num_lost_tasks": evaluated.num_lost_tasks,
    }


def versus(a: tuple[FoundRun, str], b: tuple[FoundRun, str]) -> dict[str, Any]:
    """Return the values of a comparison's page: Tasks with the largest change first."""
    both = [_read(*a), _read(*b)]
    places = [_places(*a), _places(*b)]
    rows: list[dict[str, Any]] = []
    for task in sorted({*both[0].results, *both[1].results}):
        sides = [evaluation.results.get(task) for evaluation in both]
        results = [result for result in sides if result]
        cells = [_cells(side, at) if side else [] for side, at in zip(sides, places, strict=True)]
        change = results[1].value - results[0].value if len(results) == 2 else None
        row = {"task": task, "repo": results[0].repo, "cells": cells, "change": change}
        rows.append({**row, "beside": _beside(*cells)})
    rows.sort(key=lambda row: (row["change"] is None, -abs(row["change"] or 0)))
    titles = [{"run": run.name, "name": name, **_report(run, name)} for run, name in (a, b)]
    return {"comparison": compare(*both), "rows": rows, "sides": titles}


def _beside(a: Sequence[Mapping[str, str]], b: Sequence[Mapping[str, str]]) -> str:
    """Return the address of two attempts side by side, of different verdicts if there are some."""
    pairs = [(x, y) for x, y in product(a, b) if x["href"] and y["href"]]
    pairs.sort(key=lambda pair: pair[0]["verdict"] == pair[1]["verdict"])
    if not pairs:
        return ""
    first, second = pairs[0]
    _, run, _, stage, name, _ = second["href"].split("/")
    return f"{first['href'].removesuffix('index.html')}vs/{run}/{stage}/{name}.html"


def _read(run: FoundRun, name: str) -> Evaluation:
    return evaluation.read(RunFolder(run.root).evaluation(index.plain(name)))


def _cells(result: TaskResult, places: Mapping[str, list[str]]) -> list[dict[str, str]]:
    """Return each attempt's verdict and, if it is still on disk, the address of its Episode."""
    hrefs = places.get(result.task.replace("/", "_"), [])
    return [
        {"verdict": verdict, "href": hrefs[number] if number < len(hrefs) else ""}
        for number, verdict in enumerate(result.verdicts)
    ]


def _places(run: FoundRun, name: str) -> dict[str, list[str]]:
    """Return Task -> addresses of its attempts.

    An evaluation inside training has one stage. `swerl eval` has a stage for each Task, named by
    the digest of its row.
    """
    stages = run.stages()
    if name in stages:
        stages = [name]
    else:
        stages = [stage for stage in stages if name == OWN and not stage.startswith("eval-")]
    places: dict[str, list[str]] = {}
    for stage in stages:
        top = f"r/{quote(slug_of(run.name))}/e/{quote(stage)}"
        for task, names in index.groups(run.stage(stage)).items():
            places[task] = [f"{top}/{quote(attempt)}/index.html" for attempt in names]
    return places
