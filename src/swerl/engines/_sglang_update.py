"""A weight update of live servers: begin, weights, end, checksums, version; or the server is mixed.

From the first byte on until all is confirmed a server carries the version `partial:...`: tokens of
such weights are refused, also by a controller that comes after one that died in between.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swerl.core.chat import Json
from swerl.core.contracts import WeightSource
from swerl.core.errors import EngineError
from swerl.core.learning import EngineTarget, Received, Sent
from swerl.engines._sglang_server import Server

PARTIAL = "partial:"
"""How the version of weights begins of which a server may hold only a part."""
STARTED_ANEW = f"{PARTIAL}started-anew"
"""The version of a server that was started again: it holds the run's first weights."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Confirmed:
    """How many parameters of a server have the trainer's checksum, and how many it has."""

    num: int
    num_stated: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an update of some servers."""

    version: str
    confirmed: Mapping[str, Confirmed]
    """URL -> whose checksums agreed, of servers that hold all weights."""
    failures: Mapping[str, EngineError]
    """URL -> why this one does not."""

    @property
    def received(self) -> Received:
        """Return what every server confirmed at least. Raises EngineError where none holds all."""
        if not self.confirmed:
            raise next(iter(self.failures.values()))
        least = min(self.confirmed.values(), key=lambda each: each.num)
        return Received(self.version, least.num, least.num_stated)


async def stream(
    servers: Sequence[Server],
    source: WeightSource,
    *,
    flush: bool,
    version: str | None = None,
    confirm: bool = True,
) -> Outcome:
    """Send a source's weights into paused servers; each must be paused by the caller.

    Servers are marked `usable_again = False` from the start, and again usable where all came.
    Raises TrainerError where the source fails: then all of them are mixed.
    """
    for server in servers:
        server.usable_again = False
    targets, failures = await _each(servers, _begin)
    if not targets:
        return Outcome("", {}, failures)
    _check_alike(list(targets.values()))
    sent = await source.send(list(targets.values()), version=version)
    failures |= {
        url: EngineError(
            f"{url} did not take the weights: {why}", hint="it must load all of them anew"
        )
        for url, why in sent.failures.items()
    }
    whole = [server for server in servers if server.url in targets and server.url not in failures]

    async def finish(server: Server) -> Confirmed:
        return await _finish(server, sent, flush=flush, confirm=confirm)

    confirmed, late = await _each(whole, finish)
    return Outcome(sent.version, confirmed, failures | late)


async def _each(
    servers: Sequence[Server], call: Any
) -> tuple[dict[str, Any], dict[str, EngineError]]:
    """Call for every server at once; return the answers and the failures, by URL."""
    results = await asyncio.gather(*map(call, servers), return_exceptions=True)
    answers, failures = {}, {}
    for server, result in zip(servers, results, strict=True):
        if isinstance(result, EngineError):
            failures[server.url] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            answers[server.url] = result
    return answers, failures


async def _begin(server: Server) -> EngineTarget:
    """Mark the server and open the update; one that was left open is closed first."""
    target = await _target(server)
    await set_version(server, f"{PARTIAL}{server.url}")
    try:
        await server.post("/begin_weight_update", {})
    except EngineError as error:
        if "already open" not in str(error):
            raise
        await server.post("/end_weight_update", {})
        await server.post("/begin_weight_update", {})
    return target


async def _target(server: Server) -> EngineTarget:
    info = await server.get("/server_info")
    if int(info.get("pp_size") or 1) > 1:
        raise EngineError(
            f"{server.url} is split into pipeline stages",
            hint='such engines load with weight_sync = "disk" only',
        )
    device = str(info.get("device") or "cuda")
    return EngineTarget(
        url=server.url,
        num_ranks=int(info.get("tp_size") or 1),
        dtype=_dtype(info),
        device="cpu" if device == "cpu" else "cuda",
    )


def _dtype(info: Mapping[str, Any]) -> str:
    """Return the type of the weights by torch's name; an engine on GPUs chooses bfloat16."""
    given = str(info.get("dtype") or "auto")
    known = {"half": "float16", "float": "float32", "auto": "bfloat16"}
    return known.get(given, given)


def _check_alike(targets: Sequence[EngineTarget]) -> None:
    kinds = {(each.num_ranks, each.dtype, each.device) for each in targets}
    if len(kinds) > 1:
        raise EngineError(
            f"the servers differ in ranks, type or device: {sorted(kinds)}",
            hint="start all servers of a run with the same settings",
        )


async def _finish(server: Server, sent: Sent, *, flush: bool, confirm: bool) -> Confirmed:
    """Close the update, drop what was computed before it, and check; return what was confirmed."""
    await server.post("/end_weight_update", {})
    if flush:
        await server.post("/flush_cache", {})
    confirmed = await _confirm(server, sent) if confirm else Confirmed(0, 0)
    await set_version(server, sent.version)
    info = await server.get("/model_info")
    if (found := str(info.get("weight_version"))) != sent.version:
        raise EngineError(
            f"{server.url} serves weights {found!r} after taking {sent.version!r}",
            hint="another client updates the same engine",
        )
    server.usable_again = True
    return confirmed


async def set_version(server: Server, version: str) -> None:
    """Give a server's weights a name. Raises EngineError."""
    body: dict[str, Json] = {"new_version": version, "abort_all_requests": False}
    await server.post("/update_weight_version", body)


async def _confirm(server: Server, sent: Sent) -> Confirmed:
    """Compare the checksums of every rank.

    A kind of parameters, such as the experts of all layers, may be laid out in a way that the
    trainer does not know: then none of its checksums ever agrees, and it is not confirmed. Where
    one of them agreed once, all have to. So it is with all kinds where ranks share attention's data
    (`--enable-dp-attention`), for then they cut parameters otherwise. A server that states no
    checksums confirms nothing. Raises EngineError where one differs.
    """
    try:
        answer = await server.post("/weights_checker", {"action": "checksum"})
    except EngineError:
        return Confirmed(0, 0)
    ranks = answer.get("ranks") or []
    # One entry of places for the model, more for its draft models, which are not the trainer's.
    places = [each["parallelism_info"][0] for each in ranks]
    by_rank = {
        int(place["tp_rank"]): each["checksums"] for place, each in zip(places, ranks, strict=True)
    }
    shares_data = any(int(place.get("dp_size") or 1) > 1 for place in places)
    certain = frozenset() if shares_data else sent.certain
    stated = [by_rank.get(rank, {}) for rank in range(len(sent.checksums))]
    known = [set(ours) & set(theirs) for ours, theirs in zip(sent.checksums, stated, strict=True)]
    agreed = [
        {name for name in names if theirs[name] in ours[name]}
        for names, ours, theirs in zip(known, sent.checksums, stated, strict=True)
    ]
    server.known_kinds |= {_kind(name) for names in agreed for name in names}
    wrong = {
        name
        for all_names, right in zip(known, agreed, strict=True)
        for name in all_names - right
        if name in certain or _kind(name) in server.known_kinds
    }
    if wrong:
        message = (
            f"{server.url}: {len(wrong)} of {len(set.union(*known))} parameters arrived changed, "
            f"{min(wrong)} first"
        )
        hint = "does the server hold this model in this type, unquantised?"
        raise EngineError(message, hint=hint)
    common = set.intersection(*agreed) if agreed else set()
    return Confirmed(len(common), min(map(len, stated), default=0))


def _kind(name: str) -> str:
    """Return what a parameter is called in every layer."""
    return _NUMBER.sub("*", name)
