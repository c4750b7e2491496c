"""A family made of a model's own tokenizer and chat template, and of the form of its calls.

To find the tokens after an assistant turn, a short conversation is rendered whose reply is a
marker; the text after the marker is the result. So the cost is that of the new messages, and a
template cannot rewrite earlier turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerl.core.chat import ChatRequest, Json, Message, ParsedReply, Role, Tool, ToolCall
from swerl.core.contracts import MegatronMapping
from swerl.core.errors import InputError
from swerl.engines.families._calls import THINK, THINK_END, CallForm, read_calls, read_reply
from swerl.engines.families._megatron_mapping import ModelMapping
from swerl.engines.families._tokenizer import Special, SplitTokenizer, load_tokenizer

if TYPE_CHECKING:
    import jinja2

_MARKER = "swerl-marker-6f1d"
_ASK = Message(Role.USER, "a")
_LOOK = ToolCall("call_1", "look", {})
_FOUND = Message(Role.TOOL, "b", tool_call_id=_LOOK.id)


def builder(form: CallForm | None, *, name: str) -> Callable[..., TemplateFamily]:
    """Return the `build` of a family; without a `form`, the template shows it."""

    def build(model: Path | None) -> TemplateFamily:
        """Build the family from a model folder. Raises InputError if the folder lacks a part."""
        if model is None:
            hint = "set model.path to one in Hugging Face format"
            raise InputError(f"the family {name} needs a model folder", hint=hint)
        tokenizer = load_tokenizer(model)
        source, names = read_template(model)
        template = ChatTemplate(source, tokenizer.names(), names)
        reader = find_form(template)
        if form and reader is not form:
            raise InputError(
                f"the family {name} reads calls as {form}, but the chat template of {model} "
                f"writes them as {reader}",
                hint="leave model.family out: swerl finds the family by the template",
            )
        return TemplateFamily(
            tokenizer, template, reader, stops=read_stops(model, tokenizer, names)
        )

    return build


def fitter(form: CallForm, *model_types: str) -> Callable[[Path], bool]:
    """Return the `fits` of a family: these types in config.json, and calls of this form."""

    def fits(model: Path) -> bool:
        """Return True if the family was written for the model in this folder."""
        if _read_json(model / "config.json").get("model_type") not in model_types:
            return False
        try:
            source, names = read_template(model)
            # The form of calls does not depend on which tokens are special.
            return find_form(ChatTemplate(source, (), names)) is form
        except InputError:
            return False

    return fits


class TemplateFamily:
    """Implements Family."""

    def __init__(
        self,
        tokenizer: SplitTokenizer,
        template: ChatTemplate,
        reader: CallForm,
        *,
        stops: Sequence[str],
    ) -> None:
        """`stops` are the names of the tokens that end an assistant turn, the usual one first."""
        self._tokenizer = tokenizer
        self._template = template
        self._reader = reader
        self._opening = self._after(Message(Role.USER, _MARKER), (), opening=True)
        self._turn_end = template.turn_end()
        pieces = template.split(self._turn_end)
        self._stops = tuple(map(Special, stops))
        # The files of a base model, and of one tuned from it, may name only the end of a text.
        if not any(piece in self._stops for piece in pieces):
            specials = [piece for piece in pieces if isinstance(piece, Special)]
            self._stops = (*specials[:1], *self._stops)
        self.stop_ids: tuple[int, ...] = tuple(tokenizer.id(stop) for stop in self._stops)
        ends = [piece in self._stops for piece in pieces]
        self._num_before_stop = ends.index(True) if True in ends else 0
        self._counts_calls = self._tail([_LOOK], [_FOUND]) != self._tail(
            [_LOOK], [_FOUND], num_earlier=1
        )
        self._check_tails()
        self._opens_thinking = "".join(self._opening).rstrip().endswith(THINK)

    def render(self, request: ChatRequest) -> list[int]:
        """Return the whole prompt, including the opening of the assistant's turn."""
        messages = list(self._folded(request.messages))
        try:
            pieces = self._template.pieces(messages, request.tools, opening=True)
        except InputError:
            # Some templates require a user message, which a client that compacts may not send.
            place = int(bool(messages) and messages[0].role is Role.SYSTEM)
            messages.insert(place, Message(Role.USER))
            pieces = self._template.pieces(messages, request.tools, opening=True)
        return self._tokenizer.encode(pieces)

    def render_tail(
        self, messages: Sequence[Message], *, past: Sequence[Message], last_id: int | None
    ) -> list[int]:
        """Return the tokens that follow an assistant turn: new messages and the next opening."""
        results = {message.tool_call_id for message in messages if message.role is Role.TOOL}
        num_calls = sum(len(message.tool_calls) for message in past)
        reply = takewhile(lambda message: message.role is Role.ASSISTANT, reversed(past))
        calls = [call for message in reversed(list(reply)) for call in message.tool_calls]
        num_earlier = num_calls - len(calls) if self._counts_calls else 0
        calls = [call for call in calls if call.id in results]
        tail = self._tail(calls, list(self._late(messages)), num_earlier=num_earlier)
        # The turn's end was sampled already, unless a limit or another stop ended it.
        stop = self._stop_in(tail)
        if stop is not None and self._tokenizer.id(stop) == last_id:
            tail = tail[self._num_before_stop + 1 :]
        return self._tokenizer.encode(tail)

    def parse(self, ids: Sequence[int], tools: Sequence[Tool] = ()) -> ParsedReply:
        """Read sampled ids as thinking, text and tool calls; malformed calls stay text."""
        is_closed = bool(ids) and ids[-1] in self.stop_ids
        return read_reply(
            self._tokenizer,
            ids[:-1] if is_closed else ids,
            self._reader,
            tools,
            opens_thinking=self._opens_thinking,
            is_closed=is_closed,
        )

    def text(self, ids: Sequence[int]) -> str:
        """Return ids as written, special tokens by their names."""
        return "".join(self._tokenizer.pieces(ids))

    def encode_reply(self, message: Message) -> list[int]:
        """Return the ids of this message as a reply of the model, stop id included."""
        if THINK_END in self._opening:  # the prompt has ended the thinking already
            message = replace(message, thinking="")
        whole = self._after(Message(Role.USER, _MARKER), [message], opening=False)
        turn = _beyond(self._opening, whole)
        body = takewhile(lambda p: not isinstance(p, Special) or p not in self._stops, turn)
        stop = self._turn_stop(calls=bool(message.tool_calls)) or self._stops[0]
        return self._tokenizer.encode([*body, stop])

    def megatron(self) -> MegatronMapping:
        return ModelMapping()

    def _turn_stop(self, *, calls: bool) -> Special | None:
        """Return the stop that ends a turn, with or without calls, in the template."""
        return self._stop_in(self._tail([_LOOK], [_FOUND]) if calls else self._tail([], [_ASK]))

    def _stop_in(self, tail: Sequence[str]) -> Special | None:
        """Return the stop that ends the turn before this tail, if one does."""
        piece = tail[self._num_before_stop] if len(tail) > self._num_before_stop else ""
        return piece if isinstance(piece, Special) and piece in self._stops else None

    def _tail(
        self, calls: Sequence[ToolCall], messages: Sequence[Message], *, num_earlier: int = 0
    ) -> list[str]:
        """Return the pieces after a reply with these calls, in a conversation made up for it."""
        earlier = [replace(_LOOK, id=f"earlier_{number}") for number in range(num_earlier)]
        before = [_ASK]
        if earlier:
            before.append(Message(Role.ASSISTANT, tool_calls=tuple(earlier)))
            before += [replace(_FOUND, tool_call_id=call.id) for call in earlier]
        shown = [replace(call, arguments={"a": _MARKER}) for call in calls]
        reply = Message(Role.ASSISTANT, _MARKER, "", tuple(shown))
        return self._template.after([*before, reply], messages, turn_end=self._turn_end)

    def _check_tails(self) -> None:
        """Raise InputError if the template does not show what follows a reply."""
        for num in range(3):
            calls = [replace(_LOOK, id=f"call_{number}") for number in range(num)]
            results = [Message(Role.TOOL, f"b{c.id}", tool_call_id=c.id) for c in calls]
            tail = "".join(self._tail(calls, results or [_ASK]))
            if not all(message.text in tail for message in results or [_ASK]):
                raise no_tail()

    def _after(self, marked: Message, messages: Sequence[Message], *, opening: bool) -> list[str]:
        """Return the pieces after the first marked message."""
        pieces = self._template.pieces([marked, *messages], opening=opening)
        for place, piece in enumerate(pieces):
            _, marker, rest = piece.partition(_MARKER)
            if marker and not isinstance(piece, Special):
                return [*([rest] if rest else []), *pieces[place + 1 :]]
        raise no_tail()

    def _folded(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Yield messages, with the leading system messages joined into one."""
        position = 0
        while position < len(messages) and messages[position].role is Role.SYSTEM:
            position += 1
        if position:
            yield Message(Role.SYSTEM, "\n\n".join(m.text for m in messages[:position]))
        yield from self._late(messages[position:])

    def _late(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Yield messages; a system message becomes the user's if the template refuses late ones."""
        for message in messages:
            if message.role is Role.SYSTEM and not self._template.takes_late_system:
                yield replace(message, role=Role.USER)
            else:
                yield message


def find_form(template: ChatTemplate) -> CallForm:
    """Return the form of a template's calls. Raises InputError on an unknown form."""
    call = ToolCall("call_1", "look", {"path": "a b", "deep": {"c": [1]}})
    reply = Message(Role.ASSISTANT, "", "", (call,))
    result = Message(Role.TOOL, "", "", (), "call_1")
    text = "".join(template.pieces([_ASK, reply, result], [Tool("look")], opening=False))
    for form in CallForm:
        calls = dict(read_calls(text, form).calls)
        if "path" in calls.get("look", {}):
            return form
    message = "the model's chat template writes tool calls in a form that is not known here"
    hint = f"known forms: {', '.join(CallForm)}"
    raise InputError(message, hint=hint)


def read_stops(model: Path, tokenizer: SplitTokenizer, names: Mapping[str, str]) -> list[str]:
    """Return the names of the tokens that end a turn: the tokenizer's own, then the model's."""
    ids = _read_json(model / "generation_config.json").get("eos_token_id") or []
    listed = [tokenizer.name(token) for token in (ids if isinstance(ids, list) else [ids])]
    stops = [name for name in dict.fromkeys([names.get("eos_token"), *listed]) if name]
    if not stops:
        hint = "set eos_token_id in generation_config.json"
        raise InputError(f"{model} names no token that ends a turn", hint=hint)
    return stops


def _beyond(opening: Sequence[str], whole: Sequence[str]) -> list[str]:
    """Return the pieces of a rendered turn after the part that it shares with the opening."""
    place = 0
    while place < min(len(opening), len(whole)) and opening[place] == whole[place]:
        place += 1
    if place == min(len(opening), len(whole)) or isinstance(whole[place], Special):
        return list(whole[place:])
    begun = "" if isinstance(opening[place], Special) else opening[place]
    pairs = zip(begun, whole[place], strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return [whole[place][shared:], *whole[place + 1 :]]


_PRIVATE = range(0xF5000, 0xF5100)
"""Private code points; one that a conversation does not contain becomes its guard: it breaks the
names of special tokens in texts, so that they stay plain text."""


class ChatTemplate:
    """Renders conversations to pieces of text and special tokens."""

    def __init__(self, source: str, specials: Iterable[str], names: Mapping[str, str]) -> None:
        """Compile a template. `names` maps roles such as `bos_token` to tokens.

        Raises InputError if the template has an error.
        """
        self._names = dict(names)
        self._specials = sorted(specials, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, self._specials)) + ")")
        self._template = _compile(source)

    def pieces(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opening: bool
    ) -> list[str]:
        """Render messages; `opening` adds the opening of the assistant's turn.

        Raises InputError if the template refuses the conversation.
        """
        guard = _guard(messages, tools)
        return self.split(self._written(messages, tools, guard, opening=opening), guard)

    def turn_end(self) -> str:
        """Return the text that ends a reply without calls which nothing follows."""
        alone = self._written([_ASK, Message(Role.ASSISTANT, _MARKER)], (), "", opening=False)
        if _MARKER not in alone:
            raise no_tail()
        return alone.rpartition(_MARKER)[2]

    def after(
        self, past: Sequence[Message], messages: Sequence[Message], *, turn_end: str
    ) -> list[str]:
        """Return the pieces after a reply, the last message of `past`, which holds the marker.

        `turn_end` is the end of a reply that nothing follows. Raises InputError if the reply is
        written in another way when messages follow.
        """
        guard = _guard([*past, *messages], ())
        alone = self._written(past, (), guard, opening=False)
        whole = self._written([*past, *messages], (), guard, opening=True)
        num_markers = alone.count(_MARKER)
        # The ends of the calls, which the model has sampled.
        sampled = alone.rpartition(_MARKER)[2].removesuffix(turn_end)
        rest = whole.split(_MARKER, num_markers)[-1]
        if not num_markers or not rest.startswith(sampled):
            raise no_tail()
        return self.split(rest.removeprefix(sampled), guard)

    def _written(
        self, messages: Sequence[Message], tools: Sequence[Tool], guard: str, *, opening: bool
    ) -> str:
        """Return the rendered text, with the guard in names of special tokens inside texts."""
        items = [self._message(message, guard) for message in _with_model_ids(messages)]
        return self._render(items, [self._tool(tool, guard) for tool in tools], opening)

    def split(self, text: str, guard: str = "") -> list[str]:
        """Return a rendered text as text without the guard, and special tokens."""
        parts = self._split.split(text) if self._specials else [text]
        # Every second part is a special token.
        pieces = [Special(p) if n % 2 else p.replace(guard, "") for n, p in enumerate(parts)]
        return [piece for piece, part in zip(pieces, parts, strict=True) if part]

    @cached_property
    def takes_late_system(self) -> bool:
        """True if the template accepts a system message after others."""
        late = [Message(Role.USER, "a"), Message(Role.SYSTEM, "b"), Message(Role.USER, "c")]
        try:
            return any("b" in piece for piece in self.pieces(late, opening=True))
        except InputError:
            return False

    @cached_property
    def _requires_json_text(self) -> bool:
        """True if a call's arguments must be JSON text, as in DeepSeek-V3's own template."""

        def accepts(arguments: Json) -> bool:
            call: Json = {"name": "look", "arguments": arguments}
            calls: Json = [{"id": "call_1", "type": "function", "function": call}]
            reply: Json = {"role": "assistant", "content": "", "tool_calls": calls}
            try:
                self._render([{"role": "user", "content": "a"}, reply], [], False)
            except InputError:
                return False
            return True

        return not accepts({"path": "a"}) and accepts('{"path": "a"}')

    def _render(self, messages: list[Json], tools: list[Json], opening: bool) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=opening, **self._names
            )
        except Exception as error:  # a template may raise any exception
            message = f"the model's chat template refuses the conversation: {error}"
            raise InputError(message, hint="is it the right one for the model?") from error

    def _message(self, message: Message, guard: str) -> Json:
        rendered: dict[str, Json] = {
            "role": str(message.role),
            "content": self._break(message.text, guard),
        }
        if message.thinking:
            rendered["reasoning_content"] = self._break(message.thinking, guard)
        if message.role is Role.TOOL:
            rendered["tool_call_id"] = self._break(message.tool_call_id, guard)
        if message.tool_calls:
            calls: list[Json] = []
            for call in message.tool_calls:
                arguments = self._broken(dict(call.arguments), guard)
                arguments = _to_json(arguments) if self._requires_json_text else arguments
                function: Json = {"name": self._break(call.name, guard), "arguments": arguments}
                call_id = self._break(call.id, guard)
                calls.append({"id": call_id, "type": "function", "function": function})
            rendered["tool_calls"] = calls
        return rendered

    def _tool(self, tool: Tool, guard: str) -> Json:
        function: dict[str, Json] = {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        }
        return {"type": "function", "function": self._broken(function, guard)}

    def _broken(self, value: Json, guard: str) -> Json:
        """Return a value with the guard in every name of a special token."""
        match value:
            case str():
                return self._break(value, guard)
            case list():
                return [self._broken(item, guard) for item in value]
            case dict():
                return {self._break(k, guard): self._broken(v, guard) for k, v in value.items()}
            case _:
                return value

    def _break(self, text: str, guard: str) -> str:
        if not self._specials:
            return text
        return self._split.sub(lambda match: f"{match[0][:1]}{guard}{match[0][1:]}", text)


