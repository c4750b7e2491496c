"""The replies of one Session by what was said before them: which branch a request continues.

Conversations form a tree of places. A step from one place to the next is a reply, or all that was
said between two replies, by its identity (`identity.py`). A request walks the tree as far as it
can; the last reply on the way is its parent, and only the messages after it are new.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from swerl.core.chat import ChatRequest, Finish, Message, Role, ToolCall
from swerl.core.turn import RoutedExperts, Turn, WeightChange
from swerl.gateway.identity import BLANK, Key, Words, joined, tools_key

_MOST_PARTS = 8
"""Messages of one speaker among which a known beginning is looked for."""


@dataclass(slots=True, eq=False)
class Node:
    """One recorded reply, held small: arrays take 4 bytes a token where tuples take 36."""

    parent: Node | None
    prompt_ids: array[int]
    output_ids: array[int]
    logprobs: array[float]
    finish: Finish
    weight_version: str
    started_s: float
    duration_s: float
    trainable: bool
    malformed_calls: int
    index: int | None = None
    """Number of its Turn; None until its client is known to have the reply."""
    message: Message | None = None
    """What was said, where the history policy reads it again."""
    is_rewritten: bool = False
    """Whether it begins a new root because the chat template wrote its past anew."""
    is_continued: bool = False
    """Whether the client has said something after it."""
    weight_changes: tuple[WeightChange, ...] = ()
    routed: RoutedExperts | None = None

    def turn(self) -> Turn:
        """Return the Turn of a reply that was delivered."""
        assert self.index is not None
        return Turn(
            index=self.index,
            parent=None if self.parent is None else self.parent.index,
            prompt_ids=tuple(self.prompt_ids),
            output_ids=tuple(self.output_ids),
            logprobs=tuple(self.logprobs),
            finish=self.finish,
            weight_version=self.weight_version,
            started_s=self.started_s,
            duration_s=self.duration_s,
            trainable=self.trainable,
            malformed_calls=self.malformed_calls,
            weight_changes=self.weight_changes,
            routed=self.routed,
        )


def path_ids(node: Node | None) -> array[int]:
    """Return every token from the root to the end of this reply."""
    nodes = []
    while node is not None:
        nodes.append(node)
        node = node.parent
    ids = array("i")
    for one in reversed(nodes):
        ids += one.prompt_ids
        ids += one.output_ids
    return ids


@dataclass(slots=True)
class _Place:
    """Where a conversation stands after some messages."""

    next: dict[Key, _Place] = field(default_factory=dict)
    replies: list[Node] = field(default_factory=list)
    """Replies that led here, oldest first: the same text may be sampled twice."""


@dataclass(slots=True)
class _Step:
    """A reply, or what was said between two, as a request has it; made by the hundred."""

    key: Key
    end: int
    """Number of messages up to its end."""
    messages: tuple[Message, ...]
    before: tuple[ToolCall, ...] = ()
    """The calls that its tool results can answer."""

    @property
    def is_reply(self) -> bool:
        """Whether the assistant says it."""
        return self.messages[0].role is Role.ASSISTANT


@dataclass(frozen=True, slots=True)
class _Opened:
    """The assistant's words at a request's end: clients may send them and the reply as one."""

    place: _Place | None
    """The place of the last known reply before them."""
    keys: tuple[Key, ...]
    """The steps from there to where they begin."""
    said: Message


@dataclass(frozen=True, slots=True)
class Match:
    """What is known of a request."""

    parent: Node | None
    """The reply that it continues; None where it begins a new root."""
    new: tuple[Message, ...]
    """Its messages after that reply."""
    root: Key
    """The tools on offer: they stand before everything else in a prompt."""
    place: _Place | None
    """Where `parent` ends; None at the beginning."""
    keys: tuple[Key, ...]
    """The steps from there over the new messages."""
    known: tuple[tuple[int, Node], ...]
    """The replies up to `parent` that stand as one message, with that message's number."""
    opened: _Opened | None = None
    """Set where the request ends with words of the assistant."""


