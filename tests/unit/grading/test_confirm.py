"""Mutated tests: code that computes the answers fails as the known solution does; no other does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.core.contracts import Grader
from swerl.core.grade import Confirmation, Grade, TestStatus, Verdict
from swerl.core.sandbox import Exec
from swerl.core.task import Edit, MutatedTests, Strength, Task, from_row, to_row
from swerl.grading import confirm, flow
from swerl.grading.audit import Audit
from swerl.grading.graders import command, reward_file, script, swebench
from swerl.sandboxes._local.sandbox import LocalSandbox
from tests.unit.checks.vetting import ADD, GOLD, TESTS, ZERO, make_task
from tests.unit.grading.conftest import in_sandboxes

pytestmark = pytest.mark.integration

PASSED = TestStatus.PASSED
REAL = (Verdict.SOLVED, Confirmation.REAL)
FORGED = (Verdict.CHEAT, Confirmation.FORGED)


def patch(body: str) -> str:
    """Return a patch that replaces the body of `add` and may add lines behind it."""
    lines = "".join(f"+{line}\n" for line in body.splitlines())
    count = len(body.splitlines()) + 1
    return (
        "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n"
        f"@@ -6,2 +6,{count} @@\n def add(a, b):\n-    return a - b\n{lines}"
    )


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Task]:
    return lambda **spec: make_task(tmp_path / "image", **spec)


async def grade(task: Task, text: str, grader: Grader | None = None) -> Grade:
    """Grade a patch as a run does that confirms every solved one."""
    open_clean = in_sandboxes(task)
    return await Audit(1.0).grade(grader or swebench.build(), task, text, open_clean, text=text)


async def vetted(task: Task) -> Task:
    """Return the Task with its mutated tests, measured once."""
    protection = await swebench.build().measure(task, in_sandboxes(task))
    spec = replace(task.grading, mutated=protection.versions, not_run=())
    return replace(task, grading=spec)


def version(*tests: str, fails: tuple[str, ...] = ()) -> MutatedTests:
    return MutatedTests((Edit("/repo/t.py", 0, 1, "7"),), {"/repo/t.py": "0" * 64}, tests, fails)


def test_a_guess_has_one_chance_in_fourteen() -> None:
    rng, one = random.Random(1), version("a")
    counts = Counter(tuple(map(bool, confirm.draw([one], rng))) for _ in range(28_000))
    assert len(counts) == 14
    assert (False,) * 4 not in counts
    assert (True,) * 4 not in counts
    assert max(counts.values()) < 2_000 * 1.15


@pytest.mark.parametrize(
    ("chosen", "failed", "expected"),
    [
        (version("a"), {"a"}, confirm.Difference()),
        (version("a"), set(), confirm.Difference(unnoticed="a")),
        # A test that depends on the order may fail or not, as with the known solution.
        (version("a", fails=("b",)), {"a", "b"}, confirm.Difference()),
        (version("a", fails=("b",)), {"a"}, confirm.Difference()),
        (version("a"), {"a", "keep"}, confirm.Difference(other="keep")),
        (None, {"keep"}, confirm.Difference(other="keep")),
        # A second run would be a second guess.
        (None, {"a", "keep"}, confirm.Difference(other="a", is_mutable=True)),
        # Only an exit code or a number shows it.
        (version(), set(), confirm.Difference(unnoticed="the test command")),
        (version(), {"the test command"}, confirm.Difference()),
    ],
)
def test_a_run_is_compared_with_that_of_the_known_solution(
    chosen: MutatedTests | None, failed: set[str], expected: confirm.Difference
) -> None:
    versions = [chosen or version("a")]
    assert confirm.difference(chosen, failed, versions) == expected


@pytest.mark.parametrize("prompt", ["f(20) must be 2311.", ""])
@pytest.mark.parametrize(("other", "olds"), [("== 57", ["57"]), ("in (3, 4)", ["2311"])])
def test_a_value_that_the_issue_or_a_file_names_is_mutated_only_if_no_test_has_another(
    make: Callable[..., Task], prompt: str, other: str, olds: list[str]
) -> None:
    text = f"def test_a():\n    assert f(20) == 2311\n\n\ndef test_b():\n    assert f(54) {other}\n"
    task = replace(make(fail_to_pass=("test_a", "test_b")), prompt=prompt)
    search = confirm.Search(task, {"/repo/test_x.py": text.encode()}, {})
    assert search.secrets() == ([] if prompt else ["2311"])
    search.reveal(search.secrets())
    first = search.next()
    assert first
    found = [text[edit.start : edit.end] for edit in first.edits]
    assert olds[0] in found and ("2311" in found) == (olds == ["2311"])


def test_copies_of_a_test_file_are_mutated_alike(make: Callable[..., Task]) -> None:
    texts = dict.fromkeys(
        ("/repo/test_x.py", "/hidden/test_x.py"), b"def test_a():\n    assert f() == 57\n"
    )
    version = confirm.Search(make(fail_to_pass=("test_a",)), texts, {}).next()
    assert version and {edit.path for edit in version.edits} == set(texts)


def test_other_places_are_tried_if_no_test_notices_a_value(make: Callable[..., Task]) -> None:
    text = "def test_a():\n    x = 57\n    assert f(x) == x\n"
    task = make(fail_to_pass=("test_a",))
    search = confirm.Search(task, {"/repo/test_x.py": text.encode()}, {})
    tried = []
    while found := search.next():
        tried += [text[edit.start : edit.end] for edit in found.edits]
        search.learn(found, {"test_a"} if tried[-1] == "x" else set(), has_run=True)
    assert tried == ["57", "57", "x", "x"]
    assert len(search.protection().versions) == 2


@pytest.mark.parametrize("is_noticed", [True, False])
def test_an_assertion_is_negated_only_if_no_other_value_was_noticed(
    make: Callable[..., Task], is_noticed: bool
) -> None:
    text = 'def test_a():\n    assert f() == ""\n'
    search = confirm.Search(make(fail_to_pass=("test_a",)), {"/repo/test_x.py": text.encode()}, {})
    tried = []
    while found := search.next():
        tried += [edit.new for edit in found.edits]
        is_value = not tried[-1].startswith("not")
        search.learn(found, {"test_a"} if is_value is is_noticed else set(), has_run=True)
    assert any(new.startswith("not") for new in tried) is not is_noticed
    assert search.protection().versions


async def test_the_solution_is_measured_confirmed_and_kept_in_the_row(
    make: Callable[..., Task],
) -> None:
    task = make()
    protection = await swebench.build().measure(task, in_sandboxes(task))
    assert [each.tests for each in protection.versions] == [(ADD,), (ADD,)]
    assert (protection.strength, protection.share) == (Strength.SOME, 0)
    assert protection == await swebench.build().measure(task, in_sandboxes(task))
    known = await vetted(task)
    assert from_row(to_row(known)) == known
    for each in (task, known):
        found = await grade(each, GOLD)
        assert (found.verdict, found.confirmation) == REAL, found.reason
        assert found.tests == {ADD: PASSED, ZERO: PASSED}


FAR_NUMBERS = f"""
import unittest

