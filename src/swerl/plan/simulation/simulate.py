"""A recipe's run, simulated: by its own schedule, and by the others for comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from swerl.plan.cost.estimate import Assumption
from swerl.plan.kv_cache import KvCache
from swerl.plan.layout import Layout
from swerl.plan.shape import Shape
from swerl.plan.simulation.assumptions import assumptions, override, values
from swerl.plan.simulation.episodes import Source
from swerl.plan.simulation.load import Limits, Profile
from swerl.plan.simulation.machine import SimMachine, machine
from swerl.plan.simulation.outcome import Outcome
from swerl.plan.simulation.schedule import MODES, Schedule
from swerl.recipe.schema import Recipe

DEFAULT_STEPS = 10
"""Steps that are simulated: enough for means, and about a second of a computer's time."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """What came out, and what it rests on."""

    assumptions: tuple[Assumption, ...]
    own: Outcome
    """By the recipe's own schedule."""
    others: tuple[Outcome, ...]
    split: bool
    """Whether the others have half of the GPUs for engines and half for the trainer, where the
    recipe's take turns on all of them."""


def simulate(
    recipe: Recipe,
    shape: Shape,
    layout: Layout,
    cache: KvCache,
    *,
    settings: Iterable[str] = (),
    recorded: Source | None = None,
    num_steps: int = DEFAULT_STEPS,
    compare: bool = False,
) -> Simulation:
    """Simulate some steps of a GPU recipe; `recorded` gives Episodes of a real run.

    Raises RecipeError where the speed of its GPUs is not known.
    """
    rows = override(assumptions(recipe), settings)
    value = values(rows)
    made = machine(recipe, shape, layout, cache, value)
    source = recorded or Profile(value, _limits(recipe), refills=recipe.rollout.refills)

    def run(mode: str, on: SimMachine) -> Outcome:
        schedule = Schedule(
            machine=on,
            rollout=recipe.rollout,
            source=source,
            agent_s=recipe.budgets.agent_s,
            passing_share=value["passing_share"],
            section=recipe.schedule,
            seed=recipe.seed,
        )
        return schedule.run(mode, min(num_steps, recipe.steps))

    own = run(recipe.schedule.mode, made)
    others = tuple(run(mode, on) for mode, on in _others(recipe, made, layout)) if compare else ()
    return Simulation(rows, own, others, split=layout.colocated)


def _limits(recipe: Recipe) -> Limits:
    tool_s = float(recipe.harness.options.get("tool_timeout_s", recipe.budgets.tool_s))
    return Limits(
        max_turns=recipe.rollout.max_turns,
        max_new_tokens=recipe.rollout.max_new_tokens,
        max_context_tokens=recipe.rollout.max_context_tokens,
        tool_s=min(tool_s, recipe.budgets.tool_s),
        grading_s=recipe.budgets.grading_s,
    )


def _others(recipe: Recipe, made: SimMachine, layout: Layout) -> Iterator[tuple[str, SimMachine]]:
    if layout.colocated and made.num_engines < 2:
        return
    for mode in MODES:
        if mode != recipe.schedule.mode:
            yield mode, made.halved() if layout.colocated else made
