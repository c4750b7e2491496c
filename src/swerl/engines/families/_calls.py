"""Read the tool calls in a reply's text, in the formats of the model lines.

swerl reads three formats itself. SGLang's own parsers read any other, in a process of their own:
importing them takes about ten seconds, and SGLang often has its own environment. A reply takes
about a millisecond.
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from swerl.core.chat import Json
from swerl.core.contracts import ParserChoice
from swerl.core.errors import EngineError, InputError
from swerl.core.secrets import child_environment

_Call: TypeAlias = tuple[str, Mapping[str, Json]]

_OPENED, _CLOSED = "<tool_call>", "</tool_call>"
_XML_CALL = re.compile(r"\s*<function=([^>\n]+)>\n(.*)</function>\s*", re.DOTALL)
_XML_KEY = re.compile(r"<parameter=([^>\n]+)>\n")
_XML_VALUE_END = re.compile(r"\n</parameter>\n(?=<parameter=|\Z)")
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_GLM_KEY = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_GLM_VALUE_END = "</arg_value>"
_WIRE_LEVELS = 16
"""Most levels of JSON that a wire format puts around a call's arguments."""
PARSE_SERVER = Path(__file__).with_name("_sglang_parse_server.py")
SCHEME = "sglang"
INSTALL = "set model.parser_python to an interpreter that has it; see docs/guides/engines.md"


class CallForm(StrEnum):
    """The format of a call between `<tool_call>` and `</tool_call>`."""

    JSON = "json"
    """An object with `name` and `arguments`: Qwen3, Hermes."""
    XML = "xml"
    """`<function=NAME>` with one `<parameter=KEY>` per value: Qwen3-Coder, Qwen3.5 and 3.6."""
    PAIRS = "pairs"
    """The name, then `<arg_key>` and `<arg_value>` alternately: GLM 4.5 and later."""


@dataclass(frozen=True, slots=True)
class ReadCalls:
    """A reply's text split into text and calls. A malformed call stays in `text`."""

    text: str
    calls: tuple[_Call, ...]
    num_malformed: int


def read_calls(text: str, form: CallForm) -> ReadCalls:
    """Find the calls in a reply's text.

    The time is linear in the text's length for every text: the event loop waits for it, and a model
    in training may repeat one token ten thousand times.
    """
    kept: list[str] = []
    calls: list[_Call] = []
    malformed = end = 0
    read = {CallForm.JSON: _read_json, CallForm.XML: read_xml_call, CallForm.PAIRS: _read_pairs}
    for start, stop in _blocks(text):
        kept.append(text[end:start])
        end = stop
        call = read[form](text[start + len(_OPENED) : stop - len(_CLOSED)])
        if call is None:
            malformed += 1
            kept.append(text[start:stop])
        else:
            calls.append(call)
    kept.append(text[end:])
    if _OPENED in kept[-1]:
        malformed += 1  # truncated, or never closed
    if calls:  # drop the blank lines that only separate text from calls
        kept = [kept[0].rstrip(), *(part for part in kept[1:] if part.strip())]
    return ReadCalls("".join(kept), tuple(calls), malformed)


def is_sendable(arguments: Mapping[str, Json]) -> bool:
    """Return True if these arguments can be sent to a client.

    No wire format carries half a surrogate pair. Clients' JSON readers refuse numbers over 64 bits
    and 254 nested lists.
    """
    value: Json = dict(arguments)
    for _ in range(_WIRE_LEVELS):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True


def write_xml_call(name: str, arguments: Mapping[str, Json]) -> str:
    """Return the text between a call's opening and closing tokens, in the XML format."""
    parameters = ""
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        parameters += f"<parameter={key}>\n{text}\n</parameter>\n"
    return f"\n<function={name}>\n{parameters}</function>\n"


