"""The client of SGLang's HTTP contract, for SGLang itself and for servers that speak like it.

Nothing is retried once a request may have been sampled from: its tokens would be drawn twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import aiohttp
import orjson

from swerl.chat import Finish, Json
from swerl.engines._usage import Usage, UsageMeter
from swerl.errors import EngineError, EngineLostError
from swerl.learning import WeightRef
from swerl.turn import Completion, Sampling

CONNECT_TRIES = 3
"""Tries to open a connection: a server that restarts its listener is back within a second."""
IDLE_S = 2.0
"""Seconds an unused connection is kept; shorter than the servers' own, so none is found dead."""
FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


class HttpEngine:
    """An Engine behind a URL. Use `connect` to make one.

    `num_vocab` bounds the ids that the engine may sample; None where it is not known.
    """

    def __init__(
        self, url: str, client: aiohttp.ClientSession, *, num_vocab: int | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._client = client
        self._num_vocab = num_vocab
        self._rids: dict[str, set[str]] = defaultdict(set)
        self._paused = False
        self._meter = UsageMeter()

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Sample one reply. Raises EngineLostError when the engine is gone."""
        self._check_prompt(ids)
        rid = uuid4().hex
        self._rids[session].add(rid)
        self._meter.start()
        try:
            body: dict[str, Json] = {
                "rid": rid,
                "input_ids": list(ids),
                "sampling_params": _params(sampling),
                "return_logprob": True,
            }
            answer = await self._post("/generate", body)
            completion = read_completion(answer, self._num_vocab)
        finally:
            self._meter.end()
            self._rids[session].discard(rid)
            if not self._rids[session]:
                del self._rids[session]
        self._meter.count(completion, num_prompt=len(ids))
        return completion

    async def abort(self, session: str) -> None:
        """Stop what the session is generating."""
        for rid in tuple(self._rids.get(session, ())):
            await self._post("/abort_request", {"rid": rid})

    async def pause(self) -> None:
        """Stop taking up work until `resume`; what runs keeps its tokens and waits."""
        await self._post("/pause_generation", {"mode": "retract"})
        self._paused = True

    async def load(self, weights: WeightRef) -> str:
        """Load published weights and return the version that now serves.

        Raises EngineError when the engine refuses them or serves something else afterwards.
        """
        async with self._while_paused():
            body: dict[str, Json] = {
                "model_path": str(weights.path.resolve()),
                "flush_cache": True,
                "weight_version": weights.version,
            }
            await self._post("/update_weights_from_disk", body)
            return await self._verify(weights)

    async def resume(self) -> None:
        """Take up work again."""
        await self._post("/continue_generation", {})
        self._paused = False

    async def close(self) -> None:
        """Release the connections; the server lives on."""
        await self._client.close()

    async def usage(self) -> Usage:
        """Return what was used so far; `busy_s` by the engine's own account where it keeps one."""
        info = await self._call("GET", "/server_info", None)
        used = self._meter.usage
        return replace(used, busy_s=info.get("busy_s", used.busy_s))

    async def busy_spans(self) -> list[tuple[float, float]]:
        """Return when the engine last computed, in seconds of CLOCK_MONOTONIC.

        Where the server keeps no such account: when it had at least one of our requests.
        """
        info = await self._call("GET", "/server_info", None)
        return [(start, end) for start, end in info.get("busy_spans", self._meter.spans)]

    @asynccontextmanager
    async def _while_paused(self) -> AsyncIterator[None]:
        """Pause around a block unless the caller has paused already."""
        was_paused = self._paused
        if not was_paused:
            await self.pause()
        try:
            yield
        finally:
            if not was_paused:
                await asyncio.shield(self.resume())

    def _check_prompt(self, ids: Sequence[int]) -> None:
        """Refuse what SGLang does not survive: it dies of an id outside its embedding."""
        top = self._num_vocab if self._num_vocab is not None else math.inf
        if wrong := [token for token in ids if not 0 <= token < top]:
            message = f"prompt id {wrong[0]} is outside the vocabulary of {self._num_vocab}"
            raise EngineError(message, hint="tokenizer and model belong to different families")

    async def _verify(self, weights: WeightRef) -> str:
        """Check that the engine serves these weights; a server of ours names its checksum."""
        info = await self._call("GET", "/model_info", None)
        version = str(info.get("weight_version"))
        if version != weights.version:
            message = f"the engine serves weights {version!r} after loading {weights.version!r}"
            raise EngineError(message, hint="another client updates the same engine")
        if (checksum := info.get("checksum")) and checksum != weights.checksum:
            message = f"weights {version!r} arrived changed: {checksum} is not {weights.checksum}"
            raise EngineError(message, hint="the folder was written to after it was published")
        return version

    async def _post(self, path: str, body: Mapping[str, Json]) -> dict[str, Any]:
        return await self._call("POST", path, body)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Json] | None
    ) -> dict[str, Any]:
        """Send one request; only a connection that was never made is tried again."""
        for attempt in range(CONNECT_TRIES):
            try:
                return await self._call_once(method, path, body)
            except aiohttp.ClientConnectorError as error:
                if attempt + 1 == CONNECT_TRIES:
                    raise _lost(self.url, error) from error
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                raise _lost(self.url, error) from error
            await asyncio.sleep(0.1 * 2**attempt * (1 + random.random()))
        raise AssertionError

    async def _call_once(
        self, method: str, path: str, body: Mapping[str, Json] | None
    ) -> dict[str, Any]:
        data = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json"}
        async with self._client.request(
            method, self.url + path, data=data, headers=headers
        ) as response:
            raw = await response.read()
        if response.status != 200:
            message = f"{path} answered {response.status}: {raw[:500].decode(errors='replace')}"
            raise EngineError(message, hint="the engine's log says more")
        if "json" not in response.content_type:
            return {}
        with contextlib.suppress(orjson.JSONDecodeError):
            if isinstance(answer := orjson.loads(raw), dict):
                return answer
        message = f"{path} answered {raw[:200]!r}, not an object"
        raise EngineError(message, hint=f"{self.url} does not speak SGLang's contract")


