"""Episodes of a real run as a simulation's load, read from its `events.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from swerl.core.errors import InputError
from swerl.plan.simulation.load import EpisodeLoad, TurnLoad

_BEFORE = ("boot",)
_AGENT = "agent"
_INSIDE = ("scrub", "test")
"""Phases that are a part of another."""


@dataclass(slots=True)
class _Draft:
    turns: list[tuple[float, float, int, int]] = field(default_factory=list)
    """Time of the end, seconds, prompt tokens, output tokens."""
    phases: dict[str, float] = field(default_factory=dict)


def read(run: Path) -> tuple[EpisodeLoad, ...]:
    """Return the Episodes of a run that ended. Raises InputError where there are none."""
    path = run / "events.jsonl"
    if not path.is_file():
        raise InputError(
            f"{run} is no run folder: it has no events.jsonl",
            hint="name a folder under runs/ whose run made episodes",
        )
    drafts: dict[str, _Draft] = {}
    found = []
    for event in _events(path):
        draft = drafts.setdefault(event.get("episode", ""), _Draft())
        match event["event"]:
            case "TurnEnded":
                draft.turns.append(_turn(event))
            case "PhaseEnded":
                phase = event["phase"]
                draft.phases[phase] = draft.phases.get(phase, 0.0) + event["seconds"]
            case "EpisodeEnded" if draft.turns:
                found.append(_load(drafts.pop(event["episode"])))
    if not found:
        raise InputError(
            f"{path} tells of no finished episode with turns",
            hint="let the run make some episodes first",
        )
    return tuple(found)


def _turn(event: Mapping[str, Any]) -> tuple[float, float, int, int]:
    return event["time"], event["seconds"], event["prompt_tokens"], event["output_tokens"]


def _load(draft: _Draft) -> EpisodeLoad:
    """Return a load. The time of tools is the gap between a reply's end and the next request's
    begin; what is left of the agent's time follows the last turn."""
    turns = sorted(draft.turns)
    gaps = [max(later[0] - later[1] - earlier[0], 0.0) for earlier, later in pairwise(turns)]
    modelled = sum(turn[1] for turn in turns) + sum(gaps)
    gaps.append(max(draft.phases.get(_AGENT, 0.0) - modelled, 0.0))
    before = sum(draft.phases.get(name, 0.0) for name in _BEFORE)
    known = (*_BEFORE, _AGENT, *_INSIDE)
    return EpisodeLoad(
        turns=tuple(
            TurnLoad(prompt, output, gap)
            for (_, _, prompt, output), gap in zip(turns, gaps, strict=True)
        ),
        boot_s=before,
        grading_s=sum(s for name, s in draft.phases.items() if name not in known),
    )


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events; a line that a crash cut short is passed over."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                continue
