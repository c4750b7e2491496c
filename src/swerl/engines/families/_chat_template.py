"""A model's own chat template, rendered as Hugging Face's tokenizers do, with special tokens apart.

Templates make one long text. What a person or a tool wrote must not turn into a special token in
it: each special token's name inside a message is broken by a guard character, which is taken out
again after the text was split at the special tokens that the template itself put there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerl.core.chat import Json, Message, Role, Tool, ToolCall
from swerl.core.errors import InputError
from swerl.engines.families._tokenizer import Special

if TYPE_CHECKING:
    import jinja2

_PRIVATE = range(0xF5000, 0xF5100)
"""Code points that no text needs; one that a conversation does not hold becomes its guard."""


class ChatTemplate:
    """Renders conversations to pieces of text and special tokens."""

    def __init__(self, source: str, specials: Iterable[str], names: Mapping[str, str]) -> None:
        """Compile a template. `names` are tokens that it calls by role, such as `bos_token`.

        Raises InputError on a template with an error in it.
        """
        self._names = dict(names)
        self._specials = sorted(specials, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, self._specials)) + ")")
        self._template = _compile(source)

    def pieces(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opening: bool
    ) -> list[str]:
        """Render messages; `opening` adds where the assistant begins to speak.

        Raises InputError where the template refuses the conversation.
        """
        guard = _guard(messages, tools)
        text = self._render(
            [self._message(message, guard) for message in messages],
            [self._tool(tool, guard) for tool in tools],
            opening,
        )
        parts = self._split.split(text) if self._specials else [text]
        return list(_unguarded(parts, guard))

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether a system message may stand after others."""
        late = [Message(Role.USER, "a"), Message(Role.SYSTEM, "b"), Message(Role.USER, "c")]
        try:
            return any("b" in piece for piece in self.pieces(late, opening=True))
        except InputError:
            return False

    @cached_property
    def _wants_arguments_as_text(self) -> bool:
        """Whether a call's arguments must be JSON already, as in DeepSeek-V3's own template."""

        def takes(arguments: Json) -> bool:
            call: Json = {"name": "look", "arguments": arguments}
            calls: Json = [{"id": "call_1", "type": "function", "function": call}]
            said: Json = {"role": "assistant", "content": "", "tool_calls": calls}
            try:
                self._render([{"role": "user", "content": "a"}, said], [], False)
            except InputError:
                return False
            return True

        return not takes({"path": "a"}) and takes('{"path": "a"}')

    def _render(self, messages: list[Json], tools: list[Json], opening: bool) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=opening,
                **self._names,
            )
        except Exception as error:  # a template may fail in any way that a program can
            raise InputError(
                f"the model's chat template refuses the conversation: {error}",
                hint="is this the right template for the model?",
            ) from error

    def _message(self, message: Message, guard: str) -> Json:
        shown: dict[str, Json] = {
            "role": str(message.role),
            "content": self._break(message.text, guard),
        }
        if message.thinking:
            shown["reasoning_content"] = self._break(message.thinking, guard)
        if message.role is Role.TOOL:
            shown["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            shown["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": self._arguments(call, guard),
                    },
                }
                for call in message.tool_calls
            ]
        return shown

    def _arguments(self, call: ToolCall, guard: str) -> Json:
        arguments = self._broken(dict(call.arguments), guard)
        return _to_json(arguments) if self._wants_arguments_as_text else arguments

    def _tool(self, tool: Tool, guard: str) -> Json:
        function: dict[str, Json] = {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        }
        return {"type": "function", "function": self._broken(function, guard)}

    def _broken(self, value: Json, guard: str) -> Json:
        match value:
            case str():
                return self._break(value, guard)
            case list():
                return [self._broken(each, guard) for each in value]
            case dict():
                return {self._break(k, guard): self._broken(v, guard) for k, v in value.items()}
            case _:
                return value

    def _break(self, text: str, guard: str) -> str:
        if not self._specials:
            return text
        return self._split.sub(lambda found: f"{found[0][:1]}{guard}{found[0][1:]}", text)


def read_template(folder: Path) -> tuple[str, dict[str, str]]:
    """Return a model folder's chat template and the tokens that it calls by role.

    Raises InputError where there is none.
    """
    config = _read_json(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        by_name = {entry["name"]: entry["template"] for entry in source}
        source = by_name.get("tool_use") or by_name.get("default")
    if not isinstance(source, str):
        message = f"{folder} has no chat template"
        hint = "it stands in chat_template.jinja, or in tokenizer_config.json"
        raise InputError(message, hint=hint)
    named = ((key, config.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token"))
    return source, {key: _content(token) for key, token in named if token}


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}", hint="download the model again") from error
    return value if isinstance(value, dict) else {}


def _guard(messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    said = repr((messages, tools))  # escapes what is not printable, so compare escaped
    found = next((point for point in _PRIVATE if ascii(chr(point))[1:-1] not in said), None)
    if found is None:
        raise InputError(
            "the conversation holds every guard character", hint="its messages are not text"
        )
    return chr(found)


def _unguarded(parts: list[str], guard: str) -> Iterator[str]:
    """Yield the pieces; every second one is a special token."""
    for number, part in enumerate(parts):
        if number % 2:
            yield Special(part)
        elif part:
            yield part.replace(guard, "")


def _compile(source: str) -> jinja2.Template:
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment

    # Not the immutable one: some templates append to a list, and all that they can change was made
    # for this one rendering.
    environment = SandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation()],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise InputError(
            f"the model's chat template is broken: {error}", hint="download the model again"
        ) from error


def _generation() -> type[jinja2.ext.Extension]:
    """Return an extension for `{% generation %}` blocks, which only mark what was generated."""
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
