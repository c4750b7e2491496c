"""Tool calls as Qwen3-Coder writes them: `<function=NAME>` with one `<parameter=KEY>` a value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from swerl.core.chat import Json

_CALL = re.compile(r"\s*<function=([^>\n]+)>\n(.*)</function>\s*", re.DOTALL)
_KEY = re.compile(r"<parameter=([^>\n]+)>\n")
_VALUE_END = re.compile(r"\n</parameter>\n(?=<parameter=|\Z)")


def write_call(name: str, arguments: Mapping[str, Json]) -> str:
    """Return what stands between the call's opening and closing tokens."""
    parameters = "".join(
        f"<parameter={key}>\n{_value_text(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"\n<function={name}>\n{parameters}</function>\n"


def read_call(body: str) -> tuple[str, dict[str, Json]] | None:
    """Return name and arguments, each value exactly as written; None where it is malformed."""
    call = _CALL.fullmatch(body)
    if call is None:
        return None
    name, parameters = call.groups()
    arguments: dict[str, Json] = {}
    end = 0
    while end < len(parameters):
        key = _KEY.match(parameters, end)
        stop = _VALUE_END.search(parameters, key.end()) if key else None
        if key is None or stop is None:
            return None
        arguments[key[1]] = parameters[key.end() : stop.start()]
        end = stop.end()
    return name, arguments


def _value_text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
