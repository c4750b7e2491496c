"""Find recorded Episodes in a folder, without reading what is not asked for.

A run of `swerl train` has a recipe, and a folder under `episodes/` for each step or evaluation, its
stages. Results of `swerl rollout`, `serve` and other commands are Episodes side by side: a run
with one stage.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from swerl.core.errors import InputError, RunError, SwerlError
from swerl.core.files import read_json

T = TypeVar("T")
RECIPE = "recipe.resolved.json"
ALL = "all"
"""The only stage of a run without a recipe."""
DAMAGE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    RecursionError,  # JSON that is nested too deeply
)
"""Errors that files of another shape cause."""
_MARKS = ("episode.json", "trajectory.json", "transcript.json", "transcript.jsonl")
_DEPTH = 3
"""Folders between the given one and an Episode: `runs/serve/0/1`."""
_REST_NS = 2_000_000_000
"""Nanoseconds without a change after which a listing is kept."""
_LOOKED_AT = 20
"""Subfolders that are looked at until one is an Episode: a folder has Episodes or it has not."""


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run, or a folder of Episodes."""

    name: str
    """Its path below the folder that was searched."""
    root: Path
    is_trained: bool
    """True if it has a recipe, and stages of its own."""

    @property
    def is_evaluated(self) -> bool:
        """True for a run of `swerl eval` or `solve-rate`: it has a recipe and no events."""
        return self.is_trained and not (self.root / "events.jsonl").exists()

    @property
    def is_closed(self) -> bool:
        """True if its files cannot be read for want of permission."""
        return not _is_open(self.root)

    @property
    def has_steps(self) -> bool:
        """True for a run of `swerl train`."""
        return self.is_trained and not self.is_evaluated

    def stages(self) -> list[str]:
        if not self.is_trained:
            return [] if self.is_closed else [ALL]
        return sorted(_folders(self.root / "episodes"))

    def evaluations(self) -> list[str]:
        """Return the names of its finished evaluations."""
        return sorted(path.stem for path in self.root.glob("evals/*.json"))

    def stage(self, name: str) -> Path:
        """Return the folder of a stage. Raises InputError for a name that is none."""
        require_open(self.root)
        folder = self.root / "episodes" / plain(name) if self.is_trained else self.root
        if not folder.is_dir() or (not self.is_trained and name != ALL):
            raise InputError(f"{self.name} has no step {name}", hint="its first page lists all")
        return folder

    def episode(self, stage: str, name: str) -> Path:
        """Return the folder of an Episode. Raises InputError for a name that is none."""
        folder = self.stage(stage)
        if is_episode(folder) and name == folder.name:
            return folder
        if not (folder / plain(name)).is_dir():
            raise InputError(f"{self.name} has no Episode {name} in {stage}")
        return folder / name


@dataclass(frozen=True, slots=True)
class Attempt:
    """An Episode as its summary shows it."""

    name: str
    """Name of its folder."""
    task: str
    number: int
    summary: Mapping[str, Any] = field(default_factory=dict)
    """`episode.json`; empty if it is not there."""
    problem: str = ""
    """Why the summary is missing."""


def _is_open(folder: Path) -> bool:
    return os.access(folder, os.R_OK | os.X_OK)


def require_open(folder: Path) -> None:
    """Raise RunError if the folder cannot be read for want of permission."""
    if not _is_open(folder):
        raise RunError(f"you may not read {folder}", hint="ask its owner, or copy it")


