"""What converters share: checked columns, lists of tests, the prompt, tests of a diff."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Mapping

import orjson

from swerl.core.chat import Json
from swerl.core.errors import TaskError

Row = Mapping[str, Json]

MAX_PATCH_BYTES = 10_000_000
"""Largest diff that a row may carry: no known row has a tenth of it."""

_COMMIT = re.compile(r"[0-9a-f]{4,64}")
_DIFF_TARGET = re.compile(r"diff --git a/.* b/(.*)")
"""Without an anchor: a search for plain text is ten times as fast."""
_END_OF_TESTS = ": '>>>>> End Test Output'"
_DATA_ENDINGS = (
    ".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml",
)  # fmt: skip
"""Endings of files that a test patch brings but no runner takes as an argument."""


def text(row: Row, column: str) -> str:
    """Return a text column that must not be empty."""
    value = optional_text(row, column)
    if not value or value.isspace():
        raise TaskError(
            f"column {column} is empty" if column in row else f"column {column} is missing",
            hint="check that the rows belong to this dataset",
        )
    return value


def optional_text(row: Row, column: str) -> str:
    """Return a text column, or nothing where the row has none."""
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise TaskError(
            f"column {column} holds {type(value).__name__}, not text",
            hint="check that the rows belong to this dataset",
        )
    return value or ""


def commit(row: Row, column: str) -> str:
    """Return a column with a commit's id: it is handed to git and stands in scripts."""
    value = text(row, column)
    if not _COMMIT.fullmatch(value):
        raise TaskError(f"column {column} holds no commit's id")
    return value


def diff(row: Row, column: str) -> str:
    """Return a column with a unified diff."""
    value = text(row, column)
    if len(value) > MAX_PATCH_BYTES:
        raise TaskError(f"column {column} holds a diff over {MAX_PATCH_BYTES // 1_000_000} MB")
    if "\n@@ " not in value and "\ndiff --git " not in "\n" + value:
        raise TaskError(f"column {column} holds no unified diff")
    return value


def test_ids(row: Row, column: str) -> tuple[str, ...]:
    """Return a column of test ids, given as a list or as text of one, JSON's or Python's."""
    if column not in row:
        raise TaskError(f"column {column} is missing")
    value = row[column]
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            if not (value := _python_list(value)):
                raise TaskError(f"column {column} is no JSON list: {error.msg}") from error
    # `map` and `set` look at every id without a step of Python's own: rows have up to 10,000.
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:
        raise TaskError(f"column {column} is not a list of test ids")
    if "" in value:
        raise TaskError(f"column {column} holds a test id that is empty")
    return tuple(value)  # type: ignore[arg-type]  # all are str


def _python_list(text: str) -> list[Json]:
    """Return what the text of a Python list of strings holds; nothing where it is none.

    Texts side by side without a comma, as numpy writes them, would be read as one.
    """
    try:
        found = ast.literal_eval(text.strip())
        tokens = tokenize.generate_tokens(io.StringIO(text.strip()).readline)
        num_texts = sum(token.type == tokenize.STRING for token in tokens)
    except (ValueError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError):
        return []
    return found if isinstance(found, list) and num_texts == len(found) else []


def tests_to_mend(row: Row, column: str = "FAIL_TO_PASS") -> tuple[str, ...]:
    """Return the tests that a patch must mend; a row without any cannot be graded."""
    return needed(test_ids(row, column), column)


def needed(ids: tuple[str, ...], column: str) -> tuple[str, ...]:
    """Return the tests of a column that must name one."""
    if not ids:
        raise TaskError(f"{column} is empty: every patch would count as a solution")
    return ids


def json_object(row: Row, column: str) -> dict[str, Json]:
    """Return a column that holds an object, or JSON text of one."""
    value = row.get(column)
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise TaskError(f"column {column} is no JSON object: {error.msg}") from error
    if not isinstance(value, dict):
        raise TaskError(f"column {column} is not an object" if column in row
                        else f"column {column} is missing")  # fmt: skip
    return value


def lines(row: Row, column: str) -> str:
    """Return a column of shell commands, given as text or as a list of lines."""
    value = row.get(column)
    if isinstance(value, list):
        value = "\n".join(str(line) for line in value)
    text_value = optional_text({column: value}, column)
    # Some rows were written with the two characters that stand for a line's end.
    return text_value if "\n" in text_value else text_value.replace("\\n", "\n")


def difficulty(row: Row) -> dict[str, Json]:
    """Return a column `difficulty` as metadata, where a row has one."""
    value = row.get("difficulty")
    return {"difficulty": value} if value else {}


def prompt(problem: str, workdir: str) -> str:
    """Return what the agent is asked: the issue, where the code is, and what is wanted."""
    return (
        f"You are in {workdir}, a repository with the following issue:\n\n"
        f"<issue>\n{problem.strip()}\n</issue>\n\n"
        "Change the code so that the issue is resolved. Hidden tests will check the result, so "
        "fix the cause and keep everything else working. Do not change the existing tests."
    )


def test_files(test_patch: str) -> list[str]:
    """Return the files of a test patch that a test runner takes as arguments."""
    found = _DIFF_TARGET.finditer(test_patch)
    headers = [each for each in found if test_patch[each.start() - 1 : each.start()] in {"", "\n"}]
    return [each[1] for each in headers if not each[1].endswith(_DATA_ENDINGS)]


def script_commands(script: str) -> str:
    """Return what a dataset's evaluation script does to run tests, without its git steps.

    Grading restores test files and applies the test patch by itself.
    """
    commands: list[str] = []
    until = options = ""
    for line in script.split("\n"):
        if line.startswith(_END_OF_TESTS):
            break
        if until:
            until = "" if line == until else until
        elif heredoc := re.search(r"<<'(\w+)'$", line):
            until = heredoc[1]
        elif line.startswith("set -"):
            options = line
        elif line and not line.startswith(("#!", "cd ", "git ", "rm -f ", ": '")):
            commands.append(line)
    # Scripts activate their environment twice; the last one counts.
    kept = [line for i, line in enumerate(commands) if line not in commands[i + 1 :]]
    # Without `pipefail` a pipe hides that tests fail; without `-x` Maven's log names no test.
    return "\n".join([options, *kept] if options and _is_piped(kept) else kept)


def _is_piped(commands: list[str]) -> bool:
    return any(command.endswith("| cat") for command in commands)
