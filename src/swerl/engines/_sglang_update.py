"""Weight updates of a pool: weights serve only if every server in use holds all of them.

From the first byte until all is confirmed, a server that takes streamed weights carries the version
`partial:...`. Tokens of such weights are refused, also by a controller that starts after one
that died during an update.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from swerl.core.chat import Json
from swerl.core.errors import EngineError, EngineLostError
from swerl.core.learning import EngineTarget, Received, Sent, WeightRef
from swerl.engines._sglang_pool import ServerPool
from swerl.engines._sglang_server import ServerState, SglangServer
from swerl.engines._sglang_wire import PARTIAL, PauseMode

_KINDS = ("kv_cache", "weights")
_NUMBER = re.compile(r"\d+")
_T = TypeVar("_T")


async def load(pool: ServerPool, weights: WeightRef) -> None:
    """Load a folder into every server in use, or leave the old weights in all.

    Servers with mixed weights, after an interrupted update, take part only if no other is left.
    Raises the EngineError of the first server that refuses. A server that cannot be put back to the
    old weights goes out of use, so that two versions never serve side by side.
    """
    pool.may_start.set()
    await pool.await_one()
    async with pool.changing:
        if not any(server.in_use for server in pool.servers):
            for server in await pool.reachable():
                server.use()
        servers = pool.in_use()
        was_paused = pool.paused and not pool.asleep
        if not pool.paused:
            servers = await pool.pause(servers)
        try:
            await _load_all(pool, servers, weights)
        finally:
            if not was_paused:
                await asyncio.shield(pool.resume_remaining())


async def _load_all(pool: ServerPool, servers: Sequence[SglangServer], weights: WeightRef) -> None:
    servers = await _reclaim(pool, servers, "weights")

    async def load_one(server: SglangServer) -> None:
        try:
            await _take(pool, server, weights, flush=_flushes(pool))
        except EngineLostError as error:
            server.lose(error)

    results = await asyncio.gather(*map(load_one, servers), return_exceptions=True)
    refusal = next((result for result in results if isinstance(result, BaseException)), None)
    if refusal is None:
        for server in servers:
            if server.state is ServerState.UPDATING:
                server.use()
        await _reclaim(pool, pool.in_use(), "kv_cache")
        pool.asleep = False
        pool.served.append(weights.version)
        pool.folder = weights
        return
    changed = [server for server in servers if server.state is ServerState.UPDATING]
    await asyncio.gather(*(_put_back(pool, server) for server in changed))
    raise refusal


async def _put_back(pool: ServerPool, server: SglangServer) -> None:
    """Load the weights that serve into a server that holds others."""
    if pool.folder is None:
        why = "it holds weights that the other servers refused"
        server.lose(why, to=ServerState.STALE)
        return
    try:
        await _take(pool, server, pool.folder, flush=True)
        server.use()
    except EngineError as error:
        server.lose(error, to=ServerState.STALE)


@asynccontextmanager
async def update(pool: ServerPool, *, missed: bool = False) -> AsyncIterator[ServerUpdate]:
    """Open an update of every server that answers, or of those that `missed` the last one.

    The servers are paused meanwhile. One that does not take all weights is marked as stale, and all
    of them are if the block raises. Raises EngineError if there is no server to update.
    """
    if not missed:
        # The trainer sleeps by now: a server that died meanwhile may start.
        pool.may_start.set()
        await pool.await_one()
    async with pool.changing:
        servers = pool.take_missed() if missed else await pool.reachable()
        resumes = missed or not pool.paused or pool.asleep
        if missed:
            servers = await pool.call_all(_retract, servers)
        else:
            servers = await pool.pause(servers)
        version = pool.served[-1] if missed else None
        opened = ServerUpdate(pool, version, flush=missed or _flushes(pool))
        try:
            opened.begin(servers)
            if not missed:
                opened.begin(await _reclaim(pool, servers, "weights"))
            await opened.open()
            yield opened
            if not opened.is_finished:
                raise EngineError("an update ended without weights", hint="report this bug")
        except BaseException:
            for server in servers:
                server.lose("an update of its weights was interrupted", to=ServerState.STALE)
            raise
        finally:
            if missed:
                await asyncio.shield(_continue(servers))
            elif resumes:
                await asyncio.shield(pool.resume_remaining())


async def _retract(server: SglangServer) -> None:
    await server.post("/pause_generation", {"mode": PauseMode.RETRACT})


async def _continue(servers: Sequence[SglangServer]) -> None:
    for server in servers:
        if server.in_use:
            with contextlib.suppress(EngineError):
                await server.post("/continue_generation", {})


class ServerUpdate:
    """Implements WeightUpdate for paused servers."""

    def __init__(self, pool: ServerPool, version: str | None, *, flush: bool) -> None:
        """`version`: the one that must be sent; None for any."""
        self.version = version
        self._pool = pool
        self._flush = flush
        self._servers: Sequence[SglangServer] = ()
        self._targets: Mapping[str, EngineTarget] = {}
        self._failures: dict[str, EngineError] = {}
        self.is_finished = False

    @property
    def targets(self) -> Sequence[EngineTarget]:
        return list(self._targets.values())

    def begin(self, servers: Sequence[SglangServer]) -> None:
        """Set the servers to update; from here on their old weights are gone."""
        self._servers = servers
        for server in servers:
            server.begin_update()

    async def open(self) -> None:
        """Open the update at every server. Raises EngineError if none can take weights."""
        places = {server.url: place for place, server in enumerate(self._pool.servers)}

        async def begin(server: SglangServer) -> EngineTarget:
            return await _begin(server, places[server.url])

        self._targets, self._failures = await _each(self._servers, begin)
        if not self._targets:
            raise await self._give_up()
        kinds = {(target.num_ranks, target.dtype, target.device) for target in self.targets}
        if len(kinds) > 1:
            raise EngineError(
                f"the servers differ in ranks, type or device: {sorted(kinds)}",
                hint="start all servers of a run with the same settings",
            )

    async def finish(self, sent: Sent) -> Received:
        """Check what arrived, and let the servers with all weights serve.

        Returns the report with the fewest confirmed parameters. Raises EngineError if no server
        holds all weights.
        """
        for url, why in sent.failures.items():
            message = f"{url} did not take the weights: {why}"
            self._failures[url] = EngineError(message, hint="it must load all of them again")

        async def close(server: SglangServer) -> Received:
            await server.post("/end_weight_update", {})
            if self._flush:
                await server.post("/flush_cache", {})
            confirmed = await _confirm(server, sent)
            await _set_version(server, sent.version)
            await _require_version(server, sent.version, "taking")
            return confirmed

        complete = [
            server
            for server in self._servers
            if server.url in self._targets and server.url not in self._failures
        ]
        confirmed, late = await _each(complete, close)
        self._failures |= late
        if not confirmed:
            raise await self._give_up()
        pool = self._pool
        for server in self._servers:
            if failure := self._failures.get(server.url):
                server.lose(failure, to=ServerState.STALE)
            else:
                server.use()
        await _reclaim(pool, [s for s in self._servers if s.in_use], "kv_cache")
        pool.asleep = False
        pool.served.append(sent.version)
        pool.folder = None
        self.is_finished = True
        return min(confirmed.values(), key=lambda report: report.num_confirmed)

    async def _give_up(self) -> EngineError:
        """Mark every server as stale; return the reason, as a lost engine if none answers."""
        for server in self._servers:
            server.lose(self._failures[server.url], to=ServerState.STALE)
        error = next(iter(self._failures.values()))
        if await self._pool.any_answers():
            return error
        return EngineLostError(str(error), hint=error.hint)


async def sleep(pool: ServerPool) -> None:
    """Release every server's memory; its weights are gone until the next update.

    A server that is starting finishes first; until the next update no other starts. Raises
    EngineError if a server on a GPU would keep its memory.
    """

    async def require_saver(server: SglangServer) -> None:
        info = await server.get("/server_info")
        if info.get("device") != "cpu" and not info.get("enable_memory_saver"):
            raise EngineError(
                f"{server.url} cannot give its memory back to the trainer",
                hint="start it with --enable-memory-saver (engine.flags)",
            )

    async def release(server: SglangServer) -> None:
        server.begin_update()
        kinds: list[Json] = [kind for kind in _KINDS if kind not in server.released]
        if kinds:
            await server.post("/release_memory_occupation", {"tags": kinds})
            server.released |= set(_KINDS)

    await pool.lend()
    async with pool.changing:
        # A restarted server that is not in use yet holds memory, too.
        servers = await pool.call_all(require_saver, await pool.reachable())
        await pool.pause(servers)
        pool.asleep = True
        await pool.call_all(release, servers)


async def take_back(pool: ServerPool, server: SglangServer) -> None:
    """Use a server that answers again, after it has loaded the weights that serve.

    Weights that no folder holds are sent again by the trainer (`update` with `missed`). While the
    pool is paused, the server waits for the next update.
    """
    async with pool.changing:
        if server.in_use or pool.paused:
            return
        if pool.served and pool.folder is None:
            pool.add_missed(server)
            return
        # A failed attempt leaves it out of use; the next check tries again.
        with contextlib.suppress(EngineError):
            if pool.folder is not None:
                await _retract(server)
                await _take(pool, server, pool.folder, flush=True)
                await server.post("/continue_generation", {})
                server.use()
            elif server.state is ServerState.RESTARTED:
                await _set_version(server, pool.first_version)
                server.use()
            elif server.state is ServerState.LOST:
                server.use()


def _flushes(pool: ServerPool) -> bool:
    return pool.settings.pause_mode is not PauseMode.IN_PLACE


async def _reclaim(
    pool: ServerPool, servers: Sequence[SglangServer], kind: str
) -> list[SglangServer]:
    """Reclaim memory that `sleep` released; return the servers that answered."""

    async def reclaim(server: SglangServer) -> None:
        # SGLang crashes on a request for memory that it did not release.
        if kind in server.released:
            server.released.discard(kind)
            await server.post("/resume_memory_occupation", {"tags": [kind]})

    return await pool.call_all(reclaim, servers)


async def _take(pool: ServerPool, server: SglangServer, weights: WeightRef, *, flush: bool) -> None:
    """Load a folder of weights into one paused server."""
    server.begin_update()
    body: dict[str, Json] = {
        "model_path": str(weights.path.resolve()),
        "flush_cache": flush,
        "weight_version": weights.version,
    }
    try:
        await server.post("/update_weights_from_disk", body, timeout_s=pool.settings.load_s)
    except EngineLostError:
        raise
    except EngineError:
        server.keep_weights()
        raise
    info = await _require_version(server, weights.version, "loading")
    if (checksum := info.get("checksum")) and checksum != weights.checksum:
        raise EngineError(
            f"weights {weights.version!r} arrived changed: {checksum} is not {weights.checksum}",
            hint="the folder changed after it was published",
        )


async def _require_version(server: SglangServer, version: str, doing: str) -> Mapping[str, Any]:
    info = await server.get("/model_info")
    if (serving := str(info.get("weight_version"))) != version:
        raise EngineError(
            f"{server.url} serves weights {serving!r} after {doing} {version!r}",
            hint="another client updates the same engine",
        )
    return info


async def _set_version(server: SglangServer, version: str) -> None:
    body: dict[str, Json] = {"new_version": version, "abort_all_requests": False}
    await server.post("/update_weight_version", body)


async def _each(
    servers: Sequence[SglangServer], call: Callable[[SglangServer], Awaitable[_T]]
) -> tuple[dict[str, _T], dict[str, EngineError]]:
    """Call all servers concurrently; return the answers and the failures, by URL."""
    results = await asyncio.gather(*map(call, servers), return_exceptions=True)
    answers: dict[str, _T] = {}
    failures: dict[str, EngineError] = {}
    for server, result in zip(servers, results, strict=True):
        if isinstance(result, EngineError):
            failures[server.url] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            answers[server.url] = result
    return answers, failures


async def _begin(server: SglangServer, place: int) -> EngineTarget:
    """Mark the server and open the update; an update that was left open is closed first."""
    info = await server.get("/server_info")
    if int(info.get("pp_size") or 1) > 1:
        raise EngineError(
            f"{server.url} is split into pipeline stages",
            hint='such engines load with weight_sync = "disk" only',
        )
    dtype = str(info.get("dtype") or "auto")  # by torch's name; on GPUs, auto means bfloat16
    target = EngineTarget(
        url=server.url,
        num_ranks=int(info.get("tp_size") or 1),
        dtype={"half": "float16", "float": "float32", "auto": "bfloat16"}.get(dtype, dtype),
        device="cpu" if info.get("device") == "cpu" else "cuda",
        place=place,
        gpus=server.gpus,
    )
    await _set_version(server, f"{PARTIAL}{server.url}")
    try:
        await server.post("/begin_weight_update", {})
    except EngineError as error:
        if "already open" not in str(error):
            raise
        await server.post("/end_weight_update", {})
        await server.post("/begin_weight_update", {})
    return target


async def _confirm(server: SglangServer, sent: Sent) -> Received:
    """Compare the checksums of every rank with the trainer's. Raises EngineError if one differs.

    An engine may store a kind of parameters, such as the experts of all layers, in its own layout.
    Then none of their checksums agrees, and the kind is not confirmed. If one of a kind has agreed,
    all must. With data-parallel attention (`--enable-dp-attention`) ranks split parameters in other
    ways, so any kind may disagree. A server without checksums confirms nothing.
    """
    try:
        answer = await server.post("/weights_checker", {"action": "checksum"})
    except EngineError:
        return Received(sent.version, 0)
    ranks = answer.get("ranks") or []
    # The first place of a rank is the model's; others are its draft models', not the trainer's.
    places = [report["parallelism_info"][0] for report in ranks]
    by_rank = {
        int(place["tp_rank"]): report["checksums"]
        for place, report in zip(places, ranks, strict=True)
    }
    shares_data = any(int(place.get("dp_size") or 1) > 1 for place in places)
    certain = frozenset() if shares_data else sent.certain
    stated = [by_rank.get(rank, {}) for rank in range(len(sent.checksums))]
    common_names = [
        set(ours) & set(theirs) for ours, theirs in zip(sent.checksums, stated, strict=True)
    ]
    agreed = [
        {name for name in names if theirs[name] in ours[name]}
        for names, ours, theirs in zip(common_names, sent.checksums, stated, strict=True)
    ]
    server.known_kinds |= {_kind(name) for names in agreed for name in names}
    wrong = {
        name
        for all_names, right in zip(common_names, agreed, strict=True)
        for name in all_names - right
        if name in certain or _kind(name) in server.known_kinds
    }
    if wrong:
        message = (
            f"{server.url}: {len(wrong)} of {len(set.union(*common_names))} parameters arrived "
            f"changed, {min(wrong)} first"
        )
        hint = "does the server hold this model in this type, without quantisation?"
        raise EngineError(message, hint=hint)
    common = set.intersection(*agreed) if agreed else set()
    return Received(sent.version, len(common), min(map(len, stated), default=0))


def _kind(name: str) -> str:
    """Return a parameter's name with `*` for every number."""
    return _NUMBER.sub("*", name)
