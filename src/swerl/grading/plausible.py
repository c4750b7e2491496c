"""Other values that an honest test might expect just as well.

A value changes places with another one of its test or file where it can: the values of the file
stay the same, so none looks odd. Else it becomes a value of the file, or differs from the old one
by a small step in its own spelling: a digit for a digit, a word of the file for a word.
"""

from __future__ import annotations

import builtins
import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from swerl.grading import existence
from swerl.grading import languages as known
from swerl.grading.syntax import Content, Expectation


class Kind(StrEnum):
    """How the new text of a swap was found."""

    EXCHANGE = "exchange"
    """Two expected values change places."""
    VALUE = "value"
    """Another expected value of the file, or the other truth value."""
    EDIT = "edit"
    """A small step: another number, or another word of the file."""
    NEGATION = "negation"
    """The opposite, in a spelling that the file uses, too. Code that returns the value it reads
    fails there as the known solution does: weak beside swaps of values."""
    EXCEPTION = "exception"
    """Another exception of the file or of the language."""
    OPERATOR = "operator"
    """The opposite, in a spelling that this file rarely uses: weak."""
    FOREIGN = "foreign"
    """A word that no honest text holds, in place of a single one that a text must hold: weak."""
    TOLD = "told"
    """Another place of the file, which stays, tells the old value: weak."""


WEAK = frozenset({Kind.OPERATOR, Kind.TOLD, Kind.FOREIGN})
"""Swaps that show."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """A new text for a span around one expectation, or around two that change places."""

    kind: Kind
    start: int
    end: int
    new: str
    partner: int = -1
    """Start of the expectation in another test that gets this one's value, -1 if none."""


_NUMBER = re.compile(r"(\d(?:[\d_,']*\d)?)(\.\d(?:[\d_]*\d)?)?((?:[eE][+-]?\d+)?)([a-zA-Z_]\w*)?")
_OTHER_BASE = re.compile(r"(0(?:[xX][\da-fA-F_]*|[bBoO][\d_]*))([\da-fA-F])(_?[uUiIlLnz]\w*)?")
QUOTES = re.compile(
    r"(?P<start>[a-zA-Z@#]*(?:\"{3}|'{3}|[\"'`]))(?P<body>.*)(?P<end>[\"'`]#*)", re.S
)
_TOKEN = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{\w+\}|[0-7]{1,3}|.)|%\(\w+\)\w|%-?\d*[a-zA-Z]|\{\w*\}"
    r"|(?P<word>[^\W\d_]+)|(?P<digits>\d+)", re.S
)  # fmt: skip
PROSE = re.compile(
    rb"\"{3}.*?\"{3}|'{3}.*?'{3}|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|`[^`]*`"
    rb"|(?:\#(?!\[)|//)[^\n]*|/\*.*?\*/", re.S
)  # fmt: skip
"""Strings and comments of all languages."""
_STRINGS = re.compile(rb"[\"'`]([^\"'`\n]{2,120})[\"'`]")
_EXCEPTION_NAME = re.compile(
    r"(?<![\w.])(?:[A-Za-z_]\w*(?:\.|::))*[A-Z]\w*(?:Error|Exception|Warning)\b"
)
_STOP = re.compile(
    r"(?:the|and|for|not|with|are|was|has|from|this|that|you|can|but|its)$", re.IGNORECASE
)
_BASES = frozenset(
    {"Exception", "BaseException", "Error", "StandardError", "Throwable", "Warning", "ImportError"}
)
_TELLING = re.compile(r"[^\W\d_]+|\d+")
_ODD = 0.15
"""A value that stands out more is used last."""
_DRAWS = 8
"""Tries to find a step after which the test still tells as much of a value."""
_VOCABULARY_BYTES = 400_000
_MAX_POOL = 400


