"""`swerl train rewind`: go back to the checkpoint of an earlier step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def rewind(
    run: Annotated[str, typer.Argument(help="Name of the run, or its folder.")],
    step: Annotated[int, typer.Option(help="Step whose checkpoint to go on from.")],
    runs: Annotated[Path, typer.Option(help="Folder of all run folders.")] = Path("runs"),
) -> None:
    """Set a run back to an earlier checkpoint; `swerl train resume` then goes on from there."""
    from swerl.cli._output import console
    from swerl.cli._runs import called, find_run
    from swerl.runs.layout import rewind as go_back

    root = find_run(run, runs)
    aside = go_back(root, step)
    console().print(f"{root} stands at step {step}", soft_wrap=True)
    if aside is not None:
        console().print(f"later episodes  {aside}", soft_wrap=True)
    console().print(f"next            swerl train resume {called(root)}", soft_wrap=True)
