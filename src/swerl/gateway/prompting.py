"""From a request to the engine's reply: exact tokens for training, plain chat for debugging."""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import orjson

from swerl.core.chat import ChatRequest, Json, ParsedReply, Tool, ToolCall, Usage
from swerl.core.contracts import ChatEngine, Engine, Family
from swerl.core.errors import GatewayError, Refusal
from swerl.core.experts import ExpertSpool
from swerl.core.schema import accepts, properties
from swerl.core.turn import Completion, Sampling
from swerl.gateway.history import Match, ReplyNode
from swerl.gateway.limits import LONG_REPLY, SessionLimits

MALFORMED_CALL = "malformed_tool_call"
"""Name of the stand-in for a tool call that cannot be parsed. No client offers such a tool, and
every agent answers an unknown tool with an error that the model can read."""

_PYTHON_NAMES: Mapping[str, Json] = {"True": True, "False": False, "None": None}


class HistoryPolicy(StrEnum):
    """The part of its own past that the model sees."""

    EXACT = "exact"
    """The tokens that it saw and sampled; nothing is removed."""
    TEMPLATE = "template"
    """Its chat template applied again; a past that the template changes begins a new root."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as tokens."""

    request: ChatRequest
    match: Match
    tail: array[int]
    """Tokens of the new messages."""
    ids: Sequence[int]
    """The whole prompt; an array, because it is held while the engine samples."""
    parent: ReplyNode | None
    """The reply whose tokens the prompt begins with."""
    is_rewritten: bool = False
    """True if the prompt begins a new root although the request continues a reply."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The engine's output for one prompt."""

    parsed: ParsedReply
    completion: Completion
    usage: Usage
    trainable: bool


class Prompter(Protocol):
    """Makes prompts for one kind of engine and has it sample replies."""

    rereads: bool
    """True if prompts need the messages of earlier replies again."""

    def prompt(self, request: ChatRequest, match: Match) -> Prompt:
        """Turn a request into tokens."""

    def count(self, request: ChatRequest, match: Match) -> int:
        """Return the prompt's number of tokens. Raises GatewayError if the engine hides it."""

    def check(self, prompt: Prompt, limits: SessionLimits) -> None:
        """Raise GatewayError if the prompt leaves no room for a reply."""

    async def sample(self, prompt: Prompt, limits: SessionLimits, sampling: Sampling) -> Sampled:
        """Have the engine sample a reply."""

    async def abort(self) -> None:
        """Stop everything that the Session is sampling."""


def prompter(
    engine: Engine | ChatEngine,
    family: Family,
    session: str,
    policy: HistoryPolicy = HistoryPolicy.EXACT,
    spool: ExpertSpool | None = None,
) -> Prompter:
    """Return the Prompter for this kind of engine; routed experts go to `spool`, if given."""
    if hasattr(engine, "chat"):
        return _ChatPrompter(engine, session)  # type: ignore[arg-type]  # only a ChatEngine does
    kind = _TemplatePrompter if policy is HistoryPolicy.TEMPLATE else _TokenPrompter
    return kind(engine, family, session, spool)


class _TokenPrompter:
    rereads = False

    def __init__(
        self, engine: Engine, family: Family, session: str, spool: ExpertSpool | None
    ) -> None:
        self._engine = engine
        self._family = family
        self._session = session
        self._spool = spool

    def prompt(self, request: ChatRequest, match: Match) -> Prompt:
        parent = match.parent
        if parent is None:
            tail = array("i", self._family.render(request))
        else:
            past = request.messages[: len(request.messages) - len(match.new)]
            last_id = parent.output_ids[-1] if parent.output_ids else None
            tail = array("i", self._family.render_tail(match.new, past=past, last_id=last_id))
        return Prompt(request, match, tail, path_ids(parent) + tail, parent)

    def count(self, request: ChatRequest, match: Match) -> int:
        return len(self.prompt(request, match).ids)

    def check(self, prompt: Prompt, limits: SessionLimits) -> None:
        num_tokens, most = len(prompt.ids), limits.max_context_tokens
        if num_tokens >= most:
            raise GatewayError(
                f"prompt is too long: {num_tokens} tokens > {most - 1} maximum",
                refusal=Refusal.CONTEXT,
            )

    async def sample(self, prompt: Prompt, limits: SessionLimits, sampling: Sampling) -> Sampled:
        room = limits.max_context_tokens - len(prompt.ids)
        requested = prompt.request.max_tokens or room
        stops = dict.fromkeys((*self._family.stop_ids, *sampling.stop_token_ids))
        sampling = replace(
            sampling,
            max_new_tokens=min(sampling.max_new_tokens, requested, room),
            stop_token_ids=tuple(stops),
            # All positions of the parent: its last id enters the model only with this prompt.
            num_routed=max(0, len(prompt.ids) - len(prompt.tail) - 1),
        )
        completion = await self._engine.generate(prompt.ids, sampling, self._session)
        if len(completion.ids) > LONG_REPLY:
            parsed, num_ids = await asyncio.to_thread(self._parse, completion.ids, prompt.request)
        else:
            parsed, num_ids = self._parse(completion.ids, prompt.request)
        if num_ids < len(completion.ids):
            completion = completion.cut(num_ids)
        # Storing experts may wait for the disk.
        if self._spool and completion.routed:
            stored = await asyncio.to_thread(self._spool.keep, self._session, completion.routed)
            completion = replace(completion, routed=stored)
        usage = Usage(
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(completion.ids),
            cached_tokens=min(completion.cached_tokens, len(prompt.ids)),
            thinking_tokens=parsed.thinking_tokens,
        )
        return Sampled(parsed, completion, usage, trainable=True)

    def _parse(self, ids: Sequence[int], request: ChatRequest) -> tuple[ParsedReply, int]:
        """Read a reply; return it with the number of its ids up to the client's stop text."""
        tools = (*request.late_tools, *request.tools)
        parsed = self._family.parse(ids, tools)
        if not request.first_stop(parsed.text):
            return parsed, len(ids)

        def has_stop(num_ids: int) -> bool:
            return bool(request.first_stop(self._family.parse(ids[:num_ids], tools).text))

        num_ids = bisect_left(range(len(ids)), True, key=has_stop)
        return self._family.parse(ids[:num_ids], tools), num_ids

    async def abort(self) -> None:
        await self._engine.abort(self._session)