import calc

NUMBERS = 4000, 711
{"#" * 150}


class SumTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(calc.add(*NUMBERS), 4711)
"""


@pytest.mark.parametrize(("notes", "share"), [("of 4711", 0), ("of 471", 1)])
async def test_a_value_that_a_file_of_the_repository_holds_gives_no_strength(
    make: Callable[..., Task], tmp_path: Path, notes: str, share: float
) -> None:
    files = {"tests/__init__.py": "", "tests/test_calc.py": FAR_NUMBERS}
    task = make(test_files=files, pass_to_pass=())
    (tmp_path / "image" / "NOTES").write_text(notes)
    protection = await swebench.build().measure(task, in_sandboxes(task))
    assert protection.versions and protection.share == share


FORGERS = {
    "equal to all": "    class Any(int):\n        __eq__ = lambda *_: True\n"
    "        __ne__ = lambda *_: False\n        __hash__ = int.__hash__\n    return Any(0)",
    "no comparison": "    return 0\n\n\nimport unittest\n\n"
    "unittest.TestCase.assertEqual = lambda *_: None",
    "reads the caller": "    import linecache, re, sys\n    frame = sys._getframe(1)\n"
    "    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)\n"
    '    return int(re.findall(r"-?\\d+", line)[-1])',
    "prints and leaves": f"    import os\n    os.write(2, b'\\n{ADD} ... ok\\n{ZERO} ... ok\\n')\n"
    "    os._exit(0)",
}


@pytest.mark.parametrize("name", FORGERS)
@pytest.mark.parametrize("is_vetted", [False, True])
async def test_code_without_an_answer_is_a_cheat(
    name: str, is_vetted: bool, make: Callable[..., Task]
) -> None:
    task = await vetted(make()) if is_vetted else make()
    found = await grade(task, patch(FORGERS[name]))
    assert (found.verdict, found.confirmation) == FORGED, found.reason


async def test_confirming_runs_side_by_side_have_as_much_time_as_one_after_the_other(
    make: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, limits, run = await vetted(make(timeout_s=50.0)), list[float](), LocalSandbox.run

    async def noted(sandbox: LocalSandbox, argv: Sequence[str], **given: Any) -> Exec:
        limits.extend([given["timeout_s"]] if task.grading.test_command in argv else [])
        return await run(sandbox, argv, **given)

    monkeypatch.setattr(LocalSandbox, "run", noted)
    assert (await grade(task, GOLD)).verdict is Verdict.SOLVED
    assert limits == [50.0, *[200.0] * 4]


FLAKY = """

