"""Charts as plain geometry: lines, areas, bars and lanes in SVG units, and numbers for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import Any, TypeAlias, TypeGuard

from swerl.runs.history import RunHistory
from swerl.runs.prompts import GroupEntry
from swerl.view.conversation import ShownTurn

NONE = "\N{EN DASH}"
"""Shown for a number that there is not."""
WIDTH, HEIGHT = 600, 160
"""SVG units of a chart; the page stretches it."""
_VERDICTS = ("solve_rate", "unsolved_rate", "timeout_rate", "cheat_rate")
_MAIN: Mapping[str, Sequence[str]] = {
    "Reward": ("reward", "solve_rate"),
    "Engine against trainer, nats": ("mismatch", "mismatch_max"),
    "Entropy, nats a token": ("entropy",),
    "Gradient norm": ("grad_norm",),
    "Sampled and trained tokens": ("sampled_tokens", "trained_tokens"),
    "Seconds of a step": ("step_s", "model_s", "test_s", "train_s", "publish_s"),
    "Dollars": ("dollars",),
}
_NUM_BINS = 16
_RATES = ("never solved", "solved up to 1/3", "solved up to 2/3", "solved more often")
_Row: TypeAlias = tuple[int, list[bool], bool | None, str | None]
"""Tokens of an Episode, outcomes of its Task, use and verdict."""
_PHASES = ("boot", "agent", "diff", "grade_boot", "grade")
"""Phases of an Episode in order; `hide_future` is part of boot and `test` of grade."""
_AFTER_THE_AGENT = ("diff", "grade")
"""Phases that work, without model and tools; booting is waiting."""
_SHORTEST_S = 0.001
"""Seconds below which a gap is rounding."""


@dataclass(frozen=True, slots=True)
class Line:
    """One metric in a panel."""

    name: str
    path: str
    values: Sequence[float]
    band: str = ""
    """Area of a confidence interval, or below a stacked line."""
    colour: int = 0
    """Number of its colour; 0: its place in the panel."""

    @property
    def last(self) -> float:
        """The newest value: a line may end before the others."""
        return next((value for value in reversed(self.values) if _is_number(value)), math.nan)


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
    """Return a chart of every metric of a run, the telling ones first."""
    names = sorted({name for metrics in history.steps.values() for name in metrics})
    found = [panel for title, shown in _MAIN.items() if (panel := _panel(title, shown, history))]
    verdicts = _stacked("Verdicts", _VERDICTS, history)
    evals = _evaluations(history)
    found[1:1] = [each for each in (evals, verdicts) if each]
    drawn = {name for shown in (*_MAIN.values(), _VERDICTS) for name in shown} | {"time"}
    rest = (_panel(name, [name], history, is_main=False) for name in names if name not in drawn)
    return [*found, *(each for each in rest if each)]


def together(runs: Mapping[str, RunHistory]) -> list[Panel]:
    """Return a chart of every metric and evaluation with a line for each of these runs."""
    names = {name for run in runs.values() for metrics in run.steps.values() for name in metrics}
    main = [name for shown in _MAIN.values() for name in shown]
    found = []
    for name in [*main, *_VERDICTS[1:], *sorted(names - {*main, *_VERDICTS, "time"})]:
        points = {run: _points(history, name) for run, history in runs.items()}
        found.append(_lines(name, points, is_main=name in main))
    for split in dict.fromkeys(split for run in runs.values() for split in run.evals):
        points = {run: history.evals.get(split, []) for run, history in runs.items()}
        found.insert(2, _lines(f"Evaluation: {split}", points))
    return [panel for panel in found if panel]


def _lines(
    title: str, points: Mapping[str, Sequence[tuple[int, float]]], *, is_main: bool = True
) -> Panel | None:
    steps: dict[int, dict[str, float]] = {}
    for name, values in points.items():
        for step, value in values:
            steps.setdefault(step, {})[name] = value
    return _panel(title, points, RunHistory(steps=dict(steps)), is_main=is_main)


def _panel(
    title: str, names: Iterable[str], history: RunHistory, *, is_main: bool = True
) -> Panel | None:
    every = list(names)
    series = {name: points for name in every if (points := _points(history, name))}
    if not series:
        return None
    steps = sorted({step for points in series.values() for step, _ in points})
    values = [value for points in series.values() for _, value in points]
    low, high = min(0.0, *values), max(values)
    if title == "Reward":
        high = max(high, 1.0)
    lines = [
        Line(name, _path(points, steps, low, high), _at(points, steps), "", every.index(name) + 1)
        for name, points in series.items()
    ]
    return Panel(title, steps, lines, low, high, is_main)


def _points(history: RunHistory, name: str) -> list[tuple[int, float]]:
    found = ((step, metrics.get(name)) for step, metrics in sorted(history.steps.items()))
    return [(step, v) for step, v in found if _is_number(v)]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _stacked(title: str, names: Sequence[str], history: RunHistory) -> Panel | None:
    steps = [step for step, _ in _points(history, names[0])]
    if not steps:
        return None
    below, lines = [0.0] * len(steps), []
    for name in names:
        own = dict(_points(history, name))
        values = [own.get(step, 0.0) for step in steps]
        top = [a + b for a, b in zip(below, values, strict=True)]
        upper, lower = list(zip(steps, top, strict=True)), list(zip(steps, below, strict=True))
        # An empty layer would be drawn as a line on top of the others.
        path = _path(upper, steps, 0, 1) if any(values) else ""
        lines.append(Line(name, path, values, _area(upper, lower, steps)))
        below = top
    return Panel(title, steps, lines, 0.0, 1.0)


def _evaluations(history: RunHistory) -> Panel | None:
    steps = sorted({step for points in history.evals.values() for step, _ in points})
    lines = []
    for split, points in history.evals.items():
        bounds = sorted(history.bounds.get(split, {}).items())
        low = [(step, each[0]) for step, each in bounds]
        high = [(step, each[1]) for step, each in bounds]
        band = _area(high, low, steps)
        lines.append(Line(split, _path(points, steps, 0, 1), _at(points, steps), band))
    return Panel("Evaluations, 95 % interval", steps, lines, 0.0, 1.0) if lines else None


def _at(points: Sequence[tuple[int, float]], steps: Sequence[int]) -> list[float]:
    known = dict(points)
    return [known.get(step, math.nan) for step in steps]


def _xy(
    points: Iterable[tuple[int, float]], steps: Sequence[int], low: float, high: float
) -> list[str]:
    span, height = max(steps[-1] - steps[0], 1), (high - low) or 1.0
    return [
        f"{(step - steps[0]) / span * WIDTH:.1f} {HEIGHT - (value - low) / height * HEIGHT:.1f}"
        for step, value in points
    ]


def _path(
    points: Iterable[tuple[int, float]], steps: Sequence[int], low: float, high: float
) -> str:
    found = _xy(points, steps, low, high)
    # A single step is drawn as a short stroke.
    return "M" + "L".join(found) + ("h12" if len(found) == 1 else "")


def _area(
    upper: Sequence[tuple[int, float]], lower: Sequence[tuple[int, float]], steps: Sequence[int]
) -> str:
    if len(upper) < 2:
        return ""
    return "M" + "L".join([*_xy(upper, steps, 0, 1), *_xy(reversed(lower), steps, 0, 1)]) + "Z"


@dataclass(frozen=True, slots=True)
class Bin:
    """Episodes of similar length."""

    low: int
    high: int
    num: int
    num_trained: int
    most: int
    """Episodes of the largest bin."""


def lengths(entries: Iterable[GroupEntry]) -> list[Bin]:
    """Return the distribution of sampled tokens over all Episodes and over trained ones."""
    found = [pair for entry in entries for pair in zip(entry.lengths, entry.learned, strict=False)]
    top = max((length for length, _ in found), default=0)
    if not top:
        return []
    size = -(-(top + 1) // _NUM_BINS)
    num, trained = [0] * _NUM_BINS, [0] * _NUM_BINS
    for length, is_trained in found:
        num[length // size] += 1
        trained[length // size] += is_trained
    return [
        Bin(place * size, (place + 1) * size, num[place], trained[place], max(num))
        for place in range(-(-(top + 1) // size))
    ]


@dataclass(frozen=True, slots=True)
class Part:
    """The use of some Episodes, which are alike in length or difficulty."""

    label: str
    num: int
    trained: float
    """Share of the sampled tokens that was trained; a low one is starvation."""
    solved: float | None
    cheats: float | None
    """Share of the Episodes with a known verdict."""


def parts(entries: Sequence[GroupEntry]) -> dict[str, list[Part]]:
    """Return the Episodes of a run by quarters of their length, and by their Task's solve rate."""
    solved: dict[str, list[bool]] = {}
    for entry in entries:
        solved.setdefault(entry.task, []).extend(each == "solved" for each in entry.verdicts)
    rows = [
        (length, solved[entry.task], is_trained, verdict)
        for entry in entries
        for length, is_trained, verdict in zip_longest(
            entry.lengths, entry.learned, entry.verdicts, fillvalue=None
        )
        if length is not None
    ]
    rows.sort(key=lambda row: row[0])
    ends = [round(quarter * len(rows) / 4) for quarter in range(5)]
    by_length: dict[str, list[_Row]] = {}
    for start, stop in pairwise(ends):
        if start < stop:  # Quarters of Episodes of one length are one part.
            label = f"{rows[start][0]:,} to {rows[stop - 1][0]:,} tokens"
            by_length.setdefault(label, []).extend(rows[start:stop])
    by_rate: dict[str, list[_Row]] = {name: [] for name in _RATES}
    for row in rows:
        if row[1]:
            by_rate[_RATES[math.ceil(3 * sum(row[1]) / len(row[1]))]].append(row)
    groups = {"length": by_length, "difficulty": by_rate}
    return {
        title: [_use(label, some) for label, some in named.items() if some]
        for title, named in groups.items()
    }


