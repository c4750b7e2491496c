"""Find expected values in test files, and other values that may replace them.

One tokenizer reads every language: literals, names, operators and brackets. A test begins at a
line such as `def test_x`, `it("title"` or `func TestX(`, and ends where the indentation falls back.
In its assertions, only values that are compared directly are replaced: not the arguments of the
code under test, not bounds or alternatives, which an honest answer may meet in another way.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import PurePosixPath
from typing import TypeAlias

from swerl.core.task import Edit

_HASH = frozenset({".py", ".rb", ".php", ".ex", ".exs", ".sh", ".pl", ".R"})
"""Languages in which `#` begins a comment."""
_SCRIPTS = frozenset({".js", ".jsx", ".mjs", ".cjs", ".ts", ".tsx"})
_CHARS = frozenset({".go", ".rs", ".java", ".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".cs", ".kt"})
"""Languages in which a single quote holds one character."""
_SLASH = _SCRIPTS | _CHARS | {".php", ".scala", ".swift"}
"""Languages in which `//` begins a comment."""
_DYNAMIC = _SCRIPTS | {".py", ".rb", ".php"}
"""Languages in which `[x]` may stand in the place of any `x`."""
_MAX_BYTES = 4 << 20
_MAX_PER_TEST = 6
"""Candidates of one test: a run of the known solution tries one of each test."""
_NUM_VALUES = 2
"""Other values for one place."""
_MANY = 1_000
"""Positional arguments of a call, all of them."""
_MAX_CHARS = 2_000
"""Longest text that is replaced."""
_STATEMENT_TOKENS = 400
"""Longest assertion: tables have more tokens, and their first rows suffice."""

_HEAD = re.compile(
    r"^[ \t]*(?:(?:[\w<>\[\],.@]+[ \t]+){0,5}?(?:def|func|fn|fun|function|void|test)[ \t]+"
    r"(?:self\.|\([^()\n]*\)[ \t]*)?(?P<name>\w+)"
    r"|(?:[\w.]+\.)?(?:x?it|test|specify|scenario|example|Run)\b[.\w]*(?:\([^\n]*\))??[ \t]*\(?"
    r"[ \t]*(?P<quote>[\"'`])(?P<title>[^\n]*?)(?P=quote)"
    r"|(?:TEST|SCENARIO)\w*[ \t]*\([ \t]*\"?(?P<suite>\w+)[^\n,]*,[ \t]*(?P<case>\w+))",
    re.MULTILINE,
)
"""The line at which a test begins."""
_CLASS = re.compile(r"^([ \t]*)(?:[\w@]+[ \t]+){0,3}class[ \t]+(\w+)", re.MULTILINE)
_ASSERTS = re.compile(
    r"(?:assert|expect|should|must|refute|check|verify|require|XCTAssert|raises?|warns?|deprecated"
    r"|eq|ok|equals?|same|deepEqual|notEqual|strictEqual|is|Equal|NotEqual|Error|Contains)"
    r"(?:[A-Z_]\w*)?$|(?:ASSERT|EXPECT|REQUIRE|CHECK)(?:_\w+)?$|fnmatch_lines$"
)
"""Names that begin an assertion."""
_FAILS = re.compile(
    r"\b(?:t|b|s|suite)\.(?:Error|Fatal|Fail)|\bpanic!?\(|\bfail(?:ed|ure)?\b|\braise\b|\bthrow\b"
    r"|return (?:1|-1|false)\b|\bexit\(1\)|\babort\(|\bFAIL",
)
"""A branch that fails the test."""
_OPEN_CALLS = re.compile(
    r"(?:assert|expect|must|should|refute|raises?|warns?|be|have|eq)(?:[A-Z_]\w*)?$"
    r"|to$|to(?:Be|Equal|StrictEqual|Contain|Match|Have|Throw|Include|Start|End)\w*$"
    r"|is$|is(?:Equal|Same|Not)\w*$|(?:eql|eqv|ok|err|some|contains?|includes?|include|match"
    r"|matches|throws?|equals?|same|starts?_?[wW]ith|starts|ends?_?[wW]ith|ends|deep|approx|of"
    r"|Equal|EqualValues|Contains|deepEqual|strictEqual|DeepEqual|strcmp|is_?close|allclose)$"
    r"|(?:ASSERT|EXPECT|REQUIRE|CHECK)\w*$|ck_assert\w*$|assert_all_?close$|\w*_equals?$"
    r"|(?:set|list|tuple|dict|frozenset|bytes|str|array|vec|Vec|List|Map|Set|String|Decimal"
    r"|Fraction|date|datetime|timedelta|OrderedDict|Counter|asList|Some|Ok|Err|search|fullmatch"
    r"|fnmatch|Regexp|Series|Index|DataFrame|Has(?:Prefix|Suffix)|fnmatch_lines)$"
)
"""Calls whose arguments are values that are compared."""
_OPTIONS = re.compile(
    r"\w*msg|message|reason|delta|places|decimals?|abs|rel|\w*tol\w*|timeout|check_\w+|strict|exact"
)
"""Arguments of assertions that are no expected values."""
_EXCEPTIONS = {
    ".py": ("EOFError", "BufferError"),
    ".rb": ("FloatDomainError", "FiberError"),
    ".php": (r"\UnderflowException", r"\RangeException"),
    ".java": ("ArrayStoreException", "NegativeArraySizeException"),
    ".js": ("EvalError", "URIError"),
}
"""Exceptions that honest code hardly raises, by language."""
_BOUNDS = re.compile(
    r"Greater|Less|Between|InRange|Not[A-Z_]|_not_|^(?:not|not_to|to_not)$"
    r"|^(?:above|below|at_?[lL]east|at_?[mM]ost|within|most|least|[gl][te])$"
)
"""Words of assertions that many values meet."""
_RAISES = re.compile(r"(?:[rR]aises?|[wW]arns|expectException|assertThrows|toThrow|throws)\w*$")
_WARNINGS = ("BytesWarning", "ImportWarning")
"""Their counterparts where a test asserts a warning: any other class would fail with any code."""
_LIKE = "({0} * {1} if {0} and isinstance({0}, (int, float, str, list)) else [{0}])"
"""Another value of the same type in Python, for a name."""
_PART_OF_DATE = re.compile(r"\bdate(?:time)?\([^()]*,\s*$")
"""What stands before a month or a day, which cannot be any number."""
_FLIPS = {"==": "!=", "===": "!==", "<": ">=", ">": "<="}
_FLIPS |= {new: old for old, new in _FLIPS.items()}
_PAIRS = (
    "True False", "true false", "assertTrue assertFalse", "assertIn assertNotIn", "isTrue isFalse",
    "assertIsNone assertIsNotNone", "assertEqual assertNotEqual", "assertNull assertNotNull",
    "assertSame assertNotSame", "assertCount assertNotCount", "toBeTruthy toBeFalsy", "Nil NotNil",
    "assert_equal refute_equal", "assert_includes refute_includes", "assert_nil refute_nil",
    "assert_predicate refute_predicate", "assert_eq assert_ne", "EXPECT_TRUE EXPECT_FALSE",
    "ASSERT_TRUE ASSERT_FALSE", "EXPECT_EQ EXPECT_NE", "ASSERT_EQ ASSERT_NE", "NoError Error",
    "assertGreater assertLessEqual", "assertLess assertGreaterEqual",
    "toBeGreaterThan toBeLessThanOrEqual", "toBeLessThan toBeGreaterThanOrEqual",
)  # fmt: skip
_OPPOSITES = dict([*map(str.split, _PAIRS), *(pair.split()[::-1] for pair in _PAIRS)])
"""Negations of assertions, and of truth values."""
_TRUTHS = frozenset({"True", "False", "true", "false"})
_TERMS = frozenset({"+", "-", "*", "/", "%", "&", "|", "^", "**", "//"})
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_WORD = re.compile(r"(?<![\\%])\b[A-Za-z]+|(?<=\\[nrt])[A-Za-z]+")
_INTEGER = re.compile(r"0|-?[1-9]\d*")
_PIECE = re.compile(r"[a-z]+|\d+")
_PATTERN = re.compile(r"[|\[]|[\w)]\?")
"""A regular expression with alternatives."""
_TOLERANT = re.compile(
    r"(?i)approx|close|almost|delta|tol|near|round|contain|inclu|frame|series|\bin\b"
)
"""Words of assertions in which a number near by may be right, too."""
_NEAR = 120
"""Characters around a value that show how it is compared."""
LONG = 3
"""Characters of a value that can be recognised elsewhere."""
_STRING = re.compile(
    r"(?s)(?P<open>[A-Za-z]{0,3}(?:#*\"|'''|'|`|\"\"\"))(?P<body>.*?)(?P<close>['\"`]+#*)"
)
_NUMBER = re.compile(r"(?i)(?P<prefix>0[xbo])?(?P<digits>[\d._]*\d|[\da-f_]+)(?P<rest>.*)")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replacement in a test."""

    edit: Edit
    old: str
    test: str
    """Name or title of the test; empty if the file has none."""
    outer: str
    """Class around the test; empty if there is none."""
    is_value: bool
    """False for a truth value, an exception or an operator."""
    is_alone: bool
    """True if neither the file nor the order of its neighbours reveals the old value."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


_Place: TypeAlias = tuple[_Token, tuple[str, ...]]
"""What can be replaced, and its only replacements; without any it is a value."""


@dataclass(frozen=True, slots=True)
class _Test:
    name: str
    outer: str
    start: int
    end: int


def supports(path: str) -> bool:
    """Return True if the file's language is known."""
    return PurePosixPath(path).suffix in _HASH | _SLASH


