"""Nodes on a Ray cluster: one placement group, one bundle and one actor a machine.

A bundle takes a machine's whole share, all of its GPUs with it, so ranks and engines that take
turns on the same GPUs need no fractions of them. The actor gives each process its GPUs by
CUDA_VISIBLE_DEVICES. Commands and answers travel as actor calls, so no port of swerl's own is
opened between machines. Leaving the context ends this run's actors and its group, and no more.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from swerl.cluster.node import Ended, Order
from swerl.core.errors import ClusterError

if TYPE_CHECKING:
    from swerl.cluster.ray_host import About

P = ParamSpec("P")
T = TypeVar("T")
SAID_LENGTH = 300
"""Characters of Ray's own words; the two versions of a mismatch are in its sixth line."""
KNOCK_S = 10.0
"""Seconds for a cluster's head to take a connection."""


@asynccontextmanager
async def ray_nodes(
    address: str, share: Share, *, run: str, tell: Callable[[str], None] = lambda _: None
) -> AsyncIterator[list[RayNode]]:
    """Yield nodes of the cluster at `address`, held for this run alone, by their names.

    `tell` hears what is waited for. Raises ClusterError where Ray is absent, nothing answers, or
    the cluster is too small.
    """
    ray = _connect(address, run)
    group = None
    actors: list[Any] = []
    try:
        group = await reserve(ray, share, run, tell)
        actors = _start_hosts(ray, group, share)
        abouts = await asyncio.gather(*(_asked(each.about.remote()) for each in actors))
        yield _named(actors, abouts)
    finally:
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            ray.util.remove_placement_group(group)
        ray.shutdown()


class RayNode:
    """Implements Node by an actor."""

    def __init__(self, actor: Any, about: About, name: str) -> None:
        self.name = name
        self.address = about.address
        self.gpus = about.gpus
        self._actor = actor

    async def start(self, order: Order) -> RayProcess:
        """Start a process. Raises ClusterError."""
        pid = _unpacked(await _asked(self._actor.start.remote(order)))
        return RayProcess(self._actor, pid, self.name)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function there. Raises ClusterError."""
        return cast(T, _unpacked(await _asked(self._actor.call.remote(function, args, kwargs))))


class RayProcess:
    """Implements Running."""

    def __init__(self, actor: Any, pid: int, node: str) -> None:
        self.pid = pid
        self.node = node
        self._actor = actor
        self.ended = asyncio.create_task(self._wait())

    async def signal(self, number: int) -> None:
        """Send a signal; nothing once it or its node is gone."""
        with suppress(ClusterError):
            await _asked(self._actor.signal.remote(self.pid, int(number)))

    async def send(self, line: bytes) -> None:
        """Write to its link. Raises ConnectionError where it reads no more."""
        try:
            if await _asked(self._actor.send.remote(self.pid, line)):
                return
        except ClusterError as error:
            raise ConnectionError from error
        raise BrokenPipeError

    async def receive(self) -> bytes:
        """Return its next line, or nothing where no more will come."""
        try:
            return cast(bytes, await _asked(self._actor.receive.remote(self.pid)))
        except ClusterError:
            return b""

    async def _wait(self) -> Ended:
        try:
            return cast(Ended, await _asked(self._actor.ended.remote(self.pid)))
        except ClusterError as error:
            return Ended(-1, lost=str(error))


def _connect(address: str, run: str) -> Any:
    try:
        import ray
    except ImportError:
        raise ClusterError(
            "Ray is not installed", hint="pip install 'swerl[cluster]' on every machine"
        ) from None
    try:
        _knock(address)
        # Ray's own handler would end this process in the middle of anything.
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(address=address, namespace=f"swerl-{run}", log_to_driver=False, logging_level=40)
        signal.signal(signal.SIGTERM, handler)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        said = " ".join(str(error).split())[:SAID_LENGTH]
        message = f"no Ray cluster answers at {address!r}: {said}"
        hint = "`ray status` must work on this machine; or choose another cluster.launcher"
        raise ClusterError(message, hint=hint) from error
    return ray


def _knock(address: str) -> None:
    """Raise OSError where nobody listens: Ray itself would try for five minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()


def _start_hosts(ray: Any, group: Any, share: Share) -> list[Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from swerl.cluster.ray_host import RayHost

    host = ray.remote(RayHost)
    return [
        host.options(
            num_cpus=share.cpus_per_node,
            num_gpus=share.gpus_per_node,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        ).remote()
        for index in range(share.num_nodes)
    ]


def _named(actors: Sequence[Any], abouts: Sequence[About]) -> list[RayNode]:
    """Return the nodes by their names; several on one machine are numbered."""
    count = Counter(about.name for about in abouts)
    seen: Counter[str] = Counter()
    nodes = []
    for actor, about in sorted(zip(actors, abouts, strict=True), key=lambda pair: pair[1].name):
        seen[about.name] += 1
        several = count[about.name] > 1
        name = f"{about.name}-{seen[about.name]}" if several else about.name
        nodes.append(RayNode(actor, about, name))
    return nodes


async def _asked(reference: Awaitable[T]) -> T:
    """Return what an actor answers. Raises ClusterError where it or its machine is gone."""
    from ray.exceptions import RayError

    try:
        return await reference
    except RayError as error:
        message = f"a machine of the Ray cluster failed: {_first_line(error)}"
        hint = "the same command goes on once the cluster is whole; Ray's own logs say more"
        raise ClusterError(message, hint=hint) from error


def _unpacked(answer: Any) -> Any:
    from swerl.cluster.ray_host import Failed

    if isinstance(answer, Failed):
        raise ClusterError(answer.message, hint=answer.hint)
    return answer


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


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
