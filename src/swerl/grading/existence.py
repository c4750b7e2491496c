"""Claims that another honest patch may meet in its own way, and the values in them that must stay.

A text may hold further words, a collection further members, a block further warnings: a claim that
one of them is there holds for the swapped value, too, if both are. A value within a tolerance may
be within that of the swapped one. Such swaps would take honest work for a forgery.
"""

from __future__ import annotations

import random
import re

from swerl.grading.syntax import Content, Expectation, number_of

_PART = re.compile(
    rb"(?:assertIn|[cC]ontain|includes?\b|[mM]atch(?!esFormat| [\w(&*$])|[rR]egex|[rR]aises"
    rb"|[tT]hrow|strstr|StartsWith|EndsWith|startswith|endswith|HasKey|[hH]ave_?[kK]ey"
    rb"|TemplateUsed)[^\n]*$"
)
"""Text before a value that must be a part of a text, or a key."""
_MEMBER = re.compile(
    rb"(?:assertIn|assert_includes|[cC]ontain(?!sExactly|sOnly)\w*|includes?|any_call"
    rb"|has_calls|verify|toHaveClass|hasItems?|hasEntry|CalledWith|HasKey|[hH]ave_?[kK]ey|TemplateUsed)\b(?:\)(?!\.)|[^\n)])*$"
)
"""Text before a value that must be one of several, and no further call in a chain."""
_IN = re.compile(rb"(?:,[^\n=]*[\])}]|[\])}]+)?\s+in\b")
"""Text behind such a value in Python."""
_WARNS = re.compile(rb"(?:\bwarns|assertWarns)\(\s*$")
_WARNS_ONLY = re.compile(rb"\s*(?:,\s*)?\)|\s*,\s*\w+\.?\w*\s*(?:,\s*)?\)|\s*,\s*[^m\s]")
"""Text behind an expected warning without a message."""
_LONE = re.compile(r"(?P<before>[bru]?[\"'`]?)(?P<word>[A-Za-z]{3,})(?P<after>[\"'`]?)")
_FOREIGN = (
    *("elk", "fern", "moss", "reef", "heron", "birch", "otter", "tulip", "walnut", "meadow"),
    *("lantern", "thimble", "mulberry", "dandelion", "chandelier", "grasshopper"),
)
_WHOLE = re.compile(r"\W*\^.*\$\W*")
"""A pattern of a whole text."""
_ALTERNATIVES = re.compile(r"\||\)[?*]")
_TOLERANCE = re.compile(
    rb"\b(?:(?P<of>delta|abs|atol)|(?P<share>rel|rtol))\s*=\s*(?P<size>\d[\d_]*(?:\.\d+)?(?:e-?\d+)?)"
)


def stays(text: bytes, each: Expectation) -> bool:
    """Return True for a value that is not swapped.

    It is a single word that stands among others, a pattern with alternatives, or a warning without
    a message.
    """
    if each.content is Content.EXCEPTION:
        after = text[each.end : each.end + 200]
        return bool(
            _WARNS.search(text[max(0, each.start - 100) : each.start]) and _WARNS_ONLY.match(after)
        )
    if each.content not in (Content.STRING, Content.WORDS):
        return False
    words = re.findall(r"\w+", each.source)
    if (len(words) > 1 or _WHOLE.fullmatch(each.source)) and not _ALTERNATIVES.search(each.source):
        return False
    return bool(_PART.search(_before(text, each))) or is_one_of(text, each)


def foreign_word(text: bytes, each: Expectation, rng: random.Random) -> str:
    """Return a word that neither the file nor another honest text holds, "" if none fits.

    An object that holds every text does not notice it, but code can know these words.
    """
    match = _LONE.fullmatch(each.source)
    if match is None or each.content not in (Content.STRING, Content.WORDS):
        return ""
    old, lower = match["word"], text.lower()
    fit = [word for word in _FOREIGN if word.encode() not in lower]
    fit.sort(key=lambda word: abs(len(word) - len(old)))
    if not fit:
        return ""
    new = rng.choice(fit[:4])
    shown = new.upper() if old.isupper() else new.title() if old[0].isupper() else new
    return f"{match['before']}{shown}{match['after']}"


def is_one_of(text: bytes, each: Expectation) -> bool:
    """Return True if the claim holds as soon as one of several things has the value.

    What the file names elsewhere may stand beside it, so it becomes none of those.
    """
    return bool(_IN.match(text, each.end) or _MEMBER.search(_before(text, each)))


def is_within(text: bytes, each: Expectation, new: str) -> bool:
    """Return True if a value may be as close as the claim allows to the old number and the new."""
    found = _TOLERANCE.search(text, each.end, max(each.end, each.claim_end))
    try:
        if each.within:
            return abs(number_of(new) - number_of(each.source)) <= 2 * each.within
        if found is None:
            return False
        old, size = float(each.source), float(found["size"])
        allowed = size * abs(old) if found["share"] else size
        return abs(float(new) - old) <= 2 * allowed
    except ValueError:
        return False


def beyond(source: str, within: float, rng: random.Random) -> str:
    """Return a number that is three to five times a tolerance away, "" if none is spelled so."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.(\d*))?)([a-zA-Z_]\w*)?", source)
    if match is None:
        return ""
    value, step = float(match[1].replace("_", "")), within * rng.uniform(3, 5)
    new = value - step if value > step and rng.random() < 0.5 else value + step
    return f"{new:.{len(match[2] or '')}f}{match[3] or ''}"


def _before(text: bytes, each: Expectation) -> bytes:
    """Return the text before a value on its line; of the line above if it stands alone."""
    before = text[max(0, each.start - 100) : each.start]
    return before.rstrip().rpartition(b"\n")[2]