def candidates(
    path: str, text: bytes, rng: random.Random, is_wanted: Callable[[str], bool]
) -> list[list[Candidate]]:
    """Return the replacements in each wanted test of a file, the best first.

    `is_wanted` gets the name or title of a test. A file without tests counts as one test.
    """
    if len(text) > _MAX_BYTES or not supports(path):
        return []
    # One character for each byte, so that offsets are those of the file.
    source = _Source(path, text.decode("latin-1"))
    tests = [test for test in source.tests() if is_wanted(test.name)]
    places = [(test, list(dict.fromkeys(source.places(test)))) for test in tests]
    values = Counter(core_of(token.text) for _, own in places for token, news in own if not news)
    copies = Counter(core_of(token.text) for token in source.tokens) - values
    units = [_replacements(source, test, own, copies, rng) for test, own in places]
    return [unit for unit in units if unit]


class _Source:
    """A test file as tokens."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.suffix = PurePosixPath(path).suffix
        self.tokens = list(_tokens(text, self.suffix))
        self._starts = [token.start for token in self.tokens]
        texts = [token.text for token in self.tokens if token.kind == "string" or "_" in token.text]
        self.words = sorted(set(re.findall("[A-Za-z]+", " ".join(texts))))

    def tests(self) -> list[_Test]:
        """Return the tests of the file; the whole file if no line begins a test."""
        classes = [(len(m[1]), m[2], m.start()) for m in _CLASS.finditer(self.text)]
        texts = [token for token in self.tokens if token.kind == "string"]
        inside = {text.start + m.end() for text in texts for m in re.finditer("\n", text.text)}
        found = []
        for head in _HEAD.finditer(self.text):
            if head.start() in inside:
                continue
            indent = len(head[0]) - len(head[0].lstrip())
            outer = [name for depth, name, at in classes if at < head.start() and depth < indent]
            name = head["name"] or head["title"] or head["case"]
            end = self._end(head.start(), indent, inside)
            found.append(_Test(_decoded(name), outer[-1] if outer else "", head.start(), end))
        return found or [_Test("", "", 0, len(self.text))]

    def _end(self, start: int, indent: int, inside: set[int]) -> int:
        """Return where the indentation falls back to that of the test's first line."""
        at = self.text.find("\n", start) + 1
        while at:
            line = self.text[at : at + 300].partition("\n")[0]
            text = line.lstrip()
            is_code = text and at not in inside and text[0] not in ")]}{#" and text[:2] != "//"
            if is_code and len(line) - len(text) <= indent:
                return at
            at = self.text.find("\n", at) + 1
        return len(self.text)

    def places(self, test: _Test) -> Iterator[_Place]:
        """Yield what the assertions of a test compare, values first."""
        weak = list[_Place]()
        first, last = (bisect_left(self._starts, end) for end in (test.start, test.end))
        at = first
        named: set[str] = set()
        while at < last:
            token = self.tokens[at]
            end = self._statement_end(at, last) if token.kind == "name" else at
            if end > at:
                values, names = self._values(at, end)
                yield from values
                named |= names
                weak += [*self._wrapped(at, end, names), *self._operators(at, end)]
            at = max(end, at + 1)
        for at in range(first, last - 2):
            if self.tokens[at].text in named and self.tokens[at + 1].text in ("=", ":="):
                yield from self._literals(at + 2, self._value_end(at + 2, last))
        yield from weak

    def _statement_end(self, at: int, last: int) -> int:
        """Return the end of the assertion that begins with a name; `at` if none does."""
        text = self.tokens[at].text
        if text in ("if", "unless"):
            end = self._block_start(at, last)
            return end if _FAILS.search(self.text[self.tokens[end - 1].end :][:300]) else at
        before = self.tokens[at - 1].text if at else ""
        is_call = at + 1 < last and self.tokens[at + 1].text in ("(", "!", "<", "{")
        if not _ASSERTS.match(text) or before in ("def", "func", "fn", "function", "void", "new"):
            return at
        if not (is_call or text.startswith(("assert", "expect", "should", "must", "refute"))):
            return at
        return self._line_end(at, min(last, at + _STATEMENT_TOKENS))

    def _line_end(self, at: int, last: int) -> int:
        """Return the first token behind the statement: of a new line outside of brackets."""
        depth, before = 0, ""
        for index in range(at, last):
            here = self.tokens[index]
            if here.text in _CLOSES:
                depth += 1
            elif here.text in (")", "]", "}"):
                depth -= 1
            if depth < 0 or (depth == 0 and here.text == ";"):
                return index
            is_chained = here.text in (".", ")", "]", "}") or before in (".", "\\", ",", "=")
            if index > at and depth == 0 and self._begins_line(index) and not is_chained:
                return index
            before = here.text
        return last

    def _block_start(self, at: int, last: int) -> int:
        for index in range(at + 1, min(last, at + 80)):
            # Go writes composite literals in conditions, too.
            is_block = self.suffix != ".go" or "\n" in self.text[self.tokens[index].end :][:2]
            if self.tokens[index].text in ("{", ":", "then") and is_block:
                return index
            if self.suffix == ".rb" and self._begins_line(index):
                return index
        return at + 1

    def _value_end(self, at: int, last: int) -> int:
        depth = 0
        for index in range(at, min(last, at + _STATEMENT_TOKENS)):
            text = self.tokens[index].text
            depth += (text in _CLOSES) - (text in _CLOSES.values())
            is_new = index > at and self._begins_line(index) and text not in _CLOSES.values()
            is_end = depth == 0 and (text in (",", ";") or is_new)
            if depth < 0 or is_end:
                return index
        return min(last, at + _STATEMENT_TOKENS)

    def _begins_line(self, index: int) -> bool:
        return "\n" in self.text[self.tokens[index - 1].end : self.tokens[index].start]

    def _values(self, at: int, end: int) -> tuple[list[_Place], set[str]]:
        """Return the compared literals of an assertion, and the compared names."""
        first, *texts = [token.text for token in self.tokens[at:end]]
        is_branch, is_call = first in ("if", "unless"), texts[:1] in (["("], ["!"])
        is_call = is_call and first != "assert" and not is_branch
        places = list(self._exception(at, end))
        # With alternatives, an honest answer may meet another one.
        alternatives = {"&&", "and", "if"} if is_branch else {"or", "||", "if"}
        if alternatives & set(texts) or ("?" in texts and self.suffix in _SCRIPTS):
            return places, set()
        if any(map(_BOUNDS.search, (first, *texts))):
            return places, set()
        if not is_call and {"<", "<=", ">", ">="} & set(texts):
            return places, set()
        signs = {"!=", "!=="} if first == "if" else {"==", "===", "is"}
        has_in = "in" in texts and "not" not in texts and self.suffix == ".py"
        if not (is_call or has_in or signs & set(texts)) and (is_branch or first == "assert"):
            # Only a call such as `x.startswith("a")` compares.
            needs_call = list(self._literals(at + 1, end, needs_call=True))
            return [*places, *needs_call], set()
        stop = at + 1 + texts.index("in") if has_in and not is_call else end
        num_args = 1 if first == "assert" or re.fullmatch(r"\w*[a-z]In", first) else 2
        literals = list(self._literals(at + 1, stop, num_args=num_args))
        # The last value is the expected one more often than the first.
        ordered = literals if is_call else literals[::-1]
        return [*places, *ordered], self._compared_names(at + 1, stop)

    def _compared_names(self, at: int, stop: int) -> set[str]:
        """Return the names that stand alone, outside of the arguments of the code under test."""
        stack, names = list[bool](), set[str]()
        for index in range(at, stop):
            token = self.tokens[index]
            following = self.tokens[index + 1].text if index + 1 < stop else ")"
            if token.text in _CLOSES:
                stack.append(self._compares(index))
            elif token.text in _CLOSES.values():
                del stack[-1:]
            elif (
                token.kind == "name"
                and self.tokens[index - 1].text != "."
                and all(stack)
                and following in (")", ",", "==", "!=", "{", ";")
            ):
                names.add(token.text)
        return names

    def _exception(self, at: int, end: int) -> Iterator[_Place]:
        """Yield the exception of an assertion, if it is a single name."""
        texts = [token.text for token in self.tokens[at:end]]
        index = next((index for index, text in enumerate(texts) if _RAISES.search(text)), end)
        index += 1 + (texts[index + 1 : index + 2] == ["("])
        while (
            texts[index + 1 : index + 2] in (["."], ["::"], ["\\"]) and texts[index + 2] != "class"
        ):
            index += 2
        # In Python it may be a parameter of the test.
        is_alone = self.suffix == ".py" and texts[index + 1 : index + 2] in ([")"], [","])
        name = texts[index] if index < len(texts) else ""
        if name[:1].isupper() or (name.isidentifier() and is_alone):
            token = self.tokens[at + index]
            is_warning = self.suffix == ".py" and token.text.endswith("Warning")
            names = _EXCEPTIONS.get(self.suffix, _EXCEPTIONS[".js"])
            yield token, _WARNINGS if is_warning else names

    def _literals(
        self, at: int, end: int, *, num_args: int = _MANY, needs_call: bool = False
    ) -> Iterator[_Place]:
        """Yield the literals that stand outside of calls, or in calls that compare."""
        stack: list[bool] = []
        num_commas = [0]
        for index in range(at, min(end, len(self.tokens))):
            token = self.tokens[index]
            if token.text in _CLOSES:
                is_call = token.text == "(" and self.tokens[index - 1].kind == "name"
                stack.append(all(stack) and self._compares(index))
                num_commas.append(0 if is_call else -_MANY)
            elif token.text in _CLOSES.values():
                if not stack:
                    return
                stack.pop()
                num_commas.pop()
            elif token.text == ",":
                num_commas[-1] += 1
            elif not all(stack) or (needs_call and not stack) or max(num_commas[:2]) >= num_args:
                continue
            elif token.text in ("lambda", "for", "->"):
                return
            elif token.text in _TRUTHS and self._is_value(index, end):
                yield token, (_OPPOSITES[token.text],)
            elif token.kind in ("string", "number") and self._is_value(index, end):
                yield token, ()

    def _compares(self, index: int) -> bool:
        """Return True for a bracket of a collection, or of a call that compares its arguments."""
        token, before = self.tokens[index], self.tokens[index - 1]
        if before.text in _TERMS or before.text == "in":
            return False
        if before.kind != "name" and before.text not in ("]", ")", "!", "?"):
            return True
        if token.text == "[" and before.end == token.start:
            return False
        while index > 1 and self.tokens[index - 1].text in ("!", "?"):
            index -= 1
        name = self.tokens[index - 1]
        return name.kind == "name" and bool(_OPEN_CALLS.match(name.text))

    def _is_value(self, index: int, last: int) -> bool:
        """Return True unless the literal is a term, a key, a message or another argument."""
        token = self.tokens[index]
        before = self.tokens[index - 1]
        earlier = self.tokens[index - 2].text if index > 1 else ""
        following = self.tokens[index + 1].text if index + 1 < last else ""
        is_sign = before.text == "-" and not earlier[-1:].isalnum() and earlier not in (")", "]")
        if (before.text in _TERMS and not is_sign) or following in _TERMS or following == ".":
            after = self.tokens[index + 2].text if index + 2 < last else ""
            is_same = following == "." and after in ("to_string", "to_owned", "into", "freeze")
            return token.kind == "string" and (following == "%" or is_same)
        # Options such as `delta=1` are no values.
        if before.text == "=" and _OPTIONS.fullmatch(earlier):
            return False
        if token.kind != "string":
            return not _PART_OF_DATE.search(self.text[: token.start][-80:])
        is_template = bool(re.match(r"[rR]?[fF][rR]?[\"']", token.text)) or "#{" in token.text
        is_template |= "$" in token.text and (self.suffix == ".php" or token.text[0] == "`")
        return not is_template and len(token.text) < _MAX_CHARS

    def keeps_order(self, token: _Token, new: str) -> bool:
        """Return True unless the neighbours in a list show that this literal was replaced."""
        at = bisect_left(self._starts, token.start)
        old, now = _sort_key(token.text), _sort_key(new)
        for step in (-1, 1):
            near = self.tokens[at + step : at + 3 * step : step]
            if len(near) == 2 and near[0].text == "," and near[1].kind == token.kind:
                other = _sort_key(near[1].text)
                if (other < old, old < other) != (other < now, now < other):
                    return False
        return True

    def _wrapped(self, at: int, end: int, names: set[str]) -> Iterator[_Place]:
        """Yield the last compared name, such as a parameter of the test, to be put in a list.

        A negation alone would accept objects that equal everything.
        """
        tokens = self.tokens[at:end]
        if self.suffix not in _DYNAMIC or any(_RAISES.search(token.text) for token in tokens):
            return
        if token := next((token for token in reversed(tokens) if token.text in names), None):
            forms = (_LIKE, _LIKE) if self.suffix == ".py" else ("[{0}]", "[{0}, {0}]")
            yield token, tuple(form.format(token.text, at) for at, form in enumerate(forms, 2))

    def _operators(self, at: int, end: int) -> Iterator[_Place]:
        """Yield the negation of an assertion."""
        first = self.tokens[at].text
        if first == "assert" and self.suffix == ".py":
            stop = self._value_end(at + 1, end)
            start, last = self.tokens[at + 1].start, self.tokens[stop - 1].end
            claim = self.text[start:last]
            yield _Token("claim", claim, start, last), (f"not ({claim})",)
            return
        opposites = _FLIPS if first in ("if", "unless") else _OPPOSITES
        signs = [t for t in self.tokens[at:end] if t.text in opposites and t.text not in _TRUTHS]
        for token in signs[:1]:
            yield token, (opposites[token.text],)


