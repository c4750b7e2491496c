"""`swerl view`: runs and Episodes as web pages on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from swerl.cli._options import ForceOption, require_new
from swerl.cli._output import console, safe
from swerl.cli._run import run
from swerl.core.errors import InputError
from swerl.core.files import write_text


def view(
    folder: Annotated[
        Path, typer.Argument(help="A run, an Episode, or a folder with some of them.")
    ] = Path("runs"),
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the chart of a run's reward here (.svg)."),
    ] = None,
    force: ForceOption = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8790,
) -> None:
    """Show runs, steps, Episodes and tokens as web pages."""
    if not folder.is_dir():
        hint = "`swerl train twin_cpu` or `swerl rollout` makes one"
        raise InputError(f"there is no folder {folder}", hint=hint)
    if output:
        require_new(output, force=force)
        _write_chart(folder, output)
        return
    run(_serve(folder, port), after="the same command shows it again")


def _write_chart(folder: Path, output: Path) -> None:
    from swerl.runs import history
    from swerl.runs.layout import RunFolder
    from swerl.view.charts import reward_svg

    chart = reward_svg(history.read(RunFolder(folder).events))
    if not chart:
        raise InputError(f"{folder} has no finished step", hint="name the folder of a run")
    write_text(output, chart)
    console().print(f"wrote   {safe(str(output))}")


async def _serve(folder: Path, port: int) -> None:
    from swerl.view.server import serving
    from swerl.view.site import Site

    async with serving(Site(folder), port) as url:
        console().print(f"{safe(str(folder))} is shown at [bold]{url}[/] until Ctrl-C")
        console().print("next    open it in a browser on this machine")
        console().file.flush()
        await asyncio.Event().wait()
