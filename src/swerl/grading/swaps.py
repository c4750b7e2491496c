"""Blind swaps: hidden tests with some of their expected values replaced by plausible ones.

Code under test runs in the process that reports on it, so it can report every test as passed. A
swapped test must fail. Only who computes the answer can tell a swapped expectation from a real one:
names, order, number and lines of the tests stay as they are, and the new value is as plausible as
the old one.
"""

from __future__ import annotations

import bisect
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swerl.core.task import Swap

# A rollout only makes the swaps of its Task. The parsers that find new ones take long to import.
if TYPE_CHECKING:
    from swerl.grading.plausible import Kind

_MAX_PER_TEST = 12
_MAX_PER_FILE = 400
_MAX_ALTERNATIVES = 3
_MAX_PLACES = 1_500
"""Expectations of one file that get other values."""
_MAX_BYTES = 8 << 20
_WORD = re.compile(r"\w+")
_PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One swap: a span of a test file and the text that replaces it."""

    path: str
    start: int
    """Offset of the first byte that is replaced."""
    end: int
    new: str
    line: int
    """Line of `start`, counted from 1."""
    test: str
    """Name or title of the innermost test around it, "" if unknown."""
    kind: Kind
    outer: tuple[str, ...] = ()
    """Names of the classes and describe blocks around the test, the innermost last."""
    partner: int | None = None
    """Start of the candidate in another test that gets the old value of this one. The file keeps
    its values if both are chosen."""


def supports(path: str) -> bool:
    """Return True if the file is of a language whose tests can be swapped."""
    from swerl.grading import languages

    return bool(languages.language_of(path))


def candidates(
    path: str,
    text: bytes,
    rng: random.Random,
    *,
    tests: Iterable[str] = (),
    before: bytes = b"",
) -> list[Candidate]:
    """Return the plausible swaps of a test file, the best first; [] if it cannot be parsed.

    With `tests`, ids of declared tests, only swaps that may belong to one of them. `before` is the
    file at the base commit: everybody knows its lines to be honest, so swaps in them come late.
    """
    from swerl.grading import expectations, languages
    from swerl.grading.plausible import Kind, Plausible

    language = languages.language_of(path)
    if not language or len(text) > _MAX_BYTES:
        return []
    is_wanted = _Filter(ids := list(tests))
    found = expectations.read(language, text, is_wanted.is_named if ids else None)
    plausible = Plausible(language, text, found, rng)
    wanted = [each for each in found if is_wanted(each.test)]
    if len(wanted) > _MAX_PLACES:
        wanted = rng.sample(wanted, _MAX_PLACES)
    known = set(before.split(b"\n"))
    starts = _line_starts(text)
    ranked: list[tuple[tuple[float, ...], Candidate]] = []
    seen: set[tuple[int, int, str]] = set()
    for each in wanted:
        options = plausible.replacements(each)[:_MAX_ALTERNATIVES]
        for place, option in enumerate(options):
            key = (option.start, option.end, option.new)
            if key in seen:
                continue
            seen.add(key)
            line = _line(starts, option.start)
            is_old = text[starts[line - 1] : starts[line] - 1] in known if known else False
            partner = option.partner if option.partner >= 0 else None
            candidate = Candidate(
                path, option.start, option.end, option.new, line, each.test, option.kind,
                each.outer, partner,
            )  # fmt: skip
            is_weak = option.kind is Kind.OPERATOR
            ranked.append(((is_old, is_weak, each.depth, place, rng.random()), candidate))
    ranked.sort(key=lambda pair: pair[0])
    return _capped([candidate for _, candidate in ranked])


def swapped(text: bytes, chosen: Iterable[Candidate | Swap]) -> bytes:
    """Return the text with these replacements; raise ValueError if two overlap."""
    pieces: list[bytes] = []
    at = 0
    for each in sorted(chosen, key=lambda one: (one.start, one.end)):
        if each.start < at:
            raise ValueError(f"{each.path}: two swaps overlap at byte {each.start}; choose one")
        pieces += [text[at : each.start], each.new.encode()]
        at = each.end
    return b"".join([*pieces, text[at:]])


def belongs(candidate: Candidate, test_id: str) -> bool:
    """Return True if this declared test may be the candidate's.

    A name must be a word of the id, a title a part of it. If the id has the form of pytest, its
    path and class must be the candidate's, too.
    """
    head, _, rest = test_id.partition("::")
    if rest and re.search(r"\.\w+$", head):
        if not _ends_alike(head, candidate.path):
            return False
        parts = rest.partition("[")[0].split("::")
        if candidate.test and _WORD.fullmatch(candidate.test):
            return parts[-1] == candidate.test and tuple(parts[:-1]) == candidate.outer
    if not candidate.test:
        return True
    if not _names(candidate.test, test_id):
        return False
    # An id that has a class must have the candidate's; unittest and JUnit write it as a word.
    classes = [name for name in candidate.outer if _WORD.fullmatch(name)]
    if candidate.path.endswith((".py", ".java", ".php")) and classes and "." in test_id:
        return _names(classes[-1], test_id)
    return True


def _names(name: str, test_id: str) -> bool:
    if _WORD.fullmatch(name):
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", test_id):
            return True
        title = _title(name)
        return bool(title and title in test_id.lower())
    # Go writes the blanks of a title as underscores.
    return name in test_id or name.replace(" ", "_") in test_id


def _title(name: str) -> str:
    """Return the words of a name, as PHPUnit prints `testChangeOfANote` as `Change of a note`.

    A single word has no title: it may be a part of any id.
    """
    words = _PIECE.findall(name.removeprefix("test").replace("_", " "))
    return " ".join(words).lower() if len(words) > 1 else ""


def _ends_alike(one: str, two: str) -> bool:
    """Return True if one path is the end of the other."""
    pair = [path.removeprefix("./").split("/") for path in (one, two)]
    short, long = sorted(pair, key=len)
    return long[-len(short) :] == short


class _Filter:
    """Tells which tests of a file are wanted, by ids of declared tests."""

    def __init__(self, ids: list[str]) -> None:
        self._text = "\n".join(ids)
        self._lower = self._text.lower()
        self._words = set(_WORD.findall(self._text))
        self._known: dict[str, bool] = {}

    def __call__(self, test: str) -> bool:
        return not self._text or not test or self.is_named(test)

    def is_named(self, test: str) -> bool:
        """Return True if an id names this test."""
        if test not in self._known:
            is_word = _WORD.fullmatch(test) is not None
            title = _title(test)
            is_known = test in self._words or bool(title and title in self._lower)
            self._known[test] = is_known if is_word else _names(test, self._text)
        return self._known[test]


def _capped(ranked: list[Candidate]) -> list[Candidate]:
    """Return at most so many a test and a file; each test of a large file keeps its best."""
    counts: Counter[tuple[str, ...]] = Counter()
    places: list[tuple[int, Candidate]] = []
    for each in ranked:
        test = (*each.outer, each.test)
        counts[test] += 1
        if counts[test] <= _MAX_PER_TEST:
            places.append((counts[test], each))
    if len(places) > _MAX_PER_FILE:
        last = sorted(place for place, _ in places)[_MAX_PER_FILE - 1]
        places = [pair for pair in places if pair[0] <= last][:_MAX_PER_FILE]
    return [each for _, each in places]


def _line_starts(text: bytes) -> list[int]:
    starts = [0]
    for line in text.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


def _line(starts: list[int], offset: int) -> int:
    return bisect.bisect_right(starts, offset)
