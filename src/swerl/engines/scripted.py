"""An engine that returns written messages: for tests, demos and known solutions.

A conversation's nth request gets the nth message of its session's script, in the family's own
tokens. A request that begins as an answered prompt did continues that conversation. Any other
starts the script again, so an agent's side requests take no message from it. A prompt sent again
gets the same answer, as a client that retries expects.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from swerl.core.chat import Finish, Message, Role
from swerl.core.contracts import EngineSetup, Family
from swerl.core.errors import InputError
from swerl.core.learning import WeightRef
from swerl.core.turn import Completion, Sampling

_AFTER = Message(Role.ASSISTANT, "Done.")
"""The reply after the end of a script."""
_REPEATED = 0.9
"""Share of an answered prompt, from its start, that the conversation's next request repeats. Agents
rewrite the end of their histories."""


class Options(BaseModel):
    """`engine.type = "scripted"` has no settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@asynccontextmanager
async def open(options: Options, setup: EngineSetup) -> AsyncIterator[ScriptedEngine]:
    """Open the engine. Raises InputError if there is no script."""
    if setup.script is None:
        raise InputError(
            "the scripted engine has no script to follow",
            hint="use `scripted:gold` or `scripted:noop`",
        )
    engine = ScriptedEngine(setup.family, setup.script, in_turn=setup.in_turn)
    try:
        yield engine
    finally:
        await engine.close()


@dataclass(slots=True)
class _Answers:
    """The number of the message that each prompt of a session got."""

    prompts: dict[int, int] = field(default_factory=dict)
    """By the hash of a whole prompt."""
    starts: dict[tuple[int, int], int] = field(default_factory=dict)
    """By length and hash of the part that a continued conversation repeats."""

    def next_number(self, ids: tuple[int, ...], repeated: float) -> int:
        """Return the number of the message for a prompt, if its next one repeats this share."""
        prompt = hash(ids)
        number = self.prompts.get(prompt)
        if number is None:
            starts = sorted(self.starts.items(), reverse=True)
            numbers = (n + 1 for (length, start), n in starts if hash(ids[:length]) == start)
            number = self.prompts[prompt] = next(numbers, 0)
            length = int(len(ids) * repeated)
            self.starts[length, hash(ids[:length])] = number
        return number


class ScriptedEngine:
    """Implements Engine."""

    def __init__(
        self,
        family: Family,
        script: Callable[[str], Sequence[Message]],
        *,
        in_turn: bool = False,
    ) -> None:
        self._family = family
        self._script = script
        self._repeated = 0.0 if in_turn else _REPEATED
        self._version = "scripted"
        self._answers: defaultdict[str, _Answers] = defaultdict(_Answers)
        self._running = asyncio.Event()
        self._running.set()

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Return the session's next message; a deterministic policy has log-probability 0."""
        await self._running.wait()
        number = self._answers[session].next_number(tuple(ids), self._repeated)
        script = self._script(session)
        message = script[number] if number < len(script) else _AFTER
        whole = self._family.encode_reply(message)
        cut = tuple(whole[: sampling.max_new_tokens])
        finish = Finish.STOP if len(cut) == len(whole) else Finish.LENGTH
        return Completion(cut, (0.0,) * len(cut), finish, self._version, prompt_tokens=len(ids))

    async def abort(self, session: str) -> None:
        """Do nothing: a reply takes no time."""

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
        self._answers.clear()
