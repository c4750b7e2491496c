"""Hints for names that are not known, and for packages that are not installed."""

from __future__ import annotations

import json
from importlib import metadata
from types import SimpleNamespace

import pytest

from swerl.core.errors import install_command, unknown

MANY = [f"name{n}" for n in range(10)]


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("codx", ("codex", "pi"), "did you mean codex?"),
        ("zzz", ("codex", "pi"), "known here: codex, pi"),
        ("zzz", MANY, f"known here: {', '.join(MANY[:8])} and 2 more"),
        ("zzz", (), "no agent is known here"),
    ],
)
def test_an_unknown_name_hints_at_near_ones_or_lists_known_ones(
    name: str, known: tuple[str, ...], hint: str
) -> None:
    assert unknown("agent", name, known).hint == hint


CLONE = {"url": "file:///a/my%20clone", "dir_info": {"editable": True}}


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (CLONE, "pip install -e '/a/my clone[e2b]'"),
        (CLONE | {"dir_info": {}}, "pip install '/a/my clone[e2b]'"),
        ({"url": "file:///a/x.whl", "archive_info": {}}, "pip install '/a/x.whl[e2b]'"),
        (
            {"url": "https://host/x", "vcs_info": {"vcs": "git"}},
            "pip install 'swerl-rl[e2b] @ git+https://host/x'",
        ),
        (None, "pip install 'swerl-rl[e2b]'"),
    ],
)
def test_an_extra_comes_from_where_swerl_came_from(
    origin: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = origin and json.dumps(origin)
    installed = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr(metadata, "distribution", lambda name: installed)
    assert install_command("e2b") == command
