"""Replay: answer a Session's first requests from a record, and check that they are the same.

A request repeats a recorded Turn if it continues the same reply with the same new messages. What
differs for an honest reason is covered by one of `RULES` and counted; any other difference ends the
replay. Turns keep their recorded tokens, so the engine continues the conversation exactly. A reply
that names what is random, such as a sub-agent's id, is sent with the id of this Session. Requests
and replies keep their recorded order over all branches, so a lead hears of its sub-agents' ends in
the same order.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from typing import Any

import orjson

from swerl.core.chat import ChatRequest, Json, Message, ParsedReply, Role, Tool, Usage
from swerl.core.contracts import Family
from swerl.core.errors import GatewayError
from swerl.core.turn import Completion, Recorded, Sampling, Turn
from swerl.gateway.conversation import TurnRecord
from swerl.gateway.history import Match
from swerl.gateway.limits import SessionLimits
from swerl.gateway.prompting import MALFORMED_CALL, Prompt, Prompter, Sampled, path_ids

_DATE = r"\d\d?[-/.]\d\d?"
_TIME = r"\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
RULES: Mapping[str, str] = {
    "call id": r"\b(?:call|toolu|fc|msg|req|ses|prt|chatcmpl|resp)_(?=\w*\d)\w{6,}",
    "temporary path": r"(?:/private)?/(?:tmp|var/tmp|dev/shm)/[\w.@+/-]+",
    "uuid": r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b",
    "clock": (
        rf"\b20\d\d[-/.]{_DATE}(?:[T ]{_TIME})?(?:Z|[+-]\d\d:?\d\d)?\b|\b{_DATE}/20\d\d\b"
        rf"|\b(?:{_DAY},? +)?(?:\d\d? +)?{_MONTH} +\d{{1,4}}\b(?:,? +20\d\d\b)?"
        rf"|\b{_TIME}\b|\b1[6-9]\d{{8}}(?:\d{{3}})?\b"
    ),
    "nickname": r"(?<=\"nickname\":\")[\w -]+",
    "duration": (
        r"duration_ms\W{1,3}\d+"
        r"|\b\d+(?:\.\d+)? ?(?:[mµn]?s|secs?|seconds?|milliseconds?|minutes?)\b"
    ),
    "port": r"\b(?:127\.0\.0\.1|localhost):\d+",
    "process": r"\b(?i:pid|process(?: id)?|session id|chunk id)[:= ]+(?=[\w-]*\d)[\w-]+",
    "address": r"\b0x[0-9a-f]{6,}\b",
    "hash": r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,64}\b",
}
"""Name -> pattern of texts that differ from one start of an agent to the next."""
WHITE_SPACE = "white space"
"""Name of the rule for texts that differ only in white space, which clients trim."""
_NAMES = tuple(RULES)
_RANDOM = frozenset({"call id", "temporary path", "uuid", "port", "process", "nickname", "hash"})
"""Rules whose texts a later reply may repeat."""
_LEADING = re.compile(r"^.*[:= ]+")
"""The words before an id, which a reply does not repeat."""
_LEAST_RENAMED = 8
"""Characters of a text that is replaced inside others; a shorter one must be the whole value."""
_SHOWN_CHARS = 80
_OVERDUE_S, _MOST_GAP_S = 5.0, 0.2
"""Seconds that a reply waits for what came before it, and between replies of two branches."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a request whose text is compared."""

    label: str
    text: str


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A Turn, and what the record has besides its tokens."""

    turn: Turn
    reply: Message | None = None
    parts: tuple[Part, ...] | None = None
    """Its request; None if the record has only the tokens."""


def recorded_turns(records: Iterable[TurnRecord]) -> tuple[RecordedTurn, ...]:
    """Return the Turns of a Session, in their order, with what a replay compares."""
    turns: list[RecordedTurn] = []
    for record in records:
        parent, reply = record.turn.parent, record.reply.message
        before = None if parent is None else turns[parent].reply
        calls = [call.id for call in before.tool_calls] if before else []
        parts = request_parts(record.new_messages, calls, record.tools)
        turns.append(RecordedTurn(record.turn, reply, parts))
    return tuple(turns)


class Replay:
    """The recorded Turns that a Session repeats. Implements Prompter, in front of a live one."""

    rereads = False

    def __init__(
        self,
        recorded: Sequence[RecordedTurn],
        *,
        num_turns: int,
        is_own: bool = False,
    ) -> None:
        """Repeat the first `num_turns`; later ones only identify requests for the engine.

        `is_own`: they are of the same Episode, which a crash interrupted, and are trained.
        """
        self.differences: Counter[str] = Counter()
        """Rule -> messages that differ as it allows."""
        self.failure: GatewayError | None = None
        """The first difference that no rule allows."""
        self._recorded = recorded
        self._num_turns = num_turns
        self._is_own = is_own
        # Both are set by `before`.
        self._live: Prompter
        self._family: Family
        self._played: set[int] = set()
        self._answered: set[int] = set()
        """Turns whose reply was sent, or is overdue."""
        self._moved = asyncio.Event()
        self._renamed: dict[str, str] = {}
        """Random texts of the record -> those of this Session."""
        self._refused = ""
        """How the last request that the record lacks differs; empty if there is none."""

    @property
    def num_played(self) -> int:
        return len(self._played)

    @property
    def problem(self) -> str:
        """Why the Session is no continuation of the record; empty if it is."""
        if self.failure:
            return str(self.failure)
        if len(self._played) < self._num_turns:
            progress = f"the agent made {len(self._played)} of the {self._num_turns} requests"
            refused = f"; one without room for a reply: {self._refused}" if self._refused else ""
            return f"{progress} to replay, then ended{refused}"
        return ""

    def before(self, live: Prompter, family: Family) -> Prompter:
        """Return a Prompter that repeats the record, then samples with `live`."""
        self._live, self._family = live, family
        self.rereads = live.rereads
        return self

    def prompt(self, request: ChatRequest, match: Match) -> Prompt:
        """Return the recorded tokens, or a new prompt. Raises GatewayError after a difference."""
        if self.failure:
            raise self.failure
        prompt = self._live.prompt(request, match)
        recorded = self._find(prompt) if len(self._played) < self._num_turns else None
        if recorded is None:
            return prompt
        tail, parent, rewritten = prompt.tail, prompt.parent, prompt.is_rewritten
        if isinstance(recorded, str):
            return _Unknown(request, match, tail, prompt.ids, parent, rewritten, recorded)
        number, compared = recorded
        if self._is_spelled(self._recorded[number]):
            tail = array("i", self._recorded[number].turn.prompt_ids)
        ids = path_ids(parent) + tail
        return _Repeated(request, match, tail, ids, parent, rewritten, number, compared)

    def count(self, request: ChatRequest, match: Match) -> int:
        return self._live.count(request, match)

    def check(self, prompt: Prompt, limits: SessionLimits) -> None:
        """Raise GatewayError if the prompt leaves no room for a reply, or the record lacks it."""
        # The record has no refused request: the agent continued without it, as after a compaction.
        if isinstance(prompt, _Unknown):
            self._refused = prompt.reason
        self._live.check(prompt, limits)
        if isinstance(prompt, _Unknown):
            self.failure = GatewayError(f"the replay ended: {prompt.reason}")
            raise self.failure

    async def sample(self, prompt: Prompt, limits: SessionLimits, sampling: Sampling) -> Sampled:
        """Return the recorded reply, without the engine, or sample one after the replay."""
        if not isinstance(prompt, _Repeated):
            return await self._live.sample(prompt, limits, sampling)
        number = prompt.number
        # Of two equal requests at once, each repeats a Turn of its own.
        twin = next(self._twins(number), None) if number in self._played else None
        if twin is not None:
            number = twin
            if self._is_spelled(self._recorded[twin]):
                prompt.tail[:] = array("i", self._recorded[twin].turn.prompt_ids)
        # A request that is repeated once more is answered again, but trained once. An Episode's own
        # record may begin with the Turns of another one.
        turn, is_first = self._recorded[number].turn, number not in self._played
        is_context = not self._is_own or turn.replayed or not is_first
        self._played.add(number)
        try:
            await self._in_order(number)
        except asyncio.CancelledError:
            if is_first:  # its client may ask again
                self._played.discard(number)
            raise
        self.differences.update(prompt.compared.counts)
        self._renamed |= prompt.compared.renamed
        parsed, completion = self._reply(self._recorded[number])
        usage = Usage(
            prompt_tokens=len(prompt.ids) + turn.num_prompt_reported,
            completion_tokens=len(completion.ids) + turn.num_reported,
            thinking_tokens=parsed.thinking_tokens,
        )
        recorded = Recorded(number, is_context)
        return Sampled(parsed, completion, usage, bool(completion.ids), recorded)

    async def _in_order(self, number: int) -> None:
        """Send a reply when the record did: behind earlier replies, and behind requests that had
        come by then. Those that are overdue may never come.
        """
        turn, before = self._recorded[number].turn, set(range(number))
        sent_s, replayed = _sent_s(turn), self._recorded[: self._num_turns]
        asked = {at for at, record in enumerate(replayed) if record.turn.started_s < sent_s}
        self._moved.set()
        try:
            async with asyncio.timeout(_OVERDUE_S):
                while not (before <= self._answered and asked <= self._played | self._answered):
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            self._answered |= before | asked
        if number and turn.parent != number - 1:
            # Two sub-agents that end one after the other, or together.
            gap_s = sent_s - _sent_s(self._recorded[number - 1].turn)
            await asyncio.sleep(min(gap_s, _MOST_GAP_S))
        self._answered.add(number)
        self._moved.set()

    async def abort(self) -> None:
        await self._live.abort()

    def _find(self, prompt: Prompt) -> tuple[int, Compared] | str | None:
        """Return the recorded Turn of a request and the differences; None: it is for the engine.

        A text if the record has no such request: the first difference.
        """
        parent = prompt.parent.recorded if prompt.parent else None
        if prompt.parent and not parent:
            return None  # the engine sampled the reply that it continues
        candidates = [
            number
            for number, candidate in enumerate(self._recorded)
            if candidate.turn.parent == (parent.index if parent else None)
        ]
        # Those that nothing has repeated come first.
        candidates.sort(key=lambda number: (number >= self._num_turns, number in self._played))
        tools = prompt.request.tools if parent is None else ()
        now = request_parts(prompt.match.new, _preceding_calls(prompt), tools)
        mismatch = ""
        for number in candidates:
            turn, parts = self._recorded[number].turn, self._recorded[number].parts
            if parts is None:
                said = (Part("prompt", self._family.text(prompt.tail)),)
                compared = compare((Part("prompt", self._family.text(turn.prompt_ids)),), said)
            else:
                compared = compare(parts, now)
            if isinstance(compared, Compared):
                return (number, compared) if number < self._num_turns else None
            if not mismatch and number < self._num_turns and number not in self._played:
                mismatch = f"turn {number + 1} of {self._num_turns} differs: {compared}"
        # Another branch has reached its part for the engine, which may begin with new results.
        if not mismatch and any(number >= self._num_turns for number in candidates):
            return None
        place = f"after turn {parent.index + 1}" if parent else "a new conversation"
        new = _shown(now[-1]) if now else "without new messages"
        return mismatch or f"the record has no such request: {place}, {new}"

    def _twins(self, number: int) -> Iterator[int]:
        """Yield the Turns that nothing has repeated and that equal this one."""
        mine = self._recorded[number]
        for other, twin in enumerate(self._recorded[: self._num_turns]):
            if other not in self._played and twin.turn.parent == mine.turn.parent:
                same = twin.turn.prompt_ids == mine.turn.prompt_ids
                if same or (
                    twin.parts and isinstance(compare(twin.parts, mine.parts or ()), Compared)
                ):
                    yield other

    def _is_spelled(self, recorded: RecordedTurn) -> bool:
        """Return True if the recorded ids are in the tokens of the Session's model."""
        if not recorded.turn.trainable:
            return False
        # Tokens that are trained are never encoded again.
        if recorded.reply is None or self._is_own:
            return True
        parsed = self._parse(recorded.turn)
        calls = [call.name for call in recorded.reply.tool_calls if call.name != MALFORMED_CALL]
        content = (recorded.reply.text, calls)
        return parsed is not None and (parsed.text, [name for name, _ in parsed.calls]) == content

    def _parse(self, turn: Turn) -> ParsedReply | None:
        try:
            return self._family.parse(turn.output_ids)
        except (IndexError, KeyError, OverflowError):  # ids beyond the vocabulary of another model
            return None

    def _reply(self, recorded: RecordedTurn) -> tuple[ParsedReply, Completion]:
        """Return a recorded reply in the tokens of the Session's model."""
        turn, message = recorded.turn, recorded.reply
        ids, logprobs = turn.output_ids, turn.logprobs
        if message and not self._is_spelled(recorded):
            calls = tuple((call.name, call.arguments) for call in message.tool_calls)
            parsed = ParsedReply(message.text, message.thinking, calls, turn.malformed_calls)
            ids = tuple(self._family.encode_reply(message)) if turn.trainable else ()
            logprobs = (0.0,) * len(ids)
        else:
            parsed = self._family.parse(ids)
        version, changes = turn.weight_version, turn.weight_changes
        changes = changes if ids == turn.output_ids else ()
        if self._renamed:
            calls = tuple((name, self._now(dict(arguments))) for name, arguments in parsed.calls)
            parsed = replace(parsed, text=self._now(parsed.text), calls=calls)
        return parsed, Completion(ids, logprobs, turn.finish, version, weight_changes=changes)

    def _now(self, value: Any) -> Any:
        """Return a value with the random texts of this Session."""
        match value:
            case dict():
                return {key: self._now(part) for key, part in value.items()}
            case list():
                return [self._now(part) for part in value]
            case int() if str(value) in self._renamed and not isinstance(value, bool):
                return int(now) if (now := self._renamed[str(value)]).isdecimal() else value
            case str() if value in self._renamed:
                return self._renamed[value]
            case str():
                for before, now in self._renamed.items():
                    value = value.replace(before, now) if len(before) >= _LEAST_RENAMED else value
        return value


