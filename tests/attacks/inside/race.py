"""Attacks that race with the controller between its check and its use of a path."""

from __future__ import annotations

import os
import time


def swap(place: str, target: str, wall_s: float) -> dict[str, str]:
    """Make `place/spot` alternate between a folder and a link to the target, at full speed."""
    spot, real, lure = (os.path.join(place, name) for name in ("spot", "real", "lure"))
    os.mkdir(real)
    os.symlink(target, lure)
    num, until = 0, time.monotonic() + wall_s
    while time.monotonic() < until:
        for shown in (real, lure):
            if _rename(shown, spot):
                num += 1
                _rename(spot, shown)
            else:  # the writer created the folder between two renames
                _rename(spot, os.path.join(place, f"away{time.monotonic_ns()}"))
    return {"swaps": str(num)}


def _rename(old: str, new: str) -> bool:
    try:
        os.rename(old, new)
    except OSError:
        return False
    return True
