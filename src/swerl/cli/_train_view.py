"""Print the progress of `swerl train`: stages, live rollouts, one line per step, a summary."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import TracebackType

from rich.live import Live

from swerl.cli._output import console, simple_table
from swerl.core.events import (
    EpisodeEnded,
    EvalEnded,
    Event,
    Notice,
    PhaseEnded,
    PhaseStarted,
    Progress,
    StepEnded,
    StepSkipped,
    StepStarted,
)
from swerl.recipe.schema import Recipe
from swerl.runs.history import RunHistory
from swerl.training.efficiency import MEASURED, PLANNED, compare_memory

_BARS = "▁▂▃▄▅▆▇█"
_REFRESH_S = 0.25
_ETA_STEPS = 5
"""Latest steps whose mean predicts the rest: steps grow or shrink as a policy learns."""


class TrainView:
    """Prints a run's events: a live line on a terminal, plain lines elsewhere."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._live: Live | None = None
        self._open_phases: Counter[str] = Counter()
        self._stage = "starting"
        self._verdicts: Counter[str] = Counter()
        self._expected = 0
        self._tokens = 0
        self._since = time.monotonic()
        self._drawn = 0.0
        self._printed_stage = ""
        self._step_s: deque[float] = deque(maxlen=_ETA_STEPS)

    def __enter__(self) -> TrainView:
        if sys.stdout.isatty():
            self._live = Live(console=console(), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Print one event."""
        match event:
            case PhaseStarted(phase=phase):
                self._open_phases[phase] += 1
            case PhaseEnded(phase=phase):
                self._open_phases[phase] -= 1
            case EpisodeEnded():
                self._verdicts[event.verdict] += 1
                self._tokens += event.tokens
            case StepStarted():
                self._begin(f"step {event.step + 1}/{self._recipe.steps}", event.num_episodes)
            case StepEnded():
                console().print(self._step_line(event), soft_wrap=True)
            case StepSkipped():
                console().print(f"  [yellow]step {event.step + 1} skipped[/]: {event.reason}")
            case EvalEnded():
                console().print(_eval_line(event), soft_wrap=True)
            case Progress():
                self._progress(event)
            case Notice(text=text):
                console().print(f"  {text}", markup=False, soft_wrap=True)
        self._draw()

    def _begin(self, stage: str, expected: int) -> None:
        self._stage, self._expected = stage, expected
        self._verdicts.clear()
        self._tokens = 0
        self._since = time.monotonic()

    def _progress(self, event: Progress) -> None:
        self._stage = event.in_words()
        is_milestone = event.done in (0, event.total) or event.done % max(event.total // 5, 1) == 0
        if self._live is None and is_milestone and self._stage != self._printed_stage:
            self._printed_stage = self._stage
            console().print(f"  {self._stage}")
        self._expected = 0

    def _draw(self) -> None:
        now = time.monotonic()
        if self._live is not None and now - self._drawn >= _REFRESH_S:
            self._drawn = now
            self._live.update(self._status_line(now), refresh=True)

    def _status_line(self, now: float) -> str:
        if not self._expected:
            return f"  {self._stage}"
        num_ended = sum(self._verdicts.values())
        sandboxes = self._open_phases["agent"] + self._open_phases["grade"]
        rate = self._tokens / max(now - self._since, 1e-9)
        return (
            f"  {self._stage}: {num_ended}/{self._expected} episodes, "
            f"{self._verdicts['solved']} solved, {sandboxes} sandboxes busy, {rate:,.0f} tokens/s"
        )

    def _step_line(self, event: StepEnded) -> str:
        m = event.metrics
        own_s = m["step_s"]
        self._step_s.append(own_s)
        left_s = (self._recipe.steps - event.step - 1) * sum(self._step_s) / len(self._step_s)
        if self._recipe.schedule.mode == "sync":  # otherwise rollouts continue in parallel
            own_s -= m.get("train_s", 0.0) + m.get("publish_s", 0.0)
        rate = m["sampled_tokens"] / max(own_s, 1e-9)
        figures = f"reward {m['reward']:.2f}  {rate:>6,.0f} tokens/s  "
        figures += f"mismatch {m.get('mismatch', 0):.0e}"
        if self._recipe.sft.sources:
            figures = f"loss {m.get('loss', 0):.4f}  {m['trained_tokens']:,.0f} tokens"
        return (
            f"  step {event.step + 1:>3}/{self._recipe.steps}  {figures}  "
            f"grad {m.get('grad_norm', 0):.2f}  "
            f"{m['step_s']:.1f} s (train {m.get('train_s', 0):.1f}, other {m['other_share']:.0%})"
            f"{_left(left_s)}"
        )


def _left(seconds: float) -> str:
    """Return the time that the remaining steps take, as the end of a line."""
    if seconds <= 0:
        return ""
    minutes = seconds / 60
    text = f"{minutes:,.0f} min" if 1 <= minutes < 120 else f"{minutes / 60:,.1f} h"
    return f"  {f'{seconds:.0f} s' if minutes < 1 else text} left"


def show_summary(folder: Path, past: RunHistory) -> None:
    """Print a finished run's result, its reward curve, and the next command."""
    out = console()
    name = "loss" if all("nll" in metrics for metrics in past.steps.values()) else "reward"
    out.print(f"\n{name} by step  {_sparkline(past.series(name))}", soft_wrap=True)
    table = simple_table("evaluation", "before", "after", box=None)
    for split, points in past.evals.items():
        table.add_row(split, f"{points[0][1]:.2f}", f"{points[-1][1]:.2f}")
    if past.evals:
        out.print(table)
    for line in _accounts(past):
        out.print(line, soft_wrap=True)
    out.print(f"\nrun folder      {folder}\ncharts          swerl view {folder}")
    for split, points in list(past.evals.items())[:1]:
        ends = [f"{folder}@{split.replace('/', '-')}-{step}" for step, _ in (points[0], points[-1])]
        out.print(f"compare         swerl eval compare {' '.join(ends)}", soft_wrap=True)
    out.print(f"next            swerl rollout --engine torch-cpu --model {folder}")


def _accounts(past: RunHistory) -> Iterator[str]:
    sampled, trained = sum(past.series("sampled_tokens")), sum(past.series("trained_tokens"))
    stale, mismatch = sum(past.series("stale_tokens")), max(past.series("mismatch"), default=0)
    left_out = sum(past.series("left_out_tokens"))
    seconds = past.series("step_s")
    unexplained = zip(past.series("other_share"), seconds, strict=True)
    other = sum(share * step_s for share, step_s in unexplained) / max(sum(seconds), 1e-9)
    yield (
        f"tokens          {sampled:,.0f} sampled, {trained:,.0f} trained "
        f"({trained / max(sampled, 1):.0%}); {stale:,.0f} stale tokens"
    )
    if left_out:
        yield f"left out        {left_out:,.0f} tokens, by rollout.group_filter"
    if skipped := sum(past.series("skipped")):
        yield f"skipped         {skipped:,.0f} steps without finite loss or gradients"
    yield f"mismatch        {mismatch:.1e} at most, engine against trainer"
    yield from _machines(past)
    yield (
        f"wall time       {sum(seconds):,.0f} s of steps; {other:.0%} neither model, trainer "
        "nor tests"
    )


def _machines(past: RunHistory) -> Iterator[str]:
    """Yield the figures of a paid run or a run on GPUs."""
    if planned := past.series(PLANNED):
        comparison = compare_memory(planned[-1], max(past.series(MEASURED)))
        yield f"memory          {comparison}, tensors of the trainer's fullest GPU"
    if mfu := past.series("mfu"):
        yield f"MFU             {sum(mfu) / len(mfu):.1%} of the GPUs' peak while training"
    if dollars := max(past.series("dollars"), default=0.0):
        sandbox_s = sum(past.series("sandbox_s"))
        yield f"dollars         {dollars:,.2f} estimated; {sandbox_s:,.0f} sandbox-seconds"


def _eval_line(event: EvalEnded) -> str:
    line = (
        f"  [bold]eval[/] {event.name:<8} after {event.step} steps: "
        f"[bold]{event.solve_rate:.2f}[/] ({event.low:.2f}-{event.high:.2f}) solved "
        f"of {event.num_episodes} episodes"
    )
    if event.k > 1:
        low, high = event.pass_at_k_low, event.pass_at_k_high
        line += f"; pass@{event.k} [bold]{event.pass_at_k:.2f}[/] ({low:.2f}-{high:.2f})"
    return line + (f"; {event.num_lost} lost" if event.num_lost else "")


def _sparkline(values: list[float], width: int = 60) -> str:
    if not values:
        return ""
    count = min(width, len(values))
    bounds = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds) if b > a]
    marks = "".join(_BARS[min(int(mean * len(_BARS)), len(_BARS) - 1)] for mean in means)
    return f"{values[0]:.2f} {marks} {values[-1]:.2f}"
