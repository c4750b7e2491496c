"""Every agent that the conformance suite judges: one entry each, with what it can and cannot do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from swerl.core.chat import Message, Role, ToolCall

from .brains import call as _call


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent as the suite sees it."""

    name: str
    """The word a user types."""
    shell: Callable[[str], ToolCall]
    """How a model of this agent asks for a shell command."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings, where the defaults do not suit: another release, for example."""
    needs_home: bool = True
    """Whether it keeps files in the user's home folder."""
    start_s: float = 10.0
    """Seconds within which it makes two tool calls from its start; tried again with more."""
    drops_malformed: bool = False
    """Whether a call that it cannot do is left out of its history, which makes a branch."""
    keeps_records: bool = False
    """Whether it writes down its session in files of its own, which are kept."""
    is_cli: bool = True
    """Whether it comes from a package registry."""

    def say(self, command: str) -> Message:
        """Return a reply that asks for a shell command."""
        return Message(Role.ASSISTANT, tool_calls=(self.shell(command),))

    def param(self, *, at_night: bool = False) -> Any:
        """Return the agent as a test's parameter; with `at_night` an older release waits for it."""
        words = [self.name, *map(str, self.options.values())]
        marks = [pytest.mark.agents] if self.is_cli else []
        if at_night and "version" in self.options:
            marks.append(pytest.mark.nightly)
        return pytest.param(self, id=" ".join(words), marks=marks)


AGENTS = (
    Agent(
        "builtin", lambda command: _call("bash", command=command), needs_home=False, is_cli=False
    ),
    Agent("claude-code", lambda command: _call("Bash", command=command), keeps_records=True),
    Agent(
        "claude-code",
        lambda command: _call("Bash", command=command),
        {"version": "2.1.330"},
        keeps_records=True,
    ),
    Agent("codex", lambda command: _call("exec_command", cmd=command), keeps_records=True),
    Agent(
        "mini-swe-agent",
        lambda command: _call("bash", command=command),
        needs_home=False,
        drops_malformed=True,
    ),
    Agent(
        "opencode",
        lambda command: _call("bash", command=command, description="run it"),
        start_s=30.0,
    ),
    Agent("pi", lambda command: _call("bash", command=command)),
    Agent("pi", lambda command: _call("bash", command=command), {"version": "0.87.1"}),
    Agent(
        "qwen-code", lambda command: _call("run_shell_command", command=command), keeps_records=True
    ),
)
