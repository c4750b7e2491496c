"""Answer: one reply in the making, and the clients that wait for it.

A client that leaves may ask the same again a moment later; so a reply that nobody awaits any more
is kept for `RETRY_S` seconds before it is given up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING

from swerl.core.chat import ChatReply
from swerl.core.errors import GatewayError, Refusal
from swerl.gateway import retries
from swerl.gateway.history import Node
from swerl.gateway.retries import Asker
from swerl.gateway.speakers import Prompt, Spoken

if TYPE_CHECKING:
    from swerl.gateway.pipeline import Conversation


class Answer:
    """One reply in the making. Holds its place in the Session's Admission until it is settled."""

    def __init__(self, conversation: Conversation, prompt: Prompt, key: Hashable) -> None:
        self.started_s = time.monotonic()
        self.key = key
        self.num_waiting = 0
        """Clients that wait for it."""
        self._prompt: Prompt | None = prompt
        self._conversation = conversation
        self._task = conversation.start(prompt)
        self._recorded: tuple[ChatReply, Node] | None = None
        self._expiry: asyncio.Task[None] | None = None
        self._is_settled = False
        self._is_delivered = False
        self._is_broken = False

    @property
    def prompt(self) -> Prompt:
        """What is answered; gone once the answer is settled, for it is large."""
        assert self._prompt
        return self._prompt

    def is_for(self, asker: Asker) -> bool:
        """Say whether a twin of the request that this answers is to have the same answer."""
        if not self._is_settled:
            return self._may_succeed() and bool(not self.num_waiting or asker.name or asker.again)
        if not self._is_delivered or not self._recorded or self._recorded[1].is_continued:
            return False
        return self._is_broken or asker.again

    def hold(self) -> None:
        """Begin to wait for it."""
        self.num_waiting += 1
        self._is_broken = False
        if self._expiry:
            self._expiry.cancel()
            self._expiry = None

    def release(self) -> None:
        """Wait no more; a reply that was not delivered is given up where nobody asks again."""
        self.num_waiting -= 1
        if self.num_waiting or self._is_settled:
            return
        if self._may_succeed():
            self._expiry = asyncio.create_task(self._expire())
        else:
            self.drop()

    async def ready(self, timeout_s: float) -> bool:
        """Wait so long for the reply and say whether it (or its failure) is there."""
        done, _ = await asyncio.wait({self._task}, timeout=timeout_s)
        return bool(done)

    async def reply(self) -> ChatReply:
        """Return the reply, put into the tree.

        Raises EngineError, BudgetError at `model_call_s`, GatewayError where it was aborted.
        """
        if not self._task.done():
            await asyncio.wait({self._task})
        if self._recorded and (self._is_delivered or not self._is_settled):
            return self._recorded[0]
        if self._task.cancelled() or self._is_settled:
            raise closed()
        self._recorded = self._conversation.record(self, self._task.result())
        return self._recorded[0]

    def delivered(self) -> None:
        """Note that a client has the reply."""
        if self._recorded and not self._is_settled:
            self._is_delivered = True
            reply, node = self._recorded
            try:
                self._conversation.commit(node, self, reply)
            finally:
                self._settle()

    def broke(self) -> None:
        """Note that the connection broke to which it was delivered: it may be asked for again."""
        self._is_broken = True

    def drop(self) -> None:
        """Note that no client will ever have the reply."""
        if self._is_settled:
            return
        if self._recorded:
            reply, node = self._recorded
            self._conversation.discard(node, self, reply)
            self._conversation.count_dropped("undelivered", len(node.output_ids))
        elif spoken := self._spoken():
            self._conversation.count_dropped("undelivered", len(spoken.completion.ids))
        self._settle()

    async def _expire(self) -> None:
        await asyncio.sleep(retries.RETRY_S)
        self._expiry = None
        self._conversation.hide(self)
        if not self._task.done():
            await self._conversation.stop({self._task})
        self.drop()

    def _settle(self) -> None:
        self._is_settled = True
        self._prompt = None
        if self._expiry:
            self._expiry.cancel()
            self._expiry = None
        self._conversation.settle(self, delivered=self._is_delivered)

    def _spoken(self) -> Spoken | None:
        """Return what the engine said, if it said something."""
        if not self._task.done() or self._task.cancelled() or self._task.exception():
            return None
        return self._task.result()

    def _may_succeed(self) -> bool:
        return not self._task.done() or self._spoken() is not None


def closed() -> GatewayError:
    """Return the refusal of a session that is closed."""
    return GatewayError("this session is closed", refusal=Refusal.AUTHENTICATION)
