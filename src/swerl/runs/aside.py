"""Folders for what a run no longer uses and does not throw away: `undone-01`, `undone-02`, …"""

from __future__ import annotations

from pathlib import Path

from swerl.core.files import disk_errors


def next_number(parent: Path, prefix: str) -> int:
    """Return one more than the highest number of the names that begin so, whatever was removed."""
    ends = (path.name.removeprefix(prefix) for path in parent.glob(f"{prefix}*"))
    return max((int(end) for end in ends if end.isdecimal()), default=0) + 1


def make_aside(root: Path) -> Path:
    """Make and return a folder of a run for what is moved aside. Raises RunError."""
    aside = root / f"undone-{next_number(root, 'undone-'):02d}"
    with disk_errors(aside):
        aside.mkdir()
    return aside
