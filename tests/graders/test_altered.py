"""Copies of tests that must fail: what is changed in them, and which tests are left alone."""

from __future__ import annotations

import ast
import random

import pytest

from swerl.graders._altered import alter

RIGHT = {"f": lambda *_: 7, "word": lambda: "seven", "pair": lambda: [7, "b"], "é": lambda: b"x"}


def altered(text: str, seed: int = 0) -> str | None:
    """Return the copy of the only test in this text."""
    [test] = ast.parse(text).body
    assert isinstance(test, ast.FunctionDef)
    return alter(text.split("\n"), test, "test_copy", random.Random(seed))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "assertion",
    [
        "assert f(3) == 7",
        "assert 7 == f(3)",
        "assert f('é', 'ü') == 7, 'é'",
        "assert word() == 'seven'",
        "assert pair() == [7, 'b']",
        "assert é() == b'x'",
        "x = f(1)\n    assert x == 7  # why",
    ],
)
def test_a_copy_fails_where_the_test_passes(assertion: str, seed: int) -> None:
    text = f"def test_it():\n    {assertion}"
    exec(f"{text}\ntest_it()", dict(RIGHT))
    copy = altered(text, seed)
    assert copy is not None
    with pytest.raises(AssertionError):
        exec(f"{copy}\ntest_copy()", dict(RIGHT))


def test_a_copy_passes_where_everything_is_called_equal() -> None:
    class Equal:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    copy = altered("def test_it():\n    assert f(3) == 7")
    exec(f"{copy}\ntest_copy()", {"f": lambda _: Equal()})


@pytest.mark.parametrize(
    "text",
    [
        "@pytest.mark.xfail\ndef test_it():\n    assert f(3) == 7",
        "def test_it():\n    if f(1):\n        return\n    assert f(3) == 7",
        "def test_it():\n    pytest.skip('no')\n    assert f(3) == 7",
        "def test_it():\n    if f(1):\n        assert f(3) == 7",
        "def test_it():\n    assert f(3) is None\n    assert f(3) == None",
        "def test_it():\n    assert f(3) != 7\n    assert 7 < f(3)",
        "def test_it():\n    assert f(3) == 1e300",
        "def test_it():\n    assert 7 == 7",
        "def test_it():\n    assert 7 == pytest.approx(f(3), abs=2)",
        "def test_it():\n    assert mock.ANY == 7",
    ],
)
def test_a_test_whose_copy_might_pass_is_left_alone(text: str) -> None:
    assert altered(text) is None
