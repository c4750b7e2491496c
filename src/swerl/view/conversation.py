"""An Episode for people: prompts by role, replies in parts, patches."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound

from swerl.core import plugins
from swerl.core.contracts import Family
from swerl.core.errors import RunError
from swerl.core.files import read_json
from swerl.core.turn import Trajectory, Turn
from swerl.runs import evidence

_MESSAGE = re.compile(
    r"<\|im_start\|>(\w+)\n?(.*?)(?:<\|im_end\|>|(?=<\|im_start\|>)|\Z)"
    r"|<\|(system|user|assistant|observation)\|>\n?(.*?)(?=<\|(?:system|user|assistant|observation)\|>|\Z)",
    re.DOTALL,
)
"""Messages of the two common families of chat templates: ChatML, and GLM's."""
_RESULT = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_EDITS = (("old_str", "new_str"), ("old_string", "new_string"))
"""Arguments in which editors get a text and its replacement."""
_MOST_LINES = 2000
"""Lines of an edit that are compared; a longer one is shown as removed and added."""
_MOST_COLOURED = 1000
"""Characters of a line from which it has no colours: a lexer may take minutes for a longer one."""
MAX_CHARS = 200_000
"""Characters of one text on a page; the file has the rest."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """One message of a prompt."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class ShownCall:
    """A tool call with its arguments as text."""

    name: str
    arguments: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """One request and reply as a page shows them."""

    number: int
    """From 1."""
    parent: int | None
    prompt: Sequence[PromptPart] = ()
    thinking: str = ""
    text: str = ""
    calls: Sequence[ShownCall] = ()
    finish: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Tokens in and out, seconds, weight version."""
    branch: int = 1


def clean(value: object) -> object:
    """Return a text without control characters, which become pictures, and lone surrogates."""
    if type(value) is not str:  # a Markup is made by templates and by Pygments
        return value
    cleaned = _COLOUR.sub("", value).replace("\r\n", "\n").translate(_PICTURES)
    cleaned = cleaned.encode("utf-8", "backslashreplace").decode()
    if len(cleaned) <= MAX_CHARS:
        return cleaned
    return f"{cleaned[:MAX_CHARS]}\n… {len(cleaned) - MAX_CHARS:,} more characters are in the file"


def read_tail(path: Path) -> str:
    """Return the end of a text file; the empty text if there is no file. Raises OSError."""
    if not path.is_file():
        return ""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - MAX_CHARS))
        text = file.read(MAX_CHARS).decode("utf-8", "replace")
    cut = f"… {size - MAX_CHARS:,} earlier bytes are in the file\n" if size > MAX_CHARS else ""
    return cut + text


def turns_of(folder: Path, trajectory: Trajectory | None, family: Family | None) -> list[ShownTurn]:
    """Return the Turns of an Episode, from its transcript or from its tokens. Raises RunError."""
    facts = {turn.index + 1: _facts(turn) for turn in trajectory.turns} if trajectory else {}
    written = list(_transcript(folder))
    if written:
        shown_turns = [_written(entry, facts) for entry in written]
    else:
        turns = trajectory.turns if trajectory else ()
        shown_turns = [_decoded(turn, family) for turn in turns]
    return _with_branches(shown_turns)


def _facts(turn: Turn) -> dict[str, Any]:
    return {
        "context": len(turn.prompt_ids),
        "sampled": len(turn.output_ids) or turn.num_reported,
        "started_s": turn.started_s,
        "seconds": turn.duration_s,
        "version": turn.weight_version,
        "has_ids": bool(turn.output_ids),
        "malformed": turn.malformed_calls,
    }


def _transcript(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a written transcript; a torn line is left out."""
    whole, lines = folder / "transcript.json", folder / "transcript.jsonl"
    if whole.is_file():
        entries = read_json(whole)
    elif lines.is_file():
        with lines.open(encoding="utf-8", errors="replace") as file:
            entries = [_line(line) for line in file]
    else:
        return
    if not isinstance(entries, list):
        raise RunError(f"{whole} is damaged: not a list")
    yield from (entry for entry in entries if isinstance(entry, dict))


