"""Episodes of weights that a crash took away.

After a crash an asynchronous run goes on from its committed step, and other Groups may be finished
first. So it makes other weights than those that were lost, under the same names. What the lost ones
sampled is moved aside before a name can be given again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from swerl.core.events import Emit, Notice
from swerl.core.files import disk_errors
from swerl.rollout import record
from swerl.rollout.versions import Versions
from swerl.runs.aside import make_aside
from swerl.runs.layout import Cursor, RunFolder


def set_aside(
    run: RunFolder, versions: Versions, cursor: Cursor, groups_per_step: int, emit: Emit
) -> None:
    """Move Episodes aside that unknown weights sampled, and say how many there were.

    Looks at the stages of Groups that are not trained. Raises RunError where the disk refuses.
    """
    places = (cursor.next_place, *(place for place, _ in cursor.under_way))
    first_stage = min(places) // groups_per_step
    lost = [path for path in _finished(run.root, first_stage) if not _is_known(path, versions)]
    if not lost:
        return
    aside = make_aside(run.root)
    for path in lost:
        target = aside / path.parent.name / path.name
        with disk_errors(target):
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
    emit(Notice(f"moved {len(lost)} episodes of lost weights aside, to {aside.name}"))


def _finished(root: Path, first_stage: int) -> Iterator[Path]:
    for stage in sorted((root / "episodes").iterdir()):
        if stage.name.isdecimal() and int(stage.name) >= first_stage:
            yield from (path for path in sorted(stage.iterdir()) if record.is_finished(path))


def _is_known(path: Path, versions: Versions) -> bool:
    return all(versions.place(name) is not None for name in record.read_versions(path))