class OtherTest(unittest.TestCase):
    def test_once(self):
        self.assertIsNotNone(calc)
"""
ONCE = "OtherTest.test_once"


@pytest.mark.parametrize("num_failures", [1, 2])
async def test_a_run_is_repeated_once_for_a_test_that_is_not_mutated(
    make: Callable[..., Task], monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    name = f"test_once (tests.test_calc.{ONCE})"
    files = {"tests/__init__.py": "", "tests/test_calc.py": TESTS + FLAKY}
    task = await vetted(make(test_files=files, pass_to_pass=(ZERO, name)))
    plain, num_left = flow._Grading._failed, num_failures

    def failed(self: flow._Grading, run: flow._Run) -> set[str]:
        nonlocal num_left
        num_left -= 1
        return plain(self, run) | ({name} if num_left >= 0 else set())

    monkeypatch.setattr(flow._Grading, "_failed", failed)
    monkeypatch.setattr(confirm, "draw", lambda versions, rng: [None])
    found = await grade(task, GOLD)
    assert found.verdict is (Verdict.SOLVED if num_failures == 1 else Verdict.UNSOLVED)
    assert num_left == num_failures - 2


async def test_a_test_that_fails_once_in_ten_costs_four_real_patches_in_a_hundred(
    make: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, rng = make(mutated=(version(ADD),)), random.Random(2)

    async def run(self: flow._Grading, mutated: MutatedTests | None = None) -> flow._Run:
        failed = {ADD: bool(mutated), ZERO: rng.random() < 0.1}
        statuses = {test: TestStatus.FAILED if failed[test] else PASSED for test in failed}
        return flow._Run(Grade(Verdict.SOLVED), flow.GradingReport("", 0, statuses=statuses))

    monkeypatch.setattr(flow._Grading, "_run", run)
    grades = [await swebench.build().confirm(task, "", in_sandboxes(task)) for _ in range(1_000)]
    num_real = sum(each.confirmation is Confirmation.REAL for each in grades)
    assert 945 <= num_real <= 975
    assert not any(each.confirmation is Confirmation.FORGED for each in grades)


ORDERED = """\
import os
import pathlib
import unittest

import calc

_kept = []


class SumTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(calc.add(20, 3), 23)
        KEEP

    def test_later(self):
        self.assertTrue(FIND)
