"""The prompt ledger: which Task was trained in which step, by which weights it was sampled.

One JSON line a Group, written before its step is committed. Lines of a step that was never
committed are passed over; of two lines about the same Group the later one counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from swerl.episode import Group
from swerl.run.files import disk_errors


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
    lines = [json.dumps(asdict(each)) + "\n" for each in entries]
    with disk_errors(path):
        is_torn = path.exists() and not path.read_bytes().endswith(b"\n")
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * is_torn + "".join(lines))


def read(path: Path, *, steps: int) -> list[Entry]:
    """Return the lines of the first `steps` steps; a line that a crash cut short is passed over."""
    if not path.exists():
        return []
    found: dict[tuple[str, str], Entry] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            value = json.loads(line)
            lists = {name: tuple(value.pop(name)) for name in ("versions", "lengths", "learned")}
            each = Entry(**{**value, "fate": Fate(value["fate"]), **lists})
        except (ValueError, KeyError, TypeError):
            continue
        if each.step < steps:
            found[each.task, each.stage] = each
    return list(found.values())