def _tokens(text: str, suffix: str) -> Iterator[_Token]:
    """Yield the tokens of a text in any language, without its comments."""
    strings = [
        r"r(?P<hashes>#*)\"[\s\S]*?\"(?P=hashes)" if suffix == ".rs" else "",
        r"[rbuf]{0,2}(?:\"\"\"[\s\S]*?\"\"\"|'''[\s\S]*?''')|[rbufRBUF]{0,2}\"(?:\\[\s\S]|[^\"\\\n])*\"",
        r"b?'(?:\\u\{\w+\}|\\.\w*|[^'\\\n])'" if suffix in _CHARS else "",
        r"[rbufRBUF]{0,2}'(?:\\[\s\S]|[^'\\\n])*'" if suffix not in _CHARS else "",
        r"`(?:\\[\s\S]|[^`\\])*`",
    ]
    comments = [
        r"#[^\n]*" if suffix in _HASH else "",
        r"//[^\n]*|/\*[\s\S]*?\*/" if suffix in _SLASH else "",
    ]
    pattern = re.compile(
        rf"(?P<comment>{'|'.join(filter(None, comments))})"
        rf"|(?P<string>{'|'.join(filter(None, strings))})"
        r"|(?P<number>\b\d[\w.]*(?<=[eE])[+-]\d+|\b\d(?:\w|\.\d)*)|(?P<name>[A-Za-z_$]\w*)"
        r"|(?P<operator>===|!==|==|!=|<=|>=|=>|->|:=|::|&&|\|\||\*\*|<|>|=)|(?P<other>[^\s\w])"
    )
    for match in pattern.finditer(text):
        if match.lastgroup != "comment":
            kind = "string" if match.lastgroup == "hashes" else match.lastgroup or ""
            yield _Token(kind, match[0], match.start(), match.end())


