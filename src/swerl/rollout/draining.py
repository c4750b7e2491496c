"""An Engine wrapper that empties the engine before its weights change.

`schedule.replies = "keep"` does not need it: the engine keeps the tokens of a running reply and
continues on the new weights. The wrapper implements the rules `finish` and `retry`.
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


class DrainingEngine:
    """Implements Engine in front of another one; requests wait while weights change."""

    def __init__(self, engine: Engine, rule: Literal["finish", "retry"]) -> None:
        self._engine = engine
        self._rule = rule
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._running: Counter[str] = Counter()
        """Running replies by session."""
        self._aborted: set[str] = set()
        """Sessions whose own clients aborted their replies."""
        self.num_retried = 0
        """Replies that were generated again."""
        self.num_lost_tokens = 0
        """Sampled tokens of the replies that were generated again."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Sample one reply, again if it was aborted for new weights."""
        while True:
            await self._is_open.wait()
            completion = await self._generate(ids, sampling, session)
            # With the engine open, no weight change aborted the reply: the caller sees the abort.
            if completion.finish is not Finish.ABORT or self._is_open.is_set():
                return completion
            # Nobody waits for a reply that the session's own client aborted.
            if session in self._aborted:
                return completion
            self.num_retried += 1
            self.num_lost_tokens += len(completion.ids)

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Enter once no reply runs; new requests wait until the block ends."""
        self._is_open.clear()
        try:
            if self._rule == "retry":
                await asyncio.gather(*map(self._engine.abort, list(self._running)))
            await self._is_empty.wait()
            yield
        finally:
            # Set on every path: an error while weights load must not block requests forever.
            self._is_open.set()

    async def abort(self, session: str) -> None:
        """Abort the session's replies without a retry."""
        self._aborted.add(session)
        try:
            await self._engine.abort(session)
        finally:
            self._aborted.discard(session)

    def metrics(self) -> dict[str, float]:
        """Return the work repeated because of new weights, since the start."""
        return {"replies_retried": self.num_retried, "retried_tokens": self.num_lost_tokens}

    async def pause(self) -> None:
        await self._engine.pause()

    async def load(self, weights: WeightRef) -> str:
        return await self._engine.load(weights)

    async def resume(self) -> None:
        await self._engine.resume()

    async def close(self) -> None:
        await self._engine.close()

    async def _generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        self._running[session] += 1
        self._is_empty.clear()
        try:
            return await self._engine.generate(ids, sampling, session)
        finally:
            self._running[session] -= 1
            if not self._running[session]:
                del self._running[session]
            if not self._running:
                self._is_empty.set()