def _use(label: str, rows: Sequence[_Row]) -> Part:
    verdicts = [row[3] for row in rows if row[3]]
    total = sum(row[0] for row in rows)
    shares = [
        sum(verdict == name for verdict in verdicts) / len(verdicts) if verdicts else None
        for name in ("solved", "cheat")
    ]
    return Part(label, len(rows), sum(r[0] for r in rows if r[2]) / max(total, 1), *shares)


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time in a lane."""

    label: str
    x: float
    width: float
    seconds: float
    turn: int = 0
    """Number of its Turn; 0 for none."""
    phase: str = ""
    """Phase in which it waits."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """An Episode over time: phases, the model's replies, the tools between them, waiting."""

    total_s: float
    lanes: Mapping[str, Sequence[Bar]] = field(default_factory=dict)

    def seconds(self, lane: str) -> float:
        """Return the seconds of a lane's bars together."""
        return sum(bar.seconds for bar in self.lanes.get(lane, ()))


_Stretch: TypeAlias = tuple[str, float, float, int]
"""Label, start in seconds, duration in seconds, number of the Turn."""


def lanes(timings: Mapping[str, Any], turns: Sequence[ShownTurn]) -> Lanes | None:
    """Lay an Episode's phases and Turns out along time; None if nothing was timed."""
    timed = [turn for turn in turns if _is_number(turn.facts.get("started_s"))]
    first_s = min((turn.facts["started_s"] for turn in timed), default=math.inf)
    phases = _phases(timings, first_s)
    # A Session opens when its Episode begins.
    model = [("model", t.facts["started_s"], t.facts["seconds"], t.number) for t in timed]
    calling = {t.number for t in timed if t.calls or t.finish == "tool_calls"}
    ends = sorted((begin, begin + seconds, number) for _, begin, seconds, number in model)
    tools = [
        ("tool", end, following - end, number)
        for (_, end, number), (following, _, _) in pairwise(ends)
        if following > end and number in calling
    ]
    graded = [phase for phase in phases if phase[0] in _AFTER_THE_AGENT]
    total = max((start + seconds for _, start, seconds, _ in [*phases, *model]), default=0.0)
    if not total:
        return None
    waiting = _gaps([*model, *tools, *graded], phases, total)
    found = {"phases": phases, "model": model, "tools": tools, "waiting": waiting}
    scale = WIDTH / total
    bars = {
        lane: [Bar(name, at * scale, max(s * scale, 0.6), s, n) for name, at, s, n in stretches]
        for lane, stretches in found.items()
        if stretches
    }
    if waiting:
        bars["waiting"] = [
            replace(bar, label="waiting", phase=bar.label) for bar in bars["waiting"]
        ]
    return Lanes(total, bars)


