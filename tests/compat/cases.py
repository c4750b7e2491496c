"""The scripted conversations, and the agents with the settings that each conversation requires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from swerl.core import plugins
from swerl.core.contracts import Harness

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
        scripts = ((name, self.moves.get(name, ())) for name in ("main", "after"))
        return {
            (name, len(moves) - 1)
            for name, moves in scripts
            if moves and isinstance(moves[-1], Say)
        }


_LOOK = RunShell(("echo look && ls",))
_FIND = (RunShell(("echo find && ls",)), Say("It is there."))
_FILLS = (Fill(),) * 16

CASES = (
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

_WINDOW_TOKENS = 70_000
"""A context well above every agent's first prompt, so that one compaction is enough."""
_NONE: Mapping[str, Any] = {}
_ABILITIES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "claude-code": {"sub-agents": _NONE, "compaction": {"compact_at": _WINDOW_TOKENS}},
    "codex": {"compaction": {"compact_at": 30_000}},
    "opencode": {"sub-agents": _NONE},
    "qwen-code": {"sub-agents": _NONE},
}
"""Agent -> ability that a case requires -> settings of the harness that make the agent use it."""
_RELEASES: Mapping[str, tuple[str, ...]] = {
    "claude-code": ("2.1.112", "2.1.330"),
    "codex": ("0.169.0",),
    "pi": ("0.87.1",),
}
"""Releases to play; agents that are not listed play their tested one."""


@dataclass(frozen=True, slots=True)
class Agent:
    harness: str
    release: str = ""
    """Empty if the agent comes with swerl."""

    @property
    def name(self) -> str:
        return f"{self.harness} {self.release}".strip()

    def can_play(self, case: Case) -> bool:
        """Return True if some settings give the agent the ability that the case requires."""
        return not case.needs or case.needs in _ABILITIES.get(self.harness, {})

    def build(self, case: Case) -> Harness:
        """Build its harness for a case, and fetch its bundle. Raises ImageError."""
        settings = dict(_ABILITIES.get(self.harness, {}).get(case.needs, _NONE))
        if self.release:
            settings["version"] = self.release
        module = plugins.load("harnesses", self.harness)
        harness: Harness = module.build(module.Options(**settings))
        return harness


def all_agents() -> list[Agent]:
    agents = []
    for name in plugins.names("harnesses"):
        tested = getattr(plugins.load("harnesses", name), "DEFAULT_VERSION", "")
        agents += [Agent(name, release) for release in _RELEASES.get(name, (tested,))]
    return agents