class Plausible:
    """Finds other values for the expectations of one file."""

    def __init__(
        self, language: str, text: bytes, found: Sequence[Expectation], rng: random.Random
    ) -> None:
        self._language = language
        self._text = text
        self._rng = rng
        self._num_uses = Counter(each.source for each in found)
        self._used = Counter((each.source, each.opposite) for each in found)
        self._words_of: dict[tuple[int, int], Counter[str]] = {}
        self._pools: dict[tuple[str, ...], list[Expectation]] = defaultdict(list)
        for each in found:
            self._pools[_form(each)].append(each)
        self._partners = self._pair_up(found)
        self._num_expected = 0
        self._exceptions = self._known_exceptions(found)
        self._vocabulary = self._words(found)

    def replacements(self, each: Expectation) -> list[Replacement]:
        """Return other texts for an expectation, the best first."""
        if each.content is Content.OPERATOR:
            return [self._negated(each)]
        if each.content is Content.BOOLEAN:
            words = {"true": "false", "True": "False", "TRUE": "FALSE"}
            words |= {other: one for one, other in words.items()}
            new = words.get(each.source, "")
            return [Replacement(Kind.VALUE, each.start, each.end, new)] if new else []
        if existence.stays(self._text, each):
            word = existence.foreign_word(self._text, each, self._rng)
            return [Replacement(Kind.FOREIGN, each.start, each.end, word)] if word else []
        if each.content is Content.EXCEPTION:
            return self._other_exceptions(each)
        drawn = [option for _ in range(_DRAWS) for option in self._edited(each)]
        drawn.sort(key=lambda option: self._stands_out(each, option))
        is_one_of = existence.is_one_of(self._text, each)
        fit = [option for option in drawn if self._suits(each, option.new)]
        edits = [option for option in fit if self._is_new(each, option, is_one_of)][:1]
        if each.is_near or each.content is Content.WORDS or is_one_of:
            return edits
        exchanges, values = self._exchanged(each), self._others(each)
        # A value that stands alone in its file becomes another such value; one that the file
        # repeats becomes one that the file repeats.
        options = [*edits, *exchanges, *values]
        if self._num_uses[each.source] > 1:
            options = [*exchanges, *values, *edits]
        elif exchanges and exchanges[0].partner < 0:
            options = [*exchanges, *edits, *values]
        return sorted(options, key=lambda option: self._stands_out(each, option) > _ODD)

    def _is_new(self, each: Expectation, option: Replacement, is_one_of: bool) -> bool:
        """Return True unless another honest patch may meet the claim with both values."""
        if is_one_of:
            # What the file names elsewhere may stand beside the value.
            match = QUOTES.fullmatch(option.new)
            return (match["body"] if match else option.new).encode() not in self._text
        return not (each.is_near and existence.is_within(self._text, each, option.new))

    # Values that change places.

    def _pair_up(self, found: Sequence[Expectation]) -> dict[int, Expectation]:
        """Return start -> the expectation to change places with; of one test, else of the file."""
        partners: dict[int, Expectation] = {}
        fit = [
            each
            for each in found
            if each.content in (Content.NUMBER, Content.STRING)
            and not (each.is_near or existence.stays(self._text, each))
            and not existence.is_one_of(self._text, each)
        ]
        for in_test in (True, False):
            groups: dict[tuple[str, ...], list[Expectation]] = defaultdict(list)
            for each in fit:
                if each.start not in partners:
                    place = (*each.outer, each.test) if in_test else ()
                    groups[(*_form(each), "/", *place)].append(each)
            for group in groups.values():
                mixed = self._rng.sample(group, len(group))
                for one, two in zip(mixed[::2], mixed[1::2], strict=False):
                    if one.source != two.source and self._may_exchange(one, two):
                        partners[one.start], partners[two.start] = two, one
        return partners

    def _suits(self, each: Expectation, new: str) -> bool:
        """Return False for factors and exponents that nobody writes, such as `1*x` and `x**1`."""
        if each.content is not Content.NUMBER or new.strip("0.") not in ("", "1"):
            return True
        before = self._text[max(each.start - 4, 0) : each.start].rstrip()[-1:]
        after = self._text[each.end : each.end + 4].lstrip()[:1]
        is_zero = not new.strip("0.")
        return (
            before not in (b"*", b"/", b"^")
            and after not in (b"*", b"^")
            and not (is_zero and before == b"-")
        )

    def _may_exchange(self, one: Expectation, two: Expectation) -> bool:
        if not (self._suits(one, two.source) and self._suits(two, one.source)):
            return False
        if one.container == two.container and one.container >= 0:
            # A sorted list in another order is odd.
            return not self._is_sorted(one)
        return True

    def _is_sorted(self, each: Expectation) -> bool:
        row = [o.source for o in self._pools[_form(each)] if o.container == each.container]
        values = [float(s) if re.fullmatch(r"\d+(\.\d+)?", s) else s for s in row]
        numbers = [value for value in values if isinstance(value, float)]
        if len(numbers) == len(values):
            return numbers in (sorted(numbers), sorted(numbers, reverse=True))
        return row in (sorted(row), sorted(row, reverse=True))

    def _exchanged(self, each: Expectation) -> list[Replacement]:
        other = self._partners.get(each.start)
        if other is None:
            return []
        if (other.test, other.outer) != (each.test, each.outer) or each.is_outside:
            return [Replacement(Kind.EXCHANGE, each.start, each.end, other.source, other.start)]
        first, second = sorted((each, other), key=lambda one: one.start)
        between = self._text[first.end : second.start].decode(errors="replace")
        new = f"{second.source}{between}{first.source}"
        return [Replacement(Kind.EXCHANGE, first.start, second.end, new)]

    # Values of the file.

    def _others(self, each: Expectation) -> list[Replacement]:
        """Return a value of the same form that another place of the file expects."""
        pool = self._pools[_form(each)]
        sample = self._rng.sample(pool, min(len(pool), 8))
        values = [
            other.source
            for other in sample
            if other.source != each.source and self._suits(each, other.source)
        ]
        if each.content is Content.STRING:
            values.sort(key=lambda value: -_likeness(value, each.source))
        options = [Replacement(Kind.VALUE, each.start, each.end, value) for value in values]
        return sorted(options, key=lambda option: self._stands_out(each, option))[:1]

    def _stands_out(self, each: Expectation, option: Replacement) -> float:
        """Return how much the share of its words and numbers that the rest of the test has differs.

        Answers often repeat what a test gives; one that suddenly does so, or no longer, shows.
        """
        old = self._text[option.start : option.end].decode(errors="replace")
        was, now = (_TELLING.findall(text.lower()) for text in (old, option.new))
        if each.span not in self._words_of:
            text = self._text[slice(*each.span)].decode(errors="replace").lower()
            self._words_of[each.span] = Counter(_TELLING.findall(text))
        told, own = self._words_of[each.span], Counter(was)
        one, two = (
            sum(told[word] > own[word] for word in words) / max(len(words), 1)
            for words in (was, now)
        )
        return abs(one - two)

    # Small steps.

    def _edited(self, each: Expectation) -> list[Replacement]:
        if each.content is Content.NUMBER:
            is_far = each.is_near or existence.is_one_of(self._text, each)
            texts = [_other_number(each.source, self._rng, is_far=is_far)]
            if each.within and existence.is_within(self._text, each, texts[0]):
                texts = [existence.beyond(each.source, each.within, self._rng)]
        elif each.content is Content.STRING and (match := QUOTES.fullmatch(each.source)):
            bodies = filter(None, self._other_texts(match["body"]))
            texts = [f"{match['start']}{body}{match['end']}" for body in bodies]
        else:
            texts = self._other_texts(each.source)
        return [Replacement(Kind.EDIT, each.start, each.end, new) for new in texts if new]

    def _other_texts(self, text: str) -> list[str]:
        """Return the text with a number replaced, and with a word; "" for what it does not have."""
        tokens = list(_TOKEN.finditer(text))
        words = [
            token
            for token in tokens
            if (word := token["word"]) and len(word) > 2 and not _STOP.match(word)
        ]
        digits = [token for token in tokens if token["digits"] and _is_countable(text, token)]
        numbers = [self._step_digits(text, digits)] if digits else []
        other = self._turn_words(text, words) or self._replace_word(text, words)
        return [*numbers, other] if other or numbers else [self._other_letter(text)]

    def _step_digits(self, text: str, digits: Sequence[re.Match[str]]) -> str:
        token = self._rng.choice(digits)
        return _put(text, token, _stepped_digits(token["digits"], self._rng))

    def _turn_words(self, text: str, words: Sequence[re.Match[str]]) -> str:
        """Exchange two words of the same case, so that the text keeps its words."""
        if len(words) < 2 or len(words) > 3 or " " in text:
            return ""
        one, two = sorted(self._rng.sample(words, 2), key=lambda token: token.start())
        if one[0] == two[0] or _case(one[0]) != _case(two[0]):
            return ""
        between = text[one.end() : two.start()]
        return f"{text[: one.start()]}{two[0]}{between}{one[0]}{text[two.end() :]}"

    def _replace_word(self, text: str, words: Sequence[re.Match[str]]) -> str:
        own = {word[0].lower() for word in words}
        for token in self._rng.sample(list(words), len(words)):
            old = token[0]
            pool = [
                word
                for word in self._vocabulary.get(_case(old), [])
                if abs(len(word) - len(old)) <= 2 and word.lower() not in own
            ]
            if pool:
                return _put(text, token, self._rng.choice(pool))
        return ""

    def _other_letter(self, text: str) -> str:
        """Return another text for one that is a single letter or a short run of letters."""
        if re.fullmatch(r"[a-zA-Z]", text):
            at = ord(text)
            step = self._rng.choice((-1, 1))
            new = chr(at + step)
            return new if new.isalpha() and new.isascii() else chr(at - step)
        return ""

    def _words(self, found: Sequence[Expectation]) -> dict[str, list[str]]:
        """Return case -> words of expected texts, else of all strings of the file."""
        own: list[str] = []
        for each in found:
            if each.content in (Content.STRING, Content.WORDS):
                own += [t["word"] for t in _TOKEN.finditer(each.source) if t["word"]]
        others = [
            t["word"]
            for match in _STRINGS.finditer(self._text[:_VOCABULARY_BYTES])
            for t in _TOKEN.finditer(match[1].decode(errors="replace"))
            if t["word"]
        ]
        words: dict[str, list[str]] = defaultdict(list)
        for source in (own, others):
            for word in dict.fromkeys(source):
                if len(word) > 2 and not _STOP.match(word) and len(words[_case(word)]) < _MAX_POOL:
                    words[_case(word)].append(word)
        return {case: list(dict.fromkeys(each)) for case, each in words.items()}

    # Opposites and exceptions.

    def _negated(self, each: Expectation) -> Replacement:
        """Return the opposite; it is weak if few assertions of the file are spelled so."""
        usual = self._used[each.source, each.opposite]
        opposite = self._used[each.opposite, each.source]
        kind = Kind.NEGATION if opposite * 2 >= usual else Kind.OPERATOR
        return Replacement(kind, each.start, each.end, each.opposite)

    def _known_exceptions(self, found: Sequence[Expectation]) -> list[str]:
        own = [each.source for each in found if each.content is Content.EXCEPTION]
        if not own:
            return []
        # A name in a comment may mean nothing to the file.
        text = PROSE.sub(b" ", self._text[:_VOCABULARY_BYTES]).decode(errors="replace")
        self._num_expected = len(set(own))
        return list(dict.fromkeys([*own, *_EXCEPTION_NAME.findall(text)]))

    def _other_exceptions(self, each: Expectation) -> list[Replacement]:
        """Return other exceptions: expected elsewhere in the file, common ones, named in it."""
        prefix, last = _split(each.source)
        common = known.COMMON_EXCEPTIONS.get(self._language, "").split()
        if last.endswith("Warning"):
            common = ["UserWarning", "DeprecationWarning", "RuntimeWarning", "FutureWarning"]
        expected = [name for name in self._exceptions[: self._num_expected] if name != each.source]
        named = [name for name in self._exceptions if _split(name)[0] == prefix]
        pools = [expected, named, common] if prefix else [expected, common, named]
        if last not in (own := known.own_exceptions(self._language)):
            # An honest patch may derive an exception of the project from any of these.
            pools = [[name for name in pool if _split(name)[1] not in own] for pool in pools]
        names: list[str] = []
        for pool in pools:
            fit = [
                name
                for name in dict.fromkeys(pool)
                if _is_other_exception(name, last) and not self._may_be_kind(name, last)
            ]
            names += [name for name in self._rng.sample(fit, len(fit)) if name not in names]
        odd = known.ODD_EXCEPTIONS.get(self._language, "")
        if not names and odd and last not in _BASES:
            return [Replacement(Kind.FOREIGN, each.start, each.end, odd)]
        return [Replacement(Kind.EXCEPTION, each.start, each.end, name) for name in names[:2]]

    def _may_be_kind(self, name: str, old: str) -> bool:
        """Return True if an exception may be a kind of the old one, as far as names tell.

        An honest patch may raise the narrower one, which a test of either name accepts.
        """
        new = _split(name)[1]
        if old in _BASES:
            return True
        if self._language == "py":
            types = [getattr(builtins, each, None) for each in (old, new)]
            kinds = [each for each in types if isinstance(each, type)]
            return types[0] in kinds and (len(kinds) < 2 or issubclass(kinds[1], kinds[0]))
        kinds_of_old = known.EXCEPTION_KINDS.get(self._language, {}).get(old, "").split()
        names = known.own_exceptions(self._language)
        return new in kinds_of_old or (old in names and new not in names)


