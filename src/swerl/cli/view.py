"""`swerl view`: runs and Episodes as web pages, live on this machine or as files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from swerl.cli._options import ForceOption, require_new
from swerl.cli._output import console, safe
from swerl.cli._run import progress_bar, run
from swerl.core.errors import InputError
from swerl.core.files import write_text


def view(
    folder: Annotated[
        Path, typer.Argument(help="A run, an Episode, or a folder with some of them.")
    ] = Path("runs"),
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write static files here, or a reward chart (.svg)."),
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also write the pages of tokens, which are large.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8790,
    force: ForceOption = False,
) -> None:
    """Show runs, steps, Episodes and tokens as web pages, live or as static files."""
    from swerl.view.server import write
    from swerl.view.site import Site

    if not folder.is_dir():
        hint = "`swerl train twin_cpu` or `swerl rollout` makes one"
        raise InputError(f"there is no folder {folder}", hint=hint)
    if output is None:
        run(_serve(folder, port), after="the same command shows it again")
        return
    require_new(output, force=force)
    if output.suffix == ".svg":
        _write_chart(folder, output)
        return
    site = Site(folder, is_static=True, has_tokens=tokens)
    if not site.runs():
        hint = "name a run, an Episode, or a folder with some of them"
        raise InputError(f"{folder} has no run and no Episode", hint=hint)
    with progress_bar(f"writing {output}, pages", None) as advance:
        size = write(site, output, advance)
    page = safe(str(output / "index.html"))
    console().print(f"wrote   {page}, {size / 1e6:,.1f} MB\nnext    open it in a browser")


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
        console().print("next    open it in a browser on this machine; ? lists the keys")
        console().file.flush()
        await asyncio.Event().wait()
