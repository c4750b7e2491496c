"""Lists of sandboxes: filtered, ordered, and cut into pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qsl, unquote

from swerl.sandboxes.e2b_server.failure import Code, Failure

if TYPE_CHECKING:
    from swerl.sandboxes.e2b_server.boxes import Box

_MOST = 100
_STATES = {"running", "paused"}


@dataclass(frozen=True, slots=True)
class Question:
    """Which sandboxes a client wants to see."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    states: frozenset[str] = frozenset(_STATES)
    template: str = ""
    after_unix_s: float = 0.0
    newest_first: bool = True
    limit: int = _MOST
    token: str = ""
    """Id of the sandbox after which the page begins, and its start; empty for the first page."""

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Self:
        """Return what a query asks. Raises Failure."""
        states = frozenset(filter(None, query.get("state", "").split(","))) or frozenset(_STATES)
        if wrong := states - _STATES:
            raise Failure(Code.INVALID_ARGUMENT, f"there is no state {min(wrong)[:40]!r}")
        limit = query.get("limit", str(_MOST))
        if not limit.isdecimal() or not 1 <= int(limit) <= _MOST:
            raise Failure(Code.INVALID_ARGUMENT, f"limit must be 1 to {_MOST}")
        return cls(
            metadata=wanted_metadata(query),
            states=states,
            template=query.get("template", ""),
            after_unix_s=_time(query.get("startedAfter", "")),
            newest_first=query.get("order", "desc") != "asc",
            limit=int(limit),
            token=query.get("nextToken", ""),
        )

    def fits(self, box: Box) -> bool:
        """Tell whether a sandbox is asked for; all that exist run."""
        return (
            "running" in self.states
            and self.metadata.items() <= box.wish.metadata.items()
            and self.template in ("", box.wish.template)
            and box.started_unix_s > self.after_unix_s
        )


def wanted_metadata(query: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata that a query asks for; the SDK encodes each part twice."""
    pairs = parse_qsl(query.get("metadata", ""), keep_blank_values=True)
    return {unquote(name): unquote(value) for name, value in pairs}


def page(boxes: Sequence[Box], question: Question) -> tuple[list[Box], str]:
    """Return the sandboxes of one page, and the token of the next; empty after the last."""
    found = [box for box in boxes if question.fits(box)]
    found.sort(key=_key, reverse=question.newest_first)
    if question.token:
        start = _position(question.token)
        found = [
            box
            for box in found
            if (_key(box) < start if question.newest_first else _key(box) > start)
        ]
    shown, more = found[: question.limit], found[question.limit :]
    return shown, "{:.6f}_{}".format(*_key(shown[-1])) if more else ""


def _key(box: Box) -> tuple[float, str]:
    return (round(box.started_unix_s, 6), box.id)


def _position(token: str) -> tuple[float, str]:
    started, _, sandbox_id = token.partition("_")
    try:
        return (float(started), sandbox_id)
    except ValueError as error:
        raise Failure(Code.INVALID_ARGUMENT, "the token of the next page is wrong") from error


def _time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp() if text else 0.0
    except ValueError as error:
        raise Failure(Code.INVALID_ARGUMENT, f"cannot read the time {text[:40]!r}") from error