@dataclass(frozen=True, slots=True)
class Compared:
    """Two requests that are the same but for the rules."""

    counts: Counter[str] = field(default_factory=Counter)
    """Rule -> parts that differ as it allows."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Text that a rule covers -> the other request's text at that place."""


@dataclass(frozen=True, slots=True)
class _Repeated(Prompt):
    """A prompt that repeats a recorded one."""

    number: int = 0
    compared: Compared = Compared()


@dataclass(frozen=True, slots=True)
class _Unknown(Prompt):
    """A prompt that the record lacks."""

    reason: str = ""


def _sent_s(turn: Turn) -> float:
    return turn.started_s + turn.duration_s


def request_parts(
    messages: Sequence[Message], calls: Sequence[str], tools: Sequence[Tool]
) -> tuple[Part, ...]:
    """Return the new messages of a request as parts; results by the number of their call.

    `calls`: the ids of the reply's calls before them. `tools`: the offered ones, in any order.
    Neighbouring texts of one role are one part, since clients cut them differently.
    """
    parts = [
        Part(f"tool {tool.name}", _written([tool.description, dict(tool.parameters)]))
        for tool in sorted(tools, key=lambda tool: tool.name)
    ]
    results = [message for message in messages if message.role is Role.TOOL]
    ids = [message.tool_call_id for message in results]
    order = {call_id: n for n, call_id in enumerate(calls if set(ids) <= set(calls) else ids)}
    for message in sorted(results, key=lambda message: order[message.tool_call_id]):
        number = order[message.tool_call_id] + 1
        parts.append(Part(f"result of call {number}", message.text))
    for message in messages:
        text, label = message.text, f"{message.role} message"
        if message.role is Role.TOOL or (not text.strip() and not message.tool_calls):
            continue
        text += "".join(_written([call.name, dict(call.arguments)]) for call in message.tool_calls)
        if parts and parts[-1].label == label:
            parts[-1] = Part(label, f"{parts[-1].text}\n{text}")
        else:
            parts.append(Part(label, text))
    return tuple(parts)


