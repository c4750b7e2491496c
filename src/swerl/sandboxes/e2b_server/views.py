"""Sandboxes and templates as E2B's REST interface shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from swerl.core.chat import Json
from swerl.core.sandbox import Limits
from swerl.sandboxes.e2b_server import envd

if TYPE_CHECKING:
    from swerl.sandboxes.e2b_server.boxes import Box

_CLIENT = "swerl"


def opened(box: Box, domain: str) -> dict[str, Json]:
    """Return what lets a client into a sandbox: the answer to create and connect."""
    return {
        "templateID": box.wish.template,
        "sandboxID": box.id,
        "clientID": _CLIENT,
        "envdVersion": envd.VERSION,
        "envdAccessToken": box.token,
        "trafficAccessToken": box.traffic_token,
        "domain": domain,
    }


def listed(box: Box) -> dict[str, Json]:
    """Return a sandbox as lists show it."""
    return {
        "templateID": box.wish.template,
        "sandboxID": box.id,
        "clientID": _CLIENT,
        "startedAt": _time(box.started_unix_s),
        "endAt": _time(box.end_unix_s),
        **_size(box.limits),
        "metadata": dict(box.wish.metadata),
        "state": "running",
        "envdVersion": envd.VERSION,
    }


def detail(box: Box, domain: str) -> dict[str, Json]:
    """Return all that is told of a sandbox."""
    network = {"allowInternetAccess": False}
    return {**listed(box), "envdAccessToken": box.token, "domain": domain, **network}


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
