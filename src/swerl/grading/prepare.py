"""Prepare a clean sandbox: apply the patch, write the tests, restore settings of test runners.

In files with settings of a test runner and others (`pyproject.toml`, `setup.cfg`, …), only the
sections of the runner are replaced by those of the base commit, by lines, so all other text stays.
Then both files are parsed; if the runner would still read other settings, the whole file is
restored.
"""

from __future__ import annotations

import configparser
import json
import random
import re
import secrets
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeAlias

from swerl.core.contracts import Sandbox
from swerl.core.grade import Grade, Verdict
from swerl.core.sandbox import Exec
from swerl.core.task import Task, file_bytes
from swerl.grading import canary as _canary
from swerl.grading.accept import accept, commands, script_text, scripts_to_read
from swerl.grading.sections import paths

_TIMEOUT_S = 120.0
"""Seconds for applying patches: ten times the time of the largest known one."""

_GIT = r"""
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
run_git() { git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false "$@"; }
"""
_APPLY = r"""
base=$1 tests=$2; shift 2
by_patch() { patch --batch --forward --fuzz=5 -p1 "$@" -i "$diff"; }
diff=$(mktemp) && cat >"$diff" || exit 90
if [ -s "$diff" ]; then
  run_git apply --whitespace=nowarn "$diff" ||
  run_git apply --whitespace=nowarn --ignore-whitespace "$diff" ||
  { by_patch --dry-run && by_patch --no-backup-if-mismatch; } || exit 91
fi
rm -f "$diff"
if run_git rev-parse -q --verify HEAD >/dev/null 2>&1; then
  run_git rev-parse -q --verify "${base:=HEAD}^{commit}" >/dev/null 2>&1 || base=HEAD
  for path do
    if run_git cat-file -e "$base:$path" 2>/dev/null
    then run_git checkout -q "$base" -- "$path" || exit 92
    else rm -rf -- "$path"
    fi
  done
fi
[ -z "$tests" ] || run_git apply --whitespace=nowarn "$tests" || exit 92
[ -z "$tests" ] || rm -f "$tests"
"""
_READ = r"""
for path do
  [ -f "$path" ] || continue
  printf '%s\0' "$path"
  head -c 65536 -- "$path" | tr -d '\0'
  printf '\0'
done
"""
_SCRIPT_DEPTH = 3
"""Levels of scripts that run further scripts."""
_PATCH_REFUSED = 91
_TESTS_REFUSED = 92

_SET_UP = r"""
rm -rf -- "$1" && bash -s
"""

_AT_BASE = r"""
run_git rev-parse -q --verify "${1:=HEAD}^{commit}" >/dev/null 2>&1 || set -- HEAD "$2"
run_git cat-file -e "$1:$2" 2>/dev/null || exit 93
run_git show "$1:$2"
"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A work tree ready for the tests, or the Grade of the failure."""

    restored: tuple[str, ...] = ()
    failure: Grade | None = None


async def prepare(task: Task, patch: str, sandbox: Sandbox) -> Prepared:
    """Apply the accepted part of the patch, restore test settings, write the tests."""
    # The scripts are read first, before the patch can change them.
    accepted = accept(task, patch, await _scripts(task, sandbox) if patch else None)
    if failure := await _apply(task, accepted.patch, sandbox):
        return Prepared(accepted.dropped, failure=failure)
    undone = await _undo_steering(task, accepted.patch, sandbox)
    failure = await _bring_tests(task, sandbox)
    return Prepared((*accepted.dropped, *undone), failure=failure)


async def bring_files(task: Task, sandbox: Sandbox) -> None:
    """Write the hidden files outside the work tree, over existing ones."""
    for path, text in task.grading.files.items():
        await sandbox.write(path, file_bytes(text))


def can_plant(task: Task) -> bool:
    """Return True if there is a file that can hold a canary."""
    spec = task.grading
    return bool(_canary.choose_files([*spec.test_files, *spec.files, *paths(spec.test_patch)]))


async def plant(task: Task, sandbox: Sandbox, *, in_place: bool = False) -> tuple[str, ...]:
    """Put canaries among the hidden tests and return the names of the tests that must fail.

    `in_place` replaces tests if it can, so that the files do not reveal the canaries.
    """
    # The seed is secret: a patch that could predict canaries could recognize them.
    rng = random.Random(secrets.randbits(64))
    names: list[str] = []
    for path, text in (await _test_texts(task, sandbox)).items():
        planted = _canary.replace_one(text, task.grading, rng) if in_place else None
        if planted := planted or _canary.plant(text, task.grading, rng):
            await sandbox.write(path, planted.text.encode())
            names.extend(planted.names)
    return tuple(names)


