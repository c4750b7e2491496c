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
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swerl.core.task import Swap

# A rollout only makes the swaps of its Task. The parsers that find new ones take long to import.
if TYPE_CHECKING:
    from swerl.grading.plausible import Kind, Replacement
    from swerl.grading.syntax import Expectation

_ASIDE = re.compile(
    rb"\n[ \t]*[rufb]?$|\b(?:Error|Fatal|Log|Skip|[Ff]ail|panic!?|print\w*!?)f?\(\s*$"
    rb"|\b(?:msg|message)\s*=\s*$"
)
"""Text before a docstring or a message."""
_OPERAND = re.compile(rb".?[-+*/^] ?\d")
"""A number in a term, two bytes before it."""
_NEXT = re.compile(rb"[\])}\"'`]*,\s*[rufb]?")
"""Text between a claimed value and the message of the assertion."""
_MAX_PER_TEST = 12
_MAX_PER_FILE = 400
_MAX_ALTERNATIVES = 3
_MAX_PLACES = 1_500
"""Expectations of one file that get other values."""
_MAX_BYTES = 8 << 20
_MAX_TEST_BYTES, _MAX_PLACES_OF_TEST, _MAX_ECHO_BYTES = 20_000, 300, 4_000
"""Longer tests are not searched for places that tell a value, and swaps do not become longer."""
_ROW_TITLE = re.compile(rb"\b(?:name|title|desc\w*|label|scenario)\W{1,5}[\"'`]([^\"'`\n]*)[\"'`]")
"""The title of a row in a table of cases, which is part of the test's id."""
_FIRST_TEXT = re.compile(rb"[\"'`]([^\"'`\n]*)[\"'`]")
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
    """Line of the expectation, counted from 1."""
    test: str
    """Name or title of the innermost test around it, "" if unknown."""
    kind: Kind
    outer: tuple[str, ...] = ()
    """Names of the classes and describe blocks around the test, the innermost last."""
    partner: int | None = None
    """Start of the candidate in another test that gets the old value of this one. The file keeps
    its values if both are chosen."""
    holds_before: bool = False
    """True if the code before the fix meets the claim, and fails in a later line of the test."""
    fails_before: bool = False
    """True if the code before the fix fails in this claim."""


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
    failing: Collection[int] = (),
) -> list[Candidate]:
    """Return the plausible swaps of a test file, the best first; [] if it cannot be parsed.

    With `tests`, ids of declared tests, only swaps that may belong to one of them. `before` is the
    file at the base commit: everybody knows its lines to be honest, so swaps in them come late.
    `failing` are lines in which the code before the fix fails: it meets the claims above them.
    """
    from swerl.grading import expectations, languages
    from swerl.grading.plausible import WEAK, Kind, Plausible

    language = languages.language_of(path)
    if not language or len(text) > _MAX_BYTES:
        return []
    is_wanted = _Filter(ids := list(tests))
    found = expectations.read(language, text, is_wanted.is_named if ids else None)
    plausible, echoes = Plausible(language, text, found, rng), _Echoes(text, found)
    wanted = [each for each in found if is_wanted(each.test)]
    if len(wanted) > _MAX_PLACES:
        wanted = rng.sample(wanted, _MAX_PLACES)
    known = set(before.split(b"\n"))
    starts = _line_starts(text)
    held = _Held(starts, found, failing)
    ranked: list[tuple[tuple[float, ...], Candidate]] = []
    seen: set[tuple[int, int, str]] = set()
    for each in wanted:
        options = plausible.replacements(each)[:_MAX_ALTERNATIVES]
        for place, plain in enumerate(options):
            option = echoes.repeated(each, plain)
            if held(each, option.start) and not held(each, plain.start):
                # In a claim that holds before the fix, the same value shows no forged one.
                option = replace(plain, kind=Kind.TOLD)
            key = (option.start, option.end, option.new)
            if key in seen:
                continue
            seen.add(key)
            line = _line(starts, each.start)
            is_old = text[starts[line - 1] : starts[line] - 1] in known if known else False
            partner = option.partner if option.partner >= 0 else None
            candidate = Candidate(
                path, option.start, option.end, option.new, line, each.test, option.kind,
                each.outer, partner, held(each, option.start), held.fails(each),
            )  # fmt: skip
            is_weak = option.kind in WEAK
            first = (is_old or candidate.holds_before, is_weak, each.depth, place)
            ranked.append(((*first, rng.random()), candidate))
    ranked.sort(key=lambda pair: pair[0])
    return _capped(_failing_first([candidate for _, candidate in ranked]))


