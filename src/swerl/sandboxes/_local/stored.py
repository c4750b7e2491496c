"""OCI images of the store, as the `local` sandbox shows them: their layers, and our own user.

Nothing of the host is visible in them. A few files and folders lie over the image: the accounts,
with `agent` before the image's own, the names of a machine without a network, and mount points.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from swerl.core.errors import ImageError, InputError
from swerl.images.oci.records import StoredImage
from swerl.images.oci.store import default_store
from swerl.sandboxes._local import files
from swerl.sandboxes._local.base import AGENT_ENV, GITCONFIG, NETWORK_FILES, SYSTEM_PATH, LocalImage

_SHELLS = ("/bin/bash", "/usr/bin/bash")
_MAX_ACCOUNTS = 1 << 20
"""Most bytes read of a list of accounts; real ones have a few thousand."""


@contextmanager
def use(reference: str) -> Iterator[LocalImage]:
    """Find an image and keep it in the store meanwhile. Raises ImageError."""
    try:
        with default_store().use(reference) as stored:
            yield describe(stored)
    except InputError as error:
        message = f"the local sandbox cannot open image {reference!r}"
        hint = "it opens `host`, `built:NAME`, `dir:/ABSOLUTE/FOLDER` and names of OCI images"
        raise ImageError(message, hint=hint) from error


def describe(stored: StoredImage) -> LocalImage:
    """Return what the sandbox needs to know of an image."""
    accounts = _accounts(stored.layers)
    env = {"PATH": SYSTEM_PATH, **AGENT_ENV, "SHELL": _shell(stored.layers), **stored.env}
    own = ("HOME", "USER", "LOGNAME")
    env |= {name: AGENT_ENV[name] for name in own}
    return LocalImage(
        binds=(), links={}, files=accounts, env=env, layers=stored.layers, is_whole=True
    )


@functools.lru_cache(maxsize=1024)
def _accounts(layers: tuple[Path, ...]) -> dict[str, str]:
    """Return the small files that lie over an image."""
    shell = _shell(layers)
    passwd = f"agent:x:1000:1000:agent:/home/agent:{shell}\n" + _read(layers, "/etc/passwd")
    found = {
        "/etc/passwd": passwd,
        "/etc/group": "agent:x:1000:\n" + _read(layers, "/etc/group"),
        **NETWORK_FILES,
    }
    if not _read(layers, "/etc/gitconfig"):
        found["/etc/gitconfig"] = GITCONFIG
    return found


@functools.lru_cache(maxsize=1024)
def _shell(layers: tuple[Path, ...]) -> str:
    return "/bin/bash" if any(_has(layers, path) for path in _SHELLS) else "/bin/sh"


def _has(layers: Sequence[Path], path: str) -> bool:
    return any((layer / path.lstrip("/")).is_file() for layer in layers)


def _read(layers: Sequence[Path], path: str) -> str:
    """Return a file as the highest layer has it, whose links are not followed out of it."""
    for layer in reversed(layers):
        root = os.open(layer, os.O_PATH | os.O_DIRECTORY)
        try:
            with suppress(OSError), files.open_file(root, path) as file:
                text = file.read(_MAX_ACCOUNTS).decode("utf-8", "replace")
                return text if text.endswith("\n") or not text else text + "\n"
        finally:
            os.close(root)
    return ""
