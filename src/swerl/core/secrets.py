"""The only reader of the environment's variables: secrets, and where a user keeps files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_SHORTEST_SECRET = 8


def secret(name: str) -> str | None:
    """Return the secret in this variable, or None where it is unset or empty."""
    return os.environ.get(name) or None


def secret_values() -> dict[str, str]:
    """Return the variables that sound like secrets, to look for them where they must not be.

    GPG_KEY is none: images of Python name the public key of its releases so.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST_SECRET
        and name != "GPG_KEY"
        and any(word in name.upper() for word in _SECRET_WORDS)
    }


@contextmanager
def lent(name: str, value: str) -> Iterator[None]:
    """Hold a variable in this process's environment, and so in that of its children."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


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


def slurm_node_list() -> str:
    """Return the hosts of the Slurm allocation around this process in Slurm's own short form."""
    return os.environ.get("SLURM_JOB_NODELIST", "")


def child_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment for a child of ours, with `extra` on top."""
    return {**os.environ, **extra}
