"""Names for canaries: like those of real tests, so that no word in one gives it away."""

from __future__ import annotations

import keyword
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from swerl.core.task import GradingSpec

ID_WORD = re.compile(r"\w+")
_PIECE = re.compile(r"[A-Z]+[a-z0-9]*|[a-z0-9]+")
_WORD = re.compile(r"\b[a-z]{3,10}\b")
# fmt: off
_COMMON = frozenset({
    "alias", "array", "batch", "blank", "block", "bound", "cache", "child", "class",
    "close", "column", "count", "default", "depth", "digit", "double", "empty", "error",
    "exact", "extra", "field", "filter", "first", "format", "group", "index", "inner",
    "input", "invalid", "large", "last", "level", "list", "local", "lower", "many", "match",
    "missing", "mixed", "nested", "number", "option", "order", "outer", "parent", "path",
    "plain", "prefix", "range", "record", "repeat", "root", "same", "second", "short",
    "simple", "single", "size", "sorted", "string", "suffix", "text", "type", "unicode",
    "unique", "upper", "valid", "width", "zero",
})
# fmt: on
"""Words of tests' names everywhere."""


def names_in(tests: Iterable[str]) -> set[str]:
    """Return the words of test ids without their parameters; a function's name is among them."""
    return {word for test in tests for word in ID_WORD.findall(test.partition("[")[0])}


class Namer:
    """Makes names of tests that look like the file's own."""

    def __init__(
        self, text: str, tests: Sequence[str], spec: GradingSpec, rng: random.Random
    ) -> None:
        self._rng = rng
        declared = names_in([*spec.fail_to_pass, *spec.pass_to_pass, *spec.expected])
        self._taken = {*tests, *declared}
        self._used = Counter(word for name in sorted(self._taken) for word in set(_words(name)))
        words: set[str] = {word for word in _WORD.findall(text) if not keyword.iskeyword(word)}
        self._pools = [sorted(pool - set(self._used)) for pool in (words, set(_COMMON))]

    def word(self) -> str:
        """Return a word that stands in no test's name."""
        pool = self._rng.choice([pool for pool in self._pools if pool] or [["value", "result"]])
        return self._rng.choice(pool)

    def names_like(self, like: str, num: int) -> list[str]:
        """Return names that nothing has: all differ from this one in the same one of its words.

        That is a word of its own where it has one, and the others get words of their own too.
        """
        parts, joint = (like.split("_"), "_") if "_" in like else (_PIECE.findall(like), "")
        places = [at for at in range(1, len(parts)) if parts[at]]
        own = [at for at in places if self._used[parts[at].lower()] < 2]
        at = self._rng.choice(own or places or [len(parts)])
        names: list[str] = []
        while len(names) < num:
            is_shared = places and not own and self._rng.random() < 0.9
            word = self._rng.choice(sorted(self._used)) if is_shared else self.word()
            word = word if joint or not places else word.capitalize()
            name = joint.join([*parts[:at], word, *parts[at + 1 :]])
            name = name if places else f"{like}_{word}"
            if name in self._taken:
                self._pools[1].append(f"case{len(self._pools[1])}")
            else:
                self._taken.add(name)
                names.append(name)
        return names


def _words(name: str) -> list[str]:
    pieces = name.split("_") if "_" in name else _PIECE.findall(name)
    return [piece.lower() for piece in pieces if piece.isalnum()]