@dataclass(frozen=True, slots=True)
class Assertion:
    """An assertion of a test file."""

    path: str
    test: str
    outer: tuple[str, ...]
    has_swap: bool
    """True if a swap makes the test fail there."""


def assertions(path: str, text: bytes, swaps: Iterable[Swap], tests: list[str]) -> list[Assertion]:
    """Return the assertions of the tests with these ids, of all if there is none.

    `swaps` are those of this text. Claims that have no form of their own, such as a call that must
    not raise, are not found.
    """
    from swerl.grading import expectations, languages

    is_wanted = _Filter(tests).is_named if tests else None
    found = expectations.claims(languages.language_of(path), text, is_wanted)
    places = sorted({place for claim in found for place in claim.places})
    # The test fails at the first value that a swap changes.
    first = {places[at] for s in swaps if (at := bisect.bisect_left(places, s.start)) < len(places)}
    each = (Assertion(path, c.test, c.outer, bool(first & c.places)) for c in found)
    return [one for one in each if not tests or any(belongs(one, test) for test in tests)]


def _failing_first(found: list[Candidate]) -> list[Candidate]:
    """Move one swap of each test to the front: in the claim that fails before the fix."""
    from swerl.grading.plausible import WEAK

    first: dict[tuple[str, ...], Candidate] = {}
    for each in found:
        if each.fails_before and not each.holds_before and each.kind not in WEAK:
            first.setdefault((*each.outer, each.test), each)
    front = {id(each) for each in first.values()}
    return [*first.values(), *(each for each in found if id(each) not in front)]


class _Held:
    """Tells which claims the code before the fix meets: whoever keeps it meets their swaps, too."""

    def __init__(
        self, starts: list[int], found: Sequence[Expectation], failing: Collection[int]
    ) -> None:
        self._starts, self._found, self._failing = starts, found, sorted(failing)
        self._places = [each.start for each in found]
        self._first: dict[tuple[int, int], int] = {}

    def __call__(self, each: Expectation, start: int) -> bool:
        """Return True if the first claim that a swap from `start` on changes holds before."""
        at = bisect.bisect_right(self._places, start) - 1
        first = self._found[at] if at >= 0 and start < self._found[at].end else each
        line = self._failing_line(each)
        return bool(line) and _line(self._starts, first.claim_end) < line

    def fails(self, each: Expectation) -> bool:
        """Return True if the code before the fix fails in the claim: the first that it misses."""
        if each.span not in self._first:
            line = self._failing_line(each)
            own = (one.claim_end for one in self._found if one.span == each.span)
            missed = (end for end in own if line and _line(self._starts, end) >= line)
            self._first[each.span] = min(missed, default=-1)
        return each.claim_end == self._first[each.span]

    def _failing_line(self, each: Expectation) -> int:
        """Return the first line of the test in which the code before the fix fails; 0 if none."""
        # The first line of a test is its place, not a failure.
        begin, end = (_line(self._starts, place) for place in each.span)
        return next((line for line in self._failing if begin < line <= end), 0)


