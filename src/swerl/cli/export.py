"""`swerl export`: a checkpoint as a model folder, or the trained rows as one Parquet file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from swerl.cli._options import JsonOption, PushOption, RunsOption, require_new
from swerl.cli._output import console, counted, print_json, safe, stderr, with_docs
from swerl.cli._run import waiting
from swerl.cli.train_status import find_run
from swerl.core.errors import InputError, unknown
from swerl.recipe import hub


def export(
    run: Annotated[Path, typer.Argument(help="Name of a run, or its folder.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Path to write; it must not exist.")],
    *,
    step: Annotated[int | None, typer.Option(help="Step; the newest by default.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Use the best evaluated step.")] = False,
    dtype: Annotated[
        str, typer.Option(help="bf16, fp32, or auto for the type in training.")
    ] = "auto",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only a LoRA run's adapters, for PEFT.")
    ] = False,
    samples: Annotated[
        bool, typer.Option("--samples", help="Write the trained rows as a Parquet file.")
    ] = False,
    push: PushOption = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as a model folder in Hugging Face format, or the trained rows."""
    if push:
        hub.require_id(push)
    if samples:
        if push:
            raise InputError("--push uploads a model, not rows", hint="leave out --samples")
        _export_samples(_find(run, runs), out, step, as_json=as_json)
        return
    if step is not None and best:
        raise InputError(
            "--step and --best name two different checkpoints", hint="pass one of them"
        )
    if dtype not in ("auto", "bf16", "fp32"):
        raise unknown("dtype", dtype, ("auto", "bf16", "fp32"))
    if out.exists():  # found before torch is imported
        raise InputError(f"{out} exists already", hint="name a new folder with -o")
    from swerl.training.export import ExportOptions
    from swerl.training.export import export as write

    root = _find(run, runs)
    options = ExportOptions(step=step, best=best, dtype=dtype, adapter=adapter)
    with waiting("reading and writing the weights"):
        result = write(root, out, options)
    address = None
    if push:
        with waiting(f"uploading to {push}"):
            address = hub.push(result.folder, push, kind="model")
    if as_json:
        print_json({**asdict(result), "hub": address})
        return
    say = console()
    say.print(f"step {result.step} of {root}: {result.num_params:,} parameters", soft_wrap=True)
    say.print(f"folder    {result.folder}", soft_wrap=True)
    say.print(f"size      {_size(result.num_bytes)}")
    say.print(f"checksum  {result.checksum}", soft_wrap=True)
    if address:
        say.print(f"hub       {address}", soft_wrap=True)


def _find(run: Path, runs: Path) -> Path:
    """Return a folder, or that of the run with this name. Raises UnknownNameError."""
    # A folder without a recipe, such as an older or cut copy, can still hold rows.
    return run if run.is_dir() else find_run(str(run), runs)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def _export_samples(run: Path, out: Path, step: int | None, *, as_json: bool = False) -> None:
    """Write the rows of one step, or of all; exit code 1 if a step cannot be read."""
    from swerl.runs.export import export

    require_new(out, force=False)
    size = export(run, out, step)
    if as_json:
        print_json({"file": out, "num_rows": size.num_rows, "num_steps": size.num_steps})
    console().print(
        f"{safe(str(out))}: {counted(size.num_rows, 'row')} of {counted(size.num_steps, 'step')}; "
        f"{with_docs('docs/reference/samples.md')} explains the columns",
        soft_wrap=True,
    )
    for text in size.damaged:
        stderr().print(f"[yellow]left out:[/] {safe(text)}", soft_wrap=True)
    if size.damaged:
        raise typer.Exit(1)