class History:
    """The tree of places of one Session."""

    def __init__(self, *, keeps_blank: bool = True) -> None:
        """`keeps_blank`: whether a blank reply stays where its client left it out."""
        self._keeps_blank = keeps_blank
        self._words = Words()
        self._roots: dict[Key, _Place] = {}
        self._names: dict[Key, Key] = {}
        """Each root's key by itself: one long text is kept however often it is met."""
        self._minted: dict[str, tuple[Key, int]] = {}
        """Minted call id -> identity of the reply that holds it, and which of its calls it is."""

    def match(self, request: ChatRequest) -> Match:
        """Find the longest known branch that the request continues."""
        root = tools_key(request.tools)
        root = self._names.get(root, root)
        parent, place, num_steps, num_messages = None, None, 0, 0
        known: list[tuple[int, Node]] = []
        opened: tuple[_Place | None, int] = (None, 0)
        steps: list[_Step] = []
        here = self._roots.get(root)
        for step, there in self._walk(here, self._steps(request.messages)):
            if step.is_reply:
                opened = (place, num_steps)
            steps.append(step)
            if there is None or not there.replies:
                continue
            parent, place, num_steps, num_messages = there.replies[-1], there, len(steps), step.end
            if len(step.messages) == 1:
                known.append((step.end - 1, parent))
        keys = tuple(step.key for step in steps)
        new = request.messages[num_messages:]
        match = Match(parent, new, root, place, keys[num_steps:], tuple(known))
        if not steps or not steps[-1].is_reply:
            return match
        start, num_before = opened
        said = joined(steps[-1].messages)
        return replace(match, opened=_Opened(start, keys[num_before:-1], said))

    def add(self, match: Match, message: Message, node: Node) -> None:
        """Record a reply after the messages of `match`."""
        place = self._end(match.root, match.place, match.keys)
        content = self._words.reply_key(message)
        if message.tool_calls:
            owner = _owner_key(message)
            minted = ((call.id, (owner, n)) for n, call in enumerate(message.tool_calls))
            self._minted.update(minted)
            place.next[owner] = place.next[content] = there = _Place(replies=[node])
        else:
            there = place.next.setdefault(content, _Place())
            there.replies.append(node)
        if match.opened:
            before = self._end(match.root, match.opened.place, match.opened.keys)
            whole = joined((match.opened.said, message))
            for key in filter(None, (self._owner(whole), self._words.reply_key(whole))):
                before.next.setdefault(key, there)

    def discard(self, match: Match, message: Message, node: Node) -> None:
        """Forget a reply that `add` recorded: nobody received it."""
        key = _owner_key(message) if message.tool_calls else self._words.reply_key(message)
        self._end(match.root, match.place, match.keys).next[key].replies.remove(node)

    def _end(self, root: Key, place: _Place | None, keys: Sequence[Key]) -> _Place:
        name = self._names.setdefault(root, root)
        place = place or self._roots.setdefault(name, _Place())
        for key in keys:
            place = place.next.setdefault(key, _Place())
        return place

    def _walk(
        self, here: _Place | None, steps: Iterator[_Step]
    ) -> Iterator[tuple[_Step, _Place | None]]:
        """Yield each step with where it leads, None from where nothing is known."""
        for whole in steps:
            for step in self._parts(here, whole):
                here = here.next.get(step.key) if here else None
                yield step, here

    def _parts(self, here: _Place | None, step: _Step) -> Iterator[_Step]:
        """Yield the step as it is, or in the parts in which it is known.

        Where a reply is followed by words that its client made up, the reply is still known. And
        a blank reply may have stood between two messages of the user: clients drop it.
        """
        if here is None or step.key in here.next:
            yield step
            return
        for number in range(1, min(len(step.messages), _MOST_PARTS)):
            head, tail = self._halves(step, number)
            there = here.next.get(head.key)
            if there is None:
                continue
            if step.is_reply and there.replies:
                yield head
                yield from self._parts(there, tail)
                return
            if self._keeps_blank and not step.is_reply and _has_blank_reply(there):
                yield head
                yield _Step(BLANK, head.end, (Message(Role.ASSISTANT),))
                yield from self._parts(there.next[BLANK], tail)
                return
        yield step

    def _halves(self, step: _Step, number: int) -> tuple[_Step, _Step]:
        head, tail = step.messages[:number], step.messages[number:]
        end = step.end - len(tail)
        return (
            _Step(self._key(head, step.before), end, head, step.before),
            _Step(self._key(tail, step.before), step.end, tail, step.before),
        )

    def _steps(self, messages: Sequence[Message]) -> Iterator[_Step]:
        """Yield the steps of a request. Blank messages are no part of any: clients drop them."""
        run: list[Message] = []
        calls: tuple[ToolCall, ...] = ()
        end = 0
        for position, message in enumerate(messages, 1):
            if message.role in (Role.USER, Role.SYSTEM) and not message.text.strip():
                continue
            is_reply = message.role is Role.ASSISTANT
            if run and is_reply != (run[0].role is Role.ASSISTANT):
                yield _Step(self._key(run, calls), end, tuple(run), calls)
                calls = joined(run).tool_calls if not is_reply else ()
                run = []
            run.append(message)
            end = position
        if run:
            yield _Step(self._key(run, calls), end, tuple(run), calls)

    def _key(self, run: Sequence[Message], calls: Sequence[ToolCall]) -> Key:
        if run[0].role is Role.ASSISTANT:
            said = joined(run)
            return self._owner(said) or self._words.reply_key(said)
        own = {call.id: number for number, call in enumerate(calls)}
        places: dict[str, Hashable] = {}
        for asked in {m.tool_call_id for m in run if m.role is Role.TOOL}:
            minted = self._minted.get(asked)
            places[asked] = minted[1] if minted else own.get(asked, asked)
        return self._words.heard_key(run, places)

    def _owner(self, message: Message) -> Key | None:
        """Return the identity of the reply whose minted call ids these are."""
        known = (self._minted.get(call.id) for call in message.tool_calls)
        found = next(filter(None, known), None)
        return found[0] if found else None


def _has_blank_reply(place: _Place) -> bool:
    """Say whether a reply without words was given here that a client has for certain."""
    blank = place.next.get(BLANK)
    return blank is not None and bool(blank.replies) and blank.replies[-1].index is not None


def _owner_key(message: Message) -> Key:
    return ("reply", message.tool_calls[0].id)
