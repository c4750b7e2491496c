"""Sandboxes and templates in the form of E2B's REST interface, and lists of them in pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Self
from urllib.parse import parse_qsl, unquote

from swerl.core.chat import Json
from swerl.core.sandbox import Limits
from swerl.sandboxes.e2b_server import envd
from swerl.sandboxes.e2b_server.failure import Code, WireError
from swerl.sandboxes.e2b_server.served import ServedSandbox

_CLIENT = "swerl"
_MOST = 100
_STATES = {"running", "paused"}


def opened(served: ServedSandbox, domain: str) -> dict[str, Json]:
    """Return the answer to create and connect: all that a client needs to use the sandbox."""
    return {
        "templateID": served.created.template,
        "sandboxID": served.id,
        "clientID": _CLIENT,
        "envdVersion": envd.VERSION,
        "envdAccessToken": served.token,
        "trafficAccessToken": served.traffic_token,
        "domain": domain,
    }


def listed(served: ServedSandbox) -> dict[str, Json]:
    """Return a sandbox as lists show it."""
    return {
        "templateID": served.created.template,
        "sandboxID": served.id,
        "clientID": _CLIENT,
        "startedAt": _time(served.started_unix_s),
        "endAt": _time(served.end_unix_s),
        **_size(served.limits),
        "metadata": dict(served.created.metadata),
        "state": _state(served),
        "envdVersion": envd.VERSION,
    }


def detail(served: ServedSandbox, domain: str) -> dict[str, Json]:
    network = {"allowInternetAccess": False}
    return {**listed(served), "envdAccessToken": served.token, "domain": domain, **network}


def _state(served: ServedSandbox) -> str:
    return "paused" if served.kept else "running"


def template(name: str, limits: Limits, started_unix_s: float) -> dict[str, Json]:
    """Return a template as lists show it."""
    since = _time(started_unix_s)
    return {
        "templateID": name, "buildID": name, "aliases": [name], "names": [name], "public": False,
        **_size(limits), "createdAt": since, "updatedAt": since, "createdBy": None,
        "lastSpawnedAt": None, "spawnCount": 0, "buildCount": 1, "envdVersion": envd.VERSION,
        "buildStatus": "ready",
    }  # fmt: skip


def _size(limits: Limits) -> Mapping[str, Json]:
    return {
        "cpuCount": math.ceil(limits.num_cpus),
        "memoryMB": limits.memory_mib,
        "diskSizeMB": limits.disk_mib,
    }


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True)
class ListQuery:
    """The filter, order and page of a client's list call."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    states: frozenset[str] = frozenset(_STATES)
    template: str = ""
    after_unix_s: float = 0.0
    newest_first: bool = True
    limit: int = _MOST
    token: str = ""
    """Id and start of the sandbox before the page; empty for the first page."""

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Self:
        states = frozenset(filter(None, query.get("state", "").split(","))) or frozenset(_STATES)
        if wrong := states - _STATES:
            raise WireError(Code.INVALID_ARGUMENT, f"unknown state {min(wrong)[:40]!r}")
        limit = query.get("limit", str(_MOST))
        if not limit.isdecimal() or not 1 <= int(limit) <= _MOST:
            raise WireError(Code.INVALID_ARGUMENT, f"limit must be 1 to {_MOST}")
        return cls(
            metadata=wanted_metadata(query),
            states=states,
            template=query.get("template", ""),
            after_unix_s=_unix_time(query.get("startedAfter", "")),
            newest_first=query.get("order", "desc") != "asc",
            limit=int(limit),
            token=query.get("nextToken", ""),
        )

    def fits(self, served: ServedSandbox) -> bool:
        """Return whether the filter includes a sandbox."""
        return (
            _state(served) in self.states
            and self.metadata.items() <= served.created.metadata.items()
            and self.template in ("", served.created.template)
            and served.started_unix_s > self.after_unix_s
        )


def wanted_metadata(query: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata filter of a query; the SDK encodes each part twice."""
    pairs = parse_qsl(query.get("metadata", ""), keep_blank_values=True)
    return {unquote(name): unquote(value) for name, value in pairs}


def page(sandboxes: Sequence[ServedSandbox], query: ListQuery) -> tuple[list[ServedSandbox], str]:
    """Return the sandboxes of one page, and the token of the next page; empty after the last."""
    found = [served for served in sandboxes if query.fits(served)]
    found.sort(key=_key, reverse=query.newest_first)
    if query.token:
        start = _position(query.token)
        found = [
            served
            for served in found
            if (_key(served) < start if query.newest_first else _key(served) > start)
        ]
    shown, more = found[: query.limit], found[query.limit :]
    return shown, "{:.6f}_{}".format(*_key(shown[-1])) if more else ""


def _key(served: ServedSandbox) -> tuple[float, str]:
    return (round(served.started_unix_s, 6), served.id)


def _position(token: str) -> tuple[float, str]:
    started, _, sandbox_id = token.partition("_")
    try:
        return (float(started), sandbox_id)
    except ValueError as error:
        raise WireError(Code.INVALID_ARGUMENT, "the nextToken is wrong") from error


def _unix_time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp() if text else 0.0
    except ValueError as error:
        raise WireError(Code.INVALID_ARGUMENT, f"cannot read the time {text[:40]!r}") from error
