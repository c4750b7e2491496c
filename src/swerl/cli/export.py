"""`swerl export`: a checkpoint as model folder; `swerl samples`: the trained rows of a run."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from swerl.cli._options import ForceOption, JsonOption, RunsOption, require_new
from swerl.cli._output import console, counted, print_json, safe, simple_table, stderr, with_docs
from swerl.cli._run import waiting
from swerl.cli.train_status import find_run
from swerl.core.errors import InputError, RunError, UnknownNameError, unknown


def export(
    run: Annotated[Path, typer.Argument(help="Name of a run, or its folder.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write; it must not exist.")],
    *,
    step: Annotated[int | None, typer.Option(help="Step; the newest by default.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Use the best evaluated step.")] = False,
    dtype: Annotated[
        str, typer.Option(help="bf16, fp32, or auto for the type in training.")
    ] = "auto",
    shard_size: Annotated[str, typer.Option(help="Maximum file size, such as 5GB.")] = "5GB",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only a LoRA run's adapters, for PEFT.")
    ] = False,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint of a run as a model folder in Hugging Face format."""
    if step is not None and best:
        raise InputError(
            "--step and --best name two different checkpoints", hint="pass one of them"
        )
    if dtype not in ("auto", "bf16", "fp32"):
        raise unknown("dtype", dtype, ("auto", "bf16", "fp32"))
    max_bytes = _bytes(shard_size)
    if out.exists():  # found before torch is imported
        raise InputError(f"{out} exists already", hint="name a new folder with -o")
    from swerl.training.export import ExportOptions
    from swerl.training.export import export as write

    root = _find(run, runs)
    options = ExportOptions(step=step, best=best, dtype=dtype, max_bytes=max_bytes, adapter=adapter)
    with waiting("reading and writing the weights"):
        done = write(root, out, options)
    if as_json:
        print_json(done)
        return
    # The peak resident memory of this process.
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    say = console()
    say.print(f"step {done.step} of {root}: {done.num_params:,} parameters", soft_wrap=True)
    say.print(f"folder    {done.folder}", soft_wrap=True)
    say.print(f"size      {_size(done.num_bytes)}")
    say.print(f"checksum  {done.checksum}", soft_wrap=True)
    say.print(f"memory    {peak_gib:.2f} GiB at most")


def _find(run: Path, runs: Path) -> Path:
    """Return a folder, or that of the run with this name. Raises UnknownNameError."""
    # A folder without a recipe, such as an older or cut copy, can still hold rows.
    return run if run.is_dir() else find_run(str(run), runs)


def _bytes(text: str) -> int:
    """Read a size such as 5GB. Raises InputError."""
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


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


_RUN = Annotated[Path, typer.Argument(help="Name of a run, or its folder.")]
_RUNS = Annotated[Path, typer.Option(help="Folder of all run folders.")]
_STEP = Annotated[int | None, typer.Option(min=0, help="One step; all by default.")]


def show(
    run: _RUN,
    step: _STEP = None,
    runs: _RUNS = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Print the figures of each step's rows."""
    from swerl.runs.export import steps_of

    run = _find(run, runs)
    steps, damaged = [], []
    for each in steps_of(run) if step is None else [step]:
        try:
            steps.append(_summary(run, each))
        except RunError as error:
            damaged.append(error.explained())
    if as_json:
        for row in steps:
            typer.echo(json.dumps(row))
    else:
        console().print(_table(steps))
        console().print(f"next: swerl samples export {run} -o samples.parquet", soft_wrap=True)
    _warn_damaged(damaged)


def export_samples(
    run: _RUN,
    output: Annotated[Path, typer.Option("-o", "--output", help="Parquet file to write.")],
    step: _STEP = None,
    format: Annotated[
        str, typer.Option(help="parquet (swerl's columns), slime or verl.")
    ] = "parquet",
    runs: _RUNS = Path("runs"),
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the rows of a run as one Parquet file."""
    from swerl.runs.export import ExportFormat, export

    if format not in set(ExportFormat):
        raise UnknownNameError(
            f"unknown format {format!r}", hint=f"use one of {', '.join(ExportFormat)}"
        )
    require_new(output, force=force)
    run = _find(run, runs)
    done = export(run, output, ExportFormat(format), step)
    if as_json:
        print_json({"file": output, "num_rows": done.num_rows, "num_steps": done.num_steps})
    console().print(
        f"{output}: {counted(done.num_rows, 'row')} of {counted(done.num_steps, 'step')}; "
        f"{with_docs('docs/reference/samples.md')} explains the columns",
        soft_wrap=True,
    )
    _warn_damaged(done.damaged)


def _warn_damaged(damaged: Sequence[str]) -> None:
    """Print which steps were left out; exit code 1 if there are any."""
    for text in damaged:
        stderr().print(f"[yellow]left out:[/] {safe(text)}", soft_wrap=True)
    if damaged:
        raise typer.Exit(1)


def _summary(run: Path, step: int) -> Mapping[str, Any]:
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
    titles = ("step", "tasks", "episodes", "rows", "tokens", "trained", "reward", "versions")
    table = simple_table(*titles, numbers=titles, box=None, pad_edge=True)
    for each in steps:
        names = ("step", "tasks", "episodes", "rows", "tokens", "trained_tokens")
        counts = [f"{each[name]:,}" for name in names]
        table.add_row(*counts, f"{each['reward']:.3f}", " ".join(each["versions"]))
    return table
