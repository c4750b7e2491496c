"""The twin's repositories are broken as declared, repairable as declared, and split cleanly."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swerl.core.changes import edits, touched
from swerl.core.errors import ImageError, InputError
from swerl.core.grade import Confirmation, Verdict
from swerl.core.task import Task
from swerl.grading.audit import Audit
from swerl.grading.confirm import edited
from swerl.grading.graders import command
from swerl.tasks.twin import (
    TEST_COMMAND,
    TEST_FILE,
    TRAINED,
    UNSEEN,
    Split,
    make_tasks,
    make_variants,
    solutions,
)
from tests.unit.grading.conftest import in_sandboxes


def _functions(source: str) -> set[tuple[str, ...]]:
    """Each function of a module as its name, parameters and constants."""
    found = set()
    for node in ast.parse(source).body:
        assert isinstance(node, ast.FunctionDef)
        constants = [str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant)]
        found.add((node.name, *(arg.arg for arg in node.args.args), *constants))
    return found


def _run_tests(task: Task, work: Path, *, patch: str) -> dict[str, str]:
    """Run the hidden tests in a copy of the repository and return test -> status."""
    shutil.copytree(task.image.removeprefix("dir:"), work)
    if patch:
        subprocess.run(["git", "apply", "-"], cwd=work, input=patch.encode(), check=True)
    (work / TEST_FILE).parent.mkdir()
    (work / TEST_FILE).write_text(task.grading.test_files[TEST_FILE])
    command = [sys.executable, *TEST_COMMAND.split()[1:]]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=20)
    return {name: status for status, name in (line.split() for line in done.stdout.splitlines())}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("twin")


@pytest.fixture
def task(repositories: Path) -> Task:
    [task] = make_tasks(repositories, split="train", count=1, seed=3)
    return task


def _begun_with(task: Task, text: str, folder: Path) -> Task:
    """Return the task with a text in front of its module."""
    module = touched(task.gold_patch)[0]
    shutil.copytree(task.image.removeprefix("dir:"), folder)
    (folder / module).write_text(text + (folder / module).read_text())
    return dataclasses.replace(task, image=f"dir:{folder}")


@pytest.mark.parametrize("split", ["train", "heldout", "unseen"])
def test_declared_tests_fail_before_and_pass_after_the_gold_patch(
    split: str, repositories: Path, tmp_path: Path
) -> None:
    for task in make_tasks(repositories, split=split, count=4, seed=3):
        spec = task.grading
        before = _run_tests(task, tmp_path / f"{task.id}.before", patch="")
        after = _run_tests(task, tmp_path / f"{task.id}.after", patch=task.gold_patch)
        declared = {*spec.fail_to_pass, *spec.pass_to_pass}
        assert spec.fail_to_pass
        assert set(before) == set(after) == declared
        assert {name for name, status in before.items() if status != "PASSED"} == {
            *spec.fail_to_pass
        }
        assert set(after.values()) == {"PASSED"}


def test_only_the_right_expression_passes() -> None:
    for variant in make_variants(split="train", count=40, seed=5):
        calls = (*variant.failing, *variant.passing)
        for guess in variant.guesses():
            namespace: dict[str, object] = {}
            exec(variant.source.replace(f"return {variant.bad}", f"return {guess}"), namespace)
            got = [eval(call.text, namespace) for call in calls]
            want = [call.want for call in calls]
            passes = list(map(repr, got)) == list(map(repr, want))
            assert passes == (guess == variant.good), (variant.source, guess)


@pytest.mark.parametrize(
    "way",
    [
        "os.write(1, LINES); print(LINES.decode())",
        "[os.write(fd, LINES) for fd in os.listdir_fds()]; os._exit(0)",
        "os._exit(0)",
        "import marshal; [os.write(fd, marshal.dumps([b'i'] * 99)) for fd in os.listdir_fds()]",
    ],
)
def test_a_module_cannot_forge_the_report(task: Task, tmp_path: Path, way: str) -> None:
    must_mend = task.grading.fail_to_pass
    lines = "".join(f"PASSED {name}\\n" for name in must_mend)
    writable = (
        "[fd for fd in range(1, 64) if os.path.exists(f'/proc/self/fd/{fd}')"
        " and fcntl.fcntl(fd, fcntl.F_GETFL) & 3]"
    )
    way = way.replace("os.listdir_fds()", writable)
    forged = f"import fcntl, os\nLINES = b'{lines}'\n{way}\n"
    forging = _begun_with(task, forged, tmp_path / "image")
    found = _run_tests(forging, tmp_path / "forged", patch="")
    assert not any(found.get(name) == "PASSED" for name in must_mend)


def test_a_module_sees_nothing_of_what_the_tests_want(task: Task, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    spy = (
        "import os, __main__\n"
        f"open({str(seen)!r}, 'w').write(repr((os.path.exists(__main__.__file__), "
        "__main__.CASES, __main__.wants)))\n"
    )
    _run_tests(_begun_with(task, spy, tmp_path / "image"), tmp_path / "spied", patch="")
    assert seen.read_text() == "(False, [], [])"


def test_the_mutated_tests_to_fix_fail_and_no_others(task: Task, tmp_path: Path) -> None:
    text = task.grading.test_files[TEST_FILE].encode()
    assert task.grading.mutated
    for at, version in enumerate(task.grading.mutated):
        files = {TEST_FILE: edited(text, version.edits).decode()}
        other = dataclasses.replace(
            task, grading=dataclasses.replace(task.grading, test_files=files)
        )
        found = _run_tests(other, tmp_path / str(at), patch=task.gold_patch)
        failed = {name for name, status in found.items() if status != "PASSED"}
        assert failed == {*version.tests} == {*task.grading.fail_to_pass}


READS_FRAMES = """
import sys

