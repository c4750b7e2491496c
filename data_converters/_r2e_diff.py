"""The solution of an R2E-Gym row: a unified diff, rebuilt from the parsed commit."""

from __future__ import annotations

from collections.abc import Iterator

from swerl.core.chat import Json
from swerl.core.errors import TaskError

_MARKS = {"context": " ", "added": "+", "deleted": "-"}


def solution(commit: dict[str, Json]) -> str:
    """Return the commit's diff without test files. Raises TaskError if nothing remains."""
    try:
        parts = [_file(entry) for entry in _list(commit["file_diffs"])]
    except (KeyError, TypeError) as error:
        raise TaskError(
            f"parsed_commit_content lacks a field or has one of the wrong type: {error}"
        ) from error
    text = "".join(parts)
    if not text:
        raise TaskError("the commit changes no file outside its tests")
    return text


def _file(entry: Json) -> str:
    parts = _dict(entry)
    header = _dict(parts["header"])
    path = str(_dict(header["file"])["path"])
    hunks = _list(parts["hunks"]) if parts.get("hunks") else []
    if _is_test(path) or parts.get("is_binary_file"):
        return ""
    misc = header.get("misc_line")
    lines = [f"diff --git a/{path} b/{path}", *([str(misc)] if misc else [])]
    if hunks:
        for mark, side in (("---", "minus_file"), ("+++", "plus_file")):
            lines.append(f"{mark} {_dict(parts[side])['path']}")
        lines.extend(line for hunk in hunks for line in _hunk(_dict(hunk)))
    elif not misc:
        return ""
    return "\n".join(lines) + "\n"


def _hunk(hunk: dict[str, Json]) -> Iterator[str]:
    where = _dict(hunk["descriptor"])
    section = f" {where['section']}" if where.get("section") else ""
    yield f"@@ -{_range(where['old_range'])} +{_range(where['new_range'])} @@{section}"
    for entry in _list(_dict(hunk["line_group"])["all_lines"]):
        line = _dict(entry)
        # The only other type marks a file without a newline at its end.
        mark = _MARKS.get(str(line["type"]))
        yield f"{mark}{line['content']}" if mark else "\\ No newline at end of file"


def _range(value: Json) -> str:
    span = _dict(value)
    length = span.get("length")
    return f"{span['start']}" if length is None else f"{span['start']},{length}"


def _is_test(path: str) -> bool:
    folders = path.split("/")
    is_file = path.endswith("_test.py") or folders[-1].startswith("test_")
    return is_file or bool({"tests", "Tests", "test", "Test"} & set(folders))


def _dict(value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, not {value!r:.40}")
    return value


def _list(value: Json) -> list[Json]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, not {value!r:.40}")
    return value
