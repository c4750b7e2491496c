"""What a probe found: the attack was stopped, it worked, or it could not be tried."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from swerl.core.errors import SwerlError

_MOST_SHOWN = 4


class Result(StrEnum):
    """How a probe ended."""

    PASS = "PASS"
    """The attack was tried and did not work."""
    FAIL = "FAIL"
    """The attack worked."""
    CANNOT = "CANNOT"
    """The attack could not be tried; this says nothing about the sandbox."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The end of one probe."""

    result: Result
    seen: str
    """What was seen, in a few words."""


class CannotError(SwerlError):
    """A probe lacks what it needs; the message says what."""


def passed(seen: str) -> Finding:
    """Return the finding that the attack did not work."""
    return Finding(Result.PASS, seen)


def failed(seen: str) -> Finding:
    """Return the finding that the attack worked."""
    return Finding(Result.FAIL, seen)


def cannot(seen: str) -> Finding:
    """Return the finding that the attack could not be tried."""
    return Finding(Result.CANNOT, seen)


def judge(holes: Iterable[str], otherwise: str) -> Finding:
    """Return FAIL with the holes where there are any, else PASS with what was seen."""
    found = list(dict.fromkeys(holes))
    if not found:
        return passed(otherwise)
    more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    return failed("; ".join(found[:_MOST_SHOWN]) + more)


def worked(outcomes: Mapping[str, str], *, by: str | None = None) -> list[str]:
    """Return the attempts that worked, of what a program inside reports; `by` names the user."""
    who = f" as {by}" if by else ""
    return [
        f"{attempt}{who}{text.removeprefix('ok')}"
        for attempt, text in outcomes.items()
        if text.startswith("ok")
    ]


def refused(outcomes: Mapping[str, str]) -> str:
    """Return how attempts were refused, in a few words."""
    kinds = list(dict.fromkeys(outcomes.values()))
    return ", ".join(kinds[:_MOST_SHOWN])
