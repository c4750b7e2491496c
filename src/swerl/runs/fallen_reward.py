"""The rule about a reward that falls: since when, on which Tasks, what changed with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from statistics import fmean, median

from swerl.runs.evidence import Evidence, Symptom

_WINDOW = 3
"""Steps whose mean reward is compared: one step alone is noisy."""
_LEAST_FALL = 0.25
"""Share of the best mean that must be lost."""
_NOISE_FACTOR = 4.5
"""Standard errors that a fall must exceed. In simulations with 24 to 512 Episodes a step and no
change of the policy, at most 2 % of the runs of 60 steps had a larger one."""


def fallen_reward(run: Evidence) -> Symptom | None:
    """Find a reward that fell and did not come back, and what changed with it."""
    series = run.series("reward")
    values = [value for _, value in series]
    means = [fmean(values[i : i + _WINDOW]) for i in range(len(values) - _WINDOW + 1)]
    if len(means) <= _WINDOW:
        return None
    best = worst = top = 0
    for place in range(_WINDOW, len(means)):
        if means[place - _WINDOW] > means[top]:
            top = place - _WINDOW
        if means[top] - means[place] > means[best] - means[worst]:
            best, worst = top, place
    fall = means[best] - means[worst]
    if fall <= max(_LEAST_FALL * abs(means[best]), _NOISE_FACTOR * _noise(values)):
        return None
    if means[best] - means[-1] < fall / 2:
        return None
    numbers = [step for step, _ in series]
    before, after = numbers[best : best + _WINDOW], numbers[worst : worst + _WINDOW]
    changes = _changed_metrics(run, before, after)
    key, fix = _remedy(changes)
    back = f"`swerl train rewind {run.root} --step {before[-1] + 1}` goes back to before the fall"
    return Symptom(
        after[0],
        (
            f"reward {means[best]:.2f} in steps {_span(before)}, {means[worst]:.2f} in steps "
            f"{_span(after)}, {means[-1]:.2f} in the last {_WINDOW} steps",
            _changes_in_words(changes),
            *_fallen_tasks(run, before[-1], after[0]),
        ),
        says=f"the reward fell from {means[best]:.2f} to {means[worst]:.2f}",
        key=key,
        fix=f"{fix}; {back}",
    )


def _noise(values: Sequence[float]) -> float:
    """Return the standard error of the difference of two means, by second differences.

    A trend cancels out in them. Their deviation is that of a step times √6, and 0.6745 deviations
    are the median of a normal distribution's absolute values.
    """
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return median(bends) / (0.6745 * sqrt(6)) * sqrt(2 / _WINDOW)


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}"


_Changes = Mapping[str, tuple[float, float]]
_WATCHED = (
    *("entropy", "grad_norm", "kl", "mismatch", "clip_fraction", "lr"),
    *("turns_per_episode", "sampled_tokens", "row_tokens_max", "malformed_calls"),
    *("unsolved_rate", "timeout_rate", "cheat_rate", "infra_episodes", "groups_with_signal"),
    *("step_s", "test_s", "other_share", "gateway_lag_s", "staleness"),
)
"""Metrics that may explain a fall: the policy, its replies, the verdicts, the machine."""
_CHANGE = 1.5
"""Factor from which a metric counts as changed."""
_TINY: Mapping[str, float] = {
    "mismatch": 0.01, "gateway_lag_s": 0.5, "kl": 0.02, "malformed_calls": 3, "infra_episodes": 2,
    "timeout_rate": 0.1, "cheat_rate": 0.05, "unsolved_rate": 0.1, "clip_fraction": 0.05,
}  # fmt: skip
"""Values below which a metric shows nothing, even if it is a multiple of an earlier one."""
_MOST_CHANGES = 6


def _changed_metrics(run: Evidence, before: Sequence[int], after: Sequence[int]) -> _Changes:
    """Return metric -> its means before and after, the largest change first."""
    agents = {name for m in run.metrics.values() for name in m if name.startswith("solve_rate/")}
    changes: dict[str, tuple[float, float]] = {}
    factors: dict[str, float] = {}
    for name in (*_WATCHED, *sorted(agents)):
        ends = [[run.metrics[step].get(name) for step in steps] for steps in (before, after)]
        recorded = [[value for value in values if value is not None] for values in ends]
        if not all(recorded):
            continue
        old, new = (fmean(values) for values in recorded)
        low, high = sorted((abs(old), abs(new)))
        factor = high / max(low, 1e-12)
        if factor >= _CHANGE and high > _TINY.get(name, 0.0):
            changes[name] = (old, new)
            factors[name] = factor
    ordered = sorted(changes, key=lambda name: -factors[name])[:_MOST_CHANGES]
    return {name: changes[name] for name in ordered}


def _changes_in_words(changes: _Changes) -> str:
    if not changes:
        return f"no other metric changed by a factor of {_CHANGE:g}"
    figures = (f"{name} {old:.3g} → {new:.3g}" for name, (old, new) in changes.items())
    return f"changed with it: {', '.join(figures)}"


_REMEDIES: Sequence[tuple[str, bool, str, str]] = (
    ("infra_episodes", True, "", "`swerl doctor` checks this machine; logs/ has the errors"),
    ("timeout_rate", True, "budgets.agent_s", "raise it, or lower rollout.concurrency"),
    ("cheat_rate", True, "rollout.reward", "give the verdict `cheat` no reward"),
    ("mismatch", True, "algorithm.mismatch", "find why engine and trainer differ"),
    ("kl", True, "trainer.lr", "divide it by 3 to 10"),
    ("grad_norm", True, "trainer.lr", "divide it by 3 to 10"),
    ("entropy", True, "trainer.lr", "divide it by 3 to 10"),
    ("entropy", False, "algorithm.entropy_coef", "raise it, or lower trainer.lr"),
    ("malformed_calls", True, "trainer.lr", "divide it by 3 to 10: the replies lose their form"),
    ("turns_per_episode", True, "rollout.max_turns", "read attempts that do not end"),
    ("step_s", True, "rollout.concurrency", "lower it: the machine is overloaded"),
)
"""Metric, True if it rises, the key to change, and what to do; the first match counts."""


def _remedy(changes: _Changes) -> tuple[str, str]:
    """Return the key to change and what to do, by the metric that changed with the reward."""
    for name, rises, key, fix in _REMEDIES:
        if name in changes and (changes[name][1] > changes[name][0]) is rises:
            return key, fix
    return "", "compare attempts of both steps in `swerl view`"


def _fallen_tasks(run: Evidence, before: int, after: int) -> Iterator[str]:
    """Yield the Tasks that were solved up to one step and less from another one on."""
    rates: tuple[dict[str, list[bool]], dict[str, list[bool]]] = ({}, {})
    for entry in run.groups:
        if entry.verdicts and not before < entry.step < after:
            solved = [verdict == "solved" for verdict in entry.verdicts]
            rates[entry.step >= after].setdefault(entry.task, []).extend(solved)
    old, new = rates
    shared = old.keys() & new.keys()
    if not shared:
        if old and new:
            yield f"no task was attempted both up to step {before} and from step {after} on"
        return
    drops = {task: fmean(old[task]) - fmean(new[task]) for task in shared}
    fallen = sorted((task for task in shared if drops[task] > 0), key=lambda t: (-drops[t], t))
    examples = ", ".join(
        f"{task} {sum(old[task])}/{len(old[task])} → {sum(new[task])}/{len(new[task])}"
        for task in fallen[:3]
    )
    yield f"{len(fallen)} of {len(shared)} tasks of both are solved less often: {examples}"