async def _apply(task: Task, patch: str, sandbox: Sandbox) -> Grade | None:
    spec = task.grading
    if not (patch or spec.test_patch):
        return None
    tests = ""
    if spec.test_patch:
        tests = f"/tmp/swerl-{secrets.token_hex(8)}.diff"
        text = spec.test_patch.removesuffix("\n") + "\n"
        await sandbox.write(tests, text.encode("utf-8", "surrogateescape"))
    end = await sandbox.run(
        [*_shell(_APPLY), task.base_commit, tests, *paths(spec.test_patch)],
        cwd=task.workdir,
        timeout_s=_TIMEOUT_S,
        stdin=patch.encode("utf-8", "surrogateescape"),
    )
    return _failure(end, has_patch=bool(patch)) if end.exit_code else None


def _failure(end: Exec, *, has_patch: bool) -> Grade:
    if end.exit_code == _PATCH_REFUSED:
        return Grade(Verdict.UNSOLVED, reason="patch does not apply", log=end.text)
    if end.exit_code == _TESTS_REFUSED and has_patch:
        reason = "the test patch does not apply on top of the patch"
        return Grade(Verdict.UNSOLVED, reason=reason, log=end.text)
    if end.exit_code == _TESTS_REFUSED:
        reason = "the test patch does not apply to the base"
        return Grade(Verdict.INVALID, reason=reason, log=end.text)
    reason = f"the work tree could not be prepared (exit code {end.exit_code})"
    return Grade(Verdict.INFRA, reason=reason, log=end.text)


async def _scripts(task: Task, sandbox: Sandbox) -> dict[str, str]:
    """Return the texts of the repository's scripts that the test command runs, by path."""
    texts: dict[str, str] = {}
    known = "\n".join(commands(task.grading))
    for _ in range(_SCRIPT_DEPTH):
        missing = sorted(scripts_to_read(known) - set(texts))
        if not missing:
            break
        read = await sandbox.run(
            ["sh", "-c", _READ, "sh", *missing], cwd=task.workdir, timeout_s=_TIMEOUT_S
        )
        pieces = read.stdout.decode("utf-8", "replace").split("\0")
        found = dict(zip(pieces[::2], pieces[1::2], strict=False))
        texts.update({path: script_text(path, found.get(path, "")) for path in missing})
        # The next round searches only the scripts that this round has found.
        known = "\n".join(texts[path] for path in missing)
    return texts


async def _undo_steering(task: Task, patch: str, sandbox: Sandbox) -> list[str]:
    """Restore test runners' settings in files that also hold other settings."""
    allowed = set(paths(task.gold_patch))
    changed = [p for p in paths(patch) if holds_steering(p) and p not in allowed]
    undone = []
    for path in changed:
        try:
            found = await sandbox.read(f"{task.workdir}/{path}")
        except FileNotFoundError:
            found = b""
        base = await _at_base(task, path, sandbox)
        text = found.decode("utf-8", "surrogateescape")
        kept = without_steering(path, base, text)
        if kept != text:
            undone.append(path)
            await sandbox.write(f"{task.workdir}/{path}", kept.encode("utf-8", "surrogateescape"))
    return undone


async def _at_base(task: Task, path: str, sandbox: Sandbox) -> str:
    """Return a file at the base commit; empty if it does not exist there."""
    command = [*_shell(_AT_BASE), task.base_commit, path]
    shown = await sandbox.run(command, cwd=task.workdir, timeout_s=_TIMEOUT_S)
    return "" if shown.exit_code else shown.stdout.decode("utf-8", "surrogateescape")


async def _bring_tests(task: Task, sandbox: Sandbox) -> Grade | None:
    spec = task.grading
    for path, text in spec.test_files.items():
        await sandbox.write(f"{task.workdir}/{path}", text.encode())
    await bring_files(task, sandbox)
    if not (spec.test_setup or spec.report_path):
        return None
    done = await sandbox.run(
        [*_shell(_SET_UP), spec.report_path],
        cwd=task.workdir,
        timeout_s=_TIMEOUT_S,
        stdin=spec.test_setup.encode(),
    )
    if not done.exit_code:
        return None
    reason = f"the tests cannot be set up (exit code {done.exit_code})"
    return Grade(Verdict.INVALID, reason=reason, log=done.text)


async def _test_texts(task: Task, sandbox: Sandbox) -> Mapping[str, str]:
    """Return the texts of the test files that may get a canary, by absolute path."""
    spec = task.grading
    inside = {f"{task.workdir}/{path}": text for path, text in spec.test_files.items()}
    known = {**inside, **spec.files}
    brought = [f"{task.workdir}/{path}" for path in paths(spec.test_patch)]
    texts = {}
    for path in _canary.choose_files([*known, *brought]):
        try:
            texts[path] = known[path] if path in known else (await sandbox.read(path)).decode()
        except (FileNotFoundError, UnicodeDecodeError):
            continue
    return texts


