"""A scripted model: an Engine that plays a Case with the tools that an agent offers.

The conversation itself holds the position in the script: each reply has a mark such as
`compat-main-3`. So a repeated request gets the same reply, sub-agents and the main conversation do
not mix, and a compaction carries the position in the summary that the model is asked for.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from swerl.core.chat import ChatRequest, Finish, Json, Message, ParsedReply, Role, Tool, ToolCall
from swerl.core.contracts import Family, MegatronMapping
from swerl.core.errors import EngineLostError
from swerl.core.learning import WeightRef
from swerl.core.turn import Completion, Sampling
from tests.compat.cases import (
    FILL_CHARS,
    AwaitSubtasks,
    BrokenCall,
    Case,
    Delegate,
    Fill,
    Move,
    RunShell,
    Say,
    UnknownTool,
)

PROMPT = "Work on compat-task: look around in this repository as you see fit, then stop."
_SUBTASK_PROMPT = "Your part is compat-{name}: list the folder and say what is there."
_COMPACTED = "compat-compacted"
_TASK = "compat-task"
_SUBTASK = re.compile(r"compat-(subtask-\d+)(?!-?\d)")
_FILL = f"seq 1000 {1000 + FILL_CHARS // 5}  # part {{}}"
"""Numbered, because some agents end a run whose model repeats a call."""
_VERSION = "compat"
_SUMMARY = f"Summary for compat-task, {_COMPACTED}: the folder was listed{{}}; go on."
_TROUBLED = ("main", 1)
"""The reply that a slow or lost engine delays."""
_SUMMARY_REQUEST = re.compile(
    r"CONTEXT CHECKPOINT COMPACTION"  # codex
    r"|create a detailed summary of the conversation"  # claude-code
    r"|Respond with TEXT ONLY"  # claude-code
    r"|<state_snapshot>"  # qwen-code
    r"|[Ss]ummary? of (our|the) conversation"
    r"|structured (context )?(checkpoint )?summary"  # pi
    r"|detailed prompt for continuing our conversation"  # opencode
)
"""Texts with which agents request a summary that replaces a long conversation."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The messages behind a prompt's token ids."""

    root: ChatRequest
    """The request with which this branch began."""
    new: tuple[Message, ...]
    """The client's messages since the last reply; all of them if there is no reply."""
    text: str
    """The whole prompt as text."""


