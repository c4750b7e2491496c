"""The tiny family: dense Qwen3 models of under a million parameters and a few hundred tokens.

Chat template and tool calls follow Qwen3-Coder. The system prompt and the tools' schemas are left
out of the prompt: such a model learns its tools from examples, and they alone would fill its
context. All argument values are texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from swerl.core.chat import ChatRequest, Json, Message, ParsedReply, Role
from swerl.core.contracts import ParserChoice
from swerl.core.errors import InputError
from swerl.engines.families import _tiny_tokenizer as tiny
from swerl.engines.families._megatron.mapping import ModelMapping
from swerl.engines.families._tokenizer import Special, SplitTokenizer, load_tokenizer
from swerl.engines.families._xml_calls import read_call, write_call

_GAP = "\n\n"
"""Between thinking and text, and between text and the first call."""


def build(model: Path | None, parser: ParserChoice | None = None) -> TinyFamily:
    """Build the family with the tokenizer of a model folder, or with one id per byte.

    Raises InputError on a folder without a usable tokenizer, and on a `parser`: it has its own.
    """
    if parser:
        raise InputError(
            f"the family tiny cannot be read by {parser.name}", hint="leave model.parser out"
        )
    if model is None:
        return TinyFamily(SplitTokenizer(tiny.byte_tokenizer().to_str()))
    return TinyFamily(load_tokenizer(model))


class TinyFamily:
    """Implements Family."""

    def __init__(self, tokenizer: SplitTokenizer) -> None:
        self._tokenizer = tokenizer
        ids = {token: tokenizer.id(token) for token in tiny.SPECIAL_TOKENS}
        self.stop_ids: tuple[int, ...] = (ids[tiny.END], ids[tiny.PAD])

    def render(self, request: ChatRequest) -> list[int]:
        """Return the whole prompt, up to where the assistant begins to speak."""
        return self._tokenizer.encode([*_conversation(request.messages), *_OPENING])

    def render_tail(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """Return the tokens that follow an assistant turn: new messages and the next opening."""
        end = ["\n"] if closed else [tiny.END, "\n"]
        return self._tokenizer.encode([*end, *_conversation(messages), *_OPENING])

    def parse(self, ids: Sequence[int]) -> ParsedReply:
        """Read sampled ids as thinking, text and tool calls; what cannot be read stays text."""
        body = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        found = _read(list(self._tokenizer.pieces(body)))
        if not found.thinking:
            return found
        return replace(found, thinking_tokens=self._tokenizer.count_through(body, tiny.THINK_END))

    def text(self, ids: Sequence[int]) -> str:
        """Return ids as written, special tokens by their names."""
        return "".join(self._tokenizer.pieces(ids))

    def encode_reply(self, message: Message) -> list[int]:
        """Return the ids with which the model would say this message, stop id included."""
        return self._tokenizer.encode([*_reply(message), tiny.END])

    def megatron(self) -> ModelMapping:
        """Return how Hugging Face weights and Megatron-Core parameters correspond."""
        return ModelMapping()


_OPENING = (tiny.START, "assistant\n")


def _conversation(messages: Sequence[Message]) -> Iterator[str]:
    previous = None
    for message in messages:
        if message.role is Role.SYSTEM:
            continue
        if previous is Role.TOOL and message.role is not Role.TOOL:
            yield from (tiny.END, "\n")
        if message.role is Role.TOOL:
            yield from _tool_result(message, first=previous is not Role.TOOL)
        else:
            body = _reply(message) if message.role is Role.ASSISTANT else iter([message.text])
            yield from (tiny.START, f"{message.role}\n", *body, tiny.END, "\n")
        previous = message.role
    if previous is Role.TOOL:
        yield from (tiny.END, "\n")


def _tool_result(message: Message, *, first: bool) -> Iterator[str]:
    if first:
        yield from (tiny.START, "user\n")
    yield from (tiny.RESPONSE, f"\n{message.text}\n", tiny.RESPONSE_END, "\n")


def _reply(message: Message) -> Iterator[str]:
    if message.thinking:
        yield from (tiny.THINK, f"\n{message.thinking}\n", tiny.THINK_END, _GAP)
    if message.text:
        yield message.text
        yield _GAP if message.tool_calls else ""
    for number, call in enumerate(message.tool_calls):
        yield "\n" if number else ""
        yield from (tiny.CALL, write_call(call.name, call.arguments), tiny.CALL_END)


def _read(pieces: list[str]) -> ParsedReply:
    thinking, pieces = _split_thinking(pieces)
    text = ""
    calls: list[tuple[str, Mapping[str, Json]]] = []
    malformed = place = 0
    while place < len(pieces):
        piece = pieces[place]
        place += 1
        if not _is(piece, tiny.CALL):
            text += "" if calls and piece.isspace() else piece
            continue
        end = _end_of_call(pieces, place)
        call = read_call("".join(pieces[place:end])) if end else None
        if call is None or end is None:
            malformed += 1
            text += piece
            continue
        text = text if calls else text.removesuffix(_GAP)
        calls.append(call)
        place = end + 1
    return ParsedReply(text, thinking, tuple(calls), malformed)


def _end_of_call(pieces: list[str], place: int) -> int | None:
    """Return where a call is closed; None where another one begins before."""
    for position in range(place, len(pieces)):
        if _is(pieces[position], tiny.CALL_END):
            return position
        if _is(pieces[position], tiny.CALL):
            return None
    return None


def _split_thinking(pieces: list[str]) -> tuple[str, list[str]]:
    """Return the thinking at the start and the pieces after it; thinking cut short has no end."""
    if not pieces or not _is(pieces[0], tiny.THINK):
        return "", pieces
    body, rest = _until(pieces[1:], tiny.THINK_END)
    if rest and not isinstance(rest[0], Special):
        rest = [rest[0].removeprefix(_GAP), *rest[1:]]
    return body.removeprefix("\n").removesuffix("\n"), rest or []


def _until(pieces: list[str], end: Special) -> tuple[str, list[str] | None]:
    """Return the text before `end` and the pieces after it; None where `end` never comes."""
    for position, piece in enumerate(pieces):
        if _is(piece, end):
            return "".join(pieces[:position]), pieces[position + 1 :]
    return "".join(pieces), None


def _is(piece: str, special: Special) -> bool:
    return isinstance(piece, Special) and piece == special
