"""Compare the search of `swerl train tune` with an exhaustive one, and its fit with a real run.

    python bench/tune.py                          12 pairs of machine and model
    python bench/tune.py --only "2 x 8"           those with this text in their name
    python bench/tune.py --run runs/twin          fit two steps, predict the next twenty
    python bench/tune.py --caches                 the most that scheduling caches could gain

The exhaustive search simulates every combination of a reduced grid, each with the same trainer. No
GPU is used: both searches rest on the simulation's assumptions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from swerl.cli.train_status import stored_recipe
from swerl.plan.plan import plan
from swerl.plan.simulation.fit import fit_run, measured
from swerl.plan.simulation.simulate import simulate
from swerl.plan.tune import PlanSearch
from swerl.recipe.load import load
from swerl.recipe.schema import Recipe

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
MODELS = (
    ("Qwen3-4B", "qwen4b_1node"),
    ("Qwen3-8B", "qwen4b_1node"),
    ("Qwen3-30B-A3B", "qwen35b_1node"),
    ("Qwen3.6-35B-A3B", "qwen35b_1node"),
)
MACHINES = (("h100", 1), ("h200", 1), ("h100", 2))
"""GPU and nodes of 8."""
STEPS = 6
"""Simulated steps of a plan: fewer than `tune` takes, for time."""
BUSY = ("qwen4b_1node", "qwen35b_1node", "qwen35b_8node", "glm_8node")
"""Recipes whose caches are compared with endless ones."""
FIRST, NEXT = 2, 20
"""Steps that are fitted, and steps that are predicted."""


def pairs() -> Iterator[tuple[str, Recipe]]:
    """Yield the name and the recipe of every pair."""
    for (model, name), (gpu, nodes) in product(MODELS, MACHINES):
        settings = (
            f"model.path=/models/{model}",
            f"cluster.gpu={gpu}",
            f"cluster.nodes={nodes}",
            *("rollout.groups_per_step=4", "rollout.episodes_per_group=8"),
            "rollout.concurrency=32",
        )
        yield f"{model}, {nodes} x 8 {gpu}", load([RECIPES / f"{name}.toml"], settings)


def reduced(recipe: Recipe) -> PlanSearch:
    """Return a search over two or three values of each key."""
    search = PlanSearch(recipe, most_sandboxes=64, num_steps=STEPS)
    share, schedule, engines, groups, slots = search.axes
    share[:] = [share[0], *(share[2::2] or share[1:])]
    schedule[:] = [schedule[0], schedule[2], schedule[4]]
    engines[:] = engines[1:3]
    groups[:], slots[:] = groups[1:3], slots[-1:]
    return search


def compare(recipe: Recipe) -> tuple[float, float, float, int, float]:
    """Return rollouts an hour of both searches, the search's CPU seconds and plans on the reduced
    grid, and CPU seconds on the whole grid."""
    began = time.process_time()
    whole = PlanSearch(recipe, num_steps=STEPS).best()
    whole_s = time.process_time() - began
    for each in whole:
        memory = plan(each.recipe).memory
        assert memory is not None and memory.fits
    search = reduced(recipe)
    found = search.best()[0].episodes_per_hour
    every = reduced(recipe)
    for place in product(*(range(len(axis)) for axis in every.axes)):
        every.at(place)
    return found, every.found[0].episodes_per_hour, len(search.plans), len(every.plans), whole_s


def predict(run: Path) -> None:
    """Fit the first steps of a run and print how well they predict the next ones."""
    planned = plan(stored_recipe(run))
    source, value = fit_run(run, planned, end=FIRST)
    cache = planned.memory.cache if planned.memory else None
    settings = [f"{key}={number!r}" for key, number in value.items()]
    known = planned.recipe, planned.shape, planned.layout, cache
    found = simulate(*known, settings=settings, recorded=source, num_steps=NEXT).own
    later = measured(run, FIRST, FIRST + NEXT)
    off = found.step_s / later["step_s"] - 1
    print(
        f"{found.step_s:.2f} s a step from {FIRST} steps; {later['step_s']:.2f} s in the next "
        f"{later['steps']:.0f}: {off:+.1%} (goal: within 15 %)"
    )


def caches() -> None:
    """Simulate recipes with ever more Episodes, with the engines' caches and with endless ones.

    No rule for which session gives its cache up can gain more than the difference.
    """
    print("recipe               episodes  contexts in a cache  read again  s a step  endless cache")
    for name, times in product(BUSY, (1, 2, 4, 8)):
        recipe = load([RECIPES / f"{name}.toml"], ())
        groups, slots = recipe.rollout.groups_per_step * times, recipe.rollout.concurrency * times
        settings = (f"rollout.groups_per_step={groups}", f"rollout.concurrency={slots}")
        planned = plan(load([RECIPES / f"{name}.toml"], settings))
        assert planned.memory is not None
        cache = planned.memory.cache
        own, endless = (
            simulate(planned.recipe, planned.shape, planned.layout, each, num_steps=3).own
            for each in (cache, replace(cache, tokens=10**12))
        )
        gain = own.step_s / endless.step_s - 1
        row = f"{name:<20} {slots:>8}  {cache.contexts:19.1f}  {own.tokens_again:10.1%}"
        print(f"{row}  {own.step_s:8.0f}  {endless.step_s:6.0f} ({gain:+.1%})", flush=True)


def main() -> None:
    """Print one line a pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="text in the names of the pairs to compare")
    parser.add_argument("--run", type=Path, help="folder of a real run with 22 steps")
    parser.add_argument("--caches", action="store_true", help="compare with endless caches")
    args = parser.parse_args()
    if args.caches:
        caches()
        return
    if args.run:
        predict(args.run)
        return
    print("pair                        search  exhaustive  share   plans  whole search, CPU s")
    for name, recipe in (each for each in pairs() if args.only in each[0]):
        found, best, tried, every, seconds = compare(recipe)
        row = f"{name:<27} {found:6.0f}  {best:10.0f}  {found / best:5.1%}  {tried:>2}/{every:<3}"
        print(f"{row}  {seconds:18.1f}", flush=True)
    print("goals: share of 95 % or more, 60 s or less, every plan fits")


if __name__ == "__main__":
    main()
