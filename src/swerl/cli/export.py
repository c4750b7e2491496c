"""`swerl export`: the model of a run's checkpoint, for transformers and SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or its name under --runs.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write; it must not exist.")],
    *,
    step: Annotated[int | None, typer.Option(help="Step to take; the newest by default.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Take the best evaluated step.")] = False,
    dtype: Annotated[
        str, typer.Option(help="bf16, fp32, or auto for the type in training.")
    ] = "auto",
    shard_size: Annotated[str, typer.Option(help="Largest file, such as 5GB or 500MB.")] = "5GB",
    runs: Annotated[Path, typer.Option(help="Folder of all run folders.")] = Path("runs"),
) -> None:
    """Write a checkpoint as a model folder in Hugging Face format, at any step of a run."""
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
        raise InputError(f"{text!r} is no size of a file", hint="write it as 5GB or 500MB")
    return size


def _peak_gib() -> float:
    """Return the most memory that this process had resident."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
