"""Functions for all converters: checked columns, lists of tests, the prompt, files of a diff."""

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
"""Maximum size of a diff in a row. No known row has a tenth of it."""

_COMMIT = re.compile(r"[0-9a-f]{4,64}")
_PROGRESS = re.compile(r"\[ *\d+%\]")
_DIFF_TARGET = re.compile(r"diff --git a/.* b/(.*)")
"""No anchor at the line start: a search for plain text is ten times as fast."""
_END_OF_TESTS = ": '>>>>> End Test Output'"
_DATA_ENDINGS = (
    ".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml",
)  # fmt: skip
"""Endings of data files in a test patch, which are no arguments of a test runner."""


def text(row: Row, column: str) -> str:
    """Return a text column. Raises TaskError if it is missing or empty."""
    value = optional_text(row, column)
    if not value or value.isspace():
        raise TaskError(
            f"column {column} is empty" if column in row else f"column {column} is missing",
            hint="check that the rows belong to this dataset",
        )
    return value


def optional_text(row: Row, column: str) -> str:
    """Return a text column; empty if the row lacks it."""
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise TaskError(
            f"column {column} contains {type(value).__name__}, not text",
            hint="check that the rows belong to this dataset",
        )
    return value or ""


def commit(row: Row, column: str) -> str:
    """Return a column with a commit id, checked because git commands and scripts contain it."""
    value = text(row, column)
    if not _COMMIT.fullmatch(value):
        raise TaskError(f"column {column} is not a commit id")
    return value


def diff(row: Row, column: str) -> str:
    """Return a column with a unified diff."""
    value = text(row, column)
    if len(value) > MAX_PATCH_BYTES:
        raise TaskError(f"column {column} is a diff over {MAX_PATCH_BYTES // 1_000_000} MB")
    if "\n@@ " not in value and "\ndiff --git " not in "\n" + value:
        raise TaskError(f"column {column} is not a unified diff")
    return value


def test_ids(row: Row, column: str) -> tuple[str, ...]:
    """Return a column of test ids: a list, JSON text or the text of a Python list."""
    if column not in row:
        raise TaskError(f"column {column} is missing")
    value = row[column]
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            if not (value := _python_list(value)):
                raise TaskError(f"column {column} is not a JSON list: {error.msg}") from error
    # `map` and `set` avoid a Python loop: rows have up to 10,000 ids.
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:
        raise TaskError(f"column {column} is not a list of test ids")
    if "" in value:
        raise TaskError(f"column {column} contains an empty test id")
    return tuple(value)  # type: ignore[arg-type]  # all are str


def tests_to_keep(row: Row) -> tuple[str, ...]:
    """Return the tests that a solution must not break, without artefacts of logs."""
    ids = test_ids(row, "PASS_TO_PASS")
    dropped = set(_artefacts(ids))
    return tuple(name for name in ids if name not in dropped)


def log_artefacts(row: Row) -> dict[str, Json]:
    """Return metadata with the dropped ids of PASS_TO_PASS; empty if there are none."""
    ids = _artefacts(test_ids(row, "PASS_TO_PASS"))
    return {"log_artefacts": list(ids)} if ids else {}


def _artefacts(ids: tuple[str, ...]) -> tuple[str, ...]:
    """Return ids that are no tests of the run; no solution can pass them.

    `PASSED [100%]` is a progress mark beside a live log. `PASSED test_a.py::test_x` among tests of
    folders is the captured output of a pytest that a test of pytest ran.
    """
    bare = [name for name in ids if "::" in name and "/" not in name.split("::")[0]]
    echoes = set(bare) if 10 * len(bare) < len(ids) else set()
    return tuple(name for name in ids if _PROGRESS.fullmatch(name) or name in echoes)


def _python_list(text: str) -> list[Json]:
    """Return the strings of a Python list in text form; empty if the text is no such list.

    A list without commas, as numpy prints it, is refused: Python would join its strings.
    """
    try:
        value = ast.literal_eval(text.strip())
        tokens = tokenize.generate_tokens(io.StringIO(text.strip()).readline)
        num_texts = sum(token.type == tokenize.STRING for token in tokens)
    except (ValueError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError):
        return []
    return value if isinstance(value, list) and num_texts == len(value) else []


def fail_to_pass(row: Row, column: str = "FAIL_TO_PASS") -> tuple[str, ...]:
    """Return the tests that a solution must fix. Raises TaskError if there is none."""
    return needed(test_ids(row, column), column)


def needed(ids: tuple[str, ...], column: str) -> tuple[str, ...]:
    """Return the test ids of a column. Raises TaskError if there is none."""
    if not ids:
        raise TaskError(f"{column} is empty: every patch would count as a solution")
    return ids


def json_object(row: Row, column: str) -> dict[str, Json]:
    """Return a column with an object, or with JSON text of an object."""
    value = row.get(column)
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise TaskError(f"column {column} is not a JSON object: {error.msg}") from error
    if not isinstance(value, dict):
        raise TaskError(f"column {column} is not an object" if column in row
                        else f"column {column} is missing")  # fmt: skip
    return value


def lines(row: Row, column: str) -> str:
    """Return a column of shell commands: text or a list of lines."""
    value = row.get(column)
    if isinstance(value, list):
        value = "\n".join(str(line) for line in value)
    text_value = optional_text({column: value}, column)
    # Some rows contain a backslash and an n instead of a line break.
    return text_value if "\n" in text_value else text_value.replace("\\n", "\n")


def difficulty(row: Row) -> dict[str, Json]:
    """Return the column `difficulty` as metadata; empty if the row lacks it."""
    value = row.get("difficulty")
    return {"difficulty": value} if value else {}


def prompt(problem: str, workdir: str) -> str:
    """Return the agent's prompt: the folder of the code, the issue and the instructions."""
    return (
        f"You are in {workdir}, a repository with the following issue:\n\n"
        f"<issue>\n{problem.strip()}\n</issue>\n\n"
        "Change the code so that the issue is resolved. Hidden tests will check the result, so "
        "fix the cause and keep everything else working. Do not change the existing tests."
    )


def test_files(test_patch: str) -> list[str]:
    """Return the files of a test patch that are arguments of a test runner."""
    matches = _DIFF_TARGET.finditer(test_patch)
    headers = [
        match for match in matches if test_patch[match.start() - 1 : match.start()] in {"", "\n"}
    ]
    return [match[1] for match in headers if not match[1].endswith(_DATA_ENDINGS)]


def script_commands(script: str) -> str:
    """Return the commands of a dataset's evaluation script that run tests, without git steps.

    The grader restores test files and applies the test patch itself.
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
    tests = [line for i, line in enumerate(commands) if line not in commands[i + 1 :]]
    # Without `pipefail` a pipe hides failed tests. Without `-x` Maven's log names no test.
    return "\n".join([options, *tests] if options and _is_piped(tests) else tests)


def _is_piped(commands: list[str]) -> bool:
    return any(command.endswith("| cat") for command in commands)
