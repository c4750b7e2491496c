"""`swerl agents`: the agent CLIs that sandboxes mount."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from swerl.cli import agents_compat
from swerl.cli._run import add_old_name

app = typer.Typer(no_args_is_help=True, help="Fetch agent CLIs, and try them offline.")


@app.callback()
def _agents() -> None:
    """Fetch agent CLIs, and try them offline."""


app.command("compat")(agents_compat.compat)
add_old_name(app, "lab", "agents compat", agents_compat.compat)


@app.command()
def fetch(
    agent: Annotated[str, typer.Argument(help="An agent, such as claude-code.")],
    version: Annotated[
        str | None, typer.Option(help="Exact release; the tested one by default.")
    ] = None,
) -> None:
    """Download an agent's CLI into the cache, once."""
    from swerl.cli._output import console
    from swerl.core import plugins

    module = plugins.load("harnesses", agent)
    if not hasattr(module, "fetch"):
        console().print(f"{agent} is part of swerl; there is nothing to fetch")
        return
    for mount in module.fetch(_release(agent, module, version)):
        console().print(f"{mount.target}  [dim]from[/] {mount.source}", soft_wrap=True)
    console().print(f"next: swerl rollout --agent {agent} --engine scripted:gold")


def _release(agent: str, module: Any, version: str | None) -> str:
    """Return the release to fetch. Raises InputError on what the agent's settings refuse."""
    from pydantic import ValidationError

    from swerl.core.errors import InputError

    default: str = module.DEFAULT_VERSION
    try:
        module.Options(version=version or default)
    except ValidationError as error:
        message = f"--version {version!r} is no release of {agent}"
        if (why := error.errors()[0])["type"] == "value_error":
            message = f"{agent} cannot be run here: {why['ctx']['error']}"
        raise InputError(message, hint=f"give all of it, such as {default}") from error
    return version or default
