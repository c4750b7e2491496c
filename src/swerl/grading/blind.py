"""Blind swaps: runs of the tests in which a random part of the expectations is replaced.

Code under test runs in the process that reports on it, so it can report every test as passed. It
cannot find out which expectations are real: a swapped one has another plausible value in place of
the right one (`swaps.py`), and everything else is equal. A run is believed only if exactly those
tests fail that fail with the known solution under the same swaps. Code that computes the answer
shows this pattern by itself; other code has to guess it.

The effect of each swap is measured with the known solution first, so a swap that the solution does
not notice, such as one within a tolerance, is never used.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from swerl.core.changes import touched
from swerl.core.grade import TestStatus, Verdict
from swerl.core.task import GradingSpec, Swap, Task
from swerl.grading.statuses import Statuses, reported, statuses_of
from swerl.grading.swaps import Assertion, Candidate, assertions, belongs, candidates, supports

_FEW_TESTS = 3
"""With fewer swappable tests, a run without swaps is added to the blind ones."""
_FURTHER, _ENOUGH_TESTS = 2, 6
"""Further runs with fewer swappable tests: there is little to guess in each run."""
MAX_TESTS = 40
"""Tests with a swap in one run of the known solution."""
_MAX_FILES = 40
_PLACE = re.compile(r"(?<![\w./-])(?P<name>[\w./-]{1,300})(?:\", line |[:(])(?P<line>\d{1,7})")
"""A line of a file in a log."""
_MODULE = re.compile(r"\(([\w.]+?)(?:\.[A-Z]\w*)?(?:\.\w+)?\)$")
"""The module in an id of unittest: `test_a (tests.test_b.TestC.test_a)`."""
_Claim: TypeAlias = list[Swap]
"""The swaps of one claim: alternatives for its value."""


def draw(swaps: Sequence[Swap], num_runs: int, rng: random.Random) -> list[tuple[Swap, ...]]:
    """Return the swaps of each blind run: at least `num_runs` random parts, none of them empty.

    A test has a swap in half of the parts, one with several claims in two of three, and in another
    claim each time while there is one. Each further claim brings one more run, up to twice as many.
    Fewer than six tests bring two more at least. With one or two, most parts hold them all, so a
    run without swaps is added. A single claim has a swap in any of its runs, but not in all.
    """
    # A swap that shows is used only in a test that has no other.
    units = [_claims([each for each in unit if each.is_secret] or unit) for unit in _units(swaps)]
    if _is_single(units):
        num_in_all = _num_parts(units, num_runs)
        chosen_runs = rng.randrange(1, 2**num_in_all - 1)
        [claim] = units[0]
        return [(rng.choice(claim),) if chosen_runs >> at & 1 else () for at in range(num_in_all)]
    runs: list[tuple[Swap, ...]] = [()] if len(units) < _FEW_TESTS else []
    num_in_all = len(runs) + _num_parts(units, num_runs) if units else 1
    left: list[list[Swap]] = [[] for _ in units]
    while len(runs) < num_in_all:
        if chosen := [at for at, unit in enumerate(units) if rng.random() < _chance(unit)]:
            runs.append(tuple(_next(units[at], left[at], rng) for at in chosen))
    rng.shuffle(runs)
    return runs


def _is_single(units: Sequence[Sequence[_Claim]]) -> bool:
    return len(units) == 1 and len(units[0]) == 1


def _num_parts(units: Sequence[Sequence[_Claim]], num_runs: int) -> int:
    """Return the number of runs with swaps, or of all for a single claim.

    Only claims with a secret swap bring more.
    """
    num_claims = (sum(claim[0].is_secret for claim in unit) for unit in units)
    least = min(_FURTHER, num_runs - 1) if len(units) < _ENOUGH_TESTS else 0
    found = num_runs + min(num_runs, max(least, max(num_claims, default=0) - 1))
    return max(2, found) if _is_single(units) else found


def _chance(unit: Sequence[_Claim]) -> float:
    """Return the chance that a test has a swap in a part."""
    return 1 / 2 if len(unit) == 1 else 2 / 3


def _claims(unit: Iterable[Swap]) -> list[_Claim]:
    """Return the swaps of a test by the first value that each changes: the test fails there.

    Code that forges only this value notices a swap that changes another one, too.
    """
    claims: dict[tuple[str, int], _Claim] = defaultdict(list)
    for swap in unit:
        claims[swap.place].append(swap)
    return [[s for s in own if not _covers(s, claims)] or own for own in claims.values()]


def _covers(swap: Swap, places: Iterable[tuple[str, int]]) -> bool:
    """Return True if a swap changes the value at another of these places, too."""
    return any(path == swap.path and swap.start < at < swap.end for path, at in places)


def _next(claims: Sequence[_Claim], left: list[Swap], rng: random.Random) -> Swap:
    """Take one of the swaps that are left; if none is, begin again with one of each claim."""
    if not left:
        left += map(rng.choice, rng.sample(claims, len(claims)))
    return left.pop()


def bits(swaps: Sequence[Swap], num_runs: int) -> float:
    """Return the bits that a report has to guess if its code cannot tell swapped from real.

    A guesser answers each of the k parts with the likeliest: with n tests of one claim, one of
    2**n - 1 equal ones. If a run without swaps is among them, a run is that one with probability
    1 / (k + 1), and the best guesser answers by these probabilities. For a single claim the
    2**k - 2 patterns of its runs are equally likely.
    """
    units = [_claims(unit) for unit in _units([swap for swap in swaps if swap.is_secret])]
    if not units or not num_runs:
        return 0.0
    if _is_single(units):
        return round(math.log2(2 ** _num_parts(units, num_runs) - 2), 2)
    chances = [_chance(unit) for unit in units]
    num_parts = _num_parts(units, num_runs)
    is_empty = math.prod(1 - chance for chance in chances)
    found = num_parts * (math.log2(1 - is_empty) - sum(map(math.log2, chances)))
    if len(units) < _FEW_TESTS:
        found += (num_parts + 1) * math.log2(num_parts + 1) - num_parts * math.log2(num_parts)
    return round(found, 2)


def share(spec: GradingSpec, swaps: Iterable[Swap]) -> float:
    """Return the share of the tests to fix that have a secret swap; 1 if none is declared."""
    covered = {test for swap in swaps if swap.is_secret for test in swap.fails}
    if not spec.fail_to_pass:
        return 1.0 if any(swap.is_secret for swap in swaps) else 0.0
    return sum(test in covered for test in spec.fail_to_pass) / len(spec.fail_to_pass)


def claims_share(spec: GradingSpec, texts: Mapping[str, bytes], swaps: Sequence[Swap]) -> float:
    """Return the share of the assertions in the tests to fix that have a secret swap.

    `texts` are the hidden test files. Returns 0 if no assertion is found.
    """
    found: list[Assertion] = []
    for path, text in texts.items():
        own = [swap for swap in swaps if swap.path == path and swap.is_secret]
        found += assertions(path, text, own, list(spec.fail_to_pass))
    return sum(each.has_swap for each in found) / max(len(found), 1)


def _units(swaps: Iterable[Swap]) -> list[list[Swap]]:
    """Return alternatives: swaps that share a test or text. Two might cancel out in one run.

    A swap in one test may fail others too: those behind it in C, the one around a subtest in Go.
    """
    found: list[tuple[set[str], list[Swap]]] = []
    for swap in swaps:
        names = set(swap.fails) or {""}
        near = [unit for unit in found if unit[0] & names or any(_meet(swap, s) for s in unit[1])]
        found = [unit for unit in found if unit not in near]
        joined = (names.union(*(tests for tests, _ in near)), [s for _, own in near for s in own])
        joined[1].append(swap)
        found.append(joined)
    return [own for _, own in found]


def _meet(one: Swap, two: Swap) -> bool:
    return one.path == two.path and one.start < two.end and two.start < one.end


@dataclass(frozen=True, slots=True)
class Seen:
    """The report of one run and its Verdict."""

    verdict: Verdict
    statuses: Statuses


def is_declared(spec: GradingSpec) -> bool:
    """Return True if the Task names tests; otherwise a number or an exit code decides."""
    return bool(spec.fail_to_pass or spec.pass_to_pass or spec.expected)


def unnoticed(swaps: Sequence[Swap], seen: Seen, spec: GradingSpec) -> str:
    """Return a test that did not fail though it had a swap; empty if every swap was noticed."""
    for test, status in statuses_of(_wanted(swaps), seen.statuses).items():
        if not _fails(status):
            return test
    if swaps and not is_declared(spec) and seen.verdict is Verdict.SOLVED:
        return "the test command"
    return ""


def as_unswapped(
    swaps: Sequence[Swap], seen: Mapping[str, TestStatus], spec: GradingSpec
) -> Statuses:
    """Return the report as it would be without swaps: tests that fail as predicted are good."""
    found = dict(seen)
    wanted = _wanted(swaps)
    statuses = statuses_of(wanted, seen)
    for test, names in reported(wanted, seen).items():
        good = TestStatus(spec.expected.get(test, "PASSED").lower())
        found.update({name: good for name in names if seen[name].fails})
        # A failed assertion in C ends the program, so that no later test is reported.
        if statuses[test] is TestStatus.MISSING:
            found[test] = good
    return found


def _fails(status: TestStatus) -> bool:
    return status.fails or status is TestStatus.MISSING


def other_failure(swaps: Sequence[Swap], seen: Mapping[str, TestStatus]) -> str:
    """Return a test that failed without a swap; empty if there is none, or no test is known."""
    wanted = _wanted(swaps)
    failing = (test for test, status in seen.items() if status.fails and test not in wanted)
    return next(failing, "") if wanted else ""


def _wanted(swaps: Iterable[Swap]) -> set[str]:
    return {test for swap in swaps for test in swap.fails}


def not_run(statuses: Mapping[str, TestStatus]) -> tuple[str, ...]:
    """Return the tests that were skipped or failed as expected."""
    kinds = (TestStatus.SKIPPED, TestStatus.XFAIL)
    return tuple(test for test, status in statuses.items() if status in kinds)


def test_files(task: Task) -> list[str]:
    """Return the absolute paths of files that may hold hidden tests, in a language with swaps.

    These are the files that grading brings, and those that test ids name.
    """
    spec = task.grading
    inside = [*spec.test_files, *touched(spec.test_patch)]
    for test in (*spec.fail_to_pass, *spec.pass_to_pass):
        if match := _MODULE.search(test):
            inside.append(match[1].replace(".", "/") + ".py")
        inside.append(test.partition("::")[0])
    found = [*(f"{task.workdir}/{path}" for path in inside), *spec.files]
    return [path for path in dict.fromkeys(found) if supports(path)][:_MAX_FILES]


@dataclass(frozen=True, slots=True)
class Trial:
    """A swap whose effect is to be measured in a run of the known solution."""

    swap: Swap
    candidate: Candidate


def failing_lines(log: str, paths: Iterable[str]) -> dict[str, set[int]]:
    """Return the lines of test files that a log names: of tracebacks and failed assertions.

    A name that fits several files says nothing about any.
    """
    named: dict[str, set[int]] = defaultdict(set)
    for match in _PLACE.finditer(log):
        named[match["name"]].add(int(match["line"]))
    found: dict[str, set[int]] = defaultdict(set)
    whole = {path: f"/{path}" for path in paths}
    for name, lines in named.items():
        end = f"/{name.removeprefix('./')}"
        fit = [path for path, each in whole.items() if each.endswith(end) or end.endswith(each)]
        if len(fit) == 1:
            found[fit[0]] |= lines
    return found


def trials(
    texts: Mapping[str, bytes],
    base: Mapping[str, bytes],
    spec: GradingSpec,
    *,
    at_once: int,
    failing: Mapping[str, Collection[int]] | None = None,
) -> list[list[Trial]]:
    """Return runs of the known solution that try out swaps: one for each test in every run.

    `texts` are the hidden test files and `base` the files of the same paths that the agent gets.
    Only tests to fix are tried if one of them has a swap. Secret swaps come first. `at_once` is the
    number of tests in one run. `failing` are the lines of the files in which the code before the
    fix fails. Equal arguments give equal runs.
    """
    from swerl.grading.plausible import WEAK

    units: dict[tuple[str, str], list[Trial]] = defaultdict(list)
    for path, text in texts.items():
        digest, before = hashlib.sha256(text).hexdigest(), base.get(path, b"")
        known = {line.strip() for line in before.splitlines()}
        lines = text.split(b"\n")
        rng = random.Random(digest)
        fails = (failing or {}).get(path, ())
        declared = _declared(spec)
        for each in candidates(path, text, rng, tests=declared, before=before, failing=fails):
            is_old = lines[each.line - 1].strip() in known or each.holds_before
            is_secret = not is_old and each.kind not in WEAK
            swap = Swap(path, digest, each.start, each.end, each.new, (), is_secret)
            units[path, each.test].append(Trial(swap, each))
    chosen = [_with_weak_negations(unit) for unit in _of_declared(units, spec)]
    for unit in chosen:
        places = {trial.swap.place for trial in unit}
        order = {id(each): (not each.swap.is_secret, _covers(each.swap, places)) for each in unit}
        unit.sort(key=lambda trial: order[id(trial)])
    chosen.sort(key=lambda unit: not unit[0].swap.is_secret)
    runs: list[list[Trial]] = []
    for turn in range(max(map(len, chosen), default=0)):
        left = [unit[turn] for unit in chosen if turn < len(unit)]
        runs.extend(left[at : at + at_once] for at in range(0, len(left), at_once))
    return runs


def _with_weak_negations(unit: list[Trial]) -> list[Trial]:
    """Return the swaps of a test; negations are no secret beside a value that is swapped.

    An object that holds every text notices the negation of `in`.
    """
    from swerl.grading.plausible import Kind

    kinds = {trial.candidate.kind for trial in unit if trial.swap.is_secret}
    is_text_only = any(trial.candidate.kind is Kind.FOREIGN for trial in unit)
    if kinds <= {Kind.NEGATION} and not is_text_only:
        return unit
    return [_shown(trial) if trial.candidate.kind is Kind.NEGATION else trial for trial in unit]


def _shown(trial: Trial) -> Trial:
    return replace(trial, swap=replace(trial.swap, is_secret=False))


def _declared(spec: GradingSpec) -> list[str]:
    return [*spec.fail_to_pass, *spec.pass_to_pass, *spec.expected]


def _of_declared(
    units: Mapping[tuple[str, str], list[Trial]], spec: GradingSpec
) -> list[list[Trial]]:
    """Return the candidates of tests to fix, else of tests to keep; all if no test is declared."""
    for declared in (spec.fail_to_pass, spec.pass_to_pass, tuple(spec.expected)):
        found = [
            unit
            for unit in units.values()
            if any(belongs(unit[0].candidate, test) for test in declared)
        ]
        if found:
            # Tests to keep pass before the fix, so whoever keeps the old code notices their swaps.
            is_of_fix = declared is spec.fail_to_pass or not spec.fail_to_pass
            return found if is_of_fix else [[_shown(trial) for trial in unit] for unit in found]
    return [] if is_declared(spec) else list(units.values())


def measured(run: Sequence[Trial], seen: Seen, spec: GradingSpec) -> list[Swap]:
    """Return the swaps of a run that the known solution noticed, each with the tests that fail.

    If a test fails that belongs to no swap, the run proves nothing. If tests are missing, one swap
    ended them all, so it must be the only one.
    """
    if is_declared(spec):
        found = statuses_of(_declared(spec), seen.statuses)
        is_cut = any(status is TestStatus.MISSING for status in found.values())
        if is_cut and len(run) > 1:
            return []
        wanted = {test: TestStatus(status.lower()) for test, status in spec.expected.items()}
        failing = {
            test
            for test, status in found.items()
            if _fails(status) and not wanted.get(test, TestStatus.PASSED).fails
        }
        if is_cut:
            is_own = any(belongs(run[0].candidate, test) for test in failing)
            return [replace(run[0].swap, fails=tuple(sorted(failing)))] if is_own else []
    else:
        if seen.verdict is Verdict.SOLVED:
            return []
        # A log that no parser fits holds other lines; only names of tests count.
        failing = {
            test
            for test, status in seen.statuses.items()
            if status.fails and any(belongs(trial.candidate, test) for trial in run)
        }
        if not failing:
            return [run[0].swap] if len(run) == 1 else []
    own = [{test for test in failing if belongs(trial.candidate, test)} for trial in run]
    # A title that is computed fits the tests of others, too; the longest that fits is the test's.
    length = {
        test: max(
            len(trial.candidate.test) for trial, mine in zip(run, own, strict=True) if test in mine
        )
        for test in set().union(*own)
    }
    own = [
        {test for test in mine if len(trial.candidate.test) == length[test]}
        for trial, mine in zip(run, own, strict=True)
    ]
    claims = Counter(test for tests in own for test in tests)
    if failing - set(claims):
        return []
    fixed = set(spec.fail_to_pass)
    return [
        replace(
            trial.swap,
            fails=tuple(sorted(tests)),
            # A case of a table that passes before the fix is a test to keep.
            is_secret=trial.swap.is_secret and (not fixed or bool(fixed & tests)),
        )
        for trial, tests in zip(run, own, strict=True)
        if tests and all(claims[test] == 1 for test in tests)
    ]
