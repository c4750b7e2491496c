"""The only reader of the environment's variables: secrets, and where a user keeps files."""

from __future__ import annotations

import os
from pathlib import Path


def secret(name: str) -> str | None:
    """Return the secret in this variable, or None where it is unset or empty."""
    return os.environ.get(name) or None


def cache_dir() -> Path:
    """Return the folder for what can be made again: images, bundles, warm starts.

    `SWERL_CACHE` names it; otherwise it is `swerl` in the user's cache folder.
    """
    if named := os.environ.get("SWERL_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "swerl"


def state_dir() -> Path:
    """Return the folder for what must outlive a cache: the ledger of sandboxes, their probes.

    `SWERL_STATE` names it; otherwise it is `swerl` in the user's state folder.
    """
    if named := os.environ.get("SWERL_STATE"):
        return Path(named)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "swerl"


def child_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment for a child of ours, with `extra` on top."""
    return {**os.environ, **extra}
