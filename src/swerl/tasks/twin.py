"""The twin's tasks: small broken Python repositories with hidden tests, generated from a seed.

A repository is a folder named by the hash of its content: one module, a README and a git history of
one commit. It is written atomically and used by every sandbox, so repeated and parallel calls find
it complete.

The bugs come from templates: an operation (`sub`) in a shape (`pair`: both operands are parameters;
`fixed`: the second one is a constant). A variant fixes everything else: names, the wrong
expression, the constant, file, neighbours, prompt and test inputs.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from swerl.core.errors import ImageError, InputError
from swerl.core.task import Edit, GradingSpec, MutatedTests, Task

WORKDIR = "/repo"
TEST_FILE = "tests/run_tests.py"
TEST_COMMAND = f"python3 -I -S -B {TEST_FILE}"
_TEST_TIMEOUT_S = 20.0
_TRIES_PER_TASK = 200
_AUTHOR = "twin <twin@localhost> 1767225600 +0000"
_GIT_CONFIG = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"
_RUNNER = '''"""Runs the hidden tests; prints one status line a test.

The code under test runs in a child that has no access to the report.
"""
import importlib, marshal, os, sys

CASES = {cases}


def answer(calls, pipe):
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(1, 2)
    sys.path.insert(0, os.getcwd())
    answers = []
    for module, function, args in calls:
        try:
            got = getattr(importlib.import_module(module), function)(*args)
            answers.append(marshal.dumps(got))
        except BaseException:
            answers.append(None)
    with os.fdopen(pipe, "wb") as out:
        out.write(marshal.dumps(answers))
    os._exit(0)


def passes(answer, want):
    try:
        got = marshal.loads(answer)
    except (TypeError, ValueError, EOFError):
        return False
    return type(got) is type(want) and got == want


os.unlink(__file__)
names, wants = [case[0] for case in CASES], [case[4] for case in CASES]
calls = [case[1:4] for case in CASES]
read, write = os.pipe()
if not os.fork():
    os.close(read)
    CASES.clear()
    wants.clear()
    answer(calls, write)
os.close(write)
with os.fdopen(read, "rb") as answers:
    try:
        found = list(marshal.loads(answers.read()))
    except (TypeError, ValueError, EOFError):
        found = []
found += [None] * (len(names) - len(found))
good = [passes(*pair) for pair in zip(found, wants)]
for name, is_good in zip(names, good):
    print("PASSED" if is_good else "FAILED", name)
sys.exit(not all(good))
'''
_ENDS = "sys.exit(not all(good))", "sys.stdout.flush()\nos._exit(not all(good))"
"""The end that names a Task, and the one that runs: an ordinary exit would write to every page that
the child has shared, 560 page faults."""


def make_tasks(folder: Path, *, split: str, count: int, seed: int) -> list[Task]:
    """Draw `count` different Tasks of a split and write their repositories under `folder`.

    `split` is `train`, `heldout` or `unseen`. The same arguments give the same Tasks, and only
    missing repositories are written. Raises InputError on an unknown split or too high a count,
    ImageError if a repository cannot be written.
    """
    variants = make_variants(split=split, count=count, seed=seed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_task(folder.resolve(), variant) for variant in variants]
    except OSError as error:
        hint = "is the disk full? SWERL_CACHE names another folder for `swerl rollout`"
        if isinstance(error, PermissionError):
            hint = (
                "choose a folder that you may write to; SWERL_CACHE names that of `swerl rollout`"
            )
        message = f"cannot write a twin repository under {folder}: {error}"
        raise ImageError(message, hint=hint) from error


def make_variants(*, split: str, count: int, seed: int) -> list[Variant]:
    """Draw the variants of `make_tasks` without writing anything."""
    if split not in set(Split):
        raise InputError(f"unknown split {split!r}", hint=f"choose one of {', '.join(Split)}")
    rng = random.Random(f"{split}/{seed}")
    variants: dict[str, Variant] = {}
    for _ in range(count * _TRIES_PER_TASK):
        if len(variants) == count:
            break
        variant = draw(rng, Split(split))
        variants.setdefault(_digest(variant), variant)
    if len(variants) < count:
        raise InputError(
            f"the twin has fewer than {count} different {split} tasks",
            hint=f"ask for {len(variants)} or fewer",
        )
    return list(variants.values())


def solutions(*, split: str, count: int, seed: int) -> dict[str, str]:
    """Return Task id -> known solution of the Tasks of `make_tasks`, without writing anything."""
    return {
        _task_id(variant): _gold_patch(variant)
        for variant in make_variants(split=split, count=count, seed=seed)
    }


def _task_id(variant: Variant) -> str:
    return f"twin__{variant.template}-{_digest(variant)}"


def _task(folder: Path, variant: Variant) -> Task:
    digest = _digest(variant)
    repository = folder / digest
    if not repository.is_dir():
        _write(repository, variant)
    failing = [_name(call) for call in variant.failing]
    passing = [_name(call) for call in variant.passing]
    tests = _tests(variant).replace(*_ENDS)
    return Task(
        id=_task_id(variant),
        repo=f"twin/{variant.template}",
        image=f"dir:{repository}",
        workdir=WORKDIR,
        prompt=variant.prompt,
        grading=GradingSpec(
            grader="command",
            fail_to_pass=tuple(failing),
            pass_to_pass=tuple(passing),
            test_files={TEST_FILE: tests},
            test_command=TEST_COMMAND,
            log_parser="status_lines",
            timeout_s=_TEST_TIMEOUT_S,
            mutated=_mutated(variant, tests),
            not_run=(),
        ),
        base_commit=(repository / ".git/refs/heads/main").read_text().strip(),
        gold_patch=_gold_patch(variant),
        dataset="twin",
        metadata={"template": variant.template},
    )


def _digest(variant: Variant) -> str:
    """Return the hash of everything that the agent sees and the tests check."""
    parts = [variant.file, variant.source, variant.prompt, _readme(variant), _tests(variant)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _write(repository: Path, variant: Variant) -> None:
    part = repository.with_name(f".{repository.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    (part / variant.file).write_text(variant.source)
    (part / "README.md").write_text(_readme(variant))
    _commit(part, sorted([variant.file, "README.md"]))
    try:
        part.rename(repository)
    except OSError:
        shutil.rmtree(part)
        if not repository.is_dir():
            raise


def _commit(folder: Path, names: Sequence[str]) -> None:
    """Make a folder a git repository whose only commit has these files.

    The result is that of `git init`, `add` and `commit`, without their notes of the commit, which
    would have to be hidden from an agent. Hundreds of repositories need no program for it.
    """
    git = folder / ".git"
    for name in ("objects/info", "objects/pack", "refs/heads", "refs/tags"):
        (git / name).mkdir(parents=True)
    tree, index = b"", struct.pack(">4sII", b"DIRC", 2, len(names))
    for name in names:
        blob = _write_object(git, "blob", (folder / name).read_bytes())
        tree += b"100644 %b\0%b" % (name.encode(), blob)
        status = (folder / name).stat()
        times = divmod(status.st_ctime_ns, 10**9) + divmod(status.st_mtime_ns, 10**9)
        place = status.st_dev & 0xFFFF_FFFF, status.st_ino & 0xFFFF_FFFF
        facts = (*times, *place, 0o100644, status.st_uid, status.st_gid, status.st_size)
        entry = struct.pack(">10I20sH", *facts, blob, len(name)) + name.encode()
        index += entry + bytes(8 - len(entry) % 8)
    root = _write_object(git, "tree", tree)
    index += struct.pack(">4sI", b"TREE", 6 + len(root)) + b"\0%d 0\n%b" % (len(names), root)
    (git / "index").write_bytes(index + hashlib.sha1(index, usedforsecurity=False).digest())
    text = f"tree {root.hex()}\nauthor {_AUTHOR}\ncommitter {_AUTHOR}\n\nStart\n"
    commit = _write_object(git, "commit", text.encode())
    (git / "refs/heads/main").write_text(f"{commit.hex()}\n")
    (git / "config").write_text(_GIT_CONFIG)
    (git / "HEAD").write_text("ref: refs/heads/main\n")


def _write_object(git: Path, kind: str, data: bytes) -> bytes:
    """Write an object of a git repository; return its name."""
    text = f"{kind} {len(data)}\0".encode() + data
    name = hashlib.sha1(text, usedforsecurity=False)
    file = git / "objects" / name.hexdigest()[:2] / name.hexdigest()[2:]
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(zlib.compress(text, 1))
    file.chmod(0o444)
    return name.digest()


def _readme(variant: Variant) -> str:
    return f"# {Path(variant.file).stem}\n\nSmall helpers, all in `{variant.file}`.\n"


def _tests(variant: Variant) -> str:
    module = Path(variant.file).stem
    cases = [
        (_name(call), module, call.function, call.args, call.want)
        for call in (*variant.failing, *variant.passing)
    ]
    rows = "".join(f"    {case!r},\n" for case in cases)
    return _RUNNER.format(cases=f"[\n{rows}]")


def _mutated(variant: Variant, tests: str) -> tuple[MutatedTests, ...]:
    """Return versions with other results in the tests to fix: of another call, or a neighbour."""
    path = f"{WORKDIR}/{TEST_FILE}"
    digests = {path: hashlib.sha256(tests.encode()).hexdigest()}
    wants = {call.want for call in (*variant.failing, *variant.passing)}
    versions: list[list[Edit]] = [[], []]
    for call in variant.failing:
        before = (
            f"({_name(call)!r}, {Path(variant.file).stem!r}, {call.function!r}, {call.args!r}, "
        )
        start = tests.index(before) + len(before)
        end = start + len(repr(call.want))
        near = {not call.want} if isinstance(call.want, bool) else {call.want - 1, call.want + 1}
        same_kind = {want for want in wants if type(want) is type(call.want)}
        others = sorted((near | same_kind) - {call.want})
        for number, edits in enumerate(versions):
            new = others[(start + number) % len(others)]
            edits.append(Edit(path, start, end, repr(new)))
    names = tuple(_name(call) for call in variant.failing)
    return tuple(MutatedTests(tuple(edits), digests, names) for edits in versions)


def _name(call: Call) -> str:
    return "_".join(["test", call.function, *map(str, call.args)])


def _gold_patch(variant: Variant) -> str:
    diff = difflib.unified_diff(
        variant.source.splitlines(keepends=True),
        variant.fixed.splitlines(keepends=True),
        f"a/{variant.file}",
        f"b/{variant.file}",
    )
    return f"diff --git a/{variant.file} b/{variant.file}\n" + "".join(diff)


class Split(StrEnum):
    TRAIN = "train"
    """Training variants."""
    HELDOUT = "heldout"
    """Other variants of the trained templates."""
    UNSEEN = "unseen"
    """Variants of templates that are never trained."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Intended result of a function of its operands `{a}` and `{b}`."""

    good: str
    wrong: tuple[str, ...]
    names: tuple[str, ...]
    """Possible names of a function with this operation."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function and the value it must return."""

    function: str
    args: tuple[int, ...]
    want: int | bool

    @property
    def text(self) -> str:
        """The call as Python code."""
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
    """One small broken repository, its prompt and its tests."""

    template: str
    file: str
    function: Function
    bad: str
    """The wrong expression in the file."""
    good: str
    """The right expression."""
    source: str
    """The broken file."""
    prompt: str
    """The prompt; it names one failing call."""
    failing: tuple[Call, ...]
    """Calls with a wrong result."""
    passing: tuple[Call, ...]
    """Calls that are right before and after, also of other functions."""

    @property
    def fixed(self) -> str:
        return self.source.replace(f"return {self.bad}", f"return {self.good}")

    def guesses(self) -> list[str]:
        """Return every plausible expression, right and wrong."""
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
"""Every expression of all templates: the candidates of a random repair."""
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
    """Return calls that together distinguish the right expression from every other one."""
    good = OPERATIONS[function.operation].good
    while True:
        rows = [tuple(rng.randint(1, 9) for _ in function.params) for _ in range(_NUM_CALLS)]
        calls = [
            Call(function.name, args, _value(function, good, args)) for args in dict.fromkeys(rows)
        ]
        others = (pattern for pattern in PATTERNS if pattern != good)
        if all(any(_breaks(function, pattern, call) for call in calls) for pattern in others):
            return calls


def _function(rng: random.Random, template: str) -> Function:
    operation, shape = template.split("-")
    params = rng.choice(PARAMS[shape])
    second = params[1] if shape == "pair" else str(rng.randint(2, 8))
    name = rng.choice(OPERATIONS[operation].names)
    return Function(operation, name, params, (params[0], second))


def _is_held_out(function: Function) -> bool:
    """Hold out one in four functions of every name, each name with other operands.

    So every name, parameter and constant occurs in training; only the combinations are new.
    """
    shift = hashlib.sha256(function.name.encode()).digest()[0]
    shape = "pair" if len(function.params) == 2 else "fixed"
    constant = int(function.operands[1]) if shape == "fixed" else 0
    place = PARAMS[shape].index(function.params)
    return (shift + place + constant) % _HELD_OUT_EVERY == 0


def _neighbours(rng: random.Random, function: Function) -> Iterator[Function]:
    """Yield correct functions in the same file: one in a third of the files, else none."""
    operations = {function.operation}
    for template in rng.sample(TRAINED, rng.choice((0, 0, 1))):
        operation = template.split("-")[0]
        if operation not in operations:
            operations.add(operation)
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
