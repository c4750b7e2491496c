"""The gate between the gateway and the engine: what becomes of replies when weights change.

With `schedule.replies = "keep"` nobody needs it: the engine itself keeps the tokens of a reply and
goes on with the new weights. The gate brings the two other rules about, with any engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from swerl.core.chat import Finish
from swerl.core.contracts import Engine
from swerl.core.learning import WeightRef
from swerl.core.turn import Completion, Sampling


class Gate:
    """Implements Engine in front of another one; while it is shut, requests wait."""

    def __init__(self, engine: Engine, rule: Literal["finish", "retry"]) -> None:
        self._engine = engine
        self._rule = rule
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._inside: Counter[str] = Counter()
        """Replies under way, by session."""
        self._aborted: set[str] = set()
        """Sessions whose own clients gave their replies up."""
        self.num_retried = 0
        """Replies that were asked for again."""
        self.num_lost_tokens = 0
        """Sampled tokens of replies that were asked for again."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Sample one reply, again where new weights made the engine give it up."""
        while True:
            await self._is_open.wait()
            completion = await self._pass(ids, sampling, session)
            if completion.finish is not Finish.ABORT or self._is_open.is_set():
                return completion
            if session in self._aborted:
                return completion
            self.num_retried += 1
            self.num_lost_tokens += len(completion.ids)

    @asynccontextmanager
    async def shut(self) -> AsyncIterator[None]:
        """Let nothing pass inside the context, which is entered once no reply is under way."""
        self._is_open.clear()
        try:
            if self._rule == "retry":
                await asyncio.gather(*map(self._engine.abort, list(self._inside)))
            await self._is_empty.wait()
            yield
        finally:
            self._is_open.set()

    async def abort(self, session: str) -> None:
        """Stop what the session is generating, for good."""
        self._aborted.add(session)
        try:
            await self._engine.abort(session)
        finally:
            self._aborted.discard(session)

    def metrics(self) -> dict[str, float]:
        """Return what new weights made the engine sample twice, since the gate was made."""
        return {"replies_retried": self.num_retried, "retried_tokens": self.num_lost_tokens}

    async def pause(self) -> None:
        """Stop taking up work until `resume`."""
        await self._engine.pause()

    async def load(self, weights: WeightRef) -> str:
        """Load published weights and return the version that now serves."""
        return await self._engine.load(weights)

    async def resume(self) -> None:
        """Take up work again."""
        await self._engine.resume()

    async def close(self) -> None:
        """Release what the client holds."""
        await self._engine.close()

    async def _pass(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        self._inside[session] += 1
        self._is_empty.clear()
        try:
            return await self._engine.generate(ids, sampling, session)
        finally:
            self._inside[session] -= 1
            if not self._inside[session]:
                del self._inside[session]
            if not self._inside:
                self._is_empty.set()
