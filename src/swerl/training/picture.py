"""The reward curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def reward_curve(
    path: Path, rewards: Sequence[float], evals: Mapping[str, Sequence[tuple[int, float]]]
) -> None:
    """Draw mean reward by step, and each evaluation's solve rate at its step, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    steps = range(len(rewards))
    axes.plot(steps, rewards, color="#9ec5e8", linewidth=1, label="mean reward of a step")
    axes.plot(steps, _smooth(rewards), color="#1f6fb2", linewidth=2.2, label="over five steps")
    for (name, points), marker in zip(evals.items(), "osD^v", strict=False):
        axes.plot(*zip(*points, strict=True), marker=marker, linestyle="--", label=f"eval: {name}")
    axes.set(xlabel="optimizer step", ylabel="solved", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path)


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    return [
        sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))
    ]