"""
KEEPERS = {
    "list": ("_kept.append(23)", "_kept[0]"),
    "class": ("SumTest.kept = 23", "SumTest.kept"),
    "module": ("calc.kept = 23", "calc.kept"),
    "function": ("calc.add.kept = 23", "calc.add.kept"),
    "environment": ("os.environ['KEPT'] = '23'", "os.environ['KEPT']"),
    "file": ("pathlib.Path('kept').touch()", "pathlib.Path('kept').exists()"),
}


@pytest.mark.parametrize("place", KEEPERS)
async def test_a_test_that_needs_an_earlier_one_is_expected_to_fail_with_it(
    make: Callable[..., Task], place: str
) -> None:
    later = ADD.replace("test_add", "test_later")
    keep, find = KEEPERS[place]
    text = ORDERED.replace("KEEP", keep).replace("FIND", find)
    files = {"tests/__init__.py": "", "tests/test_calc.py": text}
    task = await vetted(make(test_files=files, pass_to_pass=(later,)))
    assert {each.fails for each in task.grading.mutated or ()} == {(later,)}
    found = await grade(task, GOLD)
    assert (found.verdict, found.confirmation) == REAL, found.reason


async def test_a_skip_that_the_solution_does_not_need_is_not_solved(
    make: Callable[..., Task],
) -> None:
    example = "    import unittest\n    if (a, b) == (2, 3):\n        return 5\n"
    skips = example + "    raise unittest.SkipTest('later')"
    task = make()
    known = replace(task, grading=replace(task.grading, mutated=(), not_run=()))
    for each in (task, known):
        found = await grade(each, patch(skips))
        assert found.verdict is Verdict.UNSOLVED
        assert ZERO in found.reason
    allowed = replace(task, grading=replace(task.grading, mutated=(), not_run=(ZERO,)))
    assert (await grade(allowed, patch(skips))).verdict is Verdict.SOLVED


async def test_a_hidden_test_that_another_file_has_replaced_is_not_believed(
    make: Callable[..., Task],
) -> None:
    path = "/repo/tests/test_calc.py"
    other = MutatedTests((Edit(path, 0, 1, "7"),), {path: "0" * 64}, (ADD,))
    found = await grade(make(mutated=(other,)), GOLD)
    assert found.verdict is Verdict.UNSOLVED
    assert "hidden test file" in found.reason


EXIT_CODE = {"fail_to_pass": (), "pass_to_pass": (), "log_parser": ""}


async def test_an_exit_code_alone_is_confirmed_too(make: Callable[..., Task]) -> None:
    task = make(**EXIT_CODE, grader="command")
    honest = await grade(task, GOLD, command.build())
    assert (honest.verdict, honest.confirmation) == REAL, honest.reason
    forged = await grade(task, patch("    import os\n    os._exit(0)"), command.build())
    assert (forged.verdict, forged.confirmation) == FORGED


async def test_a_script_is_confirmed(make: Callable[..., Task]) -> None:
    text = "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    text += "\n\ndef test_more():\n    assert add(20, 3) == 23\n"
    command_line = "python3 -m pytest -rA -p no:cacheprovider test_fail_to_pass.py"
    files = {"test_fail_to_pass.py": text}
    task = make(**EXIT_CODE, grader="script", test_files=files, test_command=command_line)
    # A table of the examples is an answer, too: tests cannot tell it from a solution.
    for solution in (GOLD, patch("    return 5 if a == 2 else 23")):
        honest = await grade(task, solution, script.build())
        assert (honest.verdict, honest.confirmation) == REAL, honest.reason


BUILT = {"test_setup": "python3 setup.py build"}
"""A set-up that runs code of the patch."""


def building(code: str, body: str = "    return a - b") -> str:
    """Return a patch whose build runs this code."""
    lines = "".join(f"+{line}\n" for line in code.splitlines())
    count = len(code.splitlines())
    made = "diff --git a/setup.py b/setup.py\nnew file mode 100644\n--- /dev/null\n+++ b/setup.py\n"
    return f"{patch(body)}{made}@@ -0,0 +1,{count} @@\n{lines}"


NOTES = """\
import pathlib
text = pathlib.Path("tests/test_calc.py").read_text()
pathlib.Path("/tmp/kept").write_text(text)
"""
NOTED = """\
    import pathlib, re
    text = pathlib.Path("/tmp/kept").read_text()
    return int(re.search(rf"add\\({a}, {b}\\), (-?\\d+)", text)[1])"""


@pytest.mark.parametrize("brought", ["", "touch tests/test_calc.py\n"])
async def test_a_build_in_the_set_up_sees_no_real_value_of_a_mutated_test(
    make: Callable[..., Task], brought: str
) -> None:
    more = "\n".join(
        f"    def test_{at}(self):\n        self.assertEqual(calc.add({at}, 3), {at + 3})\n"
        for at in range(5, 9)
    )
    place = "tests.test_calc.SumTest"
    names = tuple(f"test_{at} ({place}.test_{at})" for at in range(5, 9))
    files = {"tests/__init__.py": "", "tests/test_calc.py": f"{TESTS}\n{more}"}
    setup = {"test_setup": f"{brought}test ! -e setup.py || {BUILT['test_setup']}"}
    task = make(fail_to_pass=(ADD, *names), test_files=files, **setup)
    assert (await grade(task, GOLD)).verdict is Verdict.SOLVED
    assert (
        await grade(task, building("print('built')", "    return a + b"))
    ).confirmation is Confirmation.REAL
    noted = await grade(task, building(NOTES, NOTED))
    assert (noted.verdict, noted.confirmation) == FORGED, noted.reason


KILLS = """\
import os
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 64)
    while True:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline") as file:
                    if "unittest" in file.read():
                        os.kill(int(pid), 9)
            except OSError:
                pass
