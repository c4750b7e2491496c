"""Plot a run: its reward curve, and a sheet with its other metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swerl.runs.history import RunHistory

_SHEET = "metrics.png"
_CURVE = "reward.png"
_PHASES = ("train_s", "publish_s", "save_s")


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    names: Mapping[str, str]
    """Metric -> its label in the legend."""
    log: bool = False


_PANELS = (
    _Panel("solved, share of episodes", {"solve_rate": "solved", "timeout_rate": "timed out"}),
    _Panel(
        "engine against trainer", {"mismatch": "mean |log p|", "mismatch_max": "largest"}, log=True
    ),
    _Panel("tokens of a row", {"row_tokens_mean": "mean", "row_tokens_max": "longest"}),
    _Panel("entropy, nats a token", {"entropy": "entropy"}),
    _Panel("ratio's clipping", {"clip_fraction": "share of tokens clipped"}),
    _Panel("gradient norm", {"grad_norm": "before clipping"}),
    _Panel("staleness, weight versions", {"staleness": "mean", "staleness_max": "largest"}),
    _Panel("dollars so far, estimated", {"dollars": "dollars"}),
)


def draw(folder: Path, past: RunHistory) -> None:
    """Draw `reward.png` and `metrics.png` into a run's folder."""
    reward_curve(folder / _CURVE, past.series("reward"), past.evals)
    sheet(folder / _SHEET, [metrics for _, metrics in sorted(past.steps.items())])


def sheet(path: Path, steps: Sequence[Mapping[str, float]]) -> None:
    """Draw the seconds of each phase, and every panel whose metrics the steps have, as a PNG."""
    from matplotlib.figure import Figure

    steps = [_with_means(metrics) for metrics in steps]
    panels = [panel for panel in _PANELS if any(name in m for m in steps for name in panel.names)]
    num_rows = -(-(1 + len(panels)) // 3)
    figure = Figure(figsize=(13, 3.2 * num_rows), dpi=110, layout="constrained")
    places = list(figure.subplots(num_rows, 3, squeeze=False).flat)
    _draw_phases(places[0], steps)
    for axes, panel in zip(places[1:], panels, strict=False):
        _draw_panel(axes, panel, steps)
    for axes in places[1 + len(panels) :]:
        axes.set_visible(False)
    figure.savefig(path)


def _draw_panel(axes: Any, panel: _Panel, steps: Sequence[Mapping[str, float]]) -> None:
    for name, label in panel.names.items():
        points = [(number, m[name]) for number, m in enumerate(steps) if name in m]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1.6)
    if panel.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    _finish(axes, panel.title)


def _draw_phases(axes: Any, steps: Sequence[Mapping[str, float]]) -> None:
    """Stack the seconds of a step's phases; they may overlap if rollouts run beside training."""
    parts = {name: [metrics.get(name, 0.0) for metrics in steps] for name in _PHASES}
    rest = [
        max(metrics.get("step_s", 0.0) - sum(values), 0.0)
        for metrics, *values in zip(steps, *parts.values(), strict=True)
    ]
    layers = {"rollout and the rest": rest, **{n.removesuffix("_s"): v for n, v in parts.items()}}
    axes.stackplot(range(len(steps)), list(layers.values()), labels=list(layers), alpha=0.85)
    _finish(axes, "seconds of a step")


def _finish(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)


def _with_means(metrics: Mapping[str, float]) -> Mapping[str, float]:
    if not metrics.get("rows"):
        return metrics
    return {**metrics, "row_tokens_mean": metrics["row_tokens"] / metrics["rows"]}


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
