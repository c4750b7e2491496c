"""Holding machines of a Ray cluster for a run: one placement group, one bundle a machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swerl.core.errors import ClusterError

TELL_S = 10.0
"""Seconds of waiting for machines from which it is worth a word."""
PLACE_S = 600.0
"""Seconds to wait for machines: an autoscaler may have to start them first."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a run takes of a Ray cluster."""

    num_nodes: int
    gpus_per_node: int
    cpus_per_node: int
    place_s: float = PLACE_S


async def reserve(ray: Any, share: Share, run: str, tell: Callable[[str], None]) -> Any:
    """Return a placement group of the share once its machines are there. Raises ClusterError."""
    from ray.util import placement_group

    bundle = {"CPU": share.cpus_per_node} | (
        {"GPU": share.gpus_per_node} if share.gpus_per_node else {}
    )
    strategy = "STRICT_SPREAD" if share.num_nodes > 1 else "STRICT_PACK"
    group = placement_group([bundle] * share.num_nodes, strategy=strategy, name=f"swerl-{run}")
    wanted = f"{share.num_nodes} machines with " + " and ".join(
        f"{count} {kind}" for kind, count in bundle.items()
    )
    try:
        async with asyncio.timeout(share.place_s):
            ready = asyncio.ensure_future(group.ready())
            if not (await asyncio.wait([ready], timeout=TELL_S))[0]:
                tell(f"waiting up to {share.place_s:g} s for {wanted}: {_offered(ray)}")
            await ready
    except (TimeoutError, asyncio.CancelledError) as error:
        offered = _offered(ray)
        ray.util.remove_placement_group(group)
        if isinstance(error, asyncio.CancelledError):
            raise
        message = f"the Ray cluster has no {wanted} free: {offered}"
        hint = "`ray status` says who holds what; nothing of others was touched"
        raise ClusterError(message, hint=hint) from error
    return group


def _offered(ray: Any) -> str:
    rows = [
        f"{node['NodeManagerAddress']} has {node['Resources'].get('CPU', 0):g} CPU and "
        f"{node['Resources'].get('GPU', 0):g} GPU"
        for node in ray.nodes()
        if node["Alive"]
    ]
    return "; ".join(rows[:8]) + (f"; {len(rows) - 8} more" if len(rows) > 8 else "")
