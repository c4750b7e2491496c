"""The twin's bugs: templates, and variants drawn from them.

A template is an operation (`sub`) in a shape (`pair`: both operands are parameters; `fixed`: the
second one is a constant). A variant fixes everything else: names, the wrong expression, the
constant, file, neighbours, prompt and test inputs. A function's name and operands decide whether it
is held out; a held-out function stands in no training repository, neither broken nor sound as a
neighbour of the broken one.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class Split(StrEnum):
    """Which variants to draw."""

    TRAIN = "train"
    """Variants to learn from."""
    HELDOUT = "heldout"
    """Other variants of the same templates."""
    UNSEEN = "unseen"
    """Variants of templates that nothing is ever trained on."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What a function is meant to compute of its operands `{a}` and `{b}`."""

    good: str
    wrong: tuple[str, ...]
    names: tuple[str, ...]
    """Names that a function of this operation may have."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function and the value it must return."""

    function: str
    args: tuple[int, ...]
    want: int | bool

    @property
    def text(self) -> str:
        """The call as Python writes it."""
        return f"{self.function}({', '.join(map(str, self.args))})"


@dataclass(frozen=True, slots=True)
class Function:
    """A one-line function in full."""

    operation: str
    name: str
    params: tuple[str, ...]
    operands: tuple[str, str]

    def source(self, pattern: str) -> str:
        """Return its definition with this expression."""
        return f"def {self.name}({', '.join(self.params)}):\n    return {self.fill(pattern)}\n"

    def fill(self, pattern: str) -> str:
        """Return the pattern with this function's operands."""
        return pattern.format(a=self.operands[0], b=self.operands[1])


@dataclass(frozen=True, slots=True)
class Variant:
    """One small broken repository and everything that judges a repair."""

    template: str
    file: str
    function: Function
    bad: str
    """The wrong expression, as it stands in the file."""
    good: str
    """The right one."""
    source: str
    """The broken file."""
    prompt: str
    """What the agent is asked; names one failing call."""
    failing: tuple[Call, ...]
    """Calls that the bug breaks."""
    passing: tuple[Call, ...]
    """Calls that work before and after: of the broken function and of its neighbours."""

    @property
    def fixed(self) -> str:
        """The repaired file."""
        return self.source.replace(f"return {self.bad}", f"return {self.good}")

    def guesses(self) -> list[str]:
        """Return every expression that a developer might try, the right and wrong ones alike."""
        return [self.function.fill(pattern) for pattern in PATTERNS]


OPERATIONS = {
    "add": Operation("{a} + {b}", ("{a} - {b}", "{a} * {b}"), ("add", "plus", "total")),
    "sub": Operation("{a} - {b}", ("{b} - {a}", "{a} + {b}"), ("sub", "minus", "gap")),
    "mul": Operation("{a} * {b}", ("{a} + {b}", "{a} // {b}"), ("mul", "times", "area")),
    "div": Operation("{a} // {b}", ("{b} // {a}", "{a} * {b}"), ("div", "share", "split")),
    "mod": Operation("{a} % {b}", ("{a} // {b}", "{b} % {a}"), ("mod", "rest", "left")),
    "max": Operation("max({a}, {b})", ("min({a}, {b})", "{a} > {b}"), ("top", "most", "high")),
    "min": Operation("min({a}, {b})", ("max({a}, {b})", "{a} < {b}"), ("low", "least", "small")),
    "gt": Operation("{a} > {b}", ("{a} < {b}", "{a} >= {b}"), ("above", "over", "beats")),
    "lt": Operation("{a} < {b}", ("{a} > {b}", "{a} == {b}"), ("below", "under", "trails")),
    "eq": Operation("{a} == {b}", ("{a} != {b}", "{a} >= {b}"), ("same", "equal", "match")),
}
PATTERNS = tuple(
    dict.fromkeys(pattern for op in OPERATIONS.values() for pattern in (op.good, *op.wrong))
)
"""Every expression that occurs anywhere: what a repair is picked from."""
TRAINED = (
    *(f"{name}-pair" for name in OPERATIONS),
    *(f"{name}-fixed" for name in ("add", "sub", "mod", "max", "gt")),
)
UNSEEN = ("mul-fixed", "lt-fixed")
PARAMS = {
    "pair": (("a", "b"), ("x", "y"), ("m", "n"), ("p", "q")),
    "fixed": (("a",), ("x",), ("n",), ("s",)),
}
FILES = ("calc.py", "ops.py", "util.py", "nums.py")
PROMPTS = (
    "Fix {file}: {call} should be {want}.",
    "{file} is wrong: {call} must give {want}.",
    "In {file}, {call} should return {want}.",
)
_HELD_OUT_EVERY = 4
_NUM_CALLS = 6


