"""The prompt ledger: each Group's step, fate and weight versions.

One JSON line per Group, written before its step is committed. A resumed run first removes the
lines of uncommitted steps, so each Group has one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from swerl.core.episode import Group
from swerl.core.files import disk_errors, write_text
from swerl.runs.history import ends_a_line


class Fate(StrEnum):
    """The use that a step made of a Group."""

    TRAINED = "trained"
    LEFT_OUT = "left_out"
    """Rejected by the filter."""
    SKIPPED = "skipped"
    """The loss or gradients of its step were not finite."""


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """One line of the ledger: a Group and its fate."""

    step: int
    """Step that trained or discarded it."""
    task: str
    stage: str
    """Folder under `episodes/`; together with the Task it names the Group."""
    fate: Fate
    versions: tuple[str, ...] = ()
    """Weight versions that sampled its Episodes."""
    lengths: tuple[int, ...] = ()
    """Sampled tokens of each Episode."""
    learned: tuple[bool, ...] = ()
    """True for each trained Episode; those lost to infrastructure are not trained."""
    agent: str = ""
    verdicts: tuple[str, ...] = ()
    """Of each Episode; empty if the Group was dropped."""


def entry(step: int, group: Group, fate: Fate) -> GroupEntry:
    episodes = group.episodes
    turns = [turn for e in episodes for turn in e.trajectory.turns]
    names = [turn.weight_version for turn in turns]
    names += [change.version for turn in turns for change in turn.weight_changes]
    return GroupEntry(
        step=step,
        task=group.task_id,
        stage=episodes[0].id.partition("/")[0],
        fate=fate,
        versions=tuple(sorted(set(names))),
        lengths=tuple(episode.trajectory.num_sampled_tokens for episode in episodes),
        learned=tuple(fate is Fate.TRAINED and episode.learnable for episode in episodes),
        agent=episodes[0].agent,
        verdicts=tuple(str(episode.verdict) for episode in episodes),
    )


def append(path: Path, entries: Iterable[GroupEntry]) -> None:
    """Append entries; a torn last line is ended first. Raises RunError."""
    lines = map(_line, entries)
    with disk_errors(path):
        is_torn = path.exists() and not ends_a_line(path)
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * is_torn + "".join(lines))


def read(path: Path) -> list[GroupEntry]:
    """Return the entries of a ledger, without torn lines; none if there is no ledger."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [entry for entry in map(_read, lines) if entry]


def cut(path: Path, *, steps: int) -> list[GroupEntry]:
    """Keep and return the entries of the first `steps` steps; torn lines go. Raises RunError."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    entries = [entry for entry in map(_read, lines) if entry and entry.step < steps]
    # Rewritten only if a line goes.
    if len(entries) < len(lines):
        write_text(path, "".join(map(_line, entries)))
    return entries


def _read(line: str) -> GroupEntry | None:
    try:
        value = json.loads(line)
        names = ("versions", "lengths", "learned", "verdicts")
        lists = {name: tuple(value.pop(name)) for name in names}
        return GroupEntry(**{**value, "fate": Fate(value["fate"]), **lists})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _line(entry: GroupEntry) -> str:
    return json.dumps(asdict(entry)) + "\n"
