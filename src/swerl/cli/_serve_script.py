"""What a scripted model says to whoever comes to `swerl serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swerl.core.chat import Message, Role, ToolCall
from swerl.core.errors import InputError

_LINES = (
    "Hello! I am a script behind swerl's gateway, not a model. I say three lines in turn, whatever "
    "you ask. Every token of mine is kept as it would be for training.",
    "You came back: this reply continues the branch of the last one, and only your new message was "
    "put into tokens.",
    "A real model answers with `--engine torch-cpu --model DIR` or `--engine sglang=URL --model "
    "DIR`. Ctrl-C in swerl's window shows what was recorded.",
)
_ROUNDS = 10_000
"""How often the demo says its lines, which is as good as for ever."""
_MOST_SHOWN = 80
"""Characters of a wrong reply that an error shows."""


def demo() -> list[Message]:
    """Return the replies of `scripted:demo`."""
    return [Message(Role.ASSISTANT, line) for line in _LINES] * _ROUNDS


def read(path: Path) -> list[Message]:
    """Read replies from a JSON list, or from JSON lines, of replies or of a transcript's turns.

    Raises InputError on a file that holds none.
    """
    try:
        text = path.read_text(encoding="utf-8")
        whole = text.lstrip().startswith("[")
        items = json.loads(text) if whole else list(map(json.loads, text.splitlines()))
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read the script {path}: {error}",
            hint="give a transcript, or a JSON list of replies",
        ) from error
    if not items:
        raise InputError(f"{path} holds no reply", hint='write [{"text": "Hello."}]')
    return [_reply(item, f"{path}: reply {number}") for number, item in enumerate(items, 1)]


def _reply(item: Any, where: str) -> Message:
    try:
        said: dict[str, Any] = item.get("said", item)
        calls = tuple(
            ToolCall("", str(call["name"]), dict(call.get("arguments") or {}))
            for call in said.get("tool_calls") or ()
        )
        text, thinking = said.get("text") or "", said.get("thinking") or ""
        if not (isinstance(text, str) and isinstance(thinking, str)) or not (text or calls):
            raise TypeError("no text and no tool_calls")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"{where} is no message with a text or tool calls: {_shown(item)}"
        hint = '{"text": "…", "tool_calls": [{"name": "Bash", "arguments": {"command": "ls"}}]}'
        raise InputError(message, hint=f"write it as {hint}") from error
    return Message(Role.ASSISTANT, text, thinking, calls)


def _shown(item: Any) -> str:
    text = json.dumps(item, ensure_ascii=False)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"
