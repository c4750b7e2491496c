"""Verdicts agree with the swebench package's own, on logs of real test runs.

Every run is made here, by real pytest, unittest, Django and sympy, on small repositories. For
runners of other languages there are logs in their layout. The package runs in its own
processes. `agreement/differences.py` lists the differences.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from swerl.core.grade import Grade, TestStatus, Verdict
from swerl.grading import python_logs, runner_logs
from swerl.grading import statuses as statuses_module
from swerl.grading.log_parsers import find_parser
from swerl.grading.statuses import Parser
from swerl.tasks.datasets import find_converter

from ..data_converters.examples import EXAMPLES
from .agreement import foreign, packages, recorder
from .agreement.asking import Theirs, ask
from .agreement.differences import CLASSES, classic_class, status_classes, verdict_class
from .agreement.replay import Lists, Log, grade
from .agreement.runs import Run, all_runs

pytestmark = pytest.mark.integration

GOOD = {TestStatus.PASSED, TestStatus.XFAIL}


@pytest.fixture(scope="module")
def django(request: pytest.FixtureRequest) -> Path:
    return packages.fetch(request.config.cache, *packages.DJANGO)


@pytest.fixture(scope="module")
def new(request: pytest.FixtureRequest) -> Path:
    return packages.fetch(request.config.cache, packages.NEW)


@pytest.fixture(scope="module")
def classic(request: pytest.FixtureRequest) -> Path:
    return packages.fetch(request.config.cache, packages.CLASSIC)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, django: Path) -> list[tuple[Run, str, int]]:
    """Every run with its log and exit code."""
    return list(record(list(all_runs()), tmp_path_factory.mktemp("runs"), django))


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[Run, str, int]]) -> list[Log]:
    """Every log once per parser that may read it, and some that no run produces."""
    found = []
    for run, text, code in runs:
        first = Log(run.name, run.parsers[0], text, code, Path())
        found += [replace(first, parser=parser) for parser in run.parsers]
        if run.name in {"pytest-good-plain", "pytest-killed-plain"}:
            found.append(replace(first, name=f"{run.name}-cut", ended=False))
        if run.name == "pytest-left-plain":
            before = "PASSED test_l.py::test_first"
            found.append(replace(first, name="pytest-installed", before=before))
    for parser, texts in foreign.LOGS.items():
        for text in texts:
            code = int("fail" in text.lower())
            found += [Log(parser, parser, text, each, Path()) for each in {code, 0, 1}]
    folder = tmp_path_factory.mktemp("logs")
    found = [replace(log, path=folder / f"{index}.log") for index, log in enumerate(found)]
    for log in found:
        log.save()
    return found


def record(runs: Sequence[Run], folder: Path, django: Path) -> Iterator[tuple[Run, str, int]]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(django),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    with subprocess.Popen(
        [sys.executable, str(Path(recorder.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin and process.stdout
        for run in runs:
            place, log = folder / run.name, folder / f"{run.name}.log"
            for path, text in run.files.items():
                (place / path).parent.mkdir(parents=True, exist_ok=True)
                (place / path).write_text(text)
            asked = {"folder": str(place), "runner": run.runner, "args": run.args, "log": str(log)}
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            code = int(process.stdout.readline())
            yield run, log.read_text(errors="replace"), code
        process.stdin.close()


@cache
def name_of(parser: str) -> str:
    """Return the name of our parser for rows that name the package's."""
    row = {**EXAMPLES["swe-bench"], "eval_script": "make test", "log_parser": parser}
    return find_converter("swe-bench").to_task(row).grading.log_parser


def parser_of(log: Log) -> Parser:
    return find_parser(name_of(log.parser))


def all_lists(log: Log) -> Iterator[Lists]:
    """Yield lists of tests to declare: every test alone, the good ones, cut ids, and chance."""
    statuses = parser_of(log)(log.text)
    names = sorted(statuses)
    good = tuple(name for name in names if statuses[name] in GOOD)
    skipped = tuple(name for name in names if statuses[name] is TestStatus.SKIPPED)
    cut = tuple(sorted({name.split(" ")[0] for name in names if "[" in name and " " in name}))
    yield Lists(("no::such_test",), good)
    yield from (Lists((line.removeprefix("PASSED "),)) for line in log.before.split("\n") if line)
    yield from (Lists(good[:1] or (each,), (each,)) for each in cut)
    yield Lists((), good)
    yield from (Lists((name,)) for name in printed_passes(log))
    if good:
        yield Lists(good)
        yield Lists(good[:1], good[1:])
        yield Lists(good[:1], (*good[1:], *skipped))
    chance = random.Random(log.name + log.parser)
    for name in chance.sample([*names, *cut], min(len(names) + len(cut), 5)):
        yield Lists((name,))
        yield Lists(good[:1] or names[:1], (name,))
    for _ in range(2):
        some = chance.sample(names, min(len(names), 4))
        yield Lists(tuple(some[:2]) or ("x",), tuple(some[2:]))


