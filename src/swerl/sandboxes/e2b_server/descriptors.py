"""How many files and sockets a server may have open."""

from __future__ import annotations

import resource

_NUM_FILES = 65536


def raise_file_limit() -> None:
    """Take more descriptors: a command costs up to three, and sandboxes run many."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _NUM_FILES:
        wanted = _NUM_FILES if most == resource.RLIM_INFINITY else min(_NUM_FILES, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), most))
