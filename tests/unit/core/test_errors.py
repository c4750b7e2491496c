"""Hints for names that are not known."""

from __future__ import annotations

import pytest

from swerl.core.errors import unknown

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
