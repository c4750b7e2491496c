"""`swerl train status`: state, progress and cost of runs; finding run folders."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from swerl.cli._options import JsonOption, RunsOption
from swerl.cli._output import console, print_json, safe, simple_table
from swerl.core.errors import RunError, SwerlError, unknown
from swerl.plan.cost import price_book
from swerl.recipe.load import recorded
from swerl.recipe.schema import Recipe
from swerl.runs.history import RunProgress, read, read_progress
from swerl.runs.index import RECIPE, FoundRun
from swerl.runs.layout import RunFolder
from swerl.runs.status import requested_stop, run_status
from swerl.sandboxes.ledger import default_ledger

_COLOURS = {"running": "green", "finished": "green", "failed": "red", "lost": "red"}
_METRICS = ("reward", "solve_rate", "loss", "grad_norm", "mismatch", "step_s")


def status(
    run: Annotated[str | None, typer.Argument(help="Name of a run, or its folder.")] = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Show a run's state, or list all runs; reads only run folders, on any machine."""
    if run is None:
        roots = all_runs(runs)
        rows = [_facts_or_problem(root) for root in roots]
        if as_json:
            print_json(rows)
        elif not rows:
            console().print(f"no runs in {runs}; next: swerl train twin_cpu")
        else:
            _show_all(rows)
        return
    facts = facts_of(find_run(run, runs))
    if as_json:
        print_json(facts)
    else:
        for line in _lines(facts):
            console().print(line, soft_wrap=True)


def _facts_or_problem(root: Path) -> dict[str, Any]:
    """Return the facts about a run, or why they cannot be read: it must not hide other runs."""
    try:
        return facts_of(root)
    except SwerlError as error:
        unread = {"run": root.name, "called": called(root), "folder": str(root)}
        return unread | {"standing": "unreadable", "problem": error.explained()}


def facts_of(root: Path) -> dict[str, Any]:
    """Return all facts about a run."""
    recipe, progress = recorded(root / RECIPE), read_progress(root)
    run = FoundRun(root.name, root, is_trained=True)
    report = run_status(root)
    return {
        "run": root.name,
        "called": called(root),
        "folder": str(root),
        "standing": "evaluated" if run.is_evaluated and run.stages() else str(report.status),
        "steps": recipe.steps,
        "process": asdict(report.process) if report.process else None,
        "beat_s": round(report.beat_s, 1),
        "asked_to_stop": requested_stop(root),
        "step": progress.step,
        "doing": progress.doing,
        "episodes": [progress.episodes_done, progress.episodes_expected],
        "phases": {name: count for name, count in progress.phases.items() if count > 0},
        "metrics": dict(progress.metrics),
        "dollars": _dollars(root, recipe, progress),
    }


def _dollars(root: Path, recipe: Recipe, progress: RunProgress) -> dict[str, float]:
    """Return the cost so far: sandboxes by this machine's ledger, and GPUs.

    `run` is the run's own account of both, which `cost.max_dollars` limits.
    """
    num_gpus = recipe.cluster.nodes * recipe.cluster.gpus_per_node
    price = price_book(recipe.cost.prices).get(f"{recipe.cluster.gpu}_hour")
    dollars = {"sandboxes": default_ledger().dollars(recipe.name)}
    if num_gpus and price:
        seconds = sum(read(RunFolder(root).events).series("step_s"))
        dollars["gpus"] = num_gpus * price.value * seconds / 3600
    if "dollars" in progress.metrics:
        dollars["run"] = progress.metrics["dollars"]
    return dollars