def _form(each: Expectation) -> tuple[str, ...]:
    """Return what two values must share to stand in each other's place."""
    source = each.source
    if each.content is Content.NUMBER:
        match = _NUMBER.fullmatch(source.lstrip("+-"))
        if match is None:
            return (each.content, source)
        whole = re.sub(r"\D", "", match[1])
        # In a typed language a large number may not fit where a small one stands.
        size = source[: source[0] in "+-"] + ("small" if int(whole) <= 100 else str(len(whole)))
        return (each.content, size, str(bool(match[2])), str(bool(match[3])), match[4] or "")
    if each.content is Content.STRING:
        match = QUOTES.fullmatch(source)
        start = match["start"] if match else source[:1]
        body = match["body"] if match else source
        spaces = "words" if " " in body.strip() else "word" if body else "empty"
        return (each.content, start, spaces)
    return (each.content,)


def _likeness(one: str, two: str) -> float:
    """Return how much two strings share: words first, then their length."""
    words = [set(re.findall(r"\w+", text.lower())) for text in (one, two)]
    return len(words[0] & words[1]) - abs(len(one) - len(two)) / 100


def _case(word: str) -> str:
    kinds = ("lower", "upper", "title")
    return next((kind for kind in kinds if getattr(word, f"is{kind}")()), "mixed")