def read_xml_call(body: str) -> tuple[str, dict[str, Json]] | None:
    """Return name and arguments, each value exactly as written; None if it is malformed."""
    call = _XML_CALL.fullmatch(body)
    if call is None:
        return None
    name, parameters = call.groups()
    arguments: dict[str, Json] = {}
    end = 0
    while end < len(parameters):
        key = _XML_KEY.match(parameters, end)
        stop = _XML_VALUE_END.search(parameters, key.end()) if key else None
        if key is None or stop is None:
            return None
        arguments[key[1]] = parameters[key.end() : stop.start()]
        end = stop.end()
    return name, arguments


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each closed call, tags included."""
    start = text.find(_OPENED)
    while start >= 0:
        end = text.find(_CLOSED, start)
        if end < 0:
            return
        yield start, end + len(_CLOSED)
        start = text.find(_OPENED, end)


def _read_json(body: str) -> _Call | None:
    try:
        found = json.loads(body, strict=False)
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        arguments = found.get("arguments", found.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict) or not is_sendable({found["name"]: arguments}):
        return None
    return found["name"], arguments


def _read_pairs(body: str) -> _Call | None:
    named = _GLM_NAME.match(body)
    if named is None:
        return None
    arguments: dict[str, Json] = {}
    end = named.end()
    while key := _GLM_KEY.match(body, end):
        stop = body.find(_GLM_VALUE_END, key.end())
        if stop < 0:
            return None
        arguments[key[1].strip()] = body[key.end() : stop]
        end = stop + len(_GLM_VALUE_END)
    return None if body[end:].strip() else (named[1], arguments)


START_S = 300.0
"""Seconds for SGLang's parsers to be imported."""
PARSE_S = 20.0
"""Seconds to read one reply; milliseconds, unless the process is stopped."""


class SglangParser:
    """Read replies with SGLang's parsers of tool calls and reasoning."""

    def __init__(self, choice: ParserChoice) -> None:
        """Start the process. Raises InputError on a parser name that SGLang does not have."""
        scheme, _, names = choice.name.partition(":")
        if scheme != SCHEME or not names:
            raise InputError(
                f"model.parser = {choice.name!r} names no parser",
                hint="write builtin, sglang:CALLS or sglang:CALLS+REASONING",
            )
        calls, _, reasoning = names.partition("+")
        self.reads_thinking = bool(reasoning)
        python = choice.python or Path(sys.executable)
        command = [str(python), str(PARSE_SERVER), calls, *([reasoning] if reasoning else [])]
        self._process = _start(command)
        weakref.finalize(self, _end, self._process)
        first = self._receive(START_S)
        if problem := first.get("error"):
            missing = "No module named 'sglang'" in problem
            raise InputError(
                f"{python} has no SGLang" if missing else str(problem),
                hint=INSTALL if missing else "see docs/guides/models.md",
            )

    def read(self, text: str, *, thinking_opened: bool) -> tuple[str, ReadCalls]:
        """Return the thinking, empty if this parser does not read it, and the calls."""
        assert self._process.stdin
        request: dict[str, Json] = {"text": text, "thinking_opened": thinking_opened}
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error
        found = self._receive()
        calls = tuple((name, args) for name, args in found["calls"] if is_sendable({name: args}))
        malformed = found["malformed"] + len(found["calls"]) - len(calls)
        kept = found["text"] if calls or not malformed else found["whole"]
        return found["thinking"] or "", ReadCalls(kept, calls, malformed)

    def _receive(self, within_s: float = 0.0) -> dict[str, Any]:
        assert self._process.stdout
        within_s = within_s or PARSE_S
        if not select.select([self._process.stdout], [], [], within_s)[0]:
            self._process.kill()  # a late answer would be taken for that of the next reply
            self._process.wait()
            pid = self._process.pid
            message = f"SGLang's parsers (process {pid}) did not answer within {within_s:g} s"
            raise EngineError(message, hint="was the process stopped? restart the run")
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> EngineError:
        message = f"SGLang's parsers ended with exit code {self._process.poll()}"
        command = " ".join(map(str, self._process.args))  # type: ignore[arg-type]
        return EngineError(message, hint=f"run it yourself: {command}")


def _start(command: list[str]) -> subprocess.Popen[str]:
    """Start the process. It ends when its input closes, which a killed parent causes too."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=child_environment(),
        )
    except OSError as error:
        raise InputError(f"{command[0]} cannot be run: {error.strerror}", hint=INSTALL) from error


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
