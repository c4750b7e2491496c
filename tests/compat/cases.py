"""The scripted conversations, and the agents with the settings that each conversation requires."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ValidationError

from swerl.core import plugins
from swerl.core.contracts import Harness
from swerl.core.errors import InputError, unknown

ROOMY_TOKENS = 2**20
FILL_CHARS = 9_000
"""Characters of a tool result that fills the context; every agent shows that many in full."""
_FULL_TOKENS = 60_000
"""A context that no agent's first prompt fills, and that seven such results always fill."""


@dataclass(frozen=True, slots=True)
class RunShell:
    """Run shell commands, all in one reply."""

    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fill:
    """Get a long tool result, to fill the context."""


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """Begin a tool call and do not end it."""


@dataclass(frozen=True, slots=True)
class UnknownTool:
    """Call a tool that the agent does not offer."""


@dataclass(frozen=True, slots=True)
class Delegate:
    """Start sub-agents, all in one reply."""

    subtasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AwaitSubtasks:
    """Wait for the sub-agents, if the agent does not do so by itself."""


@dataclass(frozen=True, slots=True)
class Say:
    text: str = "Done."


Move = RunShell | Fill | BrokenCall | UnknownTool | Delegate | AwaitSubtasks | Say


class End(StrEnum):
    """How a run of an agent may end."""

    DONE = "done"
    """The agent received the script's last reply and ended without an error."""
    LIMIT = "limit"
    """The gateway's context limit ended it first."""
    GAVE_UP = "gave up"
    """It ended early on an engine error that it did not wait out."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    sentence: str
    moves: Mapping[str, tuple[Move, ...]]
    """Conversation (`main`, `after` a compaction, a subtask's name) -> moves of the model."""
    ends: tuple[End, ...] = (End.DONE,)
    needs: str = ""
    """Required ability: `sub-agents` or `compaction`; the harness's settings follow it."""
    max_context_tokens: int = ROOMY_TOKENS
    slow_s: float = 0.0
    """Seconds that the second reply takes."""
    num_lost: int = 0
    """Calls on which the engine is lost before the second reply."""

    @property
    def closings(self) -> set[tuple[str, int]]:
        """Positions at which the script can end: conversation and number of the move."""
        known = ((name, self.moves.get(name, ())) for name in ("main", "after"))
        return {
            (name, len(moves) - 1) for name, moves in known if moves and isinstance(moves[-1], Say)
        }


_LOOK = RunShell(("echo look && ls",))
_FIND = (RunShell(("echo find && ls",)), Say("It is there."))
_FILLS = (Fill(),) * 16

_CASES = (
    Case(
        "tools",
        "three tool calls, one after the other",
        {"main": (_LOOK, RunShell(("echo hi > new.txt",)), RunShell(("cat new.txt",)), Say())},
    ),
    Case(
        "parallel",
        "three tool calls in one reply",
        {"main": (RunShell(("sleep 0.3; echo a", "echo b", "sleep 0.1; echo c")), Say())},
    ),
    Case(
        "sub-agents",
        "two sub-agents, started in one reply",
        {
            "main": (_LOOK, Delegate(("subtask-1", "subtask-2")), AwaitSubtasks(), Say()),
            "subtask-1": _FIND,
            "subtask-2": _FIND,
        },
        needs="sub-agents",
    ),
    Case(
        "compaction",
        "tool results until the agent summarises its history, then one more call",
        {"main": _FILLS, "after": (_LOOK, Say())},
        needs="compaction",
    ),
    Case(
        "malformed",
        "a tool call that does not end, then a good one",
        {"main": (_LOOK, BrokenCall(), _LOOK, Say())},
    ),
    Case(
        "refused",
        "a command that is denied, then a tool that does not exist",
        {"main": (RunShell(("touch /usr/denied",)), UnknownTool(), _LOOK, Say())},
    ),
    Case(
        "over-long",
        "tool results until the gateway's context limit; two more if the agent makes room",
        {"main": _FILLS, "after": (*_FILLS[:2], Say())},
        ends=(End.LIMIT, End.DONE),
        max_context_tokens=_FULL_TOKENS,
    ),
    Case(
        "slow",
        "an engine that takes 7 s for a reply; streaming clients get pings",
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


@dataclass(frozen=True, slots=True)
class _Traits:
    releases: tuple[str, ...] = ()
    """Releases to try; empty: the tested one alone."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Ability that a case requires -> settings of the harness that make the agent use it."""


_NO_SETTINGS: Mapping[str, Any] = {}
_WINDOW_TOKENS = 70_000
"""A context well above every agent's first prompt, so that one compaction is enough."""
_TRAITS: Mapping[str, _Traits] = {
    "claude-code": _Traits(
        ("2.1.112", "2.1.143", "2.1.330"),
        {"sub-agents": _NO_SETTINGS, "compaction": {"compact_at": _WINDOW_TOKENS}},
    ),
    "codex": _Traits(
        ("0.169.0", "0.94.0"),
        {"sub-agents": {"sub_agents": True}, "compaction": {"compact_at": 30_000}},
    ),
    "pi": _Traits(("0.73.1", "0.87.1")),
    "opencode": _Traits(
        settings={"sub-agents": _NO_SETTINGS, "compaction": {"context_window": _WINDOW_TOKENS}}
    ),
    "qwen-code": _Traits(
        settings={"sub-agents": _NO_SETTINGS, "compaction": {"context_window": _WINDOW_TOKENS}}
    ),
}


@dataclass(frozen=True, slots=True)
class Agent:
    harness: str
    release: str = ""
    """Empty if the agent comes with swerl or has one tested release."""

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"{self.harness} {self.release}".strip()

    def can(self, need: str) -> bool:
        """Return True if some settings give the agent this ability."""
        return not need or need in _TRAITS.get(self.harness, _Traits()).settings

    def build(self, case: Case) -> Harness:
        """Build its harness for a case, and fetch its bundle. Raises SwerlError."""
        settings = _TRAITS.get(self.harness, _Traits()).settings.get(case.needs, _NO_SETTINGS)
        built: Harness = plugins.load("harnesses", self.harness).build(self.options(settings))
        return built

    def options(self, settings: Mapping[str, Any] = _NO_SETTINGS) -> BaseModel:
        """Return its harness's settings. Raises InputError if the harness rejects them."""
        given = {**settings, **({"version": self.release} if self.release else {})}
        try:
            options: BaseModel = plugins.load("harnesses", self.harness).Options(**given)
        except ValidationError as error:
            raise InputError(
                f"{self.name} rejects the settings {given}: {error.errors()[0]['msg']}",
                hint="give a release such as codex@0.169.0",
            ) from error
        return options


def choose_agents(names: tuple[str, ...]) -> list[Agent]:
    """Return the agents of these names, `agent` or `agent@release`; all of them if none is given.

    Raises UnknownNameError, and InputError on an impossible release.
    """
    every = names or tuple(plugins.names("harnesses"))
    chosen = list(dict.fromkeys(agent for name in every for agent in _named(name)))
    for agent in chosen:
        agent.options()
    return chosen


def _named(name: str) -> Iterator[Agent]:
    harness, _, release = name.partition("@")
    module = plugins.load("harnesses", harness)
    releases = _TRAITS.get(harness, _Traits()).releases
    if release:
        yield Agent(harness, release)
    elif releases:
        yield from (Agent(harness, each) for each in releases)
    else:
        yield Agent(harness, getattr(module, "DEFAULT_VERSION", ""))