def _put(text: str, token: re.Match[str], new: str) -> str:
    return f"{text[: token.start()]}{new}{text[token.end() :]}"


def _is_countable(text: str, token: re.Match[str]) -> bool:
    """Return True if digits are a number; not part of a hash."""
    before, after = text[: token.start()][-1:], text[token.end() :][:1]
    return len(token[0]) <= 6 and not after.isalpha() and not (before.isalpha() and after.isalnum())


def _stepped_digits(digits: str, rng: random.Random) -> str:
    """Return a number of as many digits, one or two steps away; zeros at its end stay."""
    zeros = len(digits) - len(digits.rstrip("0"))
    # Either parity is as likely, as some answers always share theirs with the inputs.
    step = rng.choice((1, 2))
    if zeros == len(digits):
        return digits[:-1] + str(step)
    zeros = zeros if len(digits) > 2 else 0
    head, tail = digits[: len(digits) - zeros], digits[len(digits) - zeros :]
    value = int(head)
    around = [other for other in (value - step, value + step) if other >= 0]
    # The width stays, and powers of two stay rare: they may not fit the type.
    fit = [other for other in around if len(str(other)) == len(head.lstrip("0") or "0")]
    fit = [other for other in fit or around if other < 128 or other & (other - 1)] or around
    return str(rng.choice(fit)).zfill(len(head)) + tail


