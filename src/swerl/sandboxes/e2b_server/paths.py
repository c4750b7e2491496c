"""Paths as clients write them: absolute, below `~`, or relative to where their user is at home."""

from __future__ import annotations

import posixpath

from swerl.sandboxes.e2b_server.failure import Code, Failure


def resolve(path: str, home: str) -> str:
    """Return an absolute path. Raises Failure on another user's home."""
    if path.startswith("~"):
        if path != "~" and not path.startswith("~/"):
            raise Failure(Code.INVALID_ARGUMENT, f"cannot expand the home in {path!r}")
        path = path[2:]
    return posixpath.normpath("/" + posixpath.join(home, path).lstrip("/"))