def printed_passes(log: Log) -> list[str]:
    """Return the tests that pass only by a line that stands before the summary of pytest."""
    before, heading, summary = log.text.partition("= short test summary info =")
    lines = [line.split() for line in before.split("\n") if heading and line.startswith("PASSED ")]
    return sorted({words[1] for words in lines if len(words) > 1 and words[1] not in summary})


def test_every_log_is_read_as_the_package_reads_it(
    logs: list[Log], new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where the last line about a test counts instead of the worst, nothing else may differ.
    for module in (statuses_module, python_logs, runner_logs):
        monkeypatch.setattr(module, "worst", dict)
    # The exit code is told as 0: how a log is read has nothing to do with it.
    logs = [replace(log, exit_code=0, path=log.path.with_suffix(".zero")) for log in logs]
    for log in logs:
        log.save()
    said = ask(new, logs, [(at, Lists(("x",))) for at in range(len(logs))])
    for log, theirs in zip(logs, said, strict=True):
        ours = {name: s.name for name, s in parser_of(log)(log.text).items()}
        classes = status_classes(log, theirs.statuses)
        if not log.ended or any(not ids for ids in classes.values()):
            continue
        skip = set().union(*classes.values())
        for_them = {k: v for k, v in (theirs.statuses or {}).items() if k not in skip}
        assert {k: v for k, v in ours.items() if k not in skip} == for_them, log.name


def test_only_a_failure_outweighs_the_last_line(
    logs: list[Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {TestStatus.FAILED: 2, TestStatus.ERROR: 2, TestStatus.SKIPPED: 1}
    worst = [parser_of(log)(log.text) for log in logs]
    for module in (statuses_module, python_logs, runner_logs):
        monkeypatch.setattr(module, "worst", dict)
    for log, ours in zip(logs, worst, strict=True):
        last = parser_of(log)(log.text)
        assert ours.keys() == last.keys()
        for name in {name for name in ours if ours[name] is not last[name]}:
            assert weights.get(ours[name], 0) >= weights.get(last[name], 0), (log.name, name)


async def test_verdicts_differ_only_on_purpose(logs: list[Log], new: Path, classic: Path) -> None:
    cases = [(at, lists) for at, log in enumerate(logs) for lists in all_lists(log)]
    grades = [await grade(logs[at], name_of(logs[at].parser), lists) for at, lists in cases]
    seen = Counter[str]()
    for (at, lists), ours, theirs in zip(cases, grades, ask(new, logs, cases), strict=True):
        seen.update(compare(logs[at], lists, ours, theirs, is_classic=False))
    old = [(case, g) for case, g in zip(cases, grades, strict=True) if is_known(logs[case[0]])]
    said = ask(classic, logs, [case for case, _ in old])
    for ((at, lists), ours), theirs in zip(old, said, strict=True):
        seen.update(compare(logs[at], lists, ours, theirs, is_classic=True))
    assert seen.keys() - {""} == CLASSES.keys()
    assert seen[""] > len(cases)


def is_known(log: Log) -> bool:
    """Return True if 4.1 has the parser under its own name."""
    return log.parser not in {"parse_log_minitest", "parse_log_cucumber", "parse_log_jest_json"}


def compare(
    log: Log, lists: Lists, ours: Grade, theirs: Theirs, *, is_classic: bool
) -> Iterator[str]:
    """Yield the class of a difference, or an empty name for agreement."""
    if (ours.verdict is Verdict.SOLVED) == theirs.resolved:
        yield ""
        return
    statuses = parser_of(log)(log.text)
    found = verdict_class(log, lists, ours, theirs, statuses)
    if not found and is_classic:
        found = classic_class(log, lists, ours, theirs, statuses)
    assert found, (log.name, log.parser, lists, ours.reason, theirs)
    yield found
