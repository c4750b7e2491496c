"""Read replies with SGLang's own parsers: one JSON object a line in, one a line out.

The interpreter with SGLang runs this file, so it imports nothing of swerl. A line in names the
`parser` and holds the `text`; a line out holds the `text` outside the calls and the `calls`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # lines that SGLang prints must not look like answers
    os.environ["SGLANG_FORWARD_UNKNOWN_TOOLS"] = "1"
    for line in sys.stdin:
        answers.write(json.dumps(read(**json.loads(line))) + "\n")
    answers.flush()


def read(parser: str, text: str) -> dict[str, Any]:
    """Return the text outside the calls, the calls, and the number of unreadable ones."""
    from sglang.srt.entrypoints.openai.protocol import Function, Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    # SGLang reads calls only if a tool is declared.
    tool = Tool(type="function", function=Function(name="any", parameters={}))
    finder = FunctionCallParser([tool], parser)
    has_calls = finder.has_tool_call(text)
    outside, items = finder.parse_non_stream(text)
    calls, malformed = [], 0
    for item in items:
        arguments = None
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(item.parameters or "{}")
        if isinstance(arguments, dict) and item.name:
            calls.append([item.name, arguments])
        else:
            malformed += 1
    malformed += has_calls and not items
    return {"text": outside if calls else text, "calls": calls, "malformed": malformed}


if __name__ == "__main__":
    main()