def _phases(timings: Mapping[str, Any], first_s: float) -> list[_Stretch]:
    """Return the phases in order; the first reply begins at `first_s`.

    Time in no phase is spent on listing the work tree after the boot, and on closing the agent's
    sandbox after the diff.
    """
    seconds = {name: s for name in _PHASES if _is_number(s := timings.get(name))}
    total = timings.get("total")
    rest = max(total - sum(seconds.values()), 0.0) if _is_number(total) else 0.0
    listing = min(rest, max(first_s - seconds.get("boot", 0.0), 0.0))
    after = {"boot": listing, "diff": rest - listing}
    found, start = [], 0.0
    for name, each in seconds.items():
        found.append((name, start, each, 0))
        start += each + after.get(name, 0.0)
    return found


def _gaps(busy: Sequence[_Stretch], phases: Sequence[_Stretch], total: float) -> list[_Stretch]:
    """Return the stretches in which nothing is busy, cut where a phase begins or ends."""
    edges = sorted(
        {0.0, total, *(at for _, start, s, _ in [*busy, *phases] for at in (start, start + s))}
    )
    found = []
    for start, end in pairwise(edges):
        middle = (start + end) / 2
        within = [each[0] for each in phases if each[1] <= middle < each[1] + each[2]]
        is_busy = any(each[1] <= middle < each[1] + each[2] for each in busy)
        if end - start > _SHORTEST_S and not is_busy:
            found.append((within[0] if within else "between phases", start, end - start, 0))
    return found


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


def number(value: object) -> str:
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


def listed(values: Iterable[float]) -> str:
    """Return numbers for the script of the page, empty for none."""
    return ",".join("" if not _is_number(value) else f"{value:.5g}" for value in values)


FILTERS: dict[str, Callable[..., str]] = {
    "spark": spark, "number": number, "percent": percent, "signed": signed,
    "duration": duration, "listed": listed,
}  # fmt: skip