class RecordingFamily:
    """Record the requests that a Family renders. Implements Family.

    An engine gets token ids alone, but the scripted model needs the tools and the last messages.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._roots: list[tuple[list[int], ChatRequest]] = []
        self._tails: list[tuple[list[int], tuple[Message, ...]]] = []
        self.stop_ids = family.stop_ids

    def prompt_of(self, ids: Sequence[int]) -> RenderedPrompt:
        """Return the messages behind a prompt that this family rendered."""
        whole = list(ids)
        root_ids, root = max(
            (root for root in self._roots if whole[: len(root[0])] == root[0]),
            key=lambda pair: len(pair[0]),
        )
        new = root.messages
        if len(root_ids) < len(whole):
            ends = (tail for tail in self._tails if whole[-len(tail[0]) :] == tail[0])
            new = max(ends, key=lambda pair: len(pair[0]))[1]
        return RenderedPrompt(root, new, self._family.text(ids))

    def render(self, request: ChatRequest) -> list[int]:
        ids = self._family.render(request)
        self._roots.append((list(ids), request))
        return ids

    def render_tail(
        self, messages: Sequence[Message], *, past: Sequence[Message], last_id: int | None
    ) -> list[int]:
        ids = self._family.render_tail(messages, past=past, last_id=last_id)
        self._tails.append((list(ids), tuple(messages)))
        return ids

    def parse(self, ids: Sequence[int], tools: Sequence[Tool] = ()) -> ParsedReply:
        return self._family.parse(ids, tools)

    def text(self, ids: Sequence[int]) -> str:
        return self._family.text(ids)

    def encode_reply(self, message: Message) -> list[int]:
        return self._family.encode_reply(message)

    def megatron(self) -> MegatronMapping:
        return self._family.megatron()


@dataclass(frozen=True, slots=True)
class Position:
    conversation: str
    """`main`, `after`, a subtask, `summary`, or `other` for requests outside the script."""
    number: int = 0


class ScriptedModel:
    """Implements Engine."""

    def __init__(
        self, case: Case, family: RecordingFamily, *, closing: Sequence[ToolCall] = ()
    ) -> None:
        """`closing`: the calls with which this agent's model ends its work, if any."""
        self.answered: list[Position] = []
        """Position of each reply, call by call."""
        self.lacks = ""
        """The missing part that the script requires; empty if nothing is missing."""
        self._case = case
        self._family = family
        self._closing = closing
        self._num_lost = 0
        self._mistakes: dict[Position, int] = {}
        """Positions of the model's mistakes, with the hash of the prompt."""

    @property
    def finished(self) -> bool:
        """True once the script's last reply was given."""
        closings = self._case.closings
        return any((reply.conversation, reply.number) in closings for reply in self.answered)

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Play the next move. Raises EngineLostError if the case loses the engine here."""
        prompt = self._family.prompt_of(ids)
        position = self._after_mistake(self._position(prompt), hash(tuple(ids)))
        if (position.conversation, position.number) == _TROUBLED:
            if self._num_lost < self._case.num_lost:
                self._num_lost += 1
                raise EngineLostError("the scripted engine is lost", hint="it comes back")
            await asyncio.sleep(self._case.slow_s)
        self.answered.append(position)
        reply = self._reply(position, prompt)
        cut = tuple(reply[: sampling.max_new_tokens])
        return Completion(
            ids=cut,
            logprobs=(0.0,) * len(cut),
            finish=Finish.STOP if len(cut) == len(reply) else Finish.LENGTH,
            weight_version=_VERSION,
            prompt_tokens=len(ids),
        )

    async def abort(self, session: str) -> None:
        """Do nothing: a cancelled call ends by itself."""

    async def pause(self) -> None:
        """Do nothing: this engine loads no weights."""

    async def load(self, weights: WeightRef) -> str:
        return _VERSION

    async def resume(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    def _position(self, prompt: RenderedPrompt) -> Position:
        new = "\n".join(m.text for m in prompt.new if m.role is not Role.ASSISTANT)
        is_scripted = any(_mark_of(name) in prompt.text for name in self._case.moves)
        if _SUMMARY_REQUEST.search(new) and is_scripted:
            return Position("summary", self._num_summaries())
        conversation = _conversation(prompt)
        if conversation not in self._case.moves or not prompt.root.tools:
            return Position("other", len(self.answered))
        marks = re.findall(_mark_of(conversation) + r"(\d+)", prompt.text)
        return Position(conversation, max(map(int, marks), default=-1) + 1)

    def _after_mistake(self, position: Position, prompt: int) -> Position:
        """Return the next position if an agent hides the model's mistake from the model."""
        moves = self._case.moves.get(position.conversation, ())
        is_mistake = position.number < len(moves) and isinstance(
            moves[position.number], BrokenCall | UnknownTool
        )
        if not is_mistake or self._mistakes.setdefault(position, prompt) == prompt:
            return position
        return Position(position.conversation, position.number + 1)

    def _num_summaries(self) -> int:
        return sum(position.conversation == "summary" for position in self.answered)

    def _reply(self, position: Position, prompt: RenderedPrompt) -> list[int]:
        moves = self._case.moves.get(position.conversation, ())
        if position.conversation == "summary":
            # the last mark of `after`, so that a second compaction does not begin again
            marks = re.findall(_mark_of("after") + r"\d+", prompt.text)
            return self._encode(_SUMMARY.format(f", up to {marks[-1]}" if marks else ""))
        if position.number >= len(moves):
            return self._encode("Nothing more.")
        text = f"Next, {_mark_of(position.conversation)}{position.number}."
        move = moves[position.number]
        if isinstance(move, BrokenCall):
            return self._broken(text, prompt)
        if isinstance(move, Say):
            is_subtask = position.conversation not in ("main", "after")
            return self._encode(f"{text} {move.text}", () if is_subtask else self._closing)
        return self._encode(text, self._calls(move, prompt, position.number))

    def _calls(self, move: Move, prompt: RenderedPrompt, number: int = 0) -> list[ToolCall]:
        tools = prompt.root.tools
        match move:
            case RunShell(commands):
                calls = [shell_call(tools, command) for command in commands]
            case Fill():
                calls = [shell_call(tools, _FILL.format(number))]
            case Delegate(names):
                subtasks = [Subtask(name, _SUBTASK_PROMPT.format(name=name)) for name in names]
                calls = [delegate_call(tools, subtask) for subtask in subtasks]
            case AwaitSubtasks():
                calls = [shell_call(tools, "true")]
            case _:
                calls = [ToolCall("", "compat_no_such_tool", {"text": "hello"})]
        if None in calls:
            missing = "starts sub-agents" if isinstance(move, Delegate) else "runs commands"
            self.lacks = f"no known tool of the agent {missing}"
        return [call for call in calls if call]

    def _encode(self, text: str, calls: Sequence[ToolCall] = ()) -> list[int]:
        return self._family.encode_reply(Message(Role.ASSISTANT, text, tool_calls=tuple(calls)))

    def _broken(self, text: str, prompt: RenderedPrompt) -> list[int]:
        """Return a reply whose call lacks its end."""
        whole = self._encode(text, self._calls(RunShell(("echo broken",)), prompt))
        for end in range(len(whole) - 2, 0, -1):
            ids = [*whole[:end], whole[-1]]
            if self._family.parse(ids).malformed_calls:
                return ids
        self.lacks = "no way to break this family's calls"
        return whole