def _shell(script: str) -> list[str]:
    return ["bash", "-c", _GIT + script, "prepare"]


_INI_STEERS = re.compile(r"(tool:)?pytest|aliases|test|unittest|nosetests|flake8:local-plugins")
_TOML_STEERS = ("pytest", "tox", "nox", "nose", "unittest", "coverage", "poe", "taskipy", "pixi")
_JSON_STEERS = ("scripts", "jest", "mocha", "ava", "vitest", "nyc", "c8", "karma", "tap", "babel")
_PLUGINS = "pytest11"
"""The entry point by which a package adds a plugin to pytest."""
_HEADING = re.compile(r"^\s*\[+\s*([^\]]+?)\s*\]+")

_Settings: TypeAlias = Mapping[str, Any]


def without_steering(path: str, base: str, changed: str) -> str:
    """Return the changed file with the test runner's settings of the base.

    `base` is empty if the file is new. A file of another name is returned unchanged.
    """
    restore = _RESTORERS.get(PurePosixPath(path).name)
    return restore(base, changed) if restore else changed


def holds_steering(path: str) -> bool:
    """Return True if a file of this name can hold settings of test runners beside others."""
    return PurePosixPath(path).name in _RESTORERS


def _restored(
    is_steering: Callable[[str], bool],
    settings: Callable[[str], _Settings | None],
    base: str,
    changed: str,
) -> str:
    """Splice by lines; return the base if a test runner would read other settings from that."""
    spliced = _splice(base, changed, is_steering)
    found = settings(spliced)
    return spliced if found is not None and found == settings(base) else base


def _package_json(base: str, changed: str) -> str:
    """Restore keys; the layout may change, because npm reformats this file too."""
    try:
        old, new = json.loads(base or "{}"), json.loads(changed)
        steering = {key: old[key] for key in _JSON_STEERS if key in old}
        if {key: new[key] for key in _JSON_STEERS if key in new} == steering:
            return changed
        rest = {key: value for key, value in new.items() if key not in _JSON_STEERS}
    except (ValueError, AttributeError, TypeError):
        return base
    return json.dumps({**rest, **steering}, indent=2, ensure_ascii=False) + "\n"


def _splice(base: str, changed: str, is_steering: Callable[[str], bool]) -> str:
    """Return `changed` with the steering sections of `base` instead of its own."""
    old, new = _split(base), _split(changed)
    if [each for each in old if is_steering(each[0])] == [
        each for each in new if is_steering(each[0])
    ]:
        return changed
    kept = [text for name, text in new if not is_steering(name)]
    brought = [text for name, text in old if is_steering(name)]
    return "\n".join(text.rstrip("\n") for text in (*kept, *brought) if text.strip()) + "\n"


def _split(text: str) -> list[tuple[str, str]]:
    """Return the sections with their names; the text before the first has an empty name."""
    found: list[tuple[str, str]] = []
    name, lines = "", list[str]()
    for line in text.splitlines(keepends=True):
        if match := _HEADING.match(line):
            found.append((name, "".join(lines)))
            name, lines = match[1], []
        lines.append(line)
    return [*found, (name, "".join(lines))]


def _is_ini_steering(name: str) -> bool:
    return bool(_INI_STEERS.fullmatch(name))


def _is_toml_steering(name: str) -> bool:
    parts = [part.strip().strip("\"'") for part in name.split(".")]
    if _PLUGINS in parts:
        return True
    return len(parts) > 1 and parts[0] == "tool" and parts[1] in _TOML_STEERS


def _ini_settings(text: str) -> _Settings | None:
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
    try:
        parser.read_string(text)
    except configparser.Error:
        return None
    plugins = parser.get("options.entry_points", _PLUGINS, fallback="")
    steering = {name: dict(parser[name]) for name in parser if _is_ini_steering(name)}
    return {_PLUGINS: plugins} | steering


def _toml_settings(text: str) -> _Settings | None:
    try:
        whole = tomllib.loads(text)
        tools = whole.get("tool", {})
        return {_PLUGINS: list(_plugins(whole))} | {
            name: tools[name] for name in _TOML_STEERS if name in tools
        }
    except (tomllib.TOMLDecodeError, TypeError, AttributeError):
        return None


def _plugins(table: _Settings) -> Iterator[Any]:
    """Yield pytest's plugins, which each build tool keeps in a table of its own."""
    for key, value in table.items():
        if key == _PLUGINS:
            yield value
        elif isinstance(value, Mapping):
            yield from _plugins(value)


_RESTORERS: Mapping[str, Callable[[str, str], str]] = {
    "setup.cfg": partial(_restored, _is_ini_steering, _ini_settings),
    "pyproject.toml": partial(_restored, _is_toml_steering, _toml_settings),
    "package.json": _package_json,
}
