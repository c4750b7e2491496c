"""Model lines of the package `renderers`: `model.family = "renderers:NAME"`.

The package writes conversations and reads replies. What follows a reply, and which text is a
special token, is decided as for a model's own template.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

from swerl.core.chat import ParsedReply, Tool
from swerl.core.errors import InputError, UnknownNameError, first_line
from swerl.engines.families._calls import CallForm, is_sendable
from swerl.engines.families._template_family import ChatTemplate, TemplateFamily, no_tail
from swerl.engines.families._tokenizer import Special, SplitTokenizer, load_tokenizer
from swerl.recipe.hub import model_name


def choose(line: str) -> SimpleNamespace:
    """Return the FamilyPlugin of a model line."""
    return SimpleNamespace(build=partial(build, line=line))


def build(model: Path | None, line: str = "") -> TemplateFamily:
    """Build the family of a model line from a model folder. Raises InputError."""
    from renderers import RendererConfig, create_renderer

    types = get_args(get_args(RendererConfig)[0])
    configs = {config.model_fields["name"].default: config for config in types}
    names = sorted(configs.keys() - {"auto", "custom", "default"})
    if line not in names:
        raise UnknownNameError(f"unknown renderer {line!r}", hint=f"names: {', '.join(names)}")
    if model is None:
        raise InputError(f"the renderer {line} needs a model folder", hint="set model.path")
    template = RendererTemplate(load_tokenizer(model), model_name(model))
    try:
        template.renderer = create_renderer(template, configs[line]())
        return RendererFamily(template)
    except Exception as error:  # the boundary: each renderer has errors of its own
        message = f"the renderer {line} does not fit {model}: {first_line(error)}"
        raise InputError(message, hint="choose the renderer of this model") from error


class RendererTemplate(ChatTemplate):
    """A renderer in the place of a chat template, and the renderer's tokenizer.

    The name of a special token in the renderer's own texts is that token; those in texts of
    messages have been broken. Some renderers take a default from the model's name.
    """

    renderer: Any
    unk_token_id = None

    def __init__(self, tokenizer: SplitTokenizer, model: str) -> None:
        super().__init__("", tokenizer.names(), {})
        self._template = cast(Any, self)
        self.tokenizer = tokenizer
        self.name_or_path = model.partition("@")[0]

    def convert_tokens_to_ids(self, name: str) -> int | None:
        is_special = name in self.tokenizer.names()
        return self.tokenizer.id(Special(name)) if is_special else None

    def encode(self, text: str, **options: bool) -> list[int]:
        return self.tokenizer.encode(self.split(text))

    def decode(self, ids: Sequence[int], **options: bool) -> str:
        if len(options) > 1:  # a search for the places of characters, which may be quadratic
            raise NotImplementedError
        return "".join(self.tokenizer.pieces(ids))

    def render(self, messages: Any, **options: Any) -> str:
        names: dict[str, str] = {}
        for item in messages:
            names |= {call["id"]: call["function"]["name"] for call in item.get("tool_calls", ())}
            if item.get("tool_call_id") in names:
                item["name"] = names[item["tool_call_id"]]
        return self.decode(self.renderer.render_ids(messages, **options))


class RendererFamily(TemplateFamily):
    """A family whose template and parser are a renderer's."""

    def __init__(self, template: RendererTemplate) -> None:
        self._renderer, tokenizer = template.renderer, template.tokenizer
        stops = filter(None, map(tokenizer.name, self._renderer.get_stop_token_ids()))
        # The renderer, not this class, knows the form of calls.
        super().__init__(tokenizer, template, CallForm.JSON, stops=list(stops))
        if not self._turn_stop(calls=False):
            raise no_tail()

    def parse(self, ids: Sequence[int], tools: Sequence[Tool] = ()) -> ParsedReply:
        """Read sampled ids with the renderer; malformed calls stay text."""
        prompt = self._tokenizer.encode(self._opening)
        specs = [{"name": tool.name, "parameters": dict(tool.parameters)} for tool in tools]
        reply = self._renderer.parse_response(list(ids), tools=specs or None, prompt_ids=prompt)
        text, calls, num_malformed = reply.content, [], 0
        for call in reply.tool_calls:
            is_whole = call.name and call.status in ("ok", "unknown_tool")
            if is_whole and isinstance(call.arguments, dict) and is_sendable(call.arguments):
                calls.append((call.name, call.arguments))
            else:
                num_malformed += 1
                text += "" if call.raw in text else call.raw
        thinking = (reply.reasoning_content or "").strip("\n")
        num = min(len(self._tokenizer.encode([thinking])), len(ids))
        return ParsedReply(text, thinking, tuple(calls), num_malformed, num)