def path_ids(node: ReplyNode | None) -> array[int]:
    """Return every token from the root to the end of this reply."""
    nodes = []
    while node is not None:
        nodes.append(node)
        node = node.parent
    ids = array("i")
    for reply in reversed(nodes):
        ids += reply.prompt_ids
        ids += reply.output_ids
    return ids


class _TemplatePrompter(_TokenPrompter):
    """Continues the exact tokens as long as the template would give the same text."""

    rereads = True

    def prompt(self, request: ChatRequest, match: Match) -> Prompt:
        exact = super().prompt(request, match)
        if match.parent is None:
            return exact
        # Clients change replies on replay, so each known one is put back as it was sampled.
        messages = list(request.messages)
        for number, node in match.rereads:
            if node.message:
                messages[number] = node.message
        whole = self._family.render(replace(request, messages=tuple(messages)))
        # Other tokens may spell the same text, so texts are compared.
        if self._family.text(whole) == self._family.text(exact.ids):
            return exact
        return Prompt(request, match, array("i", whole), whole, None, is_rewritten=True)


class _ChatPrompter:
    rereads = False

    def __init__(self, engine: ChatEngine, session: str) -> None:
        self._engine = engine
        self._session = session

    def prompt(self, request: ChatRequest, match: Match) -> Prompt:
        # The server behind the engine renders the chat, so no tokens are known here.
        return Prompt(request, match, array("i"), [], match.parent)

    def count(self, request: ChatRequest, match: Match) -> int:
        raise GatewayError(
            "the engine behind this gateway cannot count tokens", refusal=Refusal.NOT_FOUND
        )

    def check(self, prompt: Prompt, limits: SessionLimits) -> None:
        """Leave the context limit to the server behind the engine, which has the tokens."""

    async def sample(self, prompt: Prompt, limits: SessionLimits, sampling: Sampling) -> Sampled:
        requested = prompt.request.max_tokens or sampling.max_new_tokens
        capped = replace(prompt.request, max_tokens=min(requested, sampling.max_new_tokens))
        reply = await self._engine.chat(capped, self._session)
        message = reply.message
        calls = tuple((call.name, call.arguments) for call in message.tool_calls)
        parsed = ParsedReply(message.text, message.thinking, calls, reply.malformed_calls)
        completion = Completion((), (), reply.finish, weight_version="")
        return Sampled(parsed, completion, reply.usage, trainable=False)

    async def abort(self) -> None:
        """Do nothing: a cancelled call closes its connection."""


def usable_call(
    call_id: str, name: str, arguments: Mapping[str, Json], request: ChatRequest
) -> ToolCall:
    """Return the model's call with arguments of the types that the client's tool declares."""
    tools = (*request.late_tools, *request.tools)
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        return ToolCall(call_id, name, dict(arguments))
    return ToolCall(call_id, name, coerce(arguments, tool), tool.is_text, tool.namespace)


def coerce(arguments: Mapping[str, Json], tool: Tool) -> dict[str, Json]:
    """Parse each text argument if the tool declares another type for it.

    Some families write every argument as text. A text that fits no declared type stays text: the
    client's own error explains the mistake.
    """
    schemas = properties(tool.parameters)
    return {
        key: _coerce(value, schemas[key], tool.parameters) if key in schemas else value
        for key, value in arguments.items()
    }


def _coerce(value: Json, schema: Json, parameters: Mapping[str, Json]) -> Json:
    # A text that may be text is never parsed, even if it looks like JSON.
    if not isinstance(value, str) or accepts(schema, value, parameters):
        return value
    # Templates write a history's true and null as Python does, and models imitate them.
    if value.strip() in _PYTHON_NAMES:
        parsed = _PYTHON_NAMES[value.strip()]
    else:
        try:
            parsed = orjson.loads(value)
            # orjson parses deeper lists than it writes, and an answer nests this one some levels.
            orjson.dumps([[[[[[[[parsed]]]]]]]])
        except (orjson.JSONDecodeError, orjson.JSONEncodeError):
            return value
    return parsed if accepts(schema, parsed, parameters) else value
