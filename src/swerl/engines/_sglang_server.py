"""One SGLang server, or a router in front of some: its calls, and what their failures mean.

Nothing is sent again once a request may have been sampled from: its tokens would be drawn twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from swerl.core.chat import Json
from swerl.core.errors import EngineError, EngineLostError
from swerl.core.learning import WeightRef

CONNECT_TRIES = 3
"""Tries to open a connection: a server that restarts its listener is back within a second."""
CONTROL_S = 120.0
"""Seconds for a call that samples nothing; a pause waits for a step of the whole batch."""
UNAVAILABLE = frozenset({502, 503, 504})
"""What a router answers when a worker died under a request, and a server that is full or ends."""
_WORKER_FAILED = "call_upstream"
"""How a router's codes begin for a worker that it could not reach, or that died under a request."""
_DP_RANK = re.compile(r"@\d+$")
"""How a router that knows data-parallel ranks marks them in a worker's URL."""


@dataclass(frozen=True, slots=True)
class Clients:
    """Connections, in two pools so that an abort never queues behind what it aborts."""

    generate: aiohttp.ClientSession
    control: aiohttp.ClientSession


class Server:
    """One base URL."""

    def __init__(self, url: str, clients: Clients) -> None:
        self.url = url.rstrip("/")
        self.misses = 0
        self.lost: EngineLostError | None = None
        """Why it was given up."""
        self.waiting: set[asyncio.Future[None]] = set()
        """Who wants to hear at once when it is given up."""
        self.usable_again = True
        """False once it may hold weights that nobody vouches for."""
        self.is_partial = False
        """Whether it was found in the middle of somebody's update."""
        self.released: set[str] = set()
        """Kinds of memory that it gave back: `weights`, `kv_cache`."""
        self.known_kinds: set[str] = set()
        """Kinds of parameters that it holds in the layout that the trainer expects."""
        self.started_anew = False
        """Whether it was started again and has been given no weights since."""
        self.ended = False
        """Whether nobody starts it again."""
        self.hung = asyncio.Event()
        """Set where it runs and answers nothing: who started it may start it again."""
        self._limits: set[asyncio.Timeout] = set()
        """Of the calls under way."""
        self._clients = clients

    async def generate(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """Sample one reply. Raises EngineLostError, at once where the server was given up."""
        if self.lost:
            raise self.lost
        return await self._call("POST", "/generate", body, headers=headers)

    async def post(
        self, path: str, body: Mapping[str, Json], *, timeout_s: float = CONTROL_S
    ) -> dict[str, Any]:
        """Make a call that samples nothing."""
        return await self._call("POST", path, body, timeout_s=timeout_s)

    async def get(self, path: str, *, timeout_s: float = CONTROL_S) -> dict[str, Any]:
        """Ask for something."""
        return await self._call("GET", path, None, timeout_s=timeout_s)

    async def delete(self, path: str, *, timeout_s: float = CONTROL_S) -> None:
        """Take something off a list."""
        await self._call("DELETE", path, None, timeout_s=timeout_s)

    async def workers(self, *, timeout_s: float = CONTROL_S) -> list[str] | None:
        """Return the servers behind a router; None where this is a server itself."""
        try:
            answer = await self.get("/workers", timeout_s=timeout_s)
        except EngineLostError:
            raise
        except EngineError:
            return None
        listed = answer.get("workers")
        if not isinstance(listed, list):
            return None
        return list(dict.fromkeys(_DP_RANK.sub("", str(one["url"])) for one in listed))

    async def load(self, weights: WeightRef, *, flush: bool, timeout_s: float) -> None:
        """Load weights and check what serves then. Raises EngineError."""
        body: dict[str, Json] = {
            "model_path": str(weights.path.resolve()),
            "flush_cache": flush,
            "weight_version": weights.version,
        }
        self.usable_again = False
        try:
            await self.post("/update_weights_from_disk", body, timeout_s=timeout_s)
        except EngineLostError:
            raise
        except EngineError:
            self.usable_again = True  # refused: the old ones serve on
            raise
        info = await self.get("/model_info")
        version = str(info.get("weight_version"))
        if version != weights.version:
            raise EngineError(
                f"{self.url} serves weights {version!r} after loading {weights.version!r}",
                hint="another client updates the same engine",
            )
        if (checksum := info.get("checksum")) and checksum != weights.checksum:
            raise EngineError(
                f"weights {version!r} arrived changed: {checksum} is not {weights.checksum}",
                hint="the folder was written to after it was published",
            )
        self.usable_again = True

    async def release(self, kinds: tuple[str, ...]) -> None:
        """Give memory back; it must be paused. What weights it held is gone."""
        self.usable_again = False
        await self.post("/release_memory_occupation", {"tags": list(kinds)})
        self.released |= set(kinds)

    async def reclaim(self, kind: str) -> None:
        """Take a kind of memory again; SGLang dies of being asked for what was not released."""
        if kind in self.released:
            self.released.discard(kind)
            await self.post("/resume_memory_occupation", {"tags": [kind]})

    def lose(self, why: Exception | str) -> None:
        """Give the server up: what it is sampling fails."""
        if not self.lost:
            self._give_up(lost(self.url, why))

    def end(self, why: str) -> None:
        """Give the server up for good: nobody starts it again, so nobody need ask again."""
        self.usable_again = False
        self.ended = True
        error = lost(self.url, why)
        self._give_up(EngineLostError(str(error), hint=error.hint, retryable=False))

    def silence(self, why: EngineError) -> None:
        """Give up a server that answers nothing, and every call that still waits for it."""
        self.lose(why)
        self.hung.set()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)  # the past

    def fresh(self) -> None:
        """Note that it runs anew, with the weights that it was started on."""
        self.usable_again = True
        self.started_anew = True
        self.released.clear()
        self.heard()

    def heard(self) -> None:
        """Note that it answered."""
        self.misses = 0
        self.hung.clear()

    def find(self) -> None:
        """Take the server back."""
        self.lost = None
        self.is_partial = False
        self.started_anew = False
        self.heard()

    def _give_up(self, error: EngineLostError) -> None:
        self.lost = error
        for future in self.waiting:
            if not future.done():
                future.set_exception(error)

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Send one request; only a connection that was never made is tried again."""
        for attempt in range(CONNECT_TRIES):
            try:
                async with self._limit(timeout_s):
                    return await self._call_once(method, path, body, headers or {})
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                if attempt + 1 == CONNECT_TRIES:
                    raise lost(self.url, error) from error
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                raise lost(self.url, error) from error
            except TimeoutError as error:
                silent = self.hung.is_set() and self.lost
                raise lost(self.url, silent or f"{path} took over {timeout_s} s") from error
            await asyncio.sleep(0.1 * 2**attempt * (1 + random.random()))
        raise AssertionError

    @asynccontextmanager
    async def _limit(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Bound a call by its own limit and by the server's silence. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    async def _call_once(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str],
    ) -> dict[str, Any]:
        client = self._clients.generate if path == "/generate" else self._clients.control
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {"Content-Type": "application/json", **headers}
        async with client.request(method, self.url + path, data=data, headers=headers) as response:
            raw = await response.read()
        if response.status not in (200, 202):
            said = raw[:500].decode(errors="replace")
            message = f"{path} answered {response.status}: {said}"
            if response.status in UNAVAILABLE or _WORKER_FAILED in said:
                raise lost(self.url, message)
            raise EngineError(message, hint="the engine's log says more")
        if "json" not in response.content_type:
            return {}
        with contextlib.suppress(orjson.JSONDecodeError):
            answer = orjson.loads(raw)
            if answer is None:  # of calls that return nothing
                return {}
            if isinstance(answer, dict):
                return answer
        raise EngineError(
            f"{path} answered {raw[:200]!r}, not an object",
            hint=f"{self.url} does not speak SGLang's contract",
        )


def lost(url: str, why: Exception | str) -> EngineLostError:
    """Build the error for a server that is gone."""
    message = (
        str(why) if isinstance(why, EngineLostError) else f"the engine at {url} is gone: {why}"
    )
    return EngineLostError(message, hint="its log says why it ended; the same command resumes")
