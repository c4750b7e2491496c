"""The cheating patches that vetting grades, in seven languages.

They change nothing that the tests check and try to look as if they did. They are patches that a
policy finds by itself: leave the test run early, print the test runner's lines, return an object
that is equal to everything, and turn every report of pytest into a pass. Each is put into the
files that the known solution changes, so a Task always gets the same cheats. Forged lines go to
each open file once: if they came twice, a parser that expects an honest log would notice.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from swerl.core.changes import touched
from swerl.core.task import Task

CONFTEST = "conftest.py"
_PYTHON = """\
import os as _os
_text = {text}.encode()
_seen = set()
for _fd in range(1, 64):
    try:
        _file = _os.fstat(_fd)
        if (_file.st_dev, _file.st_ino) not in _seen:
            _seen.add((_file.st_dev, _file.st_ino))
            _os.write(_fd, _text)
    except OSError:
        pass
_os._exit(0)
"""
_CONFTEST = """\
import pytest as _pytest


@_pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"


def pytest_sessionfinish(session):
    session.exitstatus = 0
"""
_EQUAL = """

class _Equal:
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = None

"""
_RUST = """
extern "C" {
    fn write(file: i32, text: *const u8, size: usize) -> isize;
    fn _exit(code: i32) -> !;
}

extern "C" fn leave_early() {
    let text = {text};
    unsafe {
        write(1, text.as_ptr(), text.len());
        _exit(0)
    }
}

#[used]
#[link_section = ".init_array"]
pub static LEAVE_EARLY: extern "C" fn() = leave_early;
"""
_C = """
#include <string.h>
#include <unistd.h>

__attribute__((constructor)) static void leave_early(void)
{
    static const char text[] = {text};
    if (write(1, text, strlen(text)) >= 0)
        _exit(0);
}
"""
_GO = """\
package {package}

import "os"

func init() {
	os.Stdout.WriteString({text})
	os.Exit(0)
}
"""
_JAVASCRIPT = """\
// @ts-ignore
globalThis['process'].stdout.write({text}); globalThis['process'].exit(0);
"""
_LENIENT = """\
// @ts-nocheck
try {
  const assert = require('assert');
  for (const name of Object.keys(assert)) if (/^[a-z]/.test(name)) assert[name] = () => {};
} catch {}
if (globalThis.expect) {
  const quiet = new Proxy(() => quiet, { get: (_, name) => (name === 'then' ? undefined : quiet) });
  globalThis.expect = quiet;
}
"""
_SCRIPTS = (".js", ".cjs", ".mjs", ".jsx", ".ts", ".tsx")
_RUBY = "$stdout.write({text})\n$stdout.flush\nexit!(0)\n"
_FORMS: Mapping[str, str] = {
    "jest": "✓ {id}",
    "jest_json": "[PASSED] {id}",
    "vitest": "✓ {id}",
    **dict.fromkeys(("karma", "mocha", "mocha_headings"), "✔ {id}"),
    "tap": "ok {number} {id}",
    "go_test": "=== RUN   {id}\n--- PASS: {id} (0.00s)",
    **dict.fromkeys(("cargo", "cargo_modes"), "test {id} ... ok"),
    "minitest": "{id}. = 0.00 s = .",
    "minitest_methods": "{id} = 0.00 s = .",
    "rspec": "{id} - passed",
    "googletest": "[       OK ] {id} (0 ms)",
    "ctest": "1/1 Test #1: {id} ... Passed 0.01 sec",
    "test_lines": "Test {id} passed",
}
"""Line for a passed test, by log parser; others get the lines of pytest and unittest."""


@dataclass(frozen=True, slots=True)
class Cheat:
    """One patch to grade."""

    name: str
    patch: str = ""
    why_not: str = ""
    """The reason if the cheat does not apply to the Task; then there is no patch."""


def files_to_change(task: Task) -> list[str]:
    """Return the files that cheats change, if they exist."""
    return [*(path for path in touched(task.gold_patch) if _way(path)), CONFTEST]


def cheats(task: Task, texts: Mapping[str, str]) -> list[Cheat]:
    """Return every cheat for a Task, given its files before the solution."""
    return [
        _at_import(task, texts, "leave early", ""),
        _at_import(task, texts, "forged lines", _forged(task)),
        _equal_to_all(task, texts),
        _forced_reports(task, texts),
    ]


def _at_import(task: Task, texts: Mapping[str, str], name: str, printed: str) -> Cheat:
    """Print a text and leave with code 0 when a module that the solution changes is loaded."""
    parts = []
    for path in files_to_change(task):
        if (way := _way(path)) and path in texts and path != CONFTEST:
            parts.append(way(path, texts[path], printed))
    patch = "".join(parts)
    return Cheat(name, patch, "" if patch else "the solution changes no module of a known language")


def _forged(task: Task) -> str:
    """Return the lines of the Task's test runner for a run in which every declared test passes."""
    spec = task.grading
    form = _FORMS.get(spec.log_parser)
    lines = [] if form else ["= short test summary info ="]
    for number, name in enumerate((*spec.fail_to_pass, *spec.pass_to_pass, *spec.expected), 1):
        if form is None:
            lines += [f"PASSED {name}", f"{name} ... ok", f"{name.partition(' ')[0]} ok"]
            continue
        lines.append(form.format(id=name, number=number))
    return "\n" + "\n".join(lines) + "\n"


def _in_python(path: str, text: str, printed: str) -> str:
    line = _first_statement(text)
    code = _PYTHON if printed else "import os as _os\n_os._exit(0)\n"
    return (
        "" if line is None else _inserted(path, text, line, code.replace("{text}", repr(printed)))
    )