def draw(rng: random.Random, split: Split) -> Variant:
    """Draw one variant of a split; every template is equally likely."""
    template = rng.choice(UNSEEN if split is Split.UNSEEN else TRAINED)
    function = _function(rng, template)
    while split is not Split.UNSEEN and _is_held_out(function) != (split is Split.HELDOUT):
        function = _function(rng, template)
    neighbours = [
        other
        for other in _neighbours(rng, function)
        if split is not Split.TRAIN or not _is_held_out(other)
    ]
    return _complete(rng, template, function, neighbours)


def calls(rng: random.Random, function: Function) -> list[Call]:
    """Return calls that together tell the right expression from every other one."""
    good = OPERATIONS[function.operation].good
    while True:
        rows = [tuple(rng.randint(1, 9) for _ in function.params) for _ in range(_NUM_CALLS)]
        found = [
            Call(function.name, args, _value(function, good, args)) for args in dict.fromkeys(rows)
        ]
        others = (pattern for pattern in PATTERNS if pattern != good)
        if all(any(_breaks(function, pattern, call) for call in found) for pattern in others):
            return found


def _function(rng: random.Random, template: str) -> Function:
    operation, shape = template.split("-")
    params = rng.choice(PARAMS[shape])
    second = params[1] if shape == "pair" else str(rng.randint(2, 8))
    name = rng.choice(OPERATIONS[operation].names)
    return Function(operation, name, params, (params[0], second))


def _is_held_out(function: Function) -> bool:
    """Hold out one in four functions of every name, each name with other operands.

    So every name, parameter and constant occurs in training: what is new is how they meet.
    """
    shift = hashlib.sha256(function.name.encode()).digest()[0]
    shape = "pair" if len(function.params) == 2 else "fixed"
    constant = int(function.operands[1]) if shape == "fixed" else 0
    place = PARAMS[shape].index(function.params)
    return (shift + place + constant) % _HELD_OUT_EVERY == 0


def _neighbours(rng: random.Random, function: Function) -> Iterator[Function]:
    """Yield the sound functions that share the file: none, or in a third of the files one."""
    used = {function.operation}
    for template in rng.sample(TRAINED, rng.choice((0, 0, 1))):
        operation = template.split("-")[0]
        if operation not in used:
            used.add(operation)
            yield _function(rng, template)


def _complete(
    rng: random.Random, template: str, function: Function, neighbours: list[Function]
) -> Variant:
    pattern = rng.choice(OPERATIONS[function.operation].wrong)
    bad = function.fill(pattern)
    tested = calls(rng, function)
    failing = [call for call in tested if _breaks(function, pattern, call)]
    passing = [call for call in tested if call not in failing]
    parts = [function.source(pattern)]
    for other in neighbours:
        good = OPERATIONS[other.operation].good
        if other.fill(good) != bad:
            parts.insert(rng.randint(0, len(parts)), other.source(good))
            passing += calls(rng, other)[:2]
    file, reported = rng.choice(FILES), rng.choice(failing)
    return Variant(
        template=template,
        file=file,
        function=function,
        bad=bad,
        good=function.fill(OPERATIONS[function.operation].good),
        source="\n\n".join(parts),
        prompt=rng.choice(PROMPTS).format(file=file, call=reported.text, want=reported.want),
        failing=tuple(failing),
        passing=tuple(passing),
    )


def _breaks(function: Function, pattern: str, call: Call) -> bool:
    got = _value(function, pattern, call.args)
    return type(got) is not type(call.want) or got != call.want


def _value(function: Function, pattern: str, args: tuple[int, ...]) -> int | bool:
    """Evaluate the expression; operands are never zero, so every pattern has a value."""
    second = args[1] if len(args) > 1 else int(function.operands[1])
    return _compiled(pattern)(args[0], second)


@functools.cache
def _compiled(pattern: str) -> Callable[[int, int], int | bool]:
    compiled: Callable[[int, int], int | bool] = eval(
        f"lambda a, b: {pattern.format(a='a', b='b')}"
    )
    return compiled