class _Echoes:
    """The places of a test that tell an expected value again, and would betray a swap of one.

    These are further claims, comments, docstrings and messages. They get the new value, too.
    """

    def __init__(self, text: bytes, found: Sequence[Expectation]) -> None:
        from swerl.grading.plausible import PROSE

        self._text, self._code = text, PROSE.sub(b" ", text)
        self._of_test: dict[tuple[int, int], list[Expectation]] = defaultdict(list)
        self._places: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self._owners = [(each.start, each.span) for each in found]
        for each in found:
            self._of_test[each.span].append(each)
            self._places[each.span].append((each.start, each.end))
        ends = sorted((each.end, each.start) for each in found)
        for span, places in self._places.items():
            if span[1] - span[0] <= _MAX_TEST_BYTES:
                prose = PROSE.finditer(text, *span)
                places += [match.span() for match in prose if _is_aside(text, match.span(), ends)]

    def repeated(self, each: Expectation, option: Replacement) -> Replacement:
        """Return the replacement in all places that tell the old value; weak if one must stay."""
        from swerl.grading.plausible import Kind
        from swerl.grading.syntax import Content

        if each.content in (Content.OPERATOR, Content.BOOLEAN):
            return option
        if (option.start, option.end) != (each.start, each.end):
            # Two values of one test change places.
            ends = {option.start, option.end}
            pair = [one for one in self._of_test[each.span] if {one.start, one.end} & ends]
            is_told = any(self._others(one) or self._tells(one) for one in pair)
            return replace(option, kind=Kind.TOLD) if is_told else option
        if self._tells(each):
            return replace(option, kind=Kind.TOLD)
        if not (others := self._others(each)):
            return option
        new = _core(option.new)
        start = min(each.start, *(start for start, _ in others))
        end = max(each.end, *(end for _, end in others))
        if end - start > _MAX_ECHO_BYTES or any(
            start <= at < end and span != each.span for at, span in self._owners
        ):
            return replace(option, kind=Kind.TOLD)
        pieces = dict.fromkeys(others, new) | {(each.start, each.end): option.new}
        edits = [
            Candidate("", a - start, b - start, text, 0, "", option.kind)
            for (a, b), text in pieces.items()
        ]
        text = swapped(self._text[start:end], edits).decode(errors="replace")
        return replace(option, start=start, end=end, new=text)

    def _others(self, each: Expectation) -> list[tuple[int, int]]:
        """Return the places of the test that tell the value again."""
        word, places = _word(each), [] if each.is_outside else self._places[each.span]
        return [
            match.span()
            for start, end in (places if len(places) <= _MAX_PLACES_OF_TEST else ())
            if word and start != each.start and not _OPERAND.match(self._text, max(0, start - 2))
            for match in word.finditer(self._text, start, end)
            if match.end() <= each.start or match.start() >= each.end
        ]

    def _tells(self, each: Expectation) -> bool:
        """Return True if a title around it holds the value, or an import would have no use."""
        from swerl.grading.syntax import Content

        titles = " / ".join([each.test, *each.outer, *self._titles(each)])
        if _core(each.source).lower() in (piece.lower() for piece in _PIECE.findall(titles)):
            return True
        word = _word(each)
        if word and " " in _core(each.source) and word.search(titles.encode()):
            return True
        line = self._text[each.end : each.end + 200].partition(b"\n")[0]
        if word and each.is_outside and word.search(line):
            return True
        is_exception = each.content is Content.EXCEPTION
        return bool(word and is_exception and len(word.findall(self._code)) == 2)

    def _titles(self, each: Expectation) -> list[str]:
        """Return the titles of the row of a table around a value."""
        text = self._text[max(0, each.start - 300) : each.end + 300]
        at = min(each.start, 300)
        start = max(text.rfind(sign, 0, at) for sign in (b"{", b"[", b"\n\n"))
        row = text[start + 1 :].partition(b"}")[0]
        found = [match[1] for match in _ROW_TITLE.finditer(row)]
        if each.is_outside or b".Run(" in self._text[slice(*each.span)]:
            # By custom the first text of a row is its title.
            found += _FIRST_TEXT.findall(row)[:1]
        return [title.decode(errors="replace") for title in found]


def _is_aside(text: bytes, span: tuple[int, int], ends: Sequence[tuple[int, int]]) -> bool:
    """Return True for a comment, and for a string that is no value: a docstring or a message.

    `ends` has the end and the start of each claimed value.
    """
    start, end = span
    if text[start : start + 1] not in b"\"'`":
        return True
    before = text[max(0, start - 80) : start]
    if _ASIDE.search(before):
        return True
    at = bisect.bisect_right(ends, (start, start)) - 1
    is_claim = at + 1 < len(ends) and ends[at + 1][1] < end
    return at >= 0 and not is_claim and bool(_NEXT.fullmatch(text[ends[at][0] : start]))


def _word(each: Expectation) -> re.Pattern[bytes] | None:
    core = _core(each.source)
    if not _WORD.search(core):
        return None
    return re.compile(rb"(?<![\w.])%s(?!\w|\.\d)" % re.escape(core.encode()))


def _core(source: str) -> str:
    """Return a string without its quotes, an exception without its module, a number as it is."""
    from swerl.grading.plausible import QUOTES

    match = QUOTES.fullmatch(source)
    return match["body"] if match else source


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


def belongs(candidate: Candidate | Assertion, test_id: str) -> bool:
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
    # A title that ends so goes on with a computed part.
    if _WORD.fullmatch(name) and not name.endswith("_"):
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", test_id):
            return True
        return _has_title(name, test_id.lower())
    # Go writes the blanks of a title as underscores.
    return name in test_id or name.replace(" ", "_") in test_id


def _has_title(name: str, lower: str) -> bool:
    """Return True for the words of a name, as PHPUnit prints `testChangeOfANote`.

    A single word may be a part of any id, unless a data set follows.
    """
    words = _PIECE.findall(name.removeprefix("test").replace("_", " "))
    title = " ".join(words).lower()
    return bool(words) and (title if len(words) > 1 else f"{title} with data set") in lower


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
            is_word = _WORD.fullmatch(test) is not None and not test.endswith("_")
            is_known = test in self._words or _has_title(test, self._lower)
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
