"""One line of a preflight: what was looked at on which machine, what was seen, what mends it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    """The run can start, and something may go wrong later."""
    FAIL = "fail"
    """The run cannot work like this."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    node: str
    check: str
    state: State
    found: str
    """What was seen, in a few words."""
    mend: str = ""
    """What to do; empty where all is well."""


def judged(node: str, check: str, found: str, *, good: bool, mend: str) -> Finding:
    """Return a finding that is well or fatal."""
    return Finding(node, check, State.OK if good else State.FAIL, found, "" if good else mend)
