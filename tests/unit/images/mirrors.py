"""How tests tell a mirror that failed."""

from __future__ import annotations

from swerl.core.errors import ImageError
from swerl.images.mirror import MirrorReport


def failure(report: MirrorReport) -> str:
    """The one error of a report, with its hint."""
    (done,) = report.failed
    assert isinstance(done.error, ImageError)
    return f"{done.error} | {done.error.hint}"
