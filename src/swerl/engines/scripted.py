"""An engine that returns written messages: for tests, demos and known solutions.

A session's nth new request gets the nth message of its script, in the family's own tokens. The same
prompt sent again at once gets the same answer, as a client that retries expects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from swerl.core.chat import Finish, Message, Role
from swerl.core.contracts import EngineSetup, Family
from swerl.core.errors import InputError
from swerl.core.learning import WeightRef
from swerl.core.turn import Completion, Sampling

_AFTER = Message(Role.ASSISTANT, "Done.")
"""The reply after the end of a script."""


class Options(BaseModel):
    """Settings of `engine.type = "scripted"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    delay_s: float = Field(default=0.0, ge=0)
    """Seconds before each reply; tests of waiting raise it."""


@asynccontextmanager
async def open(options: Options, setup: EngineSetup) -> AsyncIterator[ScriptedEngine]:
    """Open the engine. Raises InputError if there is no script."""
    if setup.script is None:
        raise InputError(
            "the scripted engine has no script to follow",
            hint="use `scripted:gold` or `scripted:noop`",
        )
    engine = ScriptedEngine(setup.family, setup.script, delay_s=options.delay_s)
    try:
        yield engine
    finally:
        await engine.close()


@dataclass(slots=True)
class _Position:
    """The last message that a session got from its script."""

    number: int
    prompt: int
    """Hash of the prompt that the message answers."""


class ScriptedEngine:
    """Implements Engine."""

    def __init__(
        self, family: Family, script: Callable[[str], Sequence[Message]], *, delay_s: float = 0.0
    ) -> None:
        self._family = family
        self._script = script
        self._delay_s = delay_s
        self._version = "scripted"
        self._positions: dict[str, _Position] = {}
        self._aborts: dict[str, set[asyncio.Event]] = {}
        self._running = asyncio.Event()
        self._running.set()

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Return the session's next message; a deterministic policy has log-probability 0."""
        await self._running.wait()
        number = self._next_number(session, hash(tuple(ids)))
        if await self._aborted_while_waiting(session):
            return self._completion((), Finish.ABORT, len(ids))
        script = self._script(session)
        message = script[number] if number < len(script) else _AFTER
        whole = self._family.encode_reply(message)
        cut = tuple(whole[: sampling.max_new_tokens])
        finish = Finish.STOP if len(cut) == len(whole) else Finish.LENGTH
        return self._completion(cut, finish, len(ids))

    async def abort(self, session: str) -> None:
        """End the session's requests that wait for `delay_s`."""
        for event in self._aborts.get(session, ()):
            event.set()

    async def pause(self) -> None:
        """Hold new requests until `resume`."""
        self._running.clear()

    async def load(self, weights: WeightRef) -> str:
        """Store the version: a script has no weights, but its Turns carry one."""
        self._version = weights.version
        return self._version

    async def resume(self) -> None:
        self._running.set()

    async def close(self) -> None:
        self._positions.clear()

    def _next_number(self, session: str, prompt: int) -> int:
        last = self._positions.get(session)
        if last and last.prompt == prompt:
            return last.number
        number = last.number + 1 if last else 0
        self._positions[session] = _Position(number, prompt)
        return number

    async def _aborted_while_waiting(self, session: str) -> bool:
        if not self._delay_s:
            return False
        event = asyncio.Event()
        waiting = self._aborts.setdefault(session, set())
        waiting.add(event)
        try:
            async with asyncio.timeout(self._delay_s):
                await event.wait()
        except TimeoutError:
            return False
        finally:
            waiting.discard(event)
            if not waiting:
                self._aborts.pop(session, None)
        return True

    def _completion(self, ids: tuple[int, ...], finish: Finish, num_prompt: int) -> Completion:
        return Completion(
            ids=ids,
            logprobs=(0.0,) * len(ids),
            finish=finish,
            weight_version=self._version,
            prompt_tokens=num_prompt,
        )
