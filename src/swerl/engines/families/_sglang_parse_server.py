"""Read replies with SGLang's own parsers: one JSON object a line in, one a line out.

An interpreter that has SGLang runs this file, so it imports nothing of swerl.

    python _sglang_parse_server.py CALLS [REASONING]
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

ANY_TOOL = "swerl_any_tool"
"""SGLang reads calls only if a tool is declared; the gateway checks the names of tools."""


def main() -> None:
    """Print `ready` or `error`, then answer every line until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # lines that SGLang prints must not look like answers
    os.environ["SGLANG_FORWARD_UNKNOWN_TOOLS"] = "1"
    try:
        reader = Reader(*sys.argv[1:])
    except Exception as error:  # noqa: BLE001  the boundary of this process
        _write(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    _write(answers, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            _write(answers, reader.read(request["text"], request["thinking_opened"]))
        except Exception as error:  # noqa: BLE001  a parser that fails has not read the reply
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            text = request["text"]
            empty = {"thinking": None, "text": text, "whole": text, "calls": [], "malformed": 1}
            _write(answers, empty)


class Reader:
    """One pair of parsers."""

    def __init__(self, calls: str, reasoning: str = "") -> None:
        from sglang.srt.entrypoints.openai.protocol import Function, Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        known = sorted(FunctionCallParser.ToolCallParserEnum)
        if calls not in known:
            raise ValueError(f"{calls!r} is none of SGLang's tool call parsers: {', '.join(known)}")
        known = sorted(ReasoningParser.DetectorMap)
        if reasoning and reasoning not in known:
            raise ValueError(
                f"{reasoning!r} is none of SGLang's reasoning parsers: {', '.join(known)}"
            )
        tool = Tool(type="function", function=Function(name=ANY_TOOL, parameters={}))
        make: Any = FunctionCallParser
        self._calls: Callable[[], Any] = lambda: make([tool], calls)
        self._reasoning: Any = ReasoningParser
        self._reasoning_name = reasoning

    def read(self, text: str, thinking_opened: bool) -> dict[str, Any]:
        """Split a reply into thinking, text and calls.

        `thinking` is None without a parser for it. `text` leaves out the calls that could be read;
        `whole` includes them.
        """
        thinking = None
        if self._reasoning_name:
            parser = self._reasoning(
                self._reasoning_name,
                stream_reasoning=False,
                force_reasoning=thinking_opened or None,
            )
            thinking, text = parser.parse_non_stream(text)
        finder = self._calls()
        found = finder.has_tool_call(text or "")
        outside, items = finder.parse_non_stream(text or "")
        calls, malformed = [], 0
        for item in items:
            arguments = None
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(item.parameters or "{}")
            if isinstance(arguments, dict) and item.name:
                calls.append([item.name, arguments])
            else:
                malformed += 1
        return {
            "thinking": thinking,
            "text": outside or "",
            "whole": text or "",
            "calls": calls,
            "malformed": 1 if found and not items else malformed,
        }


def _write(answers: Any, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
