"""Copies of tests that must fail: their changes, and tests without a copy."""

from __future__ import annotations

import ast
import random
import unittest

import pytest

from swerl.grading.altered import alter, other_literals

RIGHT = {
    "f": lambda *_: 7,
    "word": lambda: "seven",
    "pair": lambda: [7, "b"],
    "é": lambda: b"x",
    "pytest": pytest,
    "case": unittest.TestCase(),
}


def altered(text: str, seed: int = 0, num: int = 1) -> list[str]:
    """Return copies of the only test in this text."""
    [test] = ast.parse(text).body
    assert isinstance(test, ast.FunctionDef)
    names = [f"test_copy{at}" for at in range(num)]
    return ["\n".join(each) for each in alter(text.split("\n"), test, names, random.Random(seed))]


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
        "assert [*pair()][0] == f(1)",
        "assert f(3) == max(7, 1)",
        "assert f(3) is not None, 'why'",
        "assert (\n        f(3)\n        and word()\n    )",
        "assert f(3) != 8",
        "assert 7 == pytest.approx(f(3), abs=2)",
        "assert f(3) == None or f(3)",
        "case.assertTrue(f(3))",
        "case.assertNotIn('x', word())",
        "case.assertListEqual(pair(), [7, 'b'])",
        "with pytest.raises(ZeroDivisionError):\n        f(1 / 0)",
        "with case.assertRaises((KeyError, ZeroDivisionError)) as e:\n        f(1 / 0)",
        "case.assertRaises(ZeroDivisionError, lambda: f(1 / 0))",
        "for each in pair():\n        assert each",
    ],
)
def test_a_copy_fails_if_the_test_passes(assertion: str, seed: int) -> None:
    text = f"def test_it():\n    {assertion}"
    exec(f"{text}\ntest_it()", dict(RIGHT))
    copies = altered(text, seed, num=3)
    assert copies and len(set(copies)) == len(copies)
    for at, copy in enumerate(copies):
        with pytest.raises((AssertionError, ZeroDivisionError)):
            exec(f"{copy}\ntest_copy{at}()", dict(RIGHT))


def test_a_copy_passes_if_the_code_equals_everything() -> None:
    class Equal:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    parametrised = "@pytest.mark.parametrize('c', [7])\ndef test_it(c=7):\n    assert f(3) == c"
    for text in ("def test_it():\n    assert f(3) == 7", parametrised):
        [copy] = altered(text)
        exec(f"{copy}\ntest_copy0()", {"f": lambda _: Equal(), "pytest": pytest})


@pytest.mark.parametrize(
    "text",
    [
        "@pytest.mark.xfail\ndef test_it():\n    assert f(3) == 7",
        "def test_it():\n    if f(1):\n        return\n    assert f(3) == 7",
        "def test_it():\n    pytest.skip('no')\n    assert f(3) == 7",
        "@pytest.mark.parametrize('c', [pytest.param(1, marks=pytest.mark.xfail)])\n"
        "def test_it(c):\n    assert f(c) == 7",
        "@known_failure\ndef test_it():\n    assert f(3) == 7",
        "def test_it(): f(3)",
    ],
)
def test_a_test_whose_copy_might_pass_is_left_alone(text: str) -> None:
    assert altered(text) == []


@pytest.mark.parametrize("right", ["3", "0", "True", '"3 coins"', "b'note'", "2.50", "0x1f", '""'])
@pytest.mark.parametrize("seed", range(4))
def test_the_spelling_does_not_reveal_the_right_value(right: str, seed: int) -> None:
    value = ast.literal_eval(right)
    texts = other_literals(right, value, 3, random.Random(seed))
    values = [ast.literal_eval(text) for text in texts]
    assert texts and len({*values, value}) == len(texts) + 1
    assert all(type(other) is type(value) for other in values)
    if value and not isinstance(value, bool):
        assert {len(text) for text in texts} == {len(right)}
        assert {text[:1].isdigit() or text[:1] for text in texts} == {
            right[:1].isdigit() or right[:1]
        }


def test_the_right_number_may_be_anywhere_among_the_others() -> None:
    places = {
        sum(int(text) < 7 for text in other_literals("7", 7, 3, random.Random(seed)))
        for seed in range(40)
    }
    assert places == {0, 1, 2, 3}
