"""The scripted conversations: what the model does, what the engine does, how it must end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from swerl.core.errors import unknown

ROOMY_TOKENS = 2**20
FILL_CHARS = 9_000
"""Characters of a tool result that fills the context: within what every agent shows whole."""
_FULL_TOKENS = 60_000
"""A context that no agent's first prompt fills, and seven such results do with any."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run shell commands, all in one reply."""

    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fill:
    """Let a tool result fill the context."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Begin a tool call and not end it."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Call a tool that is not on offer."""


@dataclass(frozen=True, slots=True)
class Delegate:
    """Start sub-agents, all in one reply."""

    errands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the sub-agents, where the agent does not do so by itself."""


@dataclass(frozen=True, slots=True)
class Say:
    """End with a text."""

    text: str = "Done."


Move = Run | Fill | Broken | Unknown | Delegate | Await | Say


class End(StrEnum):
    """How a run of an agent may end."""

    DONE = "done"
    """The agent heard the script's last reply and ended without an error."""
    LIMIT = "limit"
    """The gateway's context limit ended it before."""
    GAVE_UP = "gave up"
    """It ended early, with an error of the engine that it did not wait out."""


@dataclass(frozen=True, slots=True)
class Case:
    """One scripted conversation."""

    name: str
    sentence: str
    moves: Mapping[str, tuple[Move, ...]]
    """Conversation (`main`, `after` a compaction, an errand's name) -> what the model does."""
    ends: tuple[End, ...] = (End.DONE,)
    needs: str = ""
    """What an agent must be able to do: `sub-agents`, `compaction`; the settings follow it."""
    max_context_tokens: int = ROOMY_TOKENS
    slow_s: float = 0.0
    """Seconds that the second reply takes."""
    num_lost: int = 0
    """Times that the engine is lost before the second reply."""

    @property
    def closings(self) -> set[tuple[str, int]]:
        """Where the script can end: conversation and number of the move."""
        known = ((name, self.moves.get(name, ())) for name in ("main", "after"))
        return {
            (name, len(moves) - 1) for name, moves in known if moves and isinstance(moves[-1], Say)
        }


_LOOK = Run(("echo look && ls",))
_FIND = (Run(("echo find && ls",)), Say("It is there."))
_FILLS = (Fill(),) * 16

_CASES = (
    Case(
        "tools",
        "three tool calls, one after the other",
        {"main": (_LOOK, Run(("echo hi > new.txt",)), Run(("cat new.txt",)), Say())},
    ),
    Case(
        "parallel",
        "three tool calls in one reply",
        {"main": (Run(("sleep 0.3; echo a", "echo b", "sleep 0.1; echo c")), Say())},
    ),
    Case(
        "sub-agents",
        "two sub-agents, started in one reply",
        {
            "main": (_LOOK, Delegate(("errand-1", "errand-2")), Await(), Say()),
            "errand-1": _FIND,
            "errand-2": _FIND,
        },
        needs="sub-agents",
    ),
    Case(
        "compaction",
        "tool results until the agent sums its history up, then one call more",
        {"main": _FILLS, "after": (_LOOK, Say())},
        needs="compaction",
    ),
    Case(
        "malformed",
        "a tool call that does not end, then a good one",
        {"main": (_LOOK, Broken(), _LOOK, Say())},
    ),
    Case(
        "refused",
        "a command that is denied, then a tool that is not on offer",
        {"main": (Run(("touch /usr/denied",)), Unknown(), _LOOK, Say())},
    ),
    Case(
        "over-long",
        "tool results until the gateway's context limit; two more where the agent makes room",
        {"main": _FILLS, "after": (*_FILLS[:2], Say())},
        ends=(End.LIMIT, End.DONE),
        max_context_tokens=_FULL_TOKENS,
    ),
    Case(
        "slow",
        "an engine that takes 7 s for a reply, which streaming clients see as pings",
        {"main": (_LOOK, _LOOK, Say())},
        slow_s=7.0,
    ),
    Case(
        "lost",
        "an engine that is lost for two calls, then back",
        {"main": (_LOOK, _LOOK, Say())},
        ends=(End.DONE, End.GAVE_UP),
        num_lost=2,
    ),
)

CASES: Mapping[str, Case] = {case.name: case for case in _CASES}


def find_case(name: str) -> Case:
    """Return the case of this name. Raises UnknownNameError."""
    if name not in CASES:
        raise unknown("case", name, CASES)
    return CASES[name]
