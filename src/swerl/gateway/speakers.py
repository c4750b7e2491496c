"""The two kinds of engine behind one call: exact tokens for training, plain chat for debugging."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from swerl.core.chat import ChatRequest, Message, ParsedReply, Usage
from swerl.core.contracts import ChatEngine, Engine, Family
from swerl.core.errors import GatewayError, Refusal
from swerl.core.experts import ExpertSpool
from swerl.core.turn import Completion, Sampling
from swerl.gateway.history import Match, Node, path_ids
from swerl.gateway.limits import SessionLimits


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request, and what of it is known."""

    request: ChatRequest
    match: Match
    tail: array[int]
    """Tokens of what is new."""
    ids: Sequence[int]
    """The engine's whole prompt; an array, for it is held while the engine works."""
    parent: Node | None
    """The reply whose tokens the prompt begins with."""
    is_rewritten: bool = False
    """Whether it begins anew although the request continues a reply."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """What an engine said."""

    parsed: ParsedReply
    completion: Completion
    usage: Usage
    trainable: bool


class Speaker(Protocol):
    """Turns a request into what the model says."""

    rereads: bool
    """Whether it reads earlier replies' messages again."""

    def prompt(self, request: ChatRequest, match: Match) -> Prompt:
        """Put a request into tokens."""

    def count(self, request: ChatRequest, match: Match) -> int:
        """Return the prompt's tokens. Raises GatewayError where the engine keeps them to itself."""

    def check(self, prompt: Prompt, limits: SessionLimits) -> None:
        """Raise GatewayError on a prompt that leaves no room for a reply."""

    async def speak(self, prompt: Prompt, limits: SessionLimits, sampling: Sampling) -> Spoken:
        """Let the engine answer."""

    async def abort(self) -> None:
        """Stop everything that the session is generating."""


class HistoryPolicy(StrEnum):
    """What the model sees of its own past."""

    EXACT = "exact"
    """What it saw and said, token by token; nothing is taken back."""
    TEMPLATE = "template"
    """What its chat template makes of it now; a past that is written anew begins a new root."""


def speaker(
    engine: Engine | ChatEngine,
    family: Family,
    session: str,
    policy: HistoryPolicy = HistoryPolicy.EXACT,
    spool: ExpertSpool | None = None,
) -> Speaker:
    """Return the speaker for this kind of engine; recorded experts go to `spool`, if any."""
    if _is_chat(engine):
        return _ChatSpeaker(engine, session)  # type: ignore[arg-type]  # told apart by `chat`
    kind = _TemplateSpeaker if policy is HistoryPolicy.TEMPLATE else _TokenSpeaker
    return kind(engine, family, session, spool)  # type: ignore[arg-type]  # the other kind


def _is_chat(engine: Engine | ChatEngine) -> bool:
    return hasattr(engine, "chat")


class _TokenSpeaker:
    rereads = False

    def __init__(
        self, engine: Engine, family: Family, session: str, spool: ExpertSpool | None
    ) -> None:
        self._engine = engine
        self._family = family
        self._session = session
        self._spool = spool

    def prompt(self, request: ChatRequest, match: Match) -> Prompt:
        if match.parent is None:
            tail = array("i", self._family.render(request))
        else:
            closed = _is_closed(match.parent, self._family)
            tail = array("i", self._family.render_tail(match.new, closed=closed))
        return Prompt(request, match, tail, path_ids(match.parent) + tail, match.parent)

    def count(self, request: ChatRequest, match: Match) -> int:
        return len(self.prompt(request, match).ids)

    def check(self, prompt: Prompt, limits: SessionLimits) -> None:
        num_tokens, most = len(prompt.ids), limits.max_context_tokens
        if num_tokens >= most:
            raise GatewayError(
                f"prompt is too long: {num_tokens} tokens > {most - 1} maximum",
                refusal=Refusal.CONTEXT,
            )

    async def speak(self, prompt: Prompt, limits: SessionLimits, sampling: Sampling) -> Spoken:
        room = limits.max_context_tokens - len(prompt.ids)
        wanted = prompt.request.max_tokens or room
        stops = dict.fromkeys((*self._family.stop_ids, *sampling.stop_token_ids))
        sampling = replace(
            sampling,
            max_new_tokens=min(sampling.max_new_tokens, wanted, room),
            stop_token_ids=tuple(stops),
            # All of the parent's positions: its last id is fed to the model only here.
            num_routed=max(0, len(prompt.ids) - len(prompt.tail) - 1),
        )
        completion = await self._engine.generate(prompt.ids, sampling, self._session)
        if self._spool and completion.routed:
            kept = await asyncio.to_thread(self._spool.keep, self._session, completion.routed)
            completion = replace(completion, routed=kept)
        parsed = self._family.parse(completion.ids)
        usage = Usage(
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(completion.ids),
            cached_tokens=min(completion.cached_tokens, len(prompt.ids)),
            thinking_tokens=parsed.thinking_tokens,
        )
        return Spoken(parsed, completion, usage, trainable=True)

    async def abort(self) -> None:
        await self._engine.abort(self._session)


class _TemplateSpeaker(_TokenSpeaker):
    """Goes on from the exact tokens for as long as they read as the template has it."""

    rereads = True

    def prompt(self, request: ChatRequest, match: Match) -> Prompt:
        exact = super().prompt(request, match)
        if match.parent is None:
            return exact
        whole = self._family.render(replace(request, messages=_as_said(request, match)))
        if self._family.text(whole) == self._family.text(exact.ids):
            return exact
        return Prompt(request, match, array("i", whole), whole, None, is_rewritten=True)


class _ChatSpeaker:
    rereads = False

    def __init__(self, engine: ChatEngine, session: str) -> None:
        self._engine = engine
        self._session = session

    def prompt(self, request: ChatRequest, match: Match) -> Prompt:
        return Prompt(request, match, array("i"), [], match.parent)

    def count(self, request: ChatRequest, match: Match) -> int:
        raise GatewayError(
            "the engine behind this gateway counts no tokens ahead", refusal=Refusal.NOT_FOUND
        )

    def check(self, prompt: Prompt, limits: SessionLimits) -> None:
        """Leave the context limit to the server behind the engine: it has the tokens."""

    async def speak(self, prompt: Prompt, limits: SessionLimits, sampling: Sampling) -> Spoken:
        wanted = prompt.request.max_tokens or sampling.max_new_tokens
        capped = replace(prompt.request, max_tokens=min(wanted, sampling.max_new_tokens))
        reply = await self._engine.chat(capped, self._session)
        message = reply.message
        calls = tuple((call.name, call.arguments) for call in message.tool_calls)
        parsed = ParsedReply(message.text, message.thinking, calls, reply.malformed_calls)
        completion = Completion((), (), reply.finish, weight_version="")
        return Spoken(parsed, completion, reply.usage, trainable=False)

    async def abort(self) -> None:
        """Nothing to do: cancelling the call closes its connection."""


def _is_closed(node: Node, family: Family) -> bool:
    return bool(node.output_ids) and node.output_ids[-1] in family.stop_ids


def _as_said(request: ChatRequest, match: Match) -> tuple[Message, ...]:
    """Return the messages of a request with each known reply as the model gave it."""
    messages = list(request.messages)
    for number, node in match.known:
        if node.message:
            messages[number] = node.message
    return tuple(messages)
