"""How to say a thing with the tools that an agent offers: one row a tool, found by its name.

The model of the lab reads a request's tools and looks here for the words. An agent whose shell tool
is not in the table needs one row more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from swerl.core.chat import Json, Tool, ToolCall

_Said: TypeAlias = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Errand:
    """Work for a sub-agent."""

    name: str
    prompt: str


_SHELLS: Mapping[str, Callable[[str], _Said]] = {
    "Bash": lambda command: {"command": command, "description": "Run it"},  # claude-code
    "exec_command": lambda command: {"cmd": command},  # codex
    "shell": lambda command: {"command": ["sh", "-c", command]},  # codex up to 0.94.0
    "bash": lambda command: {"command": command, "description": "Run it"},  # most others
    "run_shell_command": lambda command: {  # qwen-code
        "command": command,
        "description": "Run it",
        "is_background": False,
    },
}

_DELEGATES: Mapping[str, Callable[[Errand], _Said]] = {
    "Agent": lambda errand: _claude_errand(errand),  # claude-code
    "Task": lambda errand: _claude_errand(errand),  # claude-code, older ones
    "task": lambda errand: {  # opencode, qwen-code
        "description": errand.name,
        "prompt": errand.prompt,
        "subagent_type": "general",
    },
    "agent": lambda errand: _claude_errand(errand),  # qwen-code
    "multi_agent_v1.spawn_agent": lambda errand: {"message": errand.prompt},  # codex
    "spawn_agent": lambda errand: {"message": errand.prompt},  # codex, older ones
}

_WAITS: Mapping[str, Callable[[str], _Said]] = {
    "multi_agent_v1.wait_agent": lambda said: _codex_wait(said),  # codex
    "wait_agent": lambda said: _codex_wait(said),  # codex, older ones
    "wait": lambda said: _codex_wait(said),  # codex, those before
}
"""Tools that wait for sub-agents, of agents that do not wait by themselves."""

SUMMARIES = re.compile(
    r"CONTEXT CHECKPOINT COMPACTION"  # codex
    r"|create a detailed summary of the conversation"  # claude-code
    r"|Respond with TEXT ONLY"  # claude-code
    r"|<state_snapshot>"  # qwen-code
    r"|[Ss]ummary? of (our|the) conversation"
    r"|structured (context )?(checkpoint )?summary"  # pi
    r"|detailed prompt for continuing our conversation"  # opencode
)
"""How agents ask for what is to stand in the place of a long conversation."""

_CODEX_ID = re.compile(r'"agent_id"\s*:\s*"([0-9a-f-]{8,})"')


def run(tools: Sequence[Tool], command: str) -> ToolCall | None:
    """Return the call that runs a shell command; None where no tool on offer is known to."""
    return _call(_SHELLS, tools, command)


def delegate(tools: Sequence[Tool], errand: Errand) -> ToolCall | None:
    """Return the call that starts a sub-agent; None where no tool on offer is known to."""
    call = _call(_DELEGATES, tools, errand)
    tool = next((one for one in tools if call and one.name == call.name), None)
    if call is None or tool is None:
        return None
    known = tool.parameters.get("properties")
    offered = known if isinstance(known, dict) else {}
    # releases differ in what else may be said: what this one does not know is left out
    said = {k: v for k, v in call.arguments.items() if k in offered}
    return ToolCall("", call.name, {**said, **_known_kind(offered, said)})


def _known_kind(offered: Mapping[str, Json], said: _Said) -> _Said:
    """Return the kind of sub-agent that a release offers, where it names what it has."""
    schema = offered.get("subagent_type")
    kinds = schema.get("enum") if isinstance(schema, dict) else None
    if not isinstance(kinds, list) or not kinds or said.get("subagent_type") in kinds:
        return {}
    general = [kind for kind in kinds if str(kind).startswith("general")]
    return {"subagent_type": (general or kinds)[0]}


def wait(tools: Sequence[Tool], said: str) -> ToolCall | None:
    """Return the call that waits for the sub-agents that a conversation tells of."""
    return _call(_WAITS, tools, said)


def _call(
    table: Mapping[str, Callable[..., _Said]], tools: Sequence[Tool], meaning: object
) -> ToolCall | None:
    offered = {tool.name for tool in tools}
    name = next((name for name in table if name in offered), None)
    return None if name is None else ToolCall("", name, table[name](meaning))


def _claude_errand(errand: Errand) -> _Said:
    return {
        "description": errand.name,
        "prompt": errand.prompt,
        "subagent_type": "general-purpose",
        "run_in_background": False,
    }


def _codex_wait(said: str) -> _Said:
    ids: list[Json] = list(dict.fromkeys(_CODEX_ID.findall(said)))
    return {"ids": ids, "targets": ids, "timeout_ms": 60_000}
