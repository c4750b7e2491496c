"""Tool calls as Qwen3-Coder writes them: `<function=NAME>` with one `<parameter=KEY>` a value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from swerl.chat import Json

_CALL = re.compile(r"\s*<function=([^>\n]+)>\n(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n(?=<parameter=|\Z)", re.DOTALL
)


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
    for found in _PARAMETER.finditer(parameters):
        if found.start() != end:
            return None
        arguments[found[1]] = found[2]
        end = found.end()
    return (name, arguments) if end == len(parameters) else None


def _value_text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
