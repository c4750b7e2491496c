"""`swerl samples`: what a run trained, shown by step and written for other trainers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Look at what a run trained, and export it.")

_RUN = Annotated[Path, typer.Argument(help="Folder of a run: runs/NAME.")]
_STEP = Annotated[int | None, typer.Option(min=0, help="One step; all by default.")]


@app.command("show")
def show(
    run: _RUN,
    step: _STEP = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead.")] = False,
) -> None:
    """Say what the rows of each step hold."""
    from swerl.cli._output import console
    from swerl.runs.export import steps_of

    steps = [_summary(run, each) for each in (steps_of(run) if step is None else [step])]
    if as_json:
        for each in steps:
            typer.echo(json.dumps(each))
        return
    console().print(_table(steps))
    console().print(f"next: swerl samples export {run} -o samples.parquet", soft_wrap=True)


@app.command("export")
def export_samples(
    run: _RUN,
    output: Annotated[Path, typer.Option("-o", "--output", help="Parquet file to write.")],
    step: _STEP = None,
    format: Annotated[
        str, typer.Option(help="parquet (swerl's columns), slime or verl.")
    ] = "parquet",
) -> None:
    """Write the rows of a run as one Parquet file."""
    from swerl.cli._output import console
    from swerl.core.errors import UnknownNameError
    from swerl.runs.export import ExportFormat, export

    if format not in set(ExportFormat):
        raise UnknownNameError(
            f"no rows of the format {format!r}", hint=f"--format takes {', '.join(ExportFormat)}"
        )
    done = export(run, output, ExportFormat(format), step)
    console().print(
        f"{output}: {done.num_rows} rows of {done.num_steps} steps; "
        "docs/reference/samples.md explains the columns",
        soft_wrap=True,
    )


def _summary(run: Path, step: int) -> Mapping[str, Any]:
    """Return the figures of a step."""
    from swerl.runs.export import step_rows

    rewards: dict[str, float] = {}
    tasks: set[str] = set()
    versions: dict[str, None] = {}
    num_rows = num_tokens = num_trained = num_positions = num_routed = 0
    for row in step_rows(run, [step]):
        sample = row.sample
        rewards[sample.episode] = row.reward
        tasks.add(sample.task)
        versions |= dict.fromkeys(sample.weight_versions)
        num_rows += 1
        num_tokens += len(sample.ids)
        num_trained += sample.num_trained_tokens
        num_positions += len(sample.ids) - 1
        num_routed += sample.num_routed
    return {
        "step": step,
        "tasks": len(tasks),
        "episodes": len(rewards),
        "rows": num_rows,
        "tokens": num_tokens,
        "trained_tokens": num_trained,
        "reward": sum(rewards.values()) / max(len(rewards), 1),
        "routed_share": num_routed / max(num_positions, 1),
        "versions": list(versions),
    }


def _table(steps: list[Mapping[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(box=None)
    for name in ("step", "tasks", "episodes", "rows", "tokens", "trained", "reward", "versions"):
        table.add_column(name, justify="right")
    for each in steps:
        names = ("step", "tasks", "episodes", "rows", "tokens", "trained_tokens")
        counts = [f"{each[name]:,}" for name in names]
        table.add_row(*counts, f"{each['reward']:.3f}", " ".join(each["versions"]))
    return table
