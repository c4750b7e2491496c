"""What every command that opens sandboxes takes: the backend, and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel

    from swerl.core.contracts import SandboxBackend

BackendOption = Annotated[
    str, typer.Option("--backend", help="Kind of sandbox, as in a recipe's sandbox.type.")
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="One setting of the backend, as in a recipe's sandbox section.",
    ),
]


def open_backend(
    backend: str, settings: Sequence[str] | None = None, *, run: str = ""
) -> SandboxBackend:
    """Build a backend from a command line; `run` names in the ledger what it is used for.

    Raises UnknownNameError on a backend that is not installed, RecipeError on a setting that it
    does not take.
    """
    from swerl.cli._output import stderr
    from swerl.rollout import wiring

    def warn(text: str) -> None:
        stderr().print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)

    return wiring.open_backend(backend, backend_options(backend, settings), run=run, warn=warn)


def backend_options(backend: str, settings: Sequence[str] | None = None) -> BaseModel | None:
    """Return a backend's validated settings, None where it has none. Raises as `open_backend`."""
    from swerl.recipe.check import plugin_options
    from swerl.recipe.load import read_settings
    from swerl.recipe.schema import PluginSection

    chosen = PluginSection.model_validate({**read_settings(settings or ()), "type": backend})
    return plugin_options("sandboxes", chosen, section="sandbox")
