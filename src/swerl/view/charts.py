"""Charts as plain geometry: lines and lanes in SVG units, and numbers for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any, TypeAlias, TypeGuard

from swerl.runs.history import RunHistory
from swerl.view.conversation import ShownTurn

NONE = "\N{EN DASH}"
"""Shown in place of a missing number."""
WIDTH, HEIGHT = 600, 160
"""SVG units of a chart; the page stretches it."""
_MAIN: Mapping[str, Sequence[str]] = {
    "Reward": ("reward", "solve_rate"),
    "Verdicts": ("unsolved_rate", "timeout_rate", "cheat_rate"),
    "Audits": ("audits", "forgeries"),
    "Engine against trainer, nats": ("mismatch", "mismatch_max"),
    "Entropy, nats a token": ("entropy",),
    "Gradient norm": ("grad_norm",),
    "Sampled and trained tokens": ("sampled_tokens", "trained_tokens"),
    "Seconds of a step": ("step_s", "model_s", "test_s", "train_s", "publish_s"),
    "Dollars": ("dollars",),
}
_SHARES = ("Reward", "Verdicts")
"""Charts whose scale reaches 1."""
Points: TypeAlias = Sequence[tuple[int, float]]
"""(step, value), by step."""


@dataclass(frozen=True, slots=True)
class Line:
    """One metric in a panel."""

    name: str
    path: str
    last: float
    """The newest value: a line may end before the others."""
    colour: int
    band: str = ""
    """Area of a confidence interval."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart over the steps."""

    title: str
    steps: Sequence[int]
    lines: Sequence[Line]
    low: float
    high: float
    is_main: bool = True


def panels(history: RunHistory) -> list[Panel]:
    """Return a chart of every metric of a run, the most important ones first."""
    charts = [
        _panel(title, {name: _points(history, name) for name in names})
        for title, names in _MAIN.items()
    ]
    charts.insert(1, _panel("Evaluations, 95 % interval", history.evals, bounds=history.bounds))
    drawn = {name for names in _MAIN.values() for name in names} | {"time"}
    for name in sorted({name for metrics in history.steps.values() for name in metrics} - drawn):
        charts.append(_panel(name, {name: _points(history, name)}, is_main=False))
    return [panel for panel in charts if panel]


def reward_svg(history: RunHistory) -> str:
    """Return the chart of the reward as an SVG file of its own; empty without a step."""
    panel = _panel("Reward", {name: _points(history, name) for name in _MAIN["Reward"]})
    if panel is None:
        return ""
    colours = ("#1f5fbf", "#b86a00")
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 230" font-size="12" '
        'font-family="sans-serif" role="img" aria-label="Reward by step">',
        '<rect width="680" height="230" fill="#fff"/><g transform="translate(50 34)">',
        '<path d="M0 0H600M0 80H600M0 160H600" stroke="#ddd" fill="none"/>',
    ]
    for number, line in enumerate(panel.lines):
        stroke = f'stroke="{colours[number]}" stroke-width="2" fill="none"'
        parts.append(f'<path d="{line.path}" {stroke}/>')
        label = f'<text x="{number * 130}" y="-14" fill="{colours[number]}">'
        parts.append(f"{label}{escape(line.name)} {number_text(line.last)}</text>")
    ends = f'<text y="180">step {panel.steps[0]}</text>'
    parts.append(f'{ends}<text x="600" y="180" text-anchor="end">step {panel.steps[-1]}</text>')
    for place, value in ((4, panel.high), (164, panel.low)):
        parts.append(f'<text x="-6" y="{place}" text-anchor="end">{number_text(value)}</text>')
    return "".join([*parts, "</g></svg>\n"])


def _panel(
    title: str,
    series: Mapping[str, Points],
    *,
    bounds: Mapping[str, Mapping[int, tuple[float, float]]] | None = None,
    is_main: bool = True,
) -> Panel | None:
    """Return a chart with a line for each series; None if all are empty.

    `bounds` has series -> step -> interval, and sets the scale to 0 … 1.
    """
    drawn = {name: points for name, points in series.items() if points}
    if not drawn:
        return None
    steps = sorted({step for points in drawn.values() for step, _ in points})
    values = [value for points in drawn.values() for _, value in points]
    low, high = min(0.0, *values), max(values)
    if bounds is not None or title in _SHARES:
        high = max(high, 1.0)
    places = {name: place for place, name in enumerate(series, 1)}
    lines = []
    for name, points in drawn.items():
        path = _path(points, steps, low, high)
        band = _band((bounds or {}).get(name, {}), steps, low, high)
        lines.append(Line(name, path, points[-1][1], places[name], band))
    return Panel(title, steps, lines, low, high, is_main)


