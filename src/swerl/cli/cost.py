"""`swerl cost estimate`: estimate the speed and the cost of a run before it starts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from swerl.cli._options import JsonOption, RecipeSettingsOption
from swerl.cli._output import console, print_json
from swerl.cli._plan_view import advice, assumptions_table, cases_table, simulation_table
from swerl.plan.cost import Estimate, estimate, from_recipe, override
from swerl.plan.plan import RecipePlan, plan
from swerl.plan.simulation import Simulation, assumptions
from swerl.recipe.load import load

AssumeOption = Annotated[
    list[str] | None,
    typer.Option("--assume", metavar="KEY=VALUE", help="Override one assumption."),
]


def estimate_cost(
    recipes: Annotated[list[Path], typer.Argument(help="Recipe files.")],
    settings: RecipeSettingsOption = None,
    assumed: AssumeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate a run's minutes a step, and its sandbox and GPU dollars, with every assumption."""
    recipe = load(recipes, settings or ())
    planned = plan(recipe)
    bill = from_recipe(recipe)
    speed = assumptions(recipe, planned.shape) if planned.simulate() else ()
    rows = override((*bill, *speed), assumed or ())
    result = estimate(rows[: len(bill)])
    simulated = planned.simulate(rows[len(bill) :]) if speed else None
    if as_json:
        cases = [{**asdict(case), "total_dollars": case.total_dollars} for case in result.cases]
        print_json({**asdict(result), "cases": cases, "simulation": simulated})
    else:
        _show(planned, result, simulated)


def _show(planned: RecipePlan, result: Estimate, simulated: Simulation | None) -> None:
    recipe, out = planned.recipe, console()
    more = simulated.assumptions if simulated else ()
    out.print(assumptions_table((*result.assumptions, *more), _number))
    if simulated:
        out.print(simulation_table(recipe, simulated))
        for line in advice(recipe, simulated, planned.suggestions(simulated)):
            out.print(f"- {line}", soft_wrap=True)
    out.print(cases_table(result))
    out.print(
        f"{result.num_episodes:,} episodes in {result.num_sandboxes:,} sandboxes at "
        f"${result.sandbox_dollars_per_second * 3600:.3f} an hour each; "
        "storage, network traffic and people are not counted"
    )
    out.print("next: swerl train RECIPE --dry-run")


def _number(value: float) -> str:
    if value and abs(value) < 0.01:
        return f"{value:.8f}".rstrip("0")
    return f"{value:,.2f}".rstrip("0").rstrip(".")
