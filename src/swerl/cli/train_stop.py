"""`swerl train stop`: ask a run to end, and wait until it has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from swerl.runs.status import Look


def stop(
    run: Annotated[str, typer.Argument(help="Name of the run, or its folder.")],
    runs: Annotated[Path, typer.Option(help="Folder of all run folders.")] = Path("runs"),
    now: Annotated[
        bool, typer.Option("--now", help="End at once, not after the step under way.")
    ] = False,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait for the end.")
    ] = 3600.0,
) -> None:
    """End a run after its step under way; from any machine that shares the run folder."""
    from swerl.cli._output import console, stderr
    from swerl.cli._runs import called, find_run
    from swerl.core.errors import RunError
    from swerl.runs.status import Standing, Stop, ask_to_stop, look

    root = find_run(run, runs)
    name = called(root)
    before = look(root, tell=stderr().print)
    if before.standing is not Standing.RUNNING:
        hint = f"`swerl train status {name}` says how it ended; `swerl train resume {name}` goes on"
        raise RunError(f"{root} is not running: {before.standing}", hint=hint)
    ask_to_stop(root, Stop.NOW if now else Stop.STEP)
    when = "at once" if now else "after its step"
    console().print(f"asked {root.name} to end {when}", soft_wrap=True)
    after = _wait(root, wait_s)
    if after.standing is Standing.RUNNING:
        message = f"{root} still runs after {wait_s:g} s; the wish to end stays"
        hint = f"wait longer, or `swerl train stop {name} --now`"
        raise RunError(message, hint=hint)
    console().print(f"{root.name}: {after.standing}")
    verb = "status" if after.standing is Standing.FINISHED else "resume"
    console().print(f"next: swerl train {verb} {name}", soft_wrap=True)


def _wait(root: Path, wait_s: float) -> Look:
    import time

    from swerl.runs.status import Standing, look

    until = time.monotonic() + wait_s
    while (seen := look(root)).standing is Standing.RUNNING and time.monotonic() < until:
        time.sleep(0.2)
    return seen