def _decoded(name: str) -> str:
    return name.encode("latin-1").decode("utf-8", "replace")


def _replacements(
    source: _Source,
    test: _Test,
    places: Iterable[_Place],
    copies: Counter[str],
    rng: random.Random,
) -> list[Candidate]:
    """Return the candidates of a test: another value of each place, then a second one."""
    ranked: list[tuple[tuple[bool, int, bool, float], Candidate]] = []
    body = Counter(_PIECE.findall(source.text[test.start : test.end].lower()))
    for token, news in places:
        before = source.text[max(test.start, token.start - _NEAR) : token.start]
        around = before + source.text[token.end : min(test.end, token.end + _NEAR)]
        is_value, is_hidden = not news, _is_alone(core_of(token.text), around, body, copies)
        others = _others(token.text, source.words, rng, is_exact=not _TOLERANT.search(around))
        # A number beside it may be an argument, which is no likely result.
        beside = set(re.findall(r"\w+", around))
        made = (new for new in others if new not in beside)
        old = _decoded(token.text)
        for number, new in enumerate(news or islice(made, _NUM_VALUES)):
            edit = Edit(source.path, token.start, token.end, _decoded(new))
            is_alone = is_hidden and source.keeps_order(token, new)
            candidate = Candidate(edit, old, test.name, test.outer, is_value, is_alone)
            # In a random order, code cannot compute just those that are replaced.
            order = (number, not is_alone, rng.random()) if is_value else (0, False, 0.0)
            ranked.append(((not is_value, *order), candidate))
    ranked.sort(key=lambda pair: pair[0])
    return [candidate for _, candidate in ranked[:_MAX_PER_TEST]]


