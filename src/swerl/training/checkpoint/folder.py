"""The folder of all checkpoints of a run: what is kept, what fits, and how the last save went.

The first rank leaves a note of every save beside the checkpoints, so that the controller learns
how it went while the ranks are busy with a step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from swerl.core.errors import TrainerError
from swerl.core.files import disk_errors, write_json
from swerl.training.checkpoint.meta import steps

KEPT = 2
"""Newest checkpoints kept: the last, and the one before it in case a run stops while committing."""
_GIB = 2**30
_MARGIN = 1.02
"""Room that a checkpoint needs over its tensors: names, places and what file systems add."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one save went."""

    step: int
    num_bytes: int = 0
    write_s: float = 0.0
    """Seconds from the copy to the rename, most of them beside training."""
    warning: str = ""
    error: str = ""
    hint: str = ""


def folder_of(parent: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return parent / f"{step:05d}"


def part_of(folder: Path) -> Path:
    """Return the folder in which a checkpoint is written before it is whole."""
    return folder.with_name(f".{folder.name}.part")


def make_room(folder: Path, num_bytes: int) -> None:
    """Make the folder to write a checkpoint in, and clear away what killed runs left half-written.

    Raises TrainerError where the disk has too little room, RunError where it cannot be written.
    """
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in (*folder.parent.glob(".*.part"), *folder.parent.glob(".*.old")):
            shutil.rmtree(left, ignore_errors=True)
        _outcome(folder.parent, int(folder.name)).unlink(missing_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < num_bytes * _MARGIN:
            message = (
                f"the checkpoint {folder} needs {num_bytes / _GIB:.2f} GiB, "
                f"its disk has {free / _GIB:.2f} GiB left"
            )
            hint = "free some space, then run the same command again: it resumes"
            raise TrainerError(message, hint=hint)
        part_of(folder).mkdir()


def put_in_place(folder: Path) -> None:
    """Give a whole checkpoint its name, in place of one of the same step."""
    if folder.exists():
        _remove(folder)
    part_of(folder).rename(folder)


def prune(parent: Path, step: int, *, spare: Collection[int], every: int) -> None:
    """Remove checkpoints of earlier steps but the newest, those to spare, and every n-th.

    Later steps stay: a run that stepped back writes over them when it comes to them.
    """
    earlier = [found for found in steps(parent) if found <= step]
    for found in earlier[:-KEPT]:
        if found not in spare and not (every and found % every == 0):
            _remove(folder_of(parent, found))


def _remove(folder: Path) -> None:
    """Remove a checkpoint, which is gone before its first file is."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def space_warning(parent: Path, num_bytes: int) -> str:
    """Return a sentence where the next checkpoint will not fit, else nothing."""
    free = shutil.disk_usage(parent).free
    if free >= num_bytes * _MARGIN:
        return ""
    return (
        f"the disk of {parent} has {free / _GIB:.2f} GiB left; "
        f"the next checkpoint needs {num_bytes / _GIB:.2f} GiB"
    )


def put_outcome(parent: Path, outcome: Outcome) -> None:
    """Leave a note of how a save went."""
    write_json(_outcome(parent, outcome.step), asdict(outcome))


def take_outcome(parent: Path, step: int) -> Outcome | None:
    """Return and remove the note on a step's save; None while it is under way."""
    path = _outcome(parent, step)
    try:
        found = Outcome(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    return found


def _outcome(parent: Path, step: int) -> Path:
    return parent / f".{step:05d}.outcome.json"