def _with_model_ids(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages whose calls have ids as Kimi writes them: models imitate ids that they see."""
    ids: dict[str, str] = {}
    num_calls = 0
    for message in messages:
        calls = []
        for call in message.tool_calls:
            ids[call.id] = f"functions.{call.name}:{num_calls}"
            calls.append(replace(call, id=ids[call.id]))
            num_calls += 1
        call_id = ids.get(message.tool_call_id, message.tool_call_id)
        yield replace(message, tool_calls=tuple(calls), tool_call_id=call_id)


def no_tail() -> InputError:
    message = "the model's chat template does not show what follows a reply or a tool result"
    return InputError(message, hint="use a family that is written for the model")


def read_template(folder: Path) -> tuple[str, dict[str, str]]:
    """Return a model folder's chat template and its tokens by role. Raises InputError."""
    config = _read_json(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        by_name = {entry["name"]: entry["template"] for entry in source}
        source = by_name.get("tool_use") or by_name.get("default")
    if not isinstance(source, str):
        message = f"{folder} has no chat template"
        hint = "add chat_template.jinja, or chat_template in tokenizer_config.json"
        raise InputError(message, hint=hint)
    names = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        if token := config.get(key):
            names[key] = str(token["content"] if isinstance(token, dict) else token)
    return source, names


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}", hint="download the model again") from error
    return value if isinstance(value, dict) else {}


def _guard(messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    text = repr((messages, tools))  # escapes private code points, so the escapes are compared
    unused = next((point for point in _PRIVATE if ascii(chr(point))[1:-1] not in text), None)
    if unused is None:
        message = "the conversation contains every guard character"
        raise InputError(message, hint="its messages are not text")
    return chr(unused)


def _compile(source: str) -> jinja2.Template:
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment

    # Not ImmutableSandboxedEnvironment: some templates append to a list. The values that they can
    # change were made for this one rendering.
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        message = f"the model's chat template is broken: {error}"
        raise InputError(message, hint="download the model again") from error


def _generation() -> type[jinja2.ext.Extension]:
    """Return an extension for `{% generation %}` blocks, which only mark generated text."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  # the name and type that jinja2 reads

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **rest: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **rest)


def _refuse(message: str) -> None:
    raise ValueError(message)