def _is_alone(core: str, around: str, body: Counter[str], copies: Counter[str]) -> bool:
    """Return True if neither its test, its file nor a formula of numbers near it has a value."""
    pieces = Counter(_PIECE.findall(core.lower()))
    is_new = any(body[piece] == count for piece, count in pieces.items())
    if not is_new or (len(core) >= LONG and copies[core]):
        return False
    if not _INTEGER.fullmatch(core):
        return True
    value, numbers = int(core), set(map(int, re.findall(r"\d+", around)))
    pairs = product(numbers, repeat=2)
    return not any(value in (a + b, a - b, a * b, a // (b or 1)) for a, b in pairs)


def _sort_key(literal: str) -> tuple[float, str]:
    """Return what a literal is sorted by: its number, or its text."""
    try:
        return float(literal), ""
    except ValueError:
        return 0.0, literal


def core_of(old: str) -> str:
    """Return a value; of a text what stands between its quotes."""
    match = _STRING.fullmatch(old)
    return match["body"] if match else old


def _others(old: str, words: Sequence[str], rng: random.Random, *, is_exact: bool) -> Iterator[str]:
    """Yield other literals of the same form."""
    if text := _STRING.fullmatch(old):
        made = {old}
        for draw in range(10):
            body = _other_text(text["body"], words if draw < 5 else [], rng)
            new = text["open"] + body + text["close"]
            if new not in made:
                made.add(new)
                yield new
    elif number := _NUMBER.fullmatch(old):
        yield from _numbers(number, rng, is_exact=is_exact)


def _numbers(match: re.Match[str], rng: random.Random, *, is_exact: bool) -> Iterator[str]:
    """Yield numbers with another digit, the nearest first; far ones if a tolerance equals those."""
    prefix, digits, rest = match["prefix"] or "", match["digits"], match["rest"]
    places = [at for at, sign in enumerate(digits) if sign in "123456789"]
    if not places:
        for new in rng.sample(range(2, 10), 8):
            yield prefix + digits.replace("0", str(new), 1) + rest
        return
    # A round number stays round.
    place = places[-1 if is_exact else 0]
    old = int(digits[place])
    near = [new for new in range(old - 2, old + 3) if 0 < new < 10 and new != old]
    far = [*range(1, int(old * 0.6) + 1), *range(2 * old, 10)]
    order = {
        new: (abs(new - old) if is_exact else 0, rng.random())
        for new in (near if is_exact else far)
    }
    for new in sorted(order, key=order.__getitem__):
        yield f"{prefix}{digits[:place]}{new}{digits[place + 1 :]}{rest}"


def _digits(text: str) -> list[re.Match[str]]:
    """Return the digits that can become smaller; none of a pattern, which may allow that."""
    return [] if _PATTERN.search(text) else list(re.finditer(r"(?<!\\)[2-9]", text))


def _other_text(text: str, words: Sequence[str], rng: random.Random) -> str:
    # A smaller digit leaves a date, a time or a version what it is.
    if digits := _digits(text):
        place = digits[-1] if digits[-1][0] > "2" else rng.choice(digits[-2:])
        return f"{text[: place.start()]}{rng.randint(1, int(place[0]) - 1)}{text[place.end() :]}"
    places = list(_WORD.finditer(text))
    if not places:
        changed = re.sub(r"(?<!\\)[0-9]", lambda _: str(rng.randint(1, 9)), text)
        return changed if changed != text else text + rng.choice("xyz")
    # In a pattern, each word may be an alternative.
    is_pattern = bool(_PATTERN.search(text))
    others = [] if is_pattern else [word for word in words if word.lower() not in text.lower()]
    best = [place for place in places if _alike(place[0], others)] or places
    for place in reversed(places if is_pattern else [rng.choice(best)]):
        text = text[: place.start()] + _other_word(place[0], others, rng) + text[place.end() :]
    return text


def _other_word(word: str, words: Sequence[str], rng: random.Random) -> str:
    """Return a word of the file that looks alike, else letters: code may look a word up."""
    if others := _alike(word, words):
        return rng.choice(others)
    letters = [rng.choice("aeiou" if at % 2 else "bdgkmptvz") for at in range(len(word))]
    return "".join(n.upper() if o.isupper() else n for n, o in zip(letters, word, strict=True))


def _alike(word: str, words: Iterable[str]) -> list[str]:
    """Return the words with the same case, of the same length if there is one."""
    alike = [each for each in words if each.islower() == word.islower()]
    near = [each for each in alike if 0 < abs(len(each) - len(word)) <= 2]
    return [each for each in alike if len(each) == len(word)] or near
