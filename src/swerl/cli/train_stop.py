"""`swerl train stop`: ask a run to end, and wait until it has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from swerl.runs.status import StatusReport


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
    from swerl.runs.status import RunStatus, StopRequest, request_stop, run_status

    root = find_run(run, runs)
    name = called(root)
    before = run_status(root, notify=stderr().print)
    if before.status is not RunStatus.RUNNING:
        hint = f"`swerl train status {name}` says how it ended; `swerl train resume {name}` goes on"
        raise RunError(f"{root} is not running: {before.status}", hint=hint)
    request_stop(root, StopRequest.NOW if now else StopRequest.STEP)
    when = "at once" if now else "after its step"
    console().print(f"asked {root.name} to end {when}", soft_wrap=True)
    after = _wait(root, wait_s)
    if after.status is RunStatus.RUNNING:
        message = f"{root} still runs after {wait_s:g} s; the stop request stays"
        hint = f"wait longer, or `swerl train stop {name} --now`"
        raise RunError(message, hint=hint)
    console().print(f"{root.name}: {after.status}")
    verb = "status" if after.status is RunStatus.FINISHED else "resume"
    console().print(f"next: swerl train {verb} {name}", soft_wrap=True)


def _wait(root: Path, wait_s: float) -> StatusReport:
    import time

    from swerl.runs.status import RunStatus, run_status

    until = time.monotonic() + wait_s
    while (seen := run_status(root)).status is RunStatus.RUNNING and time.monotonic() < until:
        time.sleep(0.2)
    return seen