def _preceding_calls(prompt: Prompt) -> list[str]:
    """Return the ids of the calls that the new messages answer, as the client wrote them."""
    before = prompt.request.messages[: len(prompt.request.messages) - len(prompt.match.new)]
    last = next((m for m in reversed(before) if m.role is Role.ASSISTANT), None)
    return [call.id for call in last.tool_calls] if last else []


def compare(recorded: Sequence[Part], now: Sequence[Part]) -> Compared | str:
    """Return the differences that rules allow, or the first other one in words."""
    compared = Compared()
    for before, after in zip(recorded, now, strict=False):
        if before.label != after.label:
            return f"{_shown(before)} was sent, now {_shown(after)}"
        difference = _compare_texts(before.text, after.text, compared.renamed)
        if isinstance(difference, tuple):
            was, now_is = _around(before.text, difference[0]), _around(after.text, difference[1])
            return f"{before.label}: {was} was sent, now {now_is}"
        compared.counts.update(difference)
    if len(recorded) != len(now):
        longer, when = (recorded, "no longer") if len(recorded) > len(now) else (now, "new")
        return f"{_shown(longer[min(len(recorded), len(now))])} is {when}"
    return compared


def _compare_texts(before: str, after: str, renamed: dict[str, str]) -> set[str] | tuple[int, int]:
    """Return the rules by which two texts differ, or the places of another difference.

    Texts that a rule covers are added to `renamed`.
    """
    rules: set[str] = set()
    if before == after:
        return rules
    place = place_now = 0
    for (rule, text), (rule_now, text_now) in zip_longest(
        _split(before), _split(after), fillvalue=("", "")
    ):
        squeezed, squeezed_now = "".join(text.split()), "".join(text_now.split())
        if rule != rule_now or (not rule and squeezed != squeezed_now):
            pairs = enumerate(zip(text, text_now, strict=False))
            same = next((n for n, (a, b) in pairs if a != b), min(len(text), len(text_now)))
            return place + same, place_now + same
        if text != text_now:
            rules.add(rule or WHITE_SPACE)
            if rule in _RANDOM:
                renamed[_LEADING.sub("", text)] = _LEADING.sub("", text_now)
        place, place_now = place + len(text), place_now + len(text_now)
    return rules


@cache
def _rule() -> re.Pattern[str]:
    return re.compile("|".join(f"(?P<r{n}>{pattern})" for n, pattern in enumerate(RULES.values())))


def _split(text: str) -> Iterator[tuple[str, str]]:
    """Yield (rule, text) for each piece of a text; the rule of other pieces is empty."""
    end = 0
    for match in _rule().finditer(text):
        yield "", text[end : match.start()]
        yield _NAMES[int((match.lastgroup or "r0")[1:])], match[0]
        end = match.end()
    yield "", text[end:]


def _around(text: str, place: int) -> str:
    start = max(0, place - _SHOWN_CHARS // 4)
    cut = text[start : start + _SHOWN_CHARS]
    return repr(("…" if start else "") + cut + ("…" if start + len(cut) < len(text) else ""))


def _shown(part: Part) -> str:
    return f"{part.label} {_around(part.text, 0)}"


def _written(value: Json) -> str:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