def plain(name: str) -> str:
    """Return the name of one folder entry. Raises InputError if it could leave the folder."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise InputError(f"{name!r} is not the name of a folder")
    return name


def find_runs(folder: Path) -> dict[str, FoundRun]:
    """Return name -> run for every run in a folder, or for the folder itself, newest first."""
    runs = sorted(_find(folder, folder, 0), key=changed, reverse=True)
    return {run.name: run for run in runs}


def run_at(folder: Path) -> FoundRun | None:
    """Return the run whose folder this is; None if it is none."""
    return next(_find(folder, folder, _DEPTH), None)


def _find(folder: Path, top: Path, depth: int) -> Iterator[FoundRun]:
    name = folder.relative_to(top).as_posix() if folder != top else folder.resolve().name
    if folder.is_dir() and not _is_open(folder):
        yield FoundRun(name, folder, False)  # It may be a run, and must not hide the others.
        return
    if (folder / RECIPE).is_file():
        yield FoundRun(name, folder, True)
        return
    # Episodes in hundred thousands stand side by side, so a few tell.
    some = islice(_subfolders(folder), _LOOKED_AT)
    if is_episode(folder) or any(is_episode(folder / child) for child in some):
        yield FoundRun(name, folder, False)
    elif depth < _DEPTH:
        for child in _folders(folder):
            yield from _find(folder / child, top, depth + 1)


def is_episode(folder: Path) -> bool:
    """Return whether a folder has the files of an Episode or a served session."""
    return os.access(folder, os.X_OK) and any((folder / mark).is_file() for mark in _MARKS)


def changed(run: FoundRun) -> float:
    """Return when a run last changed, in seconds since 1970."""
    names = ("",) if run.is_closed else ("events.jsonl", "process.json", "")
    return max(path.stat().st_mtime for name in names if (path := run.root / name).exists())


def _folders(folder: Path) -> list[str]:
    return sorted(_subfolders(folder))


def _subfolders(folder: Path) -> Iterator[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        yield from (entry.name for entry in entries if entry.is_dir())


def groups(folder: Path) -> Mapping[str, Sequence[str]]:
    """Return Task -> names of its attempts in a stage's folder, by the names alone."""
    if is_episode(folder):
        return {folder.name: [folder.name]}
    changed_ns = folder.stat().st_mtime_ns
    # A new Episode changes its folder's time. A folder that has just changed may change again
    # within the resolution of that time, so only a folder at rest is not listed again.
    if time.time_ns() - changed_ns < _REST_NS:
        return _grouped(folder)
    return _kept_groups(folder, changed_ns)


@lru_cache(maxsize=16)
def _kept_groups(folder: Path, changed_ns: int) -> dict[str, list[str]]:
    return _grouped(folder)


def _grouped(folder: Path) -> dict[str, list[str]]:
    attempts: dict[str, list[str]] = {}
    for name in sorted(_folders(folder), key=_natural):
        task, dot, number = name.rpartition(".")
        attempts.setdefault(task if dot and number.isdecimal() else name, []).append(name)
    return attempts


def _natural(name: str) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def read_attempts(folder: Path, names: Sequence[str]) -> list[Attempt]:
    """Read the summaries of some attempts; a missing or damaged one says so."""
    return [_attempt(path if (path := folder / name).is_dir() else folder, name) for name in names]


def _is_summary(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("timings", {}), dict):
        return False
    numbers = (value.get(name, 0) for name in ("reward", "turns", "sampled_tokens"))
    return all(isinstance(number, int | float) for number in numbers)


def _attempt(folder: Path, name: str) -> Attempt:
    task, _, number = name.rpartition(".")
    nominal = Attempt(name, task or name, int(number) if number.isdecimal() else 0)
    path = folder / "episode.json"
    problem = "not finished: its summary was never written"
    if path.exists():
        try:
            summary = read_json(path)
            if _is_summary(summary):
                task = str(summary.get("task_id", nominal.task))
                return Attempt(name, task, nominal.number, summary)
            problem = f"{path} is damaged: it is no summary of an Episode"
        except RunError as error:
            problem = str(error)
    elif is_episode(folder):
        problem = "recorded without a grade"
    return Attempt(name, nominal.task, nominal.number, {}, problem)


def part(read: Callable[[], T]) -> tuple[T | None, str]:
    """Return a part of a run, or None and why it cannot be read: the rest is shown without it."""
    try:
        return read(), ""
    except SwerlError as error:
        return None, error.explained()
    except ModuleNotFoundError as error:
        return None, f"not read: Python package {error.name} is not installed"
    except DAMAGE as error:
        return None, f"not readable: {type(error).__name__}: {error}"
