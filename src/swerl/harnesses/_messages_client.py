"""A small client of the gateway that speaks Anthropic Messages, for agents in our own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from swerl.core.contracts import Endpoint

_MAX_ERROR_CHARS = 500
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses between attempts; an engine that starts anew needs about a minute."""


class RefusedError(Exception):
    """The gateway answered with an error."""


class _LaterError(RefusedError):
    """The gateway has no answer at the moment."""


class Client:
    """One HTTP session for all runs at a time, closed with the last of them."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._num_users = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Return the session; it is closed when the last of its users leaves."""
        if self._session is None:
            # Neither a cap on connections nor a timeout: the scheduler and the budget set those.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()
            )
        self._num_users += 1
        try:
            yield self._session
        finally:
            self._num_users -= 1
            if self._num_users == 0:
                session, self._session = self._session, None
                await session.close()


class Model:
    """Asks the gateway for the next message; `settings` go into every request."""

    def __init__(
        self, http: aiohttp.ClientSession, endpoint: Endpoint, settings: Mapping[str, Any]
    ) -> None:
        self._http = http
        self._url = f"{endpoint.url}/v1/messages"
        self._headers = {
            "x-api-key": endpoint.key,
            "anthropic-version": "2023-06-01",
            "content-type": "application/json",
        }
        self._body = {"model": endpoint.model, **settings}

    async def reply(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the next message in Anthropic's form. Raises RefusedError.

        Asks again where the gateway says that it will have an answer later.
        """
        body = orjson.dumps({**self._body, "messages": messages})
        for pause_s in _PAUSES_S:
            try:
                return await self._ask(body)
            except _LaterError:
                await asyncio.sleep(pause_s)
        return await self._ask(body)

    async def _ask(self, body: bytes) -> dict[str, Any]:
        async with self._http.post(self._url, data=body, headers=self._headers) as response:
            data = await response.read()
            if response.status != 200:
                text = data.decode("utf-8", "replace")[:_MAX_ERROR_CHARS]
                raise (_LaterError if "retry-after" in response.headers else RefusedError)(
                    f"the gateway answered {response.status}: {text}"
                )
            reply: dict[str, Any] = orjson.loads(data)
            return reply
