"""`swerl export`: a checkpoint as model folder; `swerl samples`: the trained rows of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or its name under --runs.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write; it must not exist.")],
    *,
    step: Annotated[int | None, typer.Option(help="Step; the newest by default.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Use the best evaluated step.")] = False,
    dtype: Annotated[
        str, typer.Option(help="bf16, fp32, or auto for the type in training.")
    ] = "auto",
    shard_size: Annotated[str, typer.Option(help="Maximum file size, such as 5GB.")] = "5GB",
    runs: Annotated[Path, typer.Option(help="Folder of all run folders.")] = Path("runs"),
) -> None:
    """Write a checkpoint of a run as a model folder in Hugging Face format."""
    from swerl.cli._output import console
    from swerl.core.errors import InputError, unknown

    if step is not None and best:
        raise InputError(
            "--step and --best name two different checkpoints", hint="pass one of them"
        )
    if dtype not in ("auto", "bf16", "fp32"):
        raise unknown("dtype", dtype, ("auto", "bf16", "fp32"))
    max_bytes = _bytes(shard_size)
    from swerl.training.export import ExportOptions
    from swerl.training.export import export as write

    root = run if run.is_dir() else runs / run
    done = write(root, out, ExportOptions(step=step, best=best, dtype=dtype, max_bytes=max_bytes))
    say = console()
    say.print(f"step {done.step} of {root}: {done.num_params:,} parameters", soft_wrap=True)
    say.print(f"folder    {done.folder}", soft_wrap=True)
    say.print(f"size      {done.num_bytes / 1e9:,.3f} GB")
    say.print(f"checksum  {done.checksum}", soft_wrap=True)
    say.print(f"memory    {_peak_gib():.2f} GiB at most")


def _bytes(text: str) -> int:
    """Read a size such as 5GB. Raises InputError."""
    from swerl.core.errors import InputError

    units = {"GB": 10**9, "MB": 10**6, "KB": 10**3, "GIB": 2**30, "MIB": 2**20}
    number = text.upper().rstrip("BGIKM")
    factor = units.get(text.upper()[len(number) :].strip())
    try:
        size = int(float(number) * (factor or 0))
    except ValueError:
        size = 0
    if size <= 0:
        raise InputError(f"{text!r} is not a file size", hint="write it as 5GB or 500MB")
    return size


def _peak_gib() -> float:
    """Return the peak resident memory of this process in GiB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


samples_app = typer.Typer(no_args_is_help=True, help="Show and export the rows that a run trained.")

_RUN = Annotated[Path, typer.Argument(help="Folder of a run: runs/NAME.")]
_STEP = Annotated[int | None, typer.Option(min=0, help="One step; all by default.")]


@samples_app.command("show")
def show(
    run: _RUN,
    step: _STEP = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead.")] = False,
) -> None:
    """Print the figures of each step's rows."""
    from swerl.cli._output import console
    from swerl.runs.export import steps_of

    steps = [_summary(run, each) for each in (steps_of(run) if step is None else [step])]
    if as_json:
        for each in steps:
            typer.echo(json.dumps(each))
        return
    console().print(_table(steps))
    console().print(f"next: swerl samples export {run} -o samples.parquet", soft_wrap=True)


@samples_app.command("export")
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
            f"unknown format {format!r}", hint=f"use one of {', '.join(ExportFormat)}"
        )
    done = export(run, output, ExportFormat(format), step)
    console().print(
        f"{output}: {done.num_rows} rows of {done.num_steps} steps; "
        "docs/reference/samples.md explains the columns",
        soft_wrap=True,
    )


def _summary(run: Path, step: int) -> Mapping[str, Any]:
    """Return the figures of one step."""
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