@asynccontextmanager
async def connect(url: str, *, num_vocab: int | None = None) -> AsyncIterator[HttpEngine]:
    """Open a client with one pool of connections, without a limit on requests in flight."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        yield HttpEngine(url, client, num_vocab=num_vocab)


def read_completion(answer: Mapping[str, Any], num_vocab: int | None) -> Completion:
    """Check and convert the body of a /generate. Raises EngineError on anything inconsistent."""
    try:
        meta = answer["meta_info"]
        ids = tuple(answer["output_ids"])
        pairs = meta.get("output_token_logprobs") or ()
        completion = Completion(
            ids=ids,
            logprobs=tuple(float(pair[0]) for pair in pairs),
            finish=FINISH[meta["finish_reason"]["type"]],
            weight_version=_oldest_version(meta),
            prompt_tokens=meta.get("prompt_tokens", 0),
            cached_tokens=meta.get("cached_tokens", 0),
        )
        _check_tokens(completion, [pair[1] for pair in pairs], num_vocab)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        message = f"the engine's reply makes no sense: {error!r}"
        raise EngineError(message, hint="it may not speak SGLang's contract") from error
    return completion


def _check_tokens(completion: Completion, scored: list[int], num_vocab: int | None) -> None:
    if list(completion.ids) != scored:
        message = "log-probabilities belong to other ids than the sampled ones"
        raise ValueError(message)
    top = num_vocab if num_vocab is not None else math.inf
    for token, logprob in zip(completion.ids, completion.logprobs, strict=True):
        if not (type(token) is int and 0 <= token < top):
            message = f"sampled id {token!r} is outside the vocabulary of {num_vocab}"
            raise ValueError(message)
        if not -math.inf < logprob <= 1e-4:
            message = f"log-probability {logprob} of id {token}"
            raise ValueError(message)


def _oldest_version(meta: Mapping[str, Any]) -> str:
    """Return the version of the first token: staleness is counted from the oldest weights."""
    spans = meta.get("weight_versions") or ()
    return str(spans[0]["version"] if spans else meta["weight_version"])


def _params(sampling: Sampling) -> dict[str, Json]:
    params: dict[str, Json] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return params


def _lost(url: str, error: Exception) -> EngineLostError:
    message = f"the engine at {url} is gone: {error}"
    return EngineLostError(message, hint="its log says why it ended; the same command resumes")