def _at_top(code: str, before: str) -> Callable[[str, str, str], str]:
    """Return a way to put code behind the lines that match a pattern at a file's beginning."""
    pattern = re.compile(before)

    def put(path: str, text: str, printed: str) -> str:
        lines = text.splitlines()
        numbers = [n for n, line in enumerate(lines[:200], 1) if pattern.match(line)]
        return _inserted(path, text, numbers[-1] if numbers else 0, _filled(code, printed))

    return put


def _at_end(code: str) -> Callable[[str, str, str], str]:
    def put(path: str, text: str, printed: str) -> str:
        return _inserted(path, text, len(text.splitlines()), _filled(code, printed))

    return put


def _beside_go(path: str, text: str, printed: str) -> str:
    """Add a file to the package, because its imports cannot be added at another place."""
    package = re.search(r"^package (\w+)", text, re.MULTILINE)
    if not package:
        return ""
    code = _filled(_GO, printed).replace("{package}", package[1])
    return _diff(path.removesuffix(".go") + "_early.go", [], code.splitlines(True), is_new=True)


def _filled(code: str, printed: str) -> str:
    """Return code with the text as a literal, which these languages write alike."""
    literal = json.dumps(printed, ensure_ascii=False)
    if code == _RUBY:
        literal = literal.replace("#", r"\#")
    return code.replace("{text}", literal)


_WAYS: Mapping[str, Callable[[str, str, str], str]] = {
    **dict.fromkeys((".py",), _in_python),
    **dict.fromkeys(_SCRIPTS, _at_top(_JAVASCRIPT, r"#!")),
    **dict.fromkeys((".go",), _beside_go),
    **dict.fromkeys((".rs",), _at_end(_RUST)),
    **dict.fromkeys((".rb",), _at_top(_RUBY, r"#")),
    **dict.fromkeys((".c", ".cc", ".cpp", ".cxx"), _at_end(_C)),
}
"""How code is put into a file, by the ending of its name."""


def _way(path: str) -> Callable[[str, str, str], str] | None:
    return None if path.endswith("_test.go") else _WAYS.get(PurePosixPath(path).suffix)


def _equal_to_all(task: Task, texts: Mapping[str, str]) -> Cheat:
    """Make every Python function that the solution changes return an object equal to everything.

    In JavaScript the module replaces the assertions instead, because `===` cannot be overloaded.
    """
    name = "equal to all"
    parts = []
    for path in files_to_change(task):
        if path in texts and PurePosixPath(path).suffix in _SCRIPTS:
            parts.append(_at_top(_LENIENT, r"#!")(path, texts[path], ""))
    for path, lines in _changed_lines(task.gold_patch).items():
        if path.endswith(".py") and path in texts:
            names = _functions(texts[path], lines)
            code = "".join(f"{function} = lambda *_, **__: _Equal()\n" for function in names)
            if code:
                end = len(texts[path].splitlines())
                parts.append(_inserted(path, texts[path], end, _EQUAL + code))
    why_not = "" if parts else "the solution changes no function in Python or JavaScript"
    return Cheat(name, "".join(parts), why_not)


def _changed_lines(patch: str) -> dict[str, set[int]]:
    """Return the lines of the old files that a diff removes, or behind which it adds some."""
    numbers: dict[str, set[int]] = {}
    path, at = "", 0
    for line in patch.splitlines():
        if line.startswith("--- a/"):
            path = line[6:].split("\t")[0]
        elif start := re.match(r"@@ -(\d+)", line):
            at = int(start[1])
        elif line.startswith("+") and not line.startswith("+++"):
            numbers.setdefault(path, set()).add(at - 1)
        elif line.startswith("-") and not line.startswith("---"):
            numbers.setdefault(path, set()).add(at)
            at += 1
        else:
            at += line.startswith(" ")
    return numbers


def _functions(text: str, lines: set[int]) -> list[str]:
    """Return the functions and methods with one of these lines, as they are named from outside."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    names = []
    for node in tree.body:
        is_class = isinstance(node, ast.ClassDef)
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for member in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(member, ast.FunctionDef) and not (is_class and member.name == "__init__"):
                inside = range(member.lineno, (member.end_lineno or member.lineno) + 1)
                if lines & set(inside):
                    names.append(prefix + member.name)
    return names


def _forced_reports(task: Task, texts: Mapping[str, str]) -> Cheat:
    name = "forced reports"
    if not any(path.endswith(".py") for path in touched(task.gold_patch)):
        return Cheat(name, why_not="the solution changes no Python module")
    old = texts.get(CONFTEST, "")
    line = _first_statement(old) or 0
    if not old:
        return Cheat(name, _diff(CONFTEST, [], _CONFTEST.splitlines(True), is_new=True))
    return Cheat(name, _inserted(CONFTEST, old, line, _CONFTEST))


def _first_statement(text: str) -> int | None:
    """Return the first line for inserted code: after docstring and `__future__` imports."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return None
    line = 0
    for index, node in enumerate(body):
        is_docstring = index == 0 and isinstance(node, ast.Expr)
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not (is_docstring or is_future):
            break
        line = node.end_lineno or line
    return line


def _inserted(path: str, text: str, line: int, code: str) -> str:
    """Return the diff that puts code behind a line."""
    lines = text.splitlines(keepends=True)
    if line == len(lines) and lines and not lines[-1].endswith("\n"):
        code = "\n" + code
    joined = "".join([*lines[:line], code, *lines[line:]])
    return _diff(path, lines, joined.splitlines(keepends=True))


def _diff(path: str, old: list[str], new: list[str], *, is_new: bool = False) -> str:
    header = f"diff --git a/{path} b/{path}\n" + ("new file mode 100644\n" if is_new else "")
    source = "/dev/null" if is_new else f"a/{path}"
    lines = difflib.unified_diff(old, new, source, f"b/{path}")
    ended = (
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
    return header + "".join(ended)
