"""`swerl agents`: download agent CLIs for sandboxes."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from pydantic import ValidationError

from swerl.cli._output import console
from swerl.cli._run import waiting
from swerl.core import plugins
from swerl.core.errors import InputError


def fetch(
    agent: Annotated[str, typer.Argument(help="An agent, such as claude-code.")],
    version: Annotated[
        str | None, typer.Option(help="Exact release; the tested one by default.")
    ] = None,
) -> None:
    """Download an agent's CLI into the cache, once."""
    module = plugins.load("harnesses", agent)
    if not hasattr(module, "fetch"):
        console().print(f"{agent} is part of swerl; there is nothing to fetch")
        return
    release = _release(agent, module, version)
    with waiting(f"downloading {agent} {release}"):
        mounts = module.fetch(release)
    for mount in mounts:
        console().print(f"{mount.target}  [dim]from[/] {mount.source}", soft_wrap=True)
    # A release that is not the tested one must be named again.
    setting = f" --set harness.version={version}" if version else ""
    console().print(f"next: swerl rollout --agent {agent}{setting} --engine scripted:gold")


def _release(agent: str, module: Any, version: str | None) -> str:
    """Return the release to fetch. Raises InputError if the agent's settings refuse it."""
    default: str = module.DEFAULT_VERSION
    try:
        module.Options(version=version or default)
    except ValidationError as error:
        message = f"--version {version!r} is not a release of {agent}"
        if (why := error.errors()[0])["type"] == "value_error":
            message = f"{agent} cannot be run here: {why['ctx']['error']}"
        raise InputError(message, hint=f"give the exact version, such as {default}") from error
    return version or default
