"""Read environment variables, in this file only: secrets and the user's folders.

A login in a URL is a secret, too: `without_logins` and `public` replace it before text is stored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LOGIN = re.compile(r"(?<=://)[^\s/?#<>]+@")
"""Name and password before the host of a URL; a token may stand there without a name."""
HIDDEN_LOGIN = "***@"


def secret(name: str) -> str | None:
    """Return the secret in this variable, or None if it is unset or empty."""
    return os.environ.get(name) or None


def without_logins(text: str) -> str:
    """Return a text with the login of each URL replaced by `***`."""
    return _LOGIN.sub(HIDDEN_LOGIN, text) if "://" in text else text


def public(value: Any) -> Any:
    """Return a JSON value with the login of each URL in it replaced by `***`."""
    if isinstance(value, dict):
        return {key: public(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [public(item) for item in value]
    return without_logins(value) if isinstance(value, str) else value


@contextmanager
def lent(name: str, value: str) -> Iterator[None]:
    """Set a variable in this process's environment and that of its children."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def cache_dir() -> Path:
    """Return the folder of files that can be recreated: images, bundles, warm starts.

    `SWERL_CACHE`, or `swerl` in the user's cache folder.
    """
    return _own_folder("CACHE", ".cache")


def state_dir() -> Path:
    """Return the folder of files that must outlive a cache: the ledger of sandboxes.

    `SWERL_STATE`, or `swerl` in the user's state folder.
    """
    return _own_folder("STATE", ".local/state")


def _own_folder(kind: str, usual: str) -> Path:
    if folder := os.environ.get(f"SWERL_{kind}"):
        return Path(folder)
    base = os.environ.get(f"XDG_{kind}_HOME")
    return (Path(base) if base else Path.home() / usual) / "swerl"


def visible_gpus() -> tuple[str, ...] | None:
    """Return the GPUs that CUDA shows to this process; None if the variable is unset."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if listed is None else tuple(filter(None, listed.replace(" ", "").split(",")))


def child_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment with `extra` on top, for a child process."""
    return {**os.environ, **extra}
