"""`swerl cost`: estimate the cost of a run before it starts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from swerl.cli._options import JsonOption, RecipeSettingsOption
from swerl.cli._output import console, print_json
from swerl.cli._plan_view import assumptions_table, cases_table, show_simulation
from swerl.cli.train_status import find_run
from swerl.core.errors import InputError, RecipeError
from swerl.plan.cost import Estimate, estimate, example, from_recipe
from swerl.plan.plan import plan
from swerl.plan.simulation.episodes import RecordedLoads, read_recorded
from swerl.plan.simulation.simulate import simulate
from swerl.recipe.load import load

AssumeOption = Annotated[
    list[str] | None,
    typer.Option("--assume", metavar="KEY=VALUE", help="Override one assumption."),
]


def estimate_cost(
    recipes: Annotated[
        list[Path] | None, typer.Argument(help="Recipe files; without one, the 8-node example.")
    ] = None,
    settings: RecipeSettingsOption = None,
    assumed: AssumeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate the sandbox and GPU dollars of a run, with every assumption and its source."""
    if settings and not recipes:
        raise InputError("--set overrides a recipe's key", hint="name a recipe, or use --assume")
    assumptions = from_recipe(load(recipes, settings or ())) if recipes else example()
    result = estimate(assumptions, assumed or ())
    if as_json:
        cases = [{**asdict(case), "total_dollars": case.total_dollars} for case in result.cases]
        print_json({**asdict(result), "cases": cases})
    else:
        _show(result)


def simulate_run(
    recipes: Annotated[list[Path], typer.Argument(help="Recipe files of a GPU run.")],
    settings: RecipeSettingsOption = None,
    assumed: AssumeOption = None,
    run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Draw episodes from this run."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to simulate.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Simulate a run by discrete events: its hours, its bottleneck, and other schedules."""
    recipe = load(recipes, settings or ())
    planned = plan(recipe)
    if planned.memory is None:
        raise RecipeError(
            f"{recipe.name} runs on CPU, which the simulation does not cover",
            hint="set cluster.gpus_per_node, or run a few steps",
        )
    found = simulate(
        recipe,
        planned.shape,
        planned.layout,
        planned.memory.cache,
        settings=assumed or (),
        recorded=RecordedLoads(read_recorded(find_run(str(run), Path("runs")))) if run else None,
        num_steps=steps,
        compare=True,
    )
    if as_json:
        print_json(found)
    else:
        show_simulation(recipe, found)


def _show(result: Estimate) -> None:
    console().print(assumptions_table(result.assumptions, _number))
    console().print(cases_table(result))
    console().print(
        f"{result.num_episodes:,} episodes in {result.num_sandboxes:,} sandboxes at "
        f"${result.sandbox_dollars_per_second * 3600:.3f} an hour each; "
        "storage, network traffic and people are not counted"
    )
    console().print("next: swerl train RECIPE --dry-run")


def _number(value: float) -> str:
    if value and abs(value) < 0.01:
        return f"{value:.8f}".rstrip("0")
    return f"{value:,.2f}".rstrip("0").rstrip(".")