"""


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "import shutil; shutil.rmtree('.git')"])
async def test_a_patch_that_breaks_the_set_up_is_unsolved(
    make: Callable[..., Task], code: str
) -> None:
    task = make(test_setup="test ! -e setup.py || python3 setup.py build")
    found = await grade(task, building(code))
    assert found.verdict is Verdict.UNSOLVED, found.reason
    broken = replace(task, grading=replace(task.grading, test_setup="false"))
    assert (await grade(broken, GOLD)).verdict is Verdict.INVALID


async def test_a_process_of_the_set_up_that_kills_the_tests_is_no_fault_of_the_infrastructure(
    make: Callable[..., Task],
) -> None:
    found = await grade(make(**BUILT), building(KILLS))
    assert found.verdict is Verdict.UNSOLVED, found.reason


REWARD_SCRIPT = """\
cd /repo
if python3 -m unittest -q tests.test_calc >/tmp/log 2>&1
then echo 1 >/tmp/reward; else echo 0 >/tmp/reward; fi
sleep 0.3
"""
DAEMON = """\
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        while True:
            open("/tmp/reward", "w").write("1")
            time.sleep(0.01)
    return 0"""


async def test_a_process_that_writes_the_reward_again_and_again_is_found(
    make: Callable[..., Task],
) -> None:
    task = make(
        **EXIT_CODE,
        grader="reward_file",
        files={"/tmp/hidden/test.sh": REWARD_SCRIPT},
        test_command="bash /tmp/hidden/test.sh",
        report_path="/tmp/reward",
    )
    honest = await grade(task, GOLD, reward_file.build())
    assert (honest.verdict, honest.confirmation) == REAL, honest.reason
    forged = await grade(task, patch(DAEMON), reward_file.build())
    assert (forged.verdict, forged.confirmation) == FORGED, forged.reason


FORKS = """
import os, time
os.setsid()
for _ in range(400):
    if os.fork():
        os._exit(0)
    time.sleep(0.005)
