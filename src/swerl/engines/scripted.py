"""An engine that says what it was told to say: for tests, demos and known solutions.

A session's nth new request gets the nth message of its script, in the family's own tokens. Asking
the same prompt again right away gets the same answer, as a client that retries expects.
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
    """Seconds before each reply; 0 because nobody waits for a script but tests of waiting."""


@asynccontextmanager
async def open(  # the name every engine module has
    options: Options, setup: EngineSetup
) -> AsyncIterator[ScriptedEngine]:
    """Open the engine. Raises InputError where nobody wrote a script."""
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
class _Line:
    """Where a session stands in its script."""

    number: int
    prompt: int
    """Hash of the prompt that this line answers."""


class ScriptedEngine:
    """Implements Engine."""

    def __init__(
        self, family: Family, script: Callable[[str], Sequence[Message]], *, delay_s: float = 0.0
    ) -> None:
        self._family = family
        self._script = script
        self._delay_s = delay_s
        self._version = "scripted"
        self._lines: dict[str, _Line] = {}
        self._aborts: dict[str, set[asyncio.Event]] = {}
        self._running = asyncio.Event()
        self._running.set()

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Say the session's next line; a deterministic policy has log-probability 0."""
        await self._running.wait()
        line = self._next_line(session, hash(tuple(ids)))
        if await self._aborted_while_waiting(session):
            return self._completion((), Finish.ABORT, len(ids))
        script = self._script(session)
        message = script[line] if line < len(script) else _AFTER
        spoken = self._family.encode_reply(message)
        cut = tuple(spoken[: sampling.max_new_tokens])
        finish = Finish.STOP if len(cut) == len(spoken) else Finish.LENGTH
        return self._completion(cut, finish, len(ids))

    async def abort(self, session: str) -> None:
        """Stop what the session is waiting for."""
        for event in self._aborts.get(session, ()):
            event.set()

    async def pause(self) -> None:
        """Stop taking up work until `resume`."""
        self._running.clear()

    async def load(self, weights: WeightRef) -> str:
        """Take over the version: a script has no weights, but its Turns carry one."""
        self._version = weights.version
        return self._version

    async def resume(self) -> None:
        """Take up work again."""
        self._running.set()

    async def close(self) -> None:
        """Forget every session."""
        self._lines.clear()

    def _next_line(self, session: str, prompt: int) -> int:
        last = self._lines.get(session)
        if last and last.prompt == prompt:
            return last.number
        number = last.number + 1 if last else 0
        self._lines[session] = _Line(number, prompt)
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