def _line(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _written(entry: Mapping[str, Any], facts: Mapping[int, Mapping[str, Any]]) -> ShownTurn:
    prompt = entry.get("prompt", "")
    said = entry.get("said") or {}
    counted = {
        "context": entry.get("tokens_in", 0),
        "sampled": entry.get("tokens_out", 0),
        "seconds": entry.get("duration_s", 0.0),
    }
    number = int(entry.get("turn", 1))
    return ShownTurn(
        number=number,
        parent=entry.get("parent"),
        prompt=list(split(prompt)) if isinstance(prompt, str) else list(map(_message, prompt)),
        thinking=str(said.get("thinking", "")),
        text=str(said.get("text", "")),
        calls=[_call(call["name"], call["arguments"]) for call in said.get("tool_calls", ())],
        finish=str(entry.get("finish", "")),
        facts=facts.get(number, counted),
    )


def _decoded(turn: Turn, family: Family | None) -> ShownTurn:
    facts, parent = _facts(turn), None if turn.parent is None else turn.parent + 1
    if family is None:
        return ShownTurn(turn.index + 1, parent, finish=turn.finish, facts=facts)
    reply = family.parse(turn.output_ids)
    return ShownTurn(
        number=turn.index + 1,
        parent=parent,
        prompt=list(split(family.text(turn.prompt_ids))),
        thinking=reply.thinking,
        text=reply.text,
        calls=[_call(name, arguments) for name, arguments in reply.calls],
        finish=turn.finish,
        facts=facts,
    )


def _message(message: Mapping[str, Any]) -> PromptPart:
    calls = "".join(f"\n{call.get('name')}(…)" for call in message.get("tool_calls", ()))
    return PromptPart(str(message.get("role", "?")), f"{message.get('text', '')}{calls}")


def _call(name: str, arguments: Mapping[str, Any]) -> ShownCall:
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }
    return ShownCall(name, texts)


def split(prompt: str) -> Iterator[PromptPart]:
    """Yield the messages of a rendered prompt; a text without known markers is one piece."""
    messages = [(m[1] or m[3], m[2] if m[1] else m[4]) for m in _MESSAGE.finditer(prompt)]
    if not messages and prompt.strip():
        yield PromptPart("context", prompt.strip("\n"))
    for role, text in messages:
        if results := _RESULT.findall(text):
            yield from (PromptPart("tool", result) for result in results)
        elif text.strip():
            yield PromptPart("tool" if role == "observation" else role, text.strip("\n"))


def _with_branches(turns: list[ShownTurn]) -> list[ShownTurn]:
    """Number the branches: the first child continues its parent's branch, others open one."""
    branch_of: dict[int, int] = {}
    continued: set[int] = set()
    num, numbered = 0, []
    for turn in turns:
        if turn.parent in branch_of and turn.parent not in continued:
            branch = branch_of[turn.parent]
        else:
            num += 1
            branch = num
        if turn.parent is not None:
            continued.add(turn.parent)
        branch_of[turn.number] = branch
        numbered.append(replace(turn, branch=branch))
    return numbered


def edit(arguments: Mapping[str, str]) -> Markup | None:
    """Return the change that an editing tool was asked for as a diff; None for another call."""
    pair = next((pair for pair in _EDITS if pair[0] in arguments and pair[1] in arguments), None)
    if pair is None:
        return None
    old, new = (str(clean(arguments[name])).split("\n") for name in pair)
    if len(old) + len(new) > _MOST_LINES:
        lines = [*(f"-{line}" for line in old), *(f"+{line}" for line in new)]
    else:
        # The first three lines name files and places, which the call's own arguments do.
        lines = [*difflib.unified_diff(old, new, lineterm="", n=len(old) + len(new))][3:]
    return _rows([(_kind(line), line) for line in lines])


def _kind(line: str, other: str = "same") -> str:
    if line.startswith(("+++ ", "--- ", "diff ", "*** ")):
        return "file"
    return {"+": "add", "-": "del", "@": "hunk", " ": "same"}.get(line[:1], other)


def _rows(rows: Sequence[tuple[str, str]]) -> Markup:
    row = Markup('<span class="row {}">{}</span>')
    return Markup("").join(row.format(kind, line or " ") for kind, line in rows)


def coloured_patch(patch: str) -> str:
    """Return a patch as HTML, its lines in the colours of their language."""
    formatter = HtmlFormatter(nowrap=True)
    lexer, rows = None, []
    for line in str(clean(patch.rstrip("\n"))).split("\n"):
        kind = _kind(line, "file")
        if line.startswith(("+++ ", "--- ", "diff ")):
            try:
                lexer = get_lexer_for_filename(line.split("/")[-1].strip(), stripnl=False)
            except ClassNotFound:
                lexer = None
        code = str(escape(line[1:]))
        is_short = len(line) < _MOST_COLOURED
        if lexer is not None and is_short and kind in ("add", "del", "same"):
            code = highlight(line[1:], lexer, formatter).rstrip("\n")
        content = str(escape(line)) if kind in ("file", "hunk") else f"{escape(line[:1])}{code}"
        rows.append(f'<span class="row {kind}">{content or " "}</span>')
    return "".join(rows)


def is_scripted(trajectory: Trajectory | None) -> bool:
    return trajectory is not None and any(t.weight_version == "scripted" for t in trajectory.turns)


def family_of(root: Path, is_scripted: bool) -> Family:
    """Return the family that decodes a run's tokens. Raises SwerlError if it has no tokenizer."""
    return plugins.family("tiny", None) if is_scripted else evidence.family_of(root)
