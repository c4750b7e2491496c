"""Confirm a solved report with mutated tests: hidden tests with other expected values.

Code under test runs in the process that reports on it, so it can report every test as passed. In a
confirming run either no test is mutated, or every test that has an expected value is. Code that
computes the answers then fails the same tests as the known solution; other code has to guess which
kind of run it is in: one chance in 14 for four runs that are not all alike.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swerl.core.changes import touched
from swerl.core.task import Edit, GradingSpec, MutatedTests, Protection, Strength, Task
from swerl.grading.mutations import LONG, Candidate, candidates, core_of, supports

NUM_RUNS = 4
"""Confirming runs. Not all are alike, so a guess has one chance in 2**4 - 2."""
NUM_VERSIONS = 2
"""Versions of the mutated tests that vetting stores; a confirming run draws one."""
MAX_MEASURED = 6
"""Runs of the known solution that look for them; most Tasks need two or three."""
_NUM_TRIALS = 3
"""Runs that try new values; the others use those that the known solution noticed."""
_MAX_TESTS = 200
"""Mutated tests of one version."""
_MAX_FILES = 40
_MODULE = re.compile(r"\(([\w.]+?)(?:\.[A-Z]\w*)?(?:\.\w+)?\)$")
"""The module in an id of unittest: `test_a (tests.test_b.TestC.test_a)`."""
_WORD = re.compile(r"\w+")
_PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


def draw(versions: Sequence[MutatedTests], rng: random.Random) -> list[MutatedTests | None]:
    """Return the version of each confirming run; None is a run without mutations."""
    chosen = rng.randrange(1, 2**NUM_RUNS - 1)
    return [rng.choice(versions) if chosen >> at & 1 else None for at in range(NUM_RUNS)]


def is_declared(spec: GradingSpec) -> bool:
    """Return True if the Task names tests; otherwise a number or an exit code decides."""
    return bool(spec.fail_to_pass or spec.pass_to_pass or spec.expected)


@dataclass(frozen=True, slots=True)
class Difference:
    """How a confirming run differs from that of the known solution."""

    unnoticed: str = ""
    """A mutated test that passed."""
    other: str = ""
    """A test that failed without being mutated."""
    is_mutable: bool = False
    """True if `other` is mutated in some version. Then it is judged at once: a repetition would
    give a second guess at the kind of the run."""


def difference(
    version: MutatedTests | None, failed: Collection[str], versions: Iterable[MutatedTests]
) -> Difference:
    """Compare the failed tests of a run with those of the known solution."""
    mutated = version.tests if version else ()
    expected = {*mutated, *version.fails} if version else set[str]()
    if version and not mutated:
        # Only a number or an exit code shows it.
        return Difference("" if failed else "the test command")
    unnoticed = next((test for test in mutated if test not in failed), "")
    others = sorted(set(failed) - expected)
    mutable = {test for each in versions for test in each.tests or ("the test command",)}
    first = next((test for test in others if test in mutable), "")
    return Difference(unnoticed, first or next(iter(others), ""), bool(first))


def edited(text: bytes, edits: Iterable[Edit]) -> bytes:
    """Return the text with these replacements, which do not overlap."""
    for edit in sorted(edits, key=lambda edit: -edit.start):
        text = text[: edit.start] + edit.new.encode() + text[edit.end :]
    return text


def test_files(task: Task) -> list[str]:
    """Return the absolute paths of files that may hold hidden tests, in a known language.

    These are the files that grading brings, and those that test ids name.
    """
    spec = task.grading
    inside = [*spec.test_files, *touched(spec.test_patch)]
    for test in (*spec.fail_to_pass, *spec.pass_to_pass):
        if match := _MODULE.search(test):
            inside.append(match[1].replace(".", "/") + ".py")
        inside.append(test.partition("::")[0])
    paths = [*(f"{task.workdir}/{path}" for path in inside), *spec.files]
    return [path for path in dict.fromkeys(paths) if supports(path)][:_MAX_FILES]


def candidates_of(path: str, text: bytes, tests: Sequence[str]) -> list[list[Candidate]]:
    """Return the candidates of each of these tests in a file; of all tests if none is given.

    Equal arguments give equal candidates.
    """
    rng = random.Random(hashlib.sha256(text).hexdigest())
    joined = "\n".join(tests)
    words, lower = set(_WORD.findall(joined)), joined.lower()

    def is_wanted(name: str) -> bool:
        return not (tests and name) or name in words or _names(name, joined, lower)

    units = candidates(path, text, rng, is_wanted)
    return [unit for unit in units if not tests or any(belongs(unit[0], test) for test in tests)]


def belongs(candidate: Candidate, test_id: str) -> bool:
    """Return True if this declared test may be the candidate's.

    A name must be a word of the id, a title a part of it. If the id holds a path or a class, they
    must be the candidate's, too.
    """
    name, path = candidate.test, candidate.edit.path
    head, _, rest = test_id.partition("::")
    if rest and re.search(r"\.\w+$", head):
        if not f"/{path}".endswith(f"/{head.removeprefix('./')}"):
            return False
        parts = rest.partition("[")[0].split("::")
        if name and _WORD.fullmatch(name):
            return parts[-1] == name and "".join(parts[:-1][-1:]) == candidate.outer
    if not name:
        return True
    # An id that has a class must have the candidate's; unittest and JUnit write it as a word.
    has_class = path.endswith((".py", ".java", ".php")) and candidate.outer and "." in test_id
    if has_class and candidate.outer not in _WORD.findall(test_id):
        return False
    return _names(name, test_id, test_id.lower())


def _names(name: str, test_id: str, lower: str) -> bool:
    if not _WORD.fullmatch(name):
        # Go writes the blanks of a title as underscores; a computed part ends the comparison.
        title = re.split(r"\$\{|#\{|%[sdjiofp]|\$\w", name)[0].strip()
        return bool(title) and (title in test_id or title.replace(" ", "_") in test_id)
    if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", test_id):
        return True
    # PHPUnit prints `testChangeOfANote` as a sentence.
    pieces = _PIECE.findall(name.removeprefix("test").replace("_", " "))
    return len(pieces) > 1 and " ".join(pieces).lower() in lower


@dataclass(slots=True)
class _Unit:
    """The candidates of one test."""

    untried: list[Candidate]
    noticed: list[Candidate] = field(default_factory=list)

    def next(self, number: int) -> Candidate | None:
        """Return a new candidate, or after some runs one that the known solution noticed."""
        # Values come first. An object that equals everything fails where an assertion is negated.
        has_value = any(candidate.is_value for candidate in self.noticed)
        has_next = bool(self.untried) and (self.untried[0].is_value or not has_value)
        if has_next and number < _NUM_TRIALS and len(self.noticed) < NUM_VERSIONS:
            return self.untried.pop(0)
        return self.noticed[number % len(self.noticed)] if self.noticed else None


class Search:
    """Looks for mutated tests that the known solution notices, run by run."""

    def __init__(self, task: Task, texts: Mapping[str, bytes], before: Mapping[str, bytes]) -> None:
        """`texts` are the hidden test files, `before` the files that the agent gets."""
        spec = task.grading
        self._spec = spec
        self._digests = {path: hashlib.sha256(text).hexdigest() for path, text in texts.items()}
        self._tests = spec.fail_to_pass or tuple(spec.expected)
        self._prompt = "\n".join([task.prompt, *self._tests])
        self._before = {line.strip() for text in before.values() for line in text.split(b"\n")}
        self._texts = texts
        self._candidates = [
            unit
            for path, text in texts.items()
            if self._tests or not is_declared(spec)
            for unit in candidates_of(path, text, self._tests)
        ][:_MAX_TESTS]
        self.reveal(())
        self._first = 0
        self._chosen: list[tuple[_Unit, Candidate]] = []
        self._num_runs = 0
        self._versions: dict[tuple[Edit, ...], MutatedTests] = {}
        self._used: list[Candidate] = []

    def secrets(self) -> list[str]:
        """Return the values that a file of the repository could reveal."""
        values = (each for unit in self._candidates for each in unit if self._rank(each) == 0)
        cores = {core_of(each.old) for each in values}
        return sorted(core for core in cores if len(core) >= LONG and "\n" not in core)

    def reveal(self, values: Collection[str]) -> None:
        """Note which values the repository reveals, before the first run."""
        self._revealed = frozenset(values)
        # A replaced value that the issue or a file shows would betray the whole version.
        kinds: list[list[_Unit]] = [[], [], []]
        for unit in self._candidates:
            ranked = [(self._rank(candidate), candidate) for candidate in unit]
            for rank, kind in enumerate(kinds):
                if own := [candidate for its_rank, candidate in ranked if its_rank == rank]:
                    kind.append(_Unit(own))
        self._units, *self._weaker = [kind for kind in kinds if kind] or [[]]

    def next(self) -> MutatedTests | None:
        """Return the tests of the next run of the known solution; None at the end."""
        if self._num_runs >= MAX_MEASURED or len(self._versions) >= NUM_VERSIONS:
            return None
        drawn = [(unit, unit.next(self._num_runs - self._first)) for unit in self._units]
        self._num_runs += 1
        self._chosen = []
        for unit, candidate in drawn:
            if candidate and not any(_meet(candidate.edit, each.edit) for _, each in self._chosen):
                self._chosen.append((unit, candidate))
        # Copies of a test file are mutated alike: code that found another text would know.
        edits = tuple(
            replace(candidate.edit, path=path)
            for _, candidate in self._chosen
            for path, digest in self._digests.items()
            if digest == self._digests[candidate.edit.path]
        )
        if not edits and not self._versions and self._weaker:
            self._units, self._first = self._weaker.pop(0), self._num_runs
            return self.next()
        if not edits or edits in self._versions:
            return None
        return MutatedTests(edits, {edit.path: self._digests[edit.path] for edit in edits}, ())

    def learn(self, version: MutatedTests, failed: Collection[str], *, has_run: bool) -> None:
        """Note which edits the known solution noticed, by the tests that failed.

        `has_run` is False if no test ran, as after a compiler's error.
        """
        noticed: set[str] = set()
        complete = has_run and bool(failed)
        for unit, candidate in self._chosen:
            own = {test for test in self._tests if belongs(candidate, test)} & set(failed)
            if has_run and (own or (failed and not is_declared(self._spec))):
                noticed |= own
                if candidate not in unit.noticed:
                    unit.noticed.append(candidate)
            else:
                complete = False
                if candidate in unit.noticed:
                    unit.noticed.remove(candidate)
        if complete:
            others = set(failed) - noticed if is_declared(self._spec) else set[str]()
            self._versions[version.edits] = replace(
                version, tests=tuple(sorted(noticed)), fails=tuple(sorted(others))
            )
            self._used += [candidate for _, candidate in self._chosen]

    def protection(self) -> Protection:
        """Return the versions that were found, and how well they protect the Task."""
        if not self._versions:
            return Protection()
        tests = self._tests or ("",)
        owned = {test: [c for c in self._used if belongs(c, test)] for test in tests}
        credited = [
            test
            for test, own in owned.items()
            if any(self._rank(candidate) == 0 for candidate in own)
        ]
        mutated = [test for test, own in owned.items() if own]
        share = round(len(credited) / len(tests), 3)
        strength = Strength.STRONG if share == 1 else Strength.SOME
        reason = (
            f"{len(credited)} of {len(tests)} tests to fix assert a value that code has to compute"
        )
        if share < 1:
            weak, kinds = len(mutated) - len(credited), "truth values, exceptions, copies, sums"
            reason += f"; {weak} only what can be guessed or read: {kinds}"
            reason += f"; {len(tests) - len(mutated)} are not mutated"
        return Protection(tuple(self._versions.values()), strength, share, reason)

    def _rank(self, candidate: Candidate) -> int:
        """Return 0 if code can get the old value only by computing it, 1 if it can be derived."""
        text = self._texts[candidate.edit.path]
        start = text.rfind(b"\n", 0, candidate.edit.start) + 1
        line = text[start:].partition(b"\n")[0].strip()
        core = core_of(candidate.old)
        is_told = re.search(rf"(?<!\w){re.escape(core)}(?!\w)", self._prompt) if core else True
        is_shown = is_told or core in self._revealed or line in self._before
        if is_shown or not candidate.is_value:
            return 2
        return 0 if candidate.is_alone else 1


def _meet(one: Edit, two: Edit) -> bool:
    return one.path == two.path and one.start < two.end and two.start < one.end
