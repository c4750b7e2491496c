"""The recipes' plans as pages of the docs, made from the recipes so that they never go stale."""

from __future__ import annotations

import sys
from functools import cache
from io import StringIO
from pathlib import Path

from swerl.cli._plan_view import plan_parts
from swerl.plan.plan import Plan, plan
from swerl.plan.simulation.simulate import Simulation
from swerl.recipe.load import load

RECIPES = Path("recipes")
INDEX = "plans"
_WIDTH = 96
_INTRODUCTION = """# Plans of the recipes

What `swerl train RECIPE --dry-run` says of each recipe, on any laptop and without its model. Times
are simulated on stated assumptions ([the simulation](simulation.md)), memory is added up
([the memory plan](memory.md)), dollars are the middle case ([costs](cost.md)). Nothing of it was
measured on such machines. Episodes are those of a step, memory is that of one GPU.

| recipe | model | GPUs | context | episodes | training, GiB | min a step | hours | dollars |
|---|---|---|---|---|---|---|---|---|
"""


def names() -> list[str]:
    """Return the GPU recipes, by the name of their file."""
    files = sorted(RECIPES.glob("*.toml"))
    return [file.stem for file in files if load([file]).cluster.gpus_per_node]


def as_markdown(name: str) -> str:
    """Return the page of this name: the index, or `plan-RECIPE`."""
    if name == INDEX:
        return _INTRODUCTION + "".join(map(_line, names()))
    recipe = name.removeprefix("plan-")
    command = f"swerl train recipes/{recipe}.toml --dry-run"
    shown = _shown(*planned(recipe))
    return f"# The plan of {recipe}\n\n[All plans](plans.md)\n\n```\n$ {command}\n{shown}```\n"


@cache
def planned(name: str) -> tuple[Plan, Simulation]:
    """Return the plan of a GPU recipe, and its simulation."""
    found = plan(load([RECIPES / f"{name}.toml"]))
    simulated = found.simulate()
    assert simulated is not None
    return found, simulated


def _line(name: str) -> str:
    found, simulated = planned(name)
    assert found.memory is not None
    train, own = found.memory.train, simulated.own
    dollars = f"{found.cost.cases[1].total_dollars:,.0f}" if found.cost else "?"
    cells = (
        f"[{name}](plan-{name}.md)",
        found.shape.name,
        f"{found.layout.num_gpus} {found.recipe.cluster.gpu}",
        f"{found.recipe.rollout.max_context_tokens:,}",
        found.episodes_per_step,
        f"{train.total:.1f} of {found.memory.capacity:.1f}",
        f"{own.step_s / 60:.1f}",
        f"{own.hours(found.recipe.steps):.1f}",
        dollars,
    )
    return f"| {' | '.join(map(str, cells))} |\n"


def _shown(found: Plan, simulated: Simulation) -> str:
    from rich.console import Console

    text = StringIO()
    out = Console(file=text, width=_WIDTH, highlight=False, color_system=None)
    for part in plan_parts(found, simulated):
        out.print(part)
    lines = (line.rstrip() for line in text.getvalue().splitlines())
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(as_markdown(sys.argv[1]))
