"""What `swerl rollout` shows: phases, turns and tool calls as they happen, then the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from swerl.cli._output import console
from swerl.cli._text import counted, safe
from swerl.core.episode import Episode
from swerl.core.events import (
    EpisodeEnded,
    Event,
    Notice,
    PhaseEnded,
    PhaseStarted,
    Progress,
    TurnEnded,
)
from swerl.core.grade import LEARNABLE, TestStatus, Verdict
from swerl.core.patch import touched

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

_COLOURS = {
    Verdict.SOLVED: "green",
    Verdict.UNSOLVED: "yellow",
    Verdict.TIMEOUT: "yellow",
    Verdict.CHEAT: "red",
    Verdict.INFRA: "red",
    Verdict.INVALID: "red",
}
_PHASES = {
    "scrub": "of the boot: later history removed",
    "boot": "sandbox up, agent in it",
    "agent": "agent at work",
    "diff": "patch taken",
    "grade_boot": "clean sandbox up",
    "grade": "patch graded",
    "test": "of which tests",
}
_MAX_FAILING = 10
"""Tests named under a verdict; more are counted."""


class RolloutView:
    """Listens to one Episode's events; on a terminal the open phase spins below the lines."""

    def __init__(self, out: Console | None = None, *, trainable: bool = True) -> None:
        self._out = out or console()
        self._trainable = trainable
        self._status: Status | None = None

    def __enter__(self) -> RolloutView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spin(None)

    def __call__(self, event: Event) -> None:
        """Take one event."""
        match event:
            case PhaseStarted(phase=phase):
                self._spin(_PHASES.get(phase, phase))
            case PhaseEnded(phase=phase, seconds=seconds):
                self._spin(None)
                self._out.print(f"[bold]{phase:<10}[/] {seconds:>7.2f} s  {_PHASES.get(phase, '')}")
            case TurnEnded():
                self._show_turn(event)
            case Progress():
                self._spin(f"{event.stage} {event.done}/{event.total} {event.note}".rstrip())
            case Notice(text=text):
                self._spin(None)
                self._out.print(text, markup=False, soft_wrap=True)
            case EpisodeEnded():
                self._spin(None)

    def _show_turn(self, turn: TurnEnded) -> None:
        for result in turn.results:
            self._line(f"      [dim]→ {safe(result)}[/]")
        mark = "" if self._trainable else "  [yellow]not trainable[/]"
        self._line(
            f"  [cyan]turn {turn.turn + 1:<3}[/] {turn.prompt_tokens:>7,} tokens in "
            f"{turn.output_tokens:>6,} out {turn.seconds:>6.2f} s{mark}"
        )
        if turn.said:
            self._line(f"      “{safe(turn.said)}”")
        for call in turn.calls:
            self._line(f"      {safe(call)}")

    def _line(self, text: str) -> None:
        self._out.print(text, no_wrap=True, overflow="ellipsis")

    def _spin(self, text: str | None) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if text is not None and self._out.is_terminal:
            self._status = self._out.status(f"{text} …")
            self._status.start()


def show_start(task_id: str, *, agent: str, engine: str, trainable: bool) -> None:
    """Print what is about to run."""
    note = "" if trainable else "  [yellow](for debugging: no token ids, not trainable)[/]"
    console().print(f"[bold]{safe(task_id)}[/]  {agent} on {safe(engine)}{note}")


def show_end(episode: Episode, artefacts: Mapping[str, Path], next_command: str) -> None:
    """Print the verdict in a clear line, where everything lies, and what to run next."""
    out = console()
    trajectory = episode.trajectory
    trained = sum(len(turn.output_ids) for turn in trajectory.turns if turn.trainable)
    num_branches = len(list(trajectory.leaves()))
    out.print(
        f"\n{counted(len(trajectory.turns), 'turn')}, {trained:,} trainable tokens in "
        f"{counted(num_branches, 'branch', 'branches')}, {episode.timings['total']:.2f} s; "
        f"agent {episode.status}; patch to {counted(len(touched(episode.patch)), 'file')}",
        soft_wrap=True,
    )
    colour = _COLOURS[episode.verdict]
    reward = f"reward {episode.reward:g}" if episode.verdict in LEARNABLE else "no reward"
    out.print(
        f"[bold {colour}]{episode.verdict.upper()}[/]  {reward}  {safe(episode.grade.reason)}",
        soft_wrap=True,
    )
    _show_failing(episode)
    out.print()
    for name, path in artefacts.items():
        out.print(f"{name:<12}{path}", soft_wrap=True)
    out.print(f"{'next':<12}{next_command}", soft_wrap=True)


def _show_failing(episode: Episode) -> None:
    good = {TestStatus.PASSED, TestStatus.XFAIL}
    failing = [(n, s) for n, s in episode.grade.tests.items() if s not in good]
    for name, status in failing[:_MAX_FAILING]:
        console().print(f"  {status:<8} {safe(name)}", soft_wrap=True)
    if len(failing) > _MAX_FAILING:
        console().print(f"  … and {len(failing) - _MAX_FAILING} more in grade.json")