def _conversation(prompt: RenderedPrompt) -> str:
    """Return the conversation's name, read from its first messages."""
    texts = [message.text for message in prompt.root.messages if message.role is not Role.TOOL]
    if any(_COMPACTED in text for text in texts):
        return "after"
    for text in reversed(texts):
        if _TASK in text:
            return "main"
        if match := _SUBTASK.search(text):
            return match[1]
    return "other"


def _mark_of(conversation: str) -> str:
    return f"compat-{conversation}-"


@dataclass(frozen=True, slots=True)
class Subtask:
    """Work for a sub-agent."""

    name: str
    prompt: str


_Arguments: TypeAlias = Mapping[str, Json]

# One entry per tool, found by its name. A new agent's shell tool needs one more entry.
_SHELLS: Mapping[str, Callable[[str], _Arguments]] = {
    "Bash": lambda command: {"command": command, "description": "Run it"},  # claude-code
    "exec_command": lambda command: {"cmd": command},  # codex
    "bash": lambda command: {"command": command, "description": "Run it"},  # most others
    "run_shell_command": lambda command: {  # qwen-code
        "command": command,
        "description": "Run it",
        "is_background": False,
    },
}
_DELEGATES: Mapping[str, Callable[[Subtask], _Arguments]] = {
    "Agent": lambda subtask: _claude_subtask(subtask),  # claude-code
    "Task": lambda subtask: _claude_subtask(subtask),  # claude-code, older releases
    "task": lambda subtask: {  # opencode, qwen-code
        "description": subtask.name,
        "prompt": subtask.prompt,
        "subagent_type": "general",
    },
    "agent": lambda subtask: _claude_subtask(subtask),  # qwen-code
}


def shell_call(tools: Sequence[Tool], command: str) -> ToolCall | None:
    """Return the call that runs a shell command; None if no tool is known to."""
    return _call(_SHELLS, tools, command)


def delegate_call(tools: Sequence[Tool], subtask: Subtask) -> ToolCall | None:
    """Return the call that starts a sub-agent; None if no tool is known to."""
    call = _call(_DELEGATES, tools, subtask)
    tool = next((tool for tool in tools if call and tool.name == call.name), None)
    if call is None or tool is None:
        return None
    properties = tool.parameters.get("properties")
    offered = properties if isinstance(properties, dict) else {}
    # releases differ in their arguments: those that this one does not have are left out
    arguments = {k: v for k, v in call.arguments.items() if k in offered}
    return ToolCall("", call.name, {**arguments, **_offered_kind(offered, arguments)})


def _offered_kind(offered: Mapping[str, Json], arguments: _Arguments) -> _Arguments:
    """Return a kind of sub-agent that the release offers, if it lists its kinds."""
    schema = offered.get("subagent_type")
    kinds = schema.get("enum") if isinstance(schema, dict) else None
    if not isinstance(kinds, list) or not kinds or arguments.get("subagent_type") in kinds:
        return {}
    general = [kind for kind in kinds if str(kind).startswith("general")]
    return {"subagent_type": (general or kinds)[0]}


def _call(
    table: Mapping[str, Callable[..., _Arguments]], tools: Sequence[Tool], meaning: object
) -> ToolCall | None:
    offered = {tool.name for tool in tools}
    name = next((name for name in table if name in offered), None)
    return None if name is None else ToolCall("", name, table[name](meaning))


def _claude_subtask(subtask: Subtask) -> _Arguments:
    return {
        "description": subtask.name,
        "prompt": subtask.prompt,
        "subagent_type": "general-purpose",
        "run_in_background": False,
    }
