"""Files that hold settings of a test runner beside others: `setup.cfg`, `pyproject.toml`, ….

Only the sections of the runner are replaced by those of the clean tree, by lines, so all other text
stays. Then both files are parsed; if the runner would still read other settings, the whole file is
restored.
"""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeAlias

_MAX_CHARS = 2**18
"""Size limit of a changed file; a parser could take minutes for a larger one."""
_INI_STEERS = re.compile(r"(tool:)?pytest|aliases|test|unittest|nosetests|flake8:local-plugins")
_TOML_STEERS = ("pytest", "tox", "nox", "nose", "unittest", "coverage", "poe", "taskipy", "pixi")
_JSON_STEERS = ("scripts", "jest", "mocha", "ava", "vitest", "nyc", "c8", "karma", "tap", "babel")
_PLUGINS = "pytest11"
"""The entry point by which a package adds a plugin to pytest."""
_HEADING = re.compile(r"\s*\[{1,2}([^\]]*)\]")

_Settings: TypeAlias = Mapping[str, Any]


def without_steering(path: str, base: str, changed: str) -> str:
    """Return the changed file with the test runner's settings of the base.

    `base` is empty if the file is new. A file of another name is returned unchanged.
    """
    restore = _RESTORERS.get(PurePosixPath(path).name)
    if restore is None:
        return changed
    try:
        kept = restore(base, changed) if len(changed) <= _MAX_CHARS else base
        kept.encode("utf-8", "surrogateescape")  # JSON can spell half a character
    except Exception:  # noqa: BLE001  deep nesting, huge numbers, faults of the parsers
        return base
    return kept


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
            name, lines = match[1].strip(), []
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
