"""The work of an Episode: what its turns ask of an engine, and how long everything else takes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TurnLoad:
    """One request and what the agent does before the next."""

    prompt_tokens: int
    """The whole prompt; what the engine has of it in its cache costs nothing."""
    output_tokens: int
    tool_s: float
    """Seconds of tools after it."""


@dataclass(frozen=True, slots=True)
class EpisodeLoad:
    """One Episode."""

    turns: tuple[TurnLoad, ...]
    boot_s: float
    """Until the agent begins: sandbox and installation."""
    grading_s: float
    """Diff, a fresh sandbox and the tests."""
    lost: tuple[int, ...] = ()
    """Turns of each earlier attempt, when the machinery lost it."""

    def rows(self) -> Iterator[int]:
        """Yield the lengths of the rows that it is trained as: a prompt that is shorter than what
        was said before it begins a new one."""
        length = 0
        for turn in self.turns:
            if turn.prompt_tokens < length:
                yield length
            length = turn.prompt_tokens + turn.output_tokens
        if length:
            yield length

    @property
    def sampled_tokens(self) -> int:
        """All that the engine samples."""
        return sum(turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends an Episode early."""

    max_turns: int
    max_new_tokens: int
    max_context_tokens: int
    tool_s: float
    grading_s: float


class Profile:
    """Episodes drawn from log-normal distributions, each by its median and its spread."""

    def __init__(self, value: Mapping[str, float], limits: Limits, *, refills: int = 0) -> None:
        self._value = value
        self._limits = limits
        self._refills = refills

    def draw(self, chance: random.Random) -> EpisodeLoad:
        """Return one Episode. A context that is full ends it, as the gateway would."""
        turns = tuple(self._turns(chance))
        return EpisodeLoad(
            turns=turns,
            boot_s=self._sample(chance, "boot_s"),
            grading_s=min(self._sample(chance, "grading_s"), self._limits.grading_s),
            lost=tuple(self._lost(chance, len(turns))),
        )

    def _turns(self, chance: random.Random) -> Iterator[TurnLoad]:
        limits = self._limits
        num = max(1, round(self._sample(chance, "turns")))
        said = int(self._value["first_prompt"])
        for _ in range(min(num, limits.max_turns)):
            room = limits.max_context_tokens - said
            if room <= 0:
                return
            reply = max(1, round(self._sample(chance, "reply_tokens")))
            reply = min(reply, limits.max_new_tokens, room)
            tool_s = min(self._sample(chance, "tool_s"), limits.tool_s)
            yield TurnLoad(said, reply, tool_s)
            said += reply + round(self._sample(chance, "result_tokens"))

    def _lost(self, chance: random.Random, num_turns: int) -> Iterator[int]:
        """Yield the turns of attempts that are lost, each at any moment of its agent's work."""
        for _ in range(self._refills):
            if chance.random() >= self._value["lost_share"]:
                return
            yield chance.randrange(num_turns)

    def _sample(self, chance: random.Random, key: str) -> float:
        median, spread = self._value[f"{key}.median"], self._value[f"{key}.spread"]
        if not median:
            return 0.0
        return chance.lognormvariate(math.log(median), spread)


class Recorded:
    """Episodes of a real run, drawn with replacement."""

    def __init__(self, episodes: tuple[EpisodeLoad, ...]) -> None:
        self._episodes = episodes

    def draw(self, chance: random.Random) -> EpisodeLoad:
        """Return one of them."""
        return chance.choice(self._episodes)
