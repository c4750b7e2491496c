"""Nodes on a Ray cluster: one placement group, with one bundle and one actor per machine.

A bundle takes a machine's whole share with all of its GPUs, so colocated ranks and engines need no
fractions of a GPU; the actor sets CUDA_VISIBLE_DEVICES for each process. Commands and answers
travel as actor calls, so swerl opens no port of its own between machines. Leaving the context ends
this run's actors and its group, and nothing else.
"""

from __future__ import annotations

import asyncio
import atexit
import signal
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from swerl.cluster.node import ProcessEnd, ProcessSpec
from swerl.core.errors import ClusterError, first_line, install_command
from swerl.core.secrets import lent

if TYPE_CHECKING:
    from swerl.cluster.ray_host import HostInfo

P = ParamSpec("P")
T = TypeVar("T")
QUOTED_LENGTH = 300
"""Characters quoted from Ray's errors; a version mismatch is named in the sixth line."""
CONNECT_S = 10.0
"""Seconds that a cluster's head has to accept a connection."""
INIT_S = 180.0
"""Seconds to join the cluster, and to register a reservation: busy machines need a minute."""
LEAVE_S = 20.0
"""Seconds to give the machines back. A head that is gone answers never; Ray ends this run's actors
when this process has ended."""
_WITHOUT_HEAD = ("RAY_gcs_rpc_server_reconnect_timeout_s", "86400")
"""Ray ends a process whose head is gone for 60 s, in the middle of whatever it does. The nodes then
end by themselves, so the run ends with a ClusterError instead."""


@asynccontextmanager
async def ray_nodes(
    address: str, share: RayShare, *, run: str, notify: Callable[[str], None] = lambda _: None
) -> AsyncIterator[list[RayNode]]:
    """Yield nodes of the cluster at `address`, reserved for this run, ordered by name.

    `notify` receives waiting notices. Raises ClusterError if Ray is not installed, the cluster does
    not answer, or it is too small.
    """
    with lent(*_WITHOUT_HEAD):
        ray = await _in_time(INIT_S, _connect, address, run)
    # Ray's own handler of SIGTERM, below Python's, would abort this process three seconds later.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    group = None
    actors: list[Any] = []
    try:
        group = await reserve(ray, share, run, notify)
        actors = _start_hosts(ray, group, share)
        infos = await asyncio.gather(*(_result(actor.info.remote()) for actor in actors))
        yield _named(actors, infos)
    finally:
        try:
            await _ask(LEAVE_S, _leave, ray, actors, group)
        except ClusterError as error:
            notify(f"leaving the Ray cluster: {error}")
            # The handler that Ray registered would wait for the head again.
            atexit.unregister(ray.shutdown)
            # A connection that is still open crashes this process as it ends.
            with suppress(ClusterError):
                await _ask(LEAVE_S, ray.shutdown)


class RayNode:
    """Implements Node by an actor."""

    def __init__(self, actor: Any, info: HostInfo, name: str) -> None:
        self.name = name
        self.address = info.address
        self.gpus = info.gpus
        self._actor = actor

    async def start(self, spec: ProcessSpec) -> RayProcess:
        pid = _unpacked(await _result(self._actor.start.remote(spec)))
        return RayProcess(self._actor, pid, self.name)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return cast(T, _unpacked(await _result(self._actor.call.remote(function, args, kwargs))))


class RayProcess:
    """Implements RunningProcess."""

    def __init__(self, actor: Any, pid: int, node: str) -> None:
        self.pid = pid
        self.node = node
        self._actor = actor
        self.ended = asyncio.create_task(self._wait())

    async def signal(self, number: int) -> None:
        with suppress(ClusterError):
            await _result(self._actor.signal.remote(self.pid, int(number)))

    async def send(self, line: bytes) -> None:
        try:
            if await _result(self._actor.send.remote(self.pid, line)):
                return
        except ClusterError as error:
            raise ConnectionError from error
        raise BrokenPipeError

    async def receive(self) -> bytes:
        try:
            return cast(bytes, await _result(self._actor.receive.remote(self.pid)))
        except ClusterError:
            return b""

    async def _wait(self) -> ProcessEnd:
        try:
            return cast(ProcessEnd, await _result(self._actor.ended.remote(self.pid)))
        except ClusterError as error:
            return ProcessEnd(-1, lost=str(error))


