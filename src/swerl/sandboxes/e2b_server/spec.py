"""A command as its client describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swerl.core.chat import Json


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a terminal, in characters."""

    columns: int
    rows: int


@dataclass(frozen=True, slots=True)
class Spec:
    """A command that a client starts."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    """`root`, or None for the sandbox's ordinary user."""
    tag: str = ""
    takes_input: bool = True
    size: Size | None = None
    """Size of its terminal, if it has one."""
    timeout_s: float | None = None
    """Seconds after which it is killed; None for the sandbox's whole life."""

    def message(self) -> dict[str, Json]:
        """Return it as lists of processes show it."""
        cmd, *args = self.argv
        return {"cmd": cmd, "args": list(args), "cwd": self.cwd, "envs": dict(self.env)}
