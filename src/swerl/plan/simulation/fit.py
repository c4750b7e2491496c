"""Fit the simulation's assumptions to the steps of a real run."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from pathlib import Path

from swerl.core.errors import InputError
from swerl.plan.plan import RecipePlan
from swerl.plan.simulation.episodes import RecordedLoads, read_events, read_recorded
from swerl.plan.simulation.schedule import SimulatedRun
from swerl.plan.simulation.simulate import assumptions, simulate, values

_ENGINE = {"prompt_mfu": -1, "bandwidth_share": -1, "layer_s": 1}
_TRAINER = {"train_mfu": -1, "train_layer_s": 1, "link_share": -1, "host_adam_per_s": -1}
"""Assumptions, and the power with which they change if all seconds are multiplied."""
_HALVINGS = 16
_STEPS = 6


def measured(run: Path, first: int = 0, end: int | None = None) -> dict[str, float]:
    """Return mean metrics of the ended steps `first` to `end`, and their number as `steps`."""
    events = read_events(run / "events.jsonl") if (run / "events.jsonl").is_file() else ()
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
    source, value = RecordedLoads(loads), values(assumptions(planned.recipe))
    tools = sum(turn.tool_s for load in loads for turn in load.turns)
    wanted = tools + sum(load.boot_s + load.engine_s + load.grading_s for load in loads)
    fitted = {
        **{"gateway_s": 0.0, "host_bytes_per_s": 1e30, "update_bytes_per_s": 1e30},
        **{"switch_fixed_s": 0.0, "update_fixed_s": steps["publish_s"]},
        "step_fixed_s": 0.0,
    }

    def simulated(powers: Mapping[str, int], times: float) -> SimulatedRun:
        fitted.update({key: value[key] * times**power for key, power in powers.items()})
        cache = planned.memory.cache if planned.memory else None
        settings = [f"{key}={number!r}" for key, number in fitted.items()]
        known = planned.recipe, planned.shape, planned.layout, cache
        return simulate(*known, settings=settings, recorded=source, num_steps=_STEPS).own

    low, high = 1e-3, 1e3
    for _ in range(_HALVINGS):
        times = sqrt(low * high)
        found = simulated(_ENGINE, times)
        low, high = (low, times) if found.sandbox_s > wanted / len(loads) else (times, high)
    found = simulated(_TRAINER, steps["train_s"] / found.mean("train_s"))
    fitted["step_fixed_s"] = max(steps["step_s"] - found.step_s, 0.0)
    return source, fitted
