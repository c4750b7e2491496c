"""The calls in a reply, read by swerl and by SGLang's own parsers.

Needs an interpreter with SGLang in SWERL_SGLANG_PYTHON; skips without.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swerl.engines.families._calls import CallForm, read_calls
from tests.sglang_cpu.interpreter import sglang_python

XML = "<tool_call>\n<function=bash>\n<parameter=cmd>\n{}\n</parameter>\n</function>\n</tool_call>"
JSON = '<tool_call>\n{{"name": "bash", "arguments": {{"cmd": {}}}}}\n</tool_call>'
PAIRS = "<tool_call>bash\n<arg_key>cmd</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
FORMS = {
    "qwen3_coder": (CallForm.XML, XML.format),
    "qwen25": (CallForm.JSON, lambda value: JSON.format(json.dumps(value))),
    "glm45": (CallForm.PAIRS, PAIRS.format),
}
ALIKE = [
    ("Look.\n{}", ("ls",)),
    ("{}\n{}", ("ls", "pwd")),
    ("Done.", ()),
    ("{}", ("a\nb\n  c",)),
    ("{}", ("echo é 漢 😀",)),
]
"""A text with a place for each call, and the calls' arguments."""
UNREADABLE = [
    ("qwen25", '<tool_call>\n{"name": "bash", "argu\n</tool_call>'),
    ("qwen25", "<tool_call>\nbash ls\n</tool_call>"),
    ("glm45", "<tool_call></tool_call>"),
]
DIFFERENT = {
    "cut": ("qwen3_coder", XML.format("ls")[:-40], (0, 1), (1, 0)),
    "no closing tags": ("qwen3_coder", XML.format("ls")[:-12], (0, 1), (1, 0)),
    "no line breaks": ("qwen3_coder", XML.format("ls").replace("\n", ""), (0, 1), (1, 0)),
    "good, then broken": (
        "qwen25", JSON.format('"ls"') + "\n<tool_call>\nx\n</tool_call>", (1, 1), (1, 0),
    ),
    "one line": ("qwen25", JSON.format('"ls"').replace("\n", ""), (1, 0), (0, 0)),
    "raw line break": ("qwen25", JSON.format('"a\nb"'), (1, 0), (0, 1)),
    "arguments as a string": (
        "qwen25", '<tool_call>\n{"name": "bash", "arguments": "{}"}\n</tool_call>', (1, 0), (0, 1),
    ),
    "no arguments": ("glm45", "<tool_call>bash</tool_call>", (1, 0), (0, 1)),
    "no value": ("glm45", "<tool_call>bash\n<arg_key>c</arg_key>\n</tool_call>", (0, 1), (1, 0)),
}  # fmt: skip
"""Parser, reply, and the calls and malformed calls that swerl and SGLang count."""


def by_sglang(replies: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Read (parser, text) with SGLang; its parsers take ten seconds to be imported."""
    lines = [json.dumps({"parser": parser, "text": text}) for parser, text in replies]
    program = Path(__file__).parents[1] / "sglang_cpu" / "parse.py"
    done = subprocess.run(
        [sglang_python(), program],
        input="\n".join(lines), stdout=subprocess.PIPE, text=True, timeout=300, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_well_formed_replies_are_read_alike() -> None:
    cases = [
        (name, text.format(*map(FORMS[name][1], values)), values)
        for name in FORMS
        for text, values in ALIKE
    ]
    answers = by_sglang([(name, text) for name, text, _ in cases])
    for (name, text, values), theirs in zip(cases, answers, strict=True):
        ours = read_calls(text, FORMS[name][0])
        calls = [["bash", {"cmd": value}] for value in values]
        assert theirs["calls"] == [list(call) for call in ours.calls] == calls
        assert theirs["text"].strip() == ours.text.strip()
        assert theirs["malformed"] == ours.num_malformed == 0


def test_unreadable_calls_stay_text_and_are_counted() -> None:
    for (name, text), theirs in zip(UNREADABLE, by_sglang(UNREADABLE), strict=True):
        ours = read_calls(text, FORMS[name][0])
        assert (theirs["calls"], theirs["malformed"]) == ([], 1)
        assert (ours.calls, ours.num_malformed) == ((), 1)
        assert theirs["text"] == ours.text == text


def test_the_differences_are_those_that_the_docs_list() -> None:
    answers = by_sglang([(name, text) for name, text, _, _ in DIFFERENT.values()])
    for (name, text, ours, theirs), answer in zip(DIFFERENT.values(), answers, strict=True):
        read = read_calls(text, FORMS[name][0])
        assert (len(read.calls), read.num_malformed) == ours
        assert (len(answer["calls"]), answer["malformed"]) == theirs