def _other_number(source: str, rng: random.Random, *, is_far: bool) -> str:
    """Return another number in the same spelling, "" if there is none."""
    if source[:1] in ("+", "-"):
        new = _other_number(source[1:], rng, is_far=is_far)
        return new and source[0] + new
    if re.match("0[xXbBoO]", source):
        if (found := _OTHER_BASE.fullmatch(source)) is None:
            return ""
        new = "0123456789abcdef"[int(found[2], 16) ^ 1]
        return f"{found[1]}{new.upper() if found[2].isupper() else new}{found[3] or ''}"
    match = _NUMBER.fullmatch(source)
    if match is None or (len(match[1]) > 1 and match[1][0] == "0"):
        return ""
    whole, fraction = match[1], match[2] or ""
    rest = source[len(whole) + len(fraction) :]
    if is_far:
        # The first digit that counts: a tenth of the value or more.
        body = whole + fraction
        at = next((i for i, char in enumerate(body) if char in "123456789"), -1)
        if at < 0:
            return f"{whole[:-1]}1{fraction}{rest}"
        return f"{body[:at]}{_other_digit(body[at], rng)}{body[at + 1 :]}{rest}"
    if fraction.strip(".0_"):
        at = len(fraction.rstrip("0_"))
        digit = _other_digit(fraction[at - 1], rng)
        return f"{whole}{fraction[: at - 1]}{digit}{fraction[at:]}{rest}"
    if re.search(r"\D", whole):
        return f"{whole[:-1]}{int(whole[-1]) - 1 if whole[-1] != '0' else 1}{fraction}{rest}"
    return f"{_stepped_digits(whole, rng)}{fraction}{rest}"


def _other_digit(digit: str, rng: random.Random) -> str:
    step = rng.choice((1, 2))
    return str(rng.choice([n for n in (int(digit) - step, int(digit) + step) if 1 <= n <= 9]))


def _split(name: str) -> tuple[str, str]:
    """Return the module or namespace of a name, and its last part."""
    last = re.split(r"[.:\\]", name)[-1]
    return name[: len(name) - len(last)], last


def _is_other_exception(name: str, old: str) -> bool:
    """Return True for another exception of the same family: an error or a warning."""
    last = _split(name)[1]
    is_kind = last.endswith("Warning") == old.endswith("Warning")
    return is_kind and last not in (old, *_BASES)
