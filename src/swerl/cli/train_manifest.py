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
    image: Annotated[
        str, typer.Option(help="kuberay: container image with swerl and Ray.")
    ] = "registry.example/swerl:latest",
    volume: Annotated[
        str, typer.Option(help="kuberay: claim of the volume that all pods share.")
    ] = "swerl-shared",
    hours: Annotated[int, typer.Option(min=1, help="slurm: longest run time.")] = 48,
) -> None:
    """Print a manifest for the machines that a recipe asks for."""
    from swerl.cluster.manifests import kuberay, slurm
    from swerl.recipe.load import load

    chosen = load([recipe])
    if kind is Kind.KUBERAY:
        typer.echo(kuberay(chosen, recipe, image=image, volume=volume), nl=False)
    else:
        typer.echo(slurm(chosen, recipe, hours=hours), nl=False)
