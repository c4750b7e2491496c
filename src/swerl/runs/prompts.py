"""The prompt ledger: which Task was trained in which step, by which weights it was sampled.

One JSON line a Group, written before its step is committed. A run that goes on first cuts off the
lines of steps that were never committed, so each Group has one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from swerl.core.episode import Group
from swerl.core.files import disk_errors, write_text


class Fate(StrEnum):
    """What became of a Group."""

    TRAINED = "trained"
    LEFT_OUT = "left_out"
    """The filter did not pass it, or there were enough."""
    STALE = "stale"
    """It had become too old."""
    SKIPPED = "skipped"
    """Its step's loss or gradients were not finite."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of the Episodes of one Group."""

    step: int
    """Step that used them up."""
    task: str
    stage: str
    """Their folder under `episodes/`; with the Task it names the Group."""
    fate: Fate
    versions: tuple[str, ...] = ()
    """Weights that sampled them."""
    lengths: tuple[int, ...] = ()
    """Sampled tokens of each Episode."""
    learned: tuple[bool, ...] = ()
    """Whether each was trained on: what machinery lost is not."""


def entry(step: int, group: Group, fate: Fate) -> Entry:
    """Return the line about a finished Group."""
    episodes = group.episodes
    turns = [turn for episode in episodes for turn in episode.trajectory.turns]
    names = [turn.weight_version for turn in turns]
    names += [change.version for turn in turns for change in turn.weight_changes]
    return Entry(
        step=step,
        task=group.task_id,
        stage=episodes[0].id.partition("/")[0],
        fate=fate,
        versions=tuple(sorted(set(names))),
        lengths=tuple(episode.trajectory.num_sampled_tokens for episode in episodes),
        learned=tuple(fate is Fate.TRAINED and episode.learnable for episode in episodes),
    )


def append(path: Path, entries: Iterable[Entry]) -> None:
    """Add lines, each on a line of its own also after a torn one. Raises RunError."""
    lines = map(_line, entries)
    with disk_errors(path):
        is_torn = path.exists() and not path.read_bytes().endswith(b"\n")
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * is_torn + "".join(lines))


def cut(path: Path, *, steps: int) -> list[Entry]:
    """Keep the lines of the first `steps` steps, without one that a crash cut short; return them.

    Raises RunError where the disk refuses.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [each for each in map(_read, lines) if each and each.step < steps]
    if len(kept) < len(lines):
        write_text(path, "".join(map(_line, kept)))
    return kept


def _read(line: str) -> Entry | None:
    try:
        value = json.loads(line)
        lists = {name: tuple(value.pop(name)) for name in ("versions", "lengths", "learned")}
        return Entry(**{**value, "fate": Fate(value["fate"]), **lists})
    except (ValueError, KeyError, TypeError):
        return None


def _line(each: Entry) -> str:
    return json.dumps(asdict(each)) + "\n"