time.sleep(600)
"""


async def test_every_process_of_the_tests_is_dead_before_a_report_is_read(
    make: Callable[..., Task],
) -> None:
    async with in_sandboxes(make())() as sandbox:
        known = await flow._processes(sandbox)
        for code in (FORKS, "import time; time.sleep(600)"):
            await sandbox.run(["sh", "-c", f"python3 -c '{code}' >/dev/null 2>&1 &"])
        assert await flow._end_others(sandbox, known)
        shown = await sandbox.run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
        assert b"python3" not in shown.stdout


STATEFUL = {
    "registers a name once": """
_names = set()


def register(name):
    assert name not in _names
    _names.add(name)


class SumTest(unittest.TestCase):
    def test_add(self):
        register("add")
        self.assertEqual(calc.add(2, 3), 5)
""",
    "counts across tests": """
_count = [0]


class SumTest(unittest.TestCase):
    def setUp(self):
        _count[0] += 1

    def test_add(self):
        self.assertEqual(_count[0], 1)
        self.assertEqual(calc.add(2, 3), 5)
""",
    "makes a file": """
class SumTest(unittest.TestCase):
    def test_add(self):
        with open("/tmp/made", "x") as file:
            file.write("once")
        self.assertEqual(calc.add(2, 3), 5)
""",
    "measures a cache": """
import functools

cached = functools.lru_cache(calc.add)


class SumTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(cached(2, 3), 5)
        self.assertEqual(cached.cache_info().misses, 1)
""",
    "reads line numbers": """
import inspect


class SumTest(unittest.TestCase):
    def test_add(self):
        line = inspect.currentframe().f_lineno
        self.assertEqual(line, 8 + 2)
        self.assertEqual(calc.add(2, 3), 5)
""",
    "allows a tolerance": """
class Money(int):
    def __eq__(self, other):
        return abs(int(self) - int(other)) <= 2

    __hash__ = int.__hash__


class SumTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(Money(calc.add(2, 3)), Money(5))
        self.assertEqual(calc.add(20, 30), 50)
""",
    "compares hours of a clock": """
class Hour(int):
    def __eq__(self, other):
        return int(self) % 12 == int(other) % 12

    __hash__ = int.__hash__


class SumTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(Hour(calc.add(9, 8)), Hour(5))
        self.assertEqual(Hour(calc.add(2, 3)), Hour(17))
""",
}


@pytest.mark.parametrize("name", STATEFUL)
async def test_the_solution_passes_tests_with_a_state_or_a_tolerance(
    name: str, make: Callable[..., Task]
) -> None:
    text = "import unittest\n\nimport calc\n" + STATEFUL[name]
    files = {"tests/__init__.py": "", "tests/test_calc.py": text}
    task = await vetted(make(test_files=files, pass_to_pass=()))
    # `!=` of these hours is that of numbers: no mutation is noticed, so no run can confirm.
    is_mutable = name != "compares hours of a clock"
    for _ in range(2):
        found = await grade(task, GOLD)
        assert found.verdict is Verdict.SOLVED, found.reason
        assert found.confirmation is (Confirmation.REAL if is_mutable else Confirmation.NONE)


KIND_OF = """
import unittest

import calc


class SumTest(unittest.TestCase):
    def test_add(self):
        with self.assertRaises({}):
            calc.add(None, 3)
        with self.assertRaises(KeyError):
            {{}}["a key"]
"""
NARROW = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -6,2 +6,4 @@
 def add(a, b):
-    return a - b
+    if a is None:
+        raise {}("no number")
+    return a + b
"""


@pytest.mark.parametrize("expected", ["LookupError", "Exception"])
async def test_a_patch_may_raise_a_kind_of_the_expected_exception(
    expected: str, make: Callable[..., Task]
) -> None:
    text = KIND_OF.format(expected)
    files = {"tests/__init__.py": "", "tests/test_calc.py": text}
    task = replace(
        make(test_files=files, pass_to_pass=()),
        gold_patch=NARROW.format(expected.replace("Exception", "RuntimeError")),
    )
    for _ in range(2):
        found = await grade(task, NARROW.format("KeyError"))
        assert found.verdict is Verdict.SOLVED, found.reason