def _show_all(rows: list[dict[str, Any]]) -> None:
    table = simple_table("run", "standing", "step", "reward", "process")
    readable = [row for row in rows if "problem" not in row]
    for row in readable:
        process = row["process"]
        where = f"{process['pid']} on {process['host']}" if process else ""
        reward = row["metrics"].get("reward")
        table.add_row(
            row["run"],
            _coloured(row["standing"]),
            "" if row["standing"] == "evaluated" else f"{row['step']}/{row['steps']}",
            "" if reward is None else f"{reward:.2f}",
            where,
        )
    if readable:
        console().print(table)
    for row in rows:
        if row not in readable:
            text = f"[yellow]{safe(row['run'])} cannot be read:[/] {safe(row['problem'])}"
            console().print(text, soft_wrap=True)
    console().print(f"next: swerl train status {rows[0]['called']}", soft_wrap=True)


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    process, standing = facts["process"], facts["standing"]
    yield f"[bold]{facts['run']}[/]: {_coloured(standing)}{_WHAT.get(standing, '')}"
    if standing == "evaluated":
        yield f"folder     {facts['folder']}"
        yield f"next       swerl view {facts['folder']}"
        return
    if process:
        ended = f", ended {_ago(process['ended'])}" if process["ended"] else ""
        sign = "" if process["ended"] else f", last heartbeat {facts['beat_s']:.0f} s ago"
        began = _ago(process["started"])
        yield f"process    {process['pid']} on {process['host']}, began {began}{ended}{sign}"
        if process["error"]:
            yield f"[red]error[/]      {escape(process['error'])}"
            yield f"hint       {escape(process['hint'])}"
        if standing == "running":
            for part in process["parts"]:
                yield f"           {part['name']}: {part['pid']} on {part['host']}"
    if standing == "running" and facts["asked_to_stop"]:
        yield f"asked      to end {_WHEN[facts['asked_to_stop']]}"
    yield f"steps      {facts['step']} of {facts['steps']} committed"
    if standing == "running" and facts["doing"]:
        num_ended, expected = facts["episodes"]
        phases = ", ".join(f"{count} in {name}" for name, count in facts["phases"].items())
        episodes = f": {num_ended} of {expected} episodes" if expected else ""
        yield f"doing      {facts['doing']}{episodes}{'; ' + phases if phases else ''}"
    if facts["metrics"]:
        figures = ((key, facts["metrics"][key]) for key in _METRICS if key in facts["metrics"])
        yield "last step  " + "  ".join(f"{key} {value:.4g}" for key, value in figures)
    money = ", ".join(f"{name} ${value:,.2f}" for name, value in facts["dollars"].items())
    yield f"cost       {money}"
    yield f"folder     {facts['folder']}"
    if standing == "finished":
        yield f"next       swerl export {facts['folder']} -o model"
    else:
        verb = "stop" if standing == "running" else "resume"
        yield f"next       swerl train {verb} {facts['called']}"


_WHAT = {
    "lost": ": no process is seen here; it was killed, its machine failed, or this is a copy. "
    "Nothing committed is lost",
    "new": ": no process has worked here yet",
    "evaluated": ": attempts without training; the command that made it continues it",
}

_WHEN = {"step": "after the step under way", "now": "at once"}


def _coloured(standing: str) -> str:
    return f"[{_COLOURS.get(standing, 'yellow')}]{standing}[/]"


def _ago(moment_s: float) -> str:
    at = datetime.fromtimestamp(moment_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    minutes = (time.time() - moment_s) / 60
    return (
        f"{at} ({minutes:,.0f} min ago)" if minutes < 120 else f"{at} ({minutes / 60:,.1f} h ago)"
    )


def all_runs(runs: Path) -> list[Path]:
    """Return every run folder in `runs`, the newest first."""
    roots = [path.parent for path in runs.glob(f"*/{RECIPE}")]
    return sorted(roots, key=_last_use, reverse=True)


def find_run(run: str, runs: Path) -> Path:
    """Return the folder of a run, given its name or folder.

    Raises UnknownNameError, and RunError if it is not readable.
    """
    for folder in (runs / run, Path(run)):
        try:
            if (folder / RECIPE).is_file():
                return folder
        except OSError as error:
            raise RunError(
                f"cannot read {folder}: {error.strerror}",
                hint="give the name or the folder of your own run",
            ) from error
    raise unknown("run", run, [path.name for path in all_runs(runs)])


def called(root: Path) -> str:
    """Return the argument that names a run: its name if that is enough, or its folder."""
    return root.name if root == Path("runs") / root.name else str(root)


def _last_use(root: Path) -> float:
    names = ("events.jsonl", "process.json", RECIPE)
    return max(path.stat().st_mtime for name in names if (path := root / name).exists())
