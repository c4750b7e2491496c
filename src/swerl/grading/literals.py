"""Other values of a literal, in its own spelling: beside it nothing tells which one was first."""

from __future__ import annotations

import ast
import random
import re
import string

_LARGE = 1e9
"""From somewhere above it on a float does not change with each of its digits."""
_CLASSES = (string.digits, string.ascii_lowercase, string.ascii_uppercase)
_QUOTED = re.compile(
    r"(?P<start>[a-zA-Z]*(?P<quote>\"\"\"|'''|\"|'))(?P<body>.*)(?P=quote)", re.DOTALL
)


def others(source: str, value: object, num: int, rng: random.Random) -> list[str]:
    """Return up to `num` spellings of distinct other values of the literal's type."""
    if isinstance(value, bool):
        return [repr(not value)]
    if isinstance(value, int) and source.isdecimal():
        # What is right may stand anywhere in the row. Small steps, since some things are equal to
        # numbers that are farther away: those of a clock.
        first = value - rng.randint(0, min(num, value))
        row = [str(number) for number in range(first, first + num + 1) if number != value]
        return rng.sample(row, len(row))
    if isinstance(value, int) or (isinstance(value, float) and abs(value) < _LARGE):
        return _exchanged(source, 0, len(source), value, num, rng)
    if isinstance(value, str | bytes) and (match := _QUOTED.fullmatch(source)):
        found = _exchanged(source, *match.span("body"), value, num, rng)
        return found or [f"{match['start']}{match['body']}s{match['quote']}"]
    return []


def _exchanged(
    source: str, start: int, end: int, value: object, num: int, rng: random.Random
) -> list[str]:
    """Exchange one letter or digit by others of its kind; a digit where there is one."""
    places = [at for at in range(start, end) if source[at].isascii() and source[at].isalnum()]
    places = [at for at in places if source[at].isdigit()] or places
    for at in rng.sample(places, len(places)):
        kind = next(letters for letters in _CLASSES if source[at] in letters)
        texts = [source[:at] + letter + source[at + 1 :] for letter in rng.sample(kind, len(kind))]
        if found := [text for text in texts if _is_another(text, value)]:
            return found[:num]
    return []


def _is_another(text: str, value: object) -> bool:
    try:
        other = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    return type(other) is type(value) and other != value
