"""Metrics of one step: rollouts, rows, staleness, learning, wall time."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from swerl.core.events import Event, GatewayLoad, PhaseEnded
from swerl.core.grade import Confirmation
from swerl.core.learning import StepStats
from swerl.rollout.step import StepGroups
from swerl.rollout.versions import Versions, staleness
from swerl.runs.prompts import Fate, GroupEntry, entry
from swerl.training.batch import CollectedBatch

Span = tuple[float, float]
"""Start and end in seconds of one clock."""


def metrics(
    groups: StepGroups, collected: CollectedBatch, stats: StepStats | None, *, versions: Versions
) -> dict[str, float]:
    """Return the metrics of a step; `stats` is None if the step was skipped.

    Rates are over learnable Episodes from the start, in Groups that were left out too: neither a
    filter nor a prefix must make the policy look better.
    """
    return {
        "time": time.time(),
        **_rollout(groups, collected),
        **_by_agent(groups),
        **_rows(collected),
        **_staleness(groups, versions),
        **_learning(stats, collected),
        **({"routed_share": collected.routed_share} if collected.routed_share else {}),
    }


def _rollout(groups: StepGroups, collected: CollectedBatch) -> dict[str, float]:
    episodes = [episode for group in groups.all for episode in group.episodes]
    learnable = [episode for episode in episodes if episode.learnable]
    sampled = sum(episode.trajectory.num_sampled_tokens for episode in learnable)
    everything = sum(episode.trajectory.num_sampled_tokens for episode in episodes)
    turns = [turn for e in learnable for turn in e.trajectory.turns]
    count = max(len(learnable), 1)
    return {
        "reward": sum(e.reward for e in learnable) / count,
        "solve_rate": sum(e.verdict == "solved" for e in learnable) / count,
        "unsolved_rate": sum(e.verdict == "unsolved" for e in learnable) / count,
        "timeout_rate": sum(e.verdict == "timeout" for e in learnable) / count,
        "cheat_rate": sum(e.verdict == "cheat" for e in learnable) / count,
        "audits": sum(e.grade.confirmation is not Confirmation.NONE for e in learnable),
        "forgeries": sum(e.grade.confirmation is Confirmation.FORGED for e in learnable),
        "infra_episodes": len(episodes) - len(learnable),
        "groups_with_signal": sum(group.has_signal for group in groups.all),
        "groups_left_out": len(groups.left_out),
        "left_out_tokens": sampled - collected.num_sampled_tokens,
        "turns_per_episode": sum(len(e.trajectory.turns) for e in learnable) / count,
        "sampled_tokens": sampled,
        "lost_tokens": everything - sampled + sum(episode.lost_tokens for episode in episodes),
        "dropped_tokens": sum(sum(e.trajectory.dropped.values()) for e in learnable),
        "malformed_calls": sum(turn.malformed_calls for turn in turns),
    }


def _by_agent(groups: StepGroups) -> dict[str, float]:
    """Return rates and trained Groups of each agent, if the run has several."""
    metrics: dict[str, float] = {}
    for agent in sorted({group.agent for group in groups.all if group.agent}):
        groups_of_agent = [group for group in groups.all if group.agent == agent]
        learnable = [e for g in groups_of_agent for e in g.episodes if e.learnable]
        metrics[f"groups/{agent}"] = sum(group.agent == agent for group in groups.kept)
        if learnable:
            solved = sum(e.verdict == "solved" for e in learnable)
            metrics[f"solve_rate/{agent}"] = solved / len(learnable)
            metrics[f"reward/{agent}"] = sum(e.reward for e in learnable) / len(learnable)
    return metrics


def _rows(collected: CollectedBatch) -> dict[str, float]:
    lengths = [len(sample.ids) for sample in collected.batch.samples]
    return {
        "masked_episodes": collected.num_masked,
        "rows": len(lengths),
        "row_tokens": sum(lengths),
        "row_tokens_max": max(lengths, default=0),
    }


def _staleness(groups: StepGroups, versions: Versions) -> dict[str, float]:
    """Return the age of the trained tokens, and the count of those that were too old."""
    age = staleness((e for g in groups.kept for e in g.episodes if e.learnable), versions)
    return {
        "staleness": age.mean,
        "staleness_max": age.largest,
        "stale_tokens": age.num_stale,
        "partial_replies": age.num_partial,
    }


def _learning(stats: StepStats | None, collected: CollectedBatch) -> dict[str, float]:
    num_sampled = collected.num_sampled_tokens
    if stats is None:
        return {"trained_tokens": 0, "skipped_tokens": num_sampled, "skipped": 1}
    return {
        "trained_tokens": stats.num_tokens,
        "skipped_tokens": num_sampled - stats.num_tokens,
        "skipped": 0,
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "mismatch": stats.mismatch,
        **stats.extra,
    }


def prompt_entries(step: int, groups: StepGroups, skipped: Collection[str]) -> list[GroupEntry]:
    """Return the step's lines for the prompt ledger; `skipped` are Tasks that were not trained."""
    return [
        *(
            entry(step, group, Fate.SKIPPED if group.task_id in skipped else Fate.TRAINED)
            for group in groups.kept
        ),
        *(entry(step, group, Fate.LEFT_OUT) for group in groups.left_out),
    ]


@runtime_checkable
class KeepsBusySpans(Protocol):
    async def busy_spans(self) -> Sequence[Span]:
        """Return when it computed, in seconds of CLOCK_MONOTONIC."""


class StepTimer:
    """Measure the wall time of one step: model (the engine computes), trainer, tests.

    Also collects the gateway's longest event-loop lag and the requests that it refused.
    """

    def __init__(self, engine: object) -> None:
        self._engine = engine
        self._started = time.monotonic()
        self._spans: dict[str, list[Span]] = {}
        self._loads: list[GatewayLoad] = []

    def __call__(self, event: Event) -> None:
        """Take test times and the gateway's load from the stream of events."""
        if isinstance(event, GatewayLoad):
            self._loads.append(event)
        if isinstance(event, PhaseEnded) and event.phase == "test":
            # The event is emitted at the end of the phase.
            now = time.monotonic()
            self._spans.setdefault("test", []).append((now - event.seconds, now))

    def start(self) -> None:
        self._spans.clear()
        self._loads.clear()
        self._started = time.monotonic()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._spans.setdefault(name, []).append((started, time.monotonic()))

    async def stop(self) -> dict[str, float]:
        """End the step; return its seconds by part, and the share of time in no part."""
        window = (self._started, time.monotonic())
        # Not every engine can report when it computed.
        if isinstance(self._engine, KeepsBusySpans):
            self._spans["model"] = list(await self._engine.busy_spans())
        seconds = window[1] - window[0]
        work = [span for name in ("model", "train", "test") for span in self._spans.get(name, ())]
        parts = {f"{name}_s": covered(spans, window) for name, spans in self._spans.items()}
        return {
            "step_s": seconds,
            **parts,
            "other_share": 1 - covered(work, window) / seconds,
            "gateway_lag_s": max((load.lag_s for load in self._loads), default=0.0),
        }


def covered(spans: Iterable[Span], window: Span) -> float:
    """Return the seconds of `window` during which at least one span is open."""
    start, end = window
    total, reached = 0.0, start
    # `reached` prevents that overlapping spans count twice.
    for opened, closed in sorted(spans):
        opened, closed = max(opened, reached), min(closed, end)
        if closed > opened:
            total += closed - opened
            reached = closed
    return total
