"""`swerl export`: a checkpoint as a model folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from swerl.cli._options import JsonOption, PushOption, RunsOption
from swerl.cli._output import console, print_json
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
    push: PushOption = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as a model folder in Hugging Face format."""
    if push:
        hub.require_id(push)
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

    root = run if run.is_dir() else find_run(str(run), runs)
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


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