def _points(history: RunHistory, name: str) -> list[tuple[int, float]]:
    values = ((step, metrics.get(name)) for step, metrics in sorted(history.steps.items()))
    return [(step, value) for step, value in values if _is_number(value)]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _xy(points: Iterable[tuple[int, float]], steps: Sequence[int], low: float, high: float) -> str:
    span, height = max(steps[-1] - steps[0], 1), (high - low) or 1.0
    return "L".join(
        f"{(step - steps[0]) / span * WIDTH:.1f} {HEIGHT - (value - low) / height * HEIGHT:.1f}"
        for step, value in points
    )


def _path(points: Points, steps: Sequence[int], low: float, high: float) -> str:
    # A single step is drawn as a short stroke.
    return f"M{_xy(points, steps, low, high)}" + ("h12" if len(points) == 1 else "")


def _band(
    bounds: Mapping[int, tuple[float, float]], steps: Sequence[int], low: float, high: float
) -> str:
    ends = sorted(bounds.items())
    if len(ends) < 2:
        return ""
    around = [(step, upper) for step, (_, upper) in ends]
    around += [(step, lower) for step, (lower, _) in reversed(ends)]
    return f"M{_xy(around, steps, low, high)}Z"


_PHASES = ("boot", "agent", "diff", "grade_boot", "grade")
"""Phases of an Episode in order; `hide_future` is part of boot and `test` of grade."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time in a lane."""

    label: str
    x: float
    width: float
    seconds: float
    turn: int = 0
    """Number of its Turn; 0 for none."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """An Episode over time: phases, the model's replies, the tools between them."""

    total_s: float
    lanes: Mapping[str, Sequence[Bar]] = field(default_factory=dict)

    def seconds(self, lane: str) -> float:
        """Return the seconds of a lane's bars together."""
        return sum(bar.seconds for bar in self.lanes.get(lane, ()))


_Stretch: TypeAlias = tuple[str, float, float, int]
"""Label, start in seconds, duration in seconds, number of the Turn."""


def lanes(timings: Mapping[str, Any], turns: Sequence[ShownTurn]) -> Lanes | None:
    """Place an Episode's phases and Turns along time; None if nothing was timed."""
    timed = [turn for turn in turns if _is_number(turn.facts.get("started_s"))]
    phases: list[_Stretch] = []
    for name in _PHASES:
        if _is_number(seconds := timings.get(name)):
            start = phases[-1][1] + phases[-1][2] if phases else 0.0
            phases.append((name, start, seconds, 0))
    # A Session opens when its Episode begins.
    model = [("model", t.facts["started_s"], t.facts["seconds"], t.number) for t in timed]
    calling = {turn.number for turn in timed if turn.calls or turn.finish == "tool_calls"}
    ends = sorted((begin, begin + seconds, number) for _, begin, seconds, number in model)
    tools = [
        ("tool", end, following - end, number)
        for (_, end, number), (following, _, _) in pairwise(ends)
        if following > end and number in calling
    ]
    total = max((start + seconds for _, start, seconds, _ in [*phases, *model]), default=0.0)
    if not total:
        return None
    stretches = {"phases": phases, "model": model, "tools": tools}
    scale = WIDTH / total
    bars = {
        lane: [Bar(name, at * scale, max(s * scale, 0.6), s, turn) for name, at, s, turn in rows]
        for lane, rows in stretches.items()
        if rows
    }
    return Lanes(total, bars)


def spark(values: Sequence[float], width: int = 120, height: int = 24) -> str:
    """Return the path of a small line over values between 0 and their maximum."""
    finite = [value for value in values if _is_number(value)]
    if not finite:
        return ""
    low, high = min(0.0, *finite), max(*finite, 1e-9)
    span = max(len(finite) - 1, 1)
    points = (
        f"{n / span * width:.1f} {height - 2 - (value - low) / (high - low) * (height - 4):.1f}"
        for n, value in enumerate(finite)
    )
    return "M" + "L".join(points) + ("h4" if len(finite) == 1 else "")


def number_text(value: object) -> str:
    """Return a number as people read it: 1,234 or 0.0321; a dash for none."""
    if not isinstance(value, int | float):
        return NONE
    if not math.isfinite(value):
        return "not finite"
    if float(value).is_integer() and abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(value: object, is_change: bool = False) -> str:
    """Return a share as a percentage, with its sign if it is a change."""
    if not _is_number(value):
        return NONE
    return f"{100 * value:+.1f}" if is_change else f"{100 * value:.1f} %"


def signed(value: object) -> str:
    """Return a number with its sign, so that it is read without colour."""
    return f"{value:+.2f}" if isinstance(value, int | float) else NONE


def duration(seconds: object) -> str:
    """Return seconds in the unit that people would choose."""
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return NONE
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


FILTERS: dict[str, Callable[..., str]] = {
    "spark": spark,
    "number": number_text,
    "percent": percent,
    "signed": signed,
    "duration": duration,
}
