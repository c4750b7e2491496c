"""An engine that records its exact prompts and replies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from swerl.core.chat import Finish, Message, Role
from swerl.core.contracts import Family
from swerl.core.learning import WeightRef
from swerl.core.turn import Completion, Sampling
from swerl.engines.families import tiny

Line: TypeAlias = "Message | Sequence[int] | Exception"


@dataclass
class Call:
    """One call of the engine; each sampled token has a log-probability of its own."""

    session: str
    prompt: tuple[int, ...]
    sampling: Sampling
    output: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass
class RecordingEngine:
    """Implements Engine: returns the next line, records every call."""

    lines: list[Line] = field(default_factory=list)
    """What to say: a message, raw ids, or an error to raise."""
    gate: asyncio.Event | None = None
    """Holds every reply back until it is set."""
    calls: list[Call] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    family: Family = field(default_factory=lambda: tiny.build(None))
    started: asyncio.Event = field(default_factory=asyncio.Event)
    abort_seen: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        line = self.lines.pop(0) if self.lines else Message(Role.ASSISTANT, "Done.")
        call = Call(session, tuple(ids), sampling)
        self.calls.append(call)
        self.started.set()
        if self.gate:
            await self._wait()
        if isinstance(line, Exception):
            raise line
        said = self.family.encode_reply(line) if isinstance(line, Message) else line
        if self.abort_seen.is_set():
            said = said[:2]
        cut = said[: sampling.max_new_tokens]
        numbers = sum(len(call.output) for call in self.calls)
        call.output = tuple(cut)
        call.logprobs = tuple(-1.0 - number for number in range(numbers, numbers + len(cut)))
        finish = Finish.STOP if len(cut) == len(said) else Finish.LENGTH
        finish = Finish.ABORT if self.abort_seen.is_set() else finish
        return Completion(call.output, call.logprobs, finish, "v1", len(ids), cached_tokens=1)

    async def abort(self, session: str) -> None:
        self.aborted.append(session)
        self.abort_seen.set()

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def close(self) -> None: ...

    async def load(self, weights: WeightRef) -> str:
        return weights.version

    async def _wait(self) -> None:
        assert self.gate
        waiters = {
            asyncio.ensure_future(self.gate.wait()),
            asyncio.ensure_future(self.abort_seen.wait()),
        }
        try:
            await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
