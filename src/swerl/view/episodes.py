"""All Episodes of a run over its stages, from an index that is kept beside the run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson

from swerl.core.errors import RunError
from swerl.core.files import write_bytes
from swerl.runs import index
from swerl.runs.index import FoundRun

INDEX = "episodes.index.json"
_REST_NS = 2_000_000_000
"""Nanoseconds without a change after which a stage's folder is not listed again."""
_RESULTS = frozenset({"solved", "unsolved", "timeout", "cheat"})
"""Verdicts that stay; any other attempt may run again."""
_TEXTS = ("patch.diff", "transcript.json", "transcript.jsonl", "agent.log")
MAX_SEARCHED = 2_000
"""Episodes whose texts one request reads."""


class Entry(NamedTuple):
    """One Episode."""

    stage: str
    name: str
    task: str
    verdict: str
    reward: float
    agent: str
    turns: int
    tokens: int
    malformed: int
    seconds: float

    @property
    def path(self) -> str:
        """Address of its page below the page of its run."""
        return f"e/{quote(self.stage)}/{quote(self.name)}/index.html"

    @property
    def step(self) -> int | None:
        """Training step; None for other stages."""
        return int(self.stage) if self.stage.isdecimal() else None


def read(run: FoundRun) -> list[Entry]:
    """Return every Episode of a run; only stages that changed since the last call are read."""
    path = run.root / INDEX
    stored: Mapping[str, Any] = {}
    with suppress(OSError, ValueError):
        stored = orjson.loads(path.read_bytes())
    stages = {name: _stage(run, name, stored.get(name)) for name in run.stages()}
    if stages != stored:
        # A run that this user may not write is indexed anew each time.
        with suppress(RunError):
            write_bytes(path, orjson.dumps(stages))
    return [Entry(name, *row) for name, stage in stages.items() for row in stage["rows"]]


def _stage(run: FoundRun, name: str, stored: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the rows of a stage, and the time of its folder if no row can change any more."""
    folder = run.stage(name)
    changed_ns = folder.stat().st_mtime_ns
    if stored and stored["changed_ns"] == changed_ns:
        return stored
    rows = {row[0]: row for row in stored["rows"] if row[2] in _RESULTS} if stored else {}
    names = [attempt for attempts in index.groups(folder).values() for attempt in attempts]
    for attempt in index.read_attempts(folder, [name for name in names if name not in rows]):
        summary = attempt.summary
        rows[attempt.name] = [
            attempt.name,
            attempt.task,
            str(summary.get("verdict", "")),
            summary.get("reward", 0.0),
            str(summary.get("agent", "")),
            summary.get("turns", 0),
            summary.get("sampled_tokens", 0),
            summary.get("malformed_calls", 0),
            (summary.get("timings") or {}).get("total", 0.0),
        ]
    is_settled = all(row[2] in _RESULTS for row in rows.values())
    is_settled = is_settled and time.time_ns() - changed_ns > _REST_NS
    return {"changed_ns": changed_ns if is_settled else 0, "rows": [rows[name] for name in names]}


def by_task(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return a row for each Task: attempts, solved, first solved, trend, means of an attempt."""
    tasks: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.verdict in _RESULTS:
            tasks[entry.task].append(entry)
    rows = []
    for task, attempts in sorted(tasks.items()):
        steps: dict[int, list[bool]] = defaultdict(list)
        for entry in attempts:
            if entry.step is not None:
                steps[entry.step].append(entry.verdict == "solved")
        solved = sum(entry.verdict == "solved" for entry in attempts)
        rows.append(
            {
                "task": task,
                "attempts": len(attempts),
                "solved": solved,
                "rate": solved / len(attempts),
                "first": min((step for step, ends in steps.items() if any(ends)), default=None),
                "trend": [fmean(steps[step]) for step in sorted(steps)],
                "turns": fmean(entry.turns for entry in attempts),
                "tokens": fmean(entry.tokens for entry in attempts),
                "seconds": fmean(entry.seconds for entry in attempts),
                "last": attempts[-1].path,
            }
        )
    return rows


def select(entries: Sequence[Entry], run: FoundRun, query: Mapping[str, str]) -> list[Entry]:
    """Return the Episodes that meet the filter of a page's address; unreadable parts are ignored.

    The texts of at most MAX_SEARCHED Episodes are searched.
    """
    ranges = {
        name: (_number(low, 0.0), _number(high or (low if not colon else ""), float("inf")))
        for name in ("step", "turns", "tokens")
        for low, colon, high in [query.get(name, "").strip().partition(":")]
        if low or high
    }
    chosen = [
        entry
        for entry in entries
        if query.get("task", "") in entry.task
        and query.get("verdict", "") in ("", entry.verdict)
        and query.get("agent", "") in ("", entry.agent)
        and (not query.get("malformed") or entry.malformed)
        and all(_is_in(getattr(entry, name), bounds) for name, bounds in ranges.items())
    ]
    if text := query.get("text", "").encode():
        searched = islice(chosen, MAX_SEARCHED)
        chosen = [e for e in searched if _has_text(run.stage(e.stage) / e.name, text)]
    return chosen


def _number(text: str, default: float) -> float:
    try:
        return float(text)
    except ValueError:
        return default


def _is_in(value: float | None, bounds: tuple[float, float]) -> bool:
    return value is not None and bounds[0] <= value <= bounds[1]


def _has_text(folder: Path, text: bytes) -> bool:
    for name in _TEXTS:
        with suppress(OSError):
            if text in (folder / name).read_bytes():
                return True
    return False
