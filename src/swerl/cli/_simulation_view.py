"""How a simulated run is shown: hours, what they went to, and what other schedules would do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from swerl.cli._output import console
from swerl.plan.simulation.schedule import SimulatedRun
from swerl.plan.simulation.simulate import Simulation
from swerl.recipe.schema import Recipe

if TYPE_CHECKING:
    from rich.table import Table


def show_simulation(recipe: Recipe, found: Simulation) -> None:
    """Print what a run rests on and comes to."""
    out = console()
    out.print(_assumptions(found))
    out.print(outcome_table(recipe, found))
    for line in remarks(recipe, found):
        out.print(f"- {line}", soft_wrap=True)
    out.print("next: swerl train RECIPE --dry-run")


def outcome_table(recipe: Recipe, found: Simulation) -> Table:
    """Return hours and what they went to, the recipe's own schedule first."""
    from rich.box import SIMPLE
    from rich.table import Table

    runs = (found.own, *found.others)
    table = Table(
        title=f"A simulation of {len(found.own.steps)} steps",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
    )
    table.add_column("")
    for number, run in enumerate(runs):
        table.add_column(run.mode + ("*" if number and found.split else ""), justify="right")
    for name, texts in _rows(recipe, runs):
        table.add_row(name, *texts, style="bold" if name.startswith("hours") else "")
    return table


def remarks(recipe: Recipe, found: Simulation) -> Iterator[str]:
    """Yield what the numbers say."""
    own = found.own
    name, share = next(iter(own.parts.items()))
    yield f"the run waits longest for {name}: {share:.0%} of its time"
    if own.engine_busy < 0.5 and own.trainer_busy < 0.5:
        yield (
            f"GPUs sample or train {own.engine_busy + own.trainer_busy:.0%} of the time: more "
            "episodes a step would cost few hours more"
        )
    if own.tail_share > 0.25:
        yield (
            f"for {own.tail_share:.0%} of the time fewer than one in ten episodes of a step are "
            "under way: a shorter budgets.agent_s or another schedule.mode would shorten it"
        )
    if own.tokens_again > 0.1:
        yield f"{own.tokens_again:.0%} of prompt tokens are computed again: the cache is too small"
    low, _, high = recipe.cost.step_minutes
    minutes = own.step_s / 60
    if not low <= minutes <= high:
        yield (
            f"a step takes {minutes:.1f} minutes, and cost.step_minutes says {low:g} to {high:g}"
        )
    if found.split and found.others:
        yield "* half of the GPUs for engines, half for the trainer: these schedules need both"
    yield "evaluations and saving are not simulated"


def _rows(recipe: Recipe, runs: tuple[SimulatedRun, ...]) -> Iterator[tuple[str, list[str]]]:
    yield "minutes a step", [f"{run.step_s / 60:.1f}" for run in runs]
    yield "  rollout, minutes", [f"{run.mean('rollout_s') / 60:.1f}" for run in runs]
    yield "  training, seconds", [f"{run.mean('train_s'):.0f}" for run in runs]
    yield f"hours of {recipe.steps} steps", [f"{run.hours(recipe.steps):.1f}" for run in runs]
    for name in runs[0].parts:
        shares = [run.parts.get(name, 0.0) for run in runs]
        if max(shares) >= 0.005:
            yield (
                f"  waiting for {name}",
                [f"{share:.0%}" for share in shares],
            )
    yield "engines busy", [f"{run.engine_busy:.0%}" for run in runs]
    yield "trainer busy", [f"{run.trainer_busy:.0%}" for run in runs]
    yield "replies at once, an engine", [f"{run.replies_at_once:.1f}" for run in runs]
    yield "last tenth of episodes alone", [f"{run.tail_share:.0%}" for run in runs]
    yield "agents stopped by their budget", [f"{run.timed_out:.1%}" for run in runs]
    yield "tokens an episode", [f"{run.row_tokens:,.0f}" for run in runs]
    yield "tokens a step", [f"{run.mean('row_tokens') / 1e6:.2f}M" for run in runs]
    yield "sandbox-seconds an episode", [f"{run.sandbox_s:,.0f}" for run in runs]
    turns = [run.turns_per_s() for run in runs]
    yield "gateway turns/s, mean and most", [f"{mean:.1f}, {most:.1f}" for mean, most in turns]


def _assumptions(found: Simulation) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    title = "Assumptions: override one with --set KEY=VALUE"
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("key", no_wrap=True)
    table.add_column("value", no_wrap=True, justify="right")
    table.add_column("unit")
    table.add_column("from")
    for row in found.assumptions:
        table.add_row(row.key, f"{row.value:,.6g}", row.unit, row.source)
    return table
