"""Fit the simulation's assumptions to the steps of a real run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from pathlib import Path

from swerl.core.errors import InputError
from swerl.plan.plan import RecipePlan
from swerl.plan.simulation.episodes import RecordedLoads, read_recorded
from swerl.plan.simulation.schedule import SimulatedRun
from swerl.plan.simulation.simulate import assumptions, simulate, values
from swerl.runs.history import read_events

_ENGINE = {"prompt_mfu": -1, "bandwidth_share": -1, "layer_s": 1}
_TRAINER = {"train_mfu": -1, "train_layer_s": 1, "link_share": -1, "host_adam_per_s": -1}
"""Assumptions, and the power with which they change if all seconds are multiplied."""
_CLOSE = 1.002
"""Relative width at which a factor is found."""
_ROUNDS = 3
_STEPS = 6


def measured(run: Path, first: int = 0, end: int | None = None) -> dict[str, float]:
    """Return mean metrics of the ended steps `first` to `end`, and their number as `steps`."""
    events = read_events(run / "events.jsonl")
    ended = {e["step"]: e["metrics"] for e in events if e["event"] == "StepEnded"}
    found = [*ended.values()][first:end]
    if not found:
        raise InputError(f"{run} has no ended step", hint="let a run finish two steps first")
    keys = ("step_s", "train_s", "publish_s")
    means = {key: sum(each.get(key, 0.0) for each in found) / len(found) for key in keys}
    return {**means, "steps": len(found)}


def fit_run(
    run: Path, planned: RecipePlan, *, end: int | None = None
) -> tuple[RecordedLoads, dict[str, float]]:
    """Return the Episodes of a run's steps before `end`, and the assumptions that fit them.

    `planned` is the run's own recipe. Engines give simulated Episodes their recorded seconds, the
    trainer takes the recorded seconds, and the rest of a recorded step is `step_fixed_s`.
    """
    steps = measured(run, end=end)
    loads = read_recorded(run, prefixes=tuple(f"{n:05d}/" for n in range(int(steps["steps"]))))
    value = values(assumptions(planned.recipe))
    engine_s = sum(load.engine_s for load in loads) / len(loads)
    sandbox_s = sum(load.sandbox_s for load in loads) / len(loads)
    fitted = {
        **{"gateway_s": 0.0, "host_bytes_per_s": 1e30, "update_bytes_per_s": 1e30},
        **{"switch_fixed_s": 0.0, "update_fixed_s": steps["publish_s"]},
        "step_fixed_s": 0.0,
    }

    def simulated(powers: Mapping[str, int], times: float, alone: float) -> SimulatedRun:
        fitted.update({key: value[key] * times**power for key, power in powers.items()})
        source = RecordedLoads(loads, alone)
        cache = planned.memory.cache if planned.memory else None
        settings = [f"{key}={number!r}" for key, number in fitted.items()]
        known = planned.recipe, planned.shape, planned.layout, cache
        return simulate(*known, settings=settings, recorded=source, num_steps=_STEPS).own

    def fit_engine(alone: float, low: float, high: float) -> float:
        return _bisected(lambda x: simulated(_ENGINE, x, alone).engine_s > engine_s, low, high)

    def fit_alone(engine: float) -> float:
        def is_long(alone: float) -> bool:
            found = simulated(_ENGINE, engine, alone)
            return found.sandbox_s - found.engine_s > sandbox_s

        return _bisected(is_long, 1e-2, 1.0)

    # On shared cores recorded seconds of sandboxes are longer than those of one alone, and each of
    # the two factors depends on the other.
    alone, engine = 1.0, fit_engine(1.0, 1e-3, 1e3)
    for _ in range(_ROUNDS if value["cores"] else 0):
        alone = fit_alone(engine)
        engine = fit_engine(alone, engine / 8, engine * 8)
    found = simulated(_ENGINE, engine, alone)
    found = simulated(_TRAINER, steps["train_s"] / found.mean("train_s"), alone)
    fitted["step_fixed_s"] = max(steps["step_s"] - found.step_s, 0.0)
    return RecordedLoads(loads, alone), fitted


def _bisected(is_long: Callable[[float], bool], low: float, high: float) -> float:
    """Return the factor at which times become too long."""
    while high > low * _CLOSE:
        middle = sqrt(low * high)
        low, high = (low, middle) if is_long(middle) else (middle, high)
    return sqrt(low * high)
