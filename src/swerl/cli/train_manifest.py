"""`swerl train manifest`: print what Slurm or Kubernetes needs to start a recipe."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Kind(StrEnum):
    """Who is to start the run."""

    KUBERAY = "kuberay"
    SLURM = "slurm"


def manifest(
    kind: Annotated[Kind, typer.Argument(help="kuberay: a RayJob; slurm: a script for sbatch.")],
    recipe: Annotated[Path, typer.Argument(help="Recipe file.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one recipe key."),
    ] = None,
    image: Annotated[
        str, typer.Option(help="kuberay: container image with swerl and Ray.")
    ] = "registry.example/swerl:latest",
    volume: Annotated[
        str, typer.Option(help="kuberay: claim of the volume that all pods share.")
    ] = "swerl-shared",
    secret: Annotated[
        str, typer.Option(help="kuberay: secret whose keys the controller gets as variables.")
    ] = "swerl-keys",
    hours: Annotated[int, typer.Option(min=1, help="slurm: longest run time.")] = 48,
) -> None:
    """Print a manifest for the machines that a recipe asks for."""
    from swerl.cluster.manifests import RecipeSource, kuberay, slurm
    from swerl.recipe.load import load

    chosen, source = load([recipe], settings or ()), RecipeSource(recipe, tuple(settings or ()))
    if kind is Kind.KUBERAY:
        text = kuberay(chosen, source, image=image, volume=volume, secret=secret)
    else:
        text = slurm(chosen, source, hours=hours)
    typer.echo(text, nl=False)
