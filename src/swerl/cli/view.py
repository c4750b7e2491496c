"""`swerl view`: runs and Episodes as web pages, live on this machine or as files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from swerl.cli._options import require_new
from swerl.cli._output import console, safe
from swerl.cli._run import run, waiting
from swerl.core.errors import InputError


def view(
    folder: Annotated[
        Path, typer.Argument(help="A run, an Episode, or a folder with some of them.")
    ] = Path("runs"),
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write static files here, serve nothing.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also write the pages of tokens, which are large.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8790,
    force: Annotated[bool, typer.Option("--force", help="Write into an existing folder.")] = False,
) -> None:
    """Show runs, steps, Episodes and tokens as web pages, live or as static files."""
    from swerl.view.server import write
    from swerl.view.site import Site

    if not folder.is_dir():
        hint = "`swerl train twin_cpu` or `swerl rollout` makes one"
        raise InputError(f"there is no folder {folder}", hint=hint)
    if output is None:
        run(_serve(folder, port), after="nothing was changed; run the command again")
        return
    require_new(output, force=force)
    with waiting(f"writing {output}"):
        size = write(Site(folder, is_static=True, tokens=tokens), output)
    shown = safe(str(output / "index.html"))
    console().print(f"wrote   {shown}, {size / 1e6:,.1f} MB\nnext    open it in a browser")


async def _serve(folder: Path, port: int) -> None:
    from swerl.view.server import serving
    from swerl.view.site import Site

    async with serving(Site(folder), port) as url:
        console().print(f"{safe(str(folder))} is shown at [bold]{url}[/] until Ctrl-C")
        console().print("next    open it in a browser on this machine; ? lists the keys")
        console().file.flush()
        await asyncio.Event().wait()