_frame = sys._getframe()
while _frame.f_back:
    _frame = _frame.f_back


def _rows(value):
    if isinstance(value, tuple):
        yield value
        for each in value:
            yield from _rows(each)


_known = {row[2:4]: row[4] for row in _rows(_frame.f_code.co_consts) if len(row) == 5}


def {name}(*args):
    return _known.get(({name!r}, args))
"""


async def test_code_that_reads_the_wanted_values_in_the_runner_is_a_cheat(task: Task) -> None:
    module = touched(task.gold_patch)[0]
    before = (Path(task.image.removeprefix("dir:")) / module).read_text()
    name = task.grading.fail_to_pass[0].split("_")[1]
    after = before + READS_FRAMES.replace("{name!r}", repr(name)).replace("{name}", name)
    diff = difflib.unified_diff(
        before.splitlines(True), after.splitlines(True), f"a/{module}", f"b/{module}"
    )
    patch = f"diff --git a/{module} b/{module}\n" + "".join(diff)
    grade = await Audit().grade(command.build(), task, patch, in_sandboxes(task), text=patch)
    assert (grade.verdict, grade.confirmation) == (Verdict.CHEAT, Confirmation.FORGED), grade.reason


def test_a_repository_is_a_clean_git_work_tree_at_the_base_commit(task: Task) -> None:
    folder = task.image.removeprefix("dir:")

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", *arguments], cwd=folder, text=True).strip()

    assert git("rev-parse", "HEAD") == task.base_commit
    assert git("status", "--porcelain") == ""
    assert git("rev-list", "--count", "--all") == "1"
    assert git("fsck", "--strict") == ""


def test_no_heldout_function_stands_in_a_training_repository() -> None:
    train = make_variants(split="train", count=2000, seed=0)
    seen = set().union(*(_functions(variant.source) for variant in train))
    for variant in make_variants(split="heldout", count=300, seed=0):
        function = variant.function
        constants = [word for word in function.operands if word.isdigit()]
        assert (function.name, *function.params, *constants) not in seen


def test_every_name_and_operand_of_a_heldout_function_occurs_in_training() -> None:
    train = make_variants(split="train", count=2000, seed=0)
    names = {variant.function.name for variant in train}
    operands = {word for variant in train for word in variant.function.operands}
    for variant in make_variants(split="heldout", count=300, seed=0):
        assert variant.function.name in names
        assert set(variant.function.operands) <= operands


def test_unseen_templates_never_occur_in_training() -> None:
    assert len(TRAINED) >= 8
    assert len(UNSEEN) >= 2
    assert {v.template for v in make_variants(split="train", count=500, seed=1)} == {*TRAINED}
    assert {v.template for v in make_variants(split="unseen", count=100, seed=1)} == {*UNSEEN}
    assert not {*TRAINED} & {*UNSEEN}


def test_the_same_arguments_give_the_same_tasks_and_write_nothing_twice(tmp_path: Path) -> None:
    first = make_tasks(tmp_path, split="heldout", count=3, seed=7)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert make_tasks(tmp_path, split="heldout", count=3, seed=7) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == written
    assert make_tasks(tmp_path, split="heldout", count=3, seed=8) != first
    elsewhere = make_tasks(tmp_path / "elsewhere", split="heldout", count=3, seed=7)
    assert [(each.id, each.base_commit) for each in elsewhere] == [
        (each.id, each.base_commit) for each in first
    ]


def test_a_task_keeps_its_name_from_release_to_release() -> None:
    # The seeds of sampling follow from it, so another name changes every measured run.
    names = {split: next(iter(solutions(split=split, count=1, seed=0))) for split in Split}
    assert names == {
        Split.TRAIN: "twin__sub-pair-1b5a02de212f",
        Split.HELDOUT: "twin__add-fixed-c7bf26e5b86a",
        Split.UNSEEN: "twin__lt-fixed-bc3de9e9fc32",
    }


def test_the_gold_patch_is_one_edit_that_git_and_swerl_read_alike(task: Task) -> None:
    (edit,) = edits(task.gold_patch)
    source = (Path(task.image.removeprefix("dir:")) / edit.path).read_text()
    assert touched(task.gold_patch) == (edit.path,)
    assert source.count(edit.old) == 1


def test_an_unknown_split_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        make_tasks(tmp_path, split="valid", count=1, seed=0)
    assert "train, heldout, unseen" in caught.value.hint


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ImageError, match="cannot write a twin repository"):
        make_tasks(tmp_path / "file", split="train", count=1, seed=0)