async def _ask(seconds: float, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a blocking call of Ray. Raises ClusterError if it fails or is late."""
    return await _result(_in_time(seconds, call, *args, **kwargs))


async def _in_time(seconds: float, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a blocking call of Ray. Raises ClusterError if it takes longer.

    It runs in a thread that delays neither the event loop nor the end of this process.
    """
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  raised below
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
    except TimeoutError as error:
        message = f"the head of the Ray cluster did not answer within {seconds:g} s"
        raise ClusterError(message, hint="`ray status` must work on this machine") from error


def _leave(ray: Any, actors: Sequence[Any], group: Any) -> None:
    for actor in actors:
        ray.kill(actor)
    if group is not None:
        ray.util.remove_placement_group(group)
    ray.shutdown()


def _connect(address: str, run: str) -> Any:
    try:
        import ray
    except ImportError:
        raise ClusterError(
            "Ray is not installed", hint=f"{install_command('cluster')} on every machine"
        ) from None
    try:
        # Raise OSError if the port is closed: Ray itself would try for five minutes.
        host, _, port = address.rpartition(":")
        if host and port.isdigit():
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(address=address, namespace=f"swerl-{run}", log_to_driver=False, logging_level=40)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split())[:QUOTED_LENGTH]
        message = f"no Ray cluster answers at {address!r}: {reason}"
        hint = "start one with `ray start --head`; `ray status` must work on this machine"
        raise ClusterError(message, hint=hint) from error
    return ray


def _start_hosts(ray: Any, group: Any, share: RayShare) -> list[Any]:
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


def _named(actors: Sequence[Any], infos: Sequence[HostInfo]) -> list[RayNode]:
    """Return the nodes ordered by name; several on one machine are numbered."""
    count = Counter(info.name for info in infos)
    numbers: Counter[str] = Counter()
    nodes = []
    for actor, info in sorted(zip(actors, infos, strict=True), key=lambda pair: pair[1].name):
        numbers[info.name] += 1
        several = count[info.name] > 1
        name = f"{info.name}-{numbers[info.name]}" if several else info.name
        nodes.append(RayNode(actor, info, name))
    return nodes


async def _result(reference: Awaitable[T]) -> T:
    """Return the answer of an actor or of the head. Raises ClusterError if its machine is gone."""
    from ray.exceptions import RayError

    try:
        return await reference
    except RayError as error:
        message = f"a machine of the Ray cluster failed: {first_line(error)}"
        hint = "the same command resumes once the cluster is whole; see Ray's own logs"
        raise ClusterError(message, hint=hint) from error


def _unpacked(answer: Any) -> Any:
    from swerl.cluster.ray_host import RemoteError

    if isinstance(answer, RemoteError):
        raise ClusterError(answer.message, hint=answer.hint)
    return answer


NOTIFY_S = 10.0
"""Seconds of waiting for machines before a notice is emitted."""
PLACE_S = 600.0
"""Seconds to wait for machines: an autoscaler may have to start them."""


@dataclass(frozen=True, slots=True)
class RayShare:
    """The part of a Ray cluster that a run reserves."""

    num_nodes: int
    gpus_per_node: int
    cpus_per_node: int
    place_s: float = PLACE_S


async def reserve(ray: Any, share: RayShare, run: str, notify: Callable[[str], None]) -> Any:
    """Reserve the share as a placement group; wait for its machines. Raises ClusterError."""
    from ray.util import placement_group

    bundle = {"CPU": share.cpus_per_node} | (
        {"GPU": share.gpus_per_node} if share.gpus_per_node else {}
    )
    # One bundle a machine, on different machines.
    strategy = "STRICT_SPREAD" if share.num_nodes > 1 else "STRICT_PACK"
    bundles, name = [bundle] * share.num_nodes, f"swerl-{run}"
    group = await _ask(INIT_S, placement_group, bundles, strategy=strategy, name=name)
    machines = f"{share.num_nodes} machines with " + " and ".join(
        f"{count} {kind}" for kind, count in bundle.items()
    )
    try:
        async with asyncio.timeout(share.place_s):
            ready = asyncio.ensure_future(group.ready())
            if not (await asyncio.wait([ready], timeout=NOTIFY_S))[0]:
                offered = await _ask(LEAVE_S, _offered, ray)
                notify(f"waiting up to {share.place_s:g} s for {machines}: {offered}")
            await ready
    except (TimeoutError, asyncio.CancelledError) as error:
        # A reservation that stays would take machines that become free later.
        await _ask(LEAVE_S, ray.util.remove_placement_group, group)
        if isinstance(error, asyncio.CancelledError):
            raise
        offered = await _ask(LEAVE_S, _offered, ray)
        message = f"the Ray cluster has no {machines} free: {offered}"
        hint = "`ray status` shows who holds what; other runs were not touched"
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
