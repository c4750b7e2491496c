"""The part of a patch that grading accepts: no hidden test file, no file that steers tests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.task import GradingSpec, Task
from swerl.grading.accept import accept
from swerl.grading.sections import paths
from swerl.tasks.datasets import find_converter


def section(path: str, *, old: str = "", extra: str = "") -> str:
    return (
        f"diff --git a/{old or path} b/{path}\n{extra}--- a/{old or path}\n+++ b/{path}\n"
        "@@ -1 +1 @@\n-x\n+y\n"
    )


TEST_PATCH = section("tests/unit/test_calc.py")
TASK = Task(
    id="t",
    repo="r",
    image="host",
    workdir="/w",
    prompt="p",
    grading=GradingSpec(
        "command",
        fail_to_pass=("pkg/test_declared.py::test_it[a b]",),
        test_patch=TEST_PATCH,
        test_files={"hidden/run.py": ""},
        test_command="pip install -e . && bash ./ci/run.sh",
    ),
)


@pytest.mark.parametrize(
    "path",
    [
        "tests/unit/test_calc.py",
        "hidden/run.py",
        "conftest.py",
        "deep/down/conftest.py",
        "pytest.ini",
        "tox.ini",
        "sitecustomize.py",
        "lib/x.pth",
        "tests",
        "tests/unit",
        "tests/unit/helpers.py",
        "tests/data/answers.json",
        "pkg/test_declared.py",
        "ci/run.sh",
        ".github/workflows/test.yml",
        "web/jest.config.ts",
        ".git/hooks/post-checkout",
        "sub/.GIT/config",
        "a/../../outside.py",
        ".gitattributes",
        "hidden/run.py/folder_in_its_place",
        "pkg/__pycache__/test_declared.cpython-311.pyc",
        "web/babel.config.js",
        "sitecustomize/__init__.py",
        "lib/usercustomize.pyc",
        "pkg/calc.pyc",
        ".venv/lib/python3.11/site-packages/_pytest/runner.py",
        "venv/bin/activate",
        "web/node_modules/mocha/index.js",
        ".npmrc",
        "web/.yarnrc.yml",
        ".mvn/jvm.config",
        "vite.config.ts",
    ],
)
def test_protected_paths_are_dropped_and_named(path: str) -> None:
    result = accept(TASK, section(path) + section("calc.py"))
    assert result.patch == section("calc.py")
    assert result.dropped == (path,)


def test_patch_without_protected_paths_is_kept_to_the_byte() -> None:
    kept = ("calc.py", "pkg/tests_of_time.py", "docs/testing/run.md", "bin/run", "a b/ü.py")
    patch = "".join(map(section, kept))
    assert accept(TASK, patch).patch == patch


@pytest.mark.parametrize(
    "patch",
    [
        section("calc.py", old="conftest.py", extra="rename from conftest.py\nrename to calc.py\n"),
        section("conftest.py", old="x.py", extra="rename from x.py\nrename to conftest.py\n"),
        section("x.py", extra="copy from x.py\ncopy to conftest.py\n"),
        section("x.py").replace("+++ b/x.py", "+++ b/conftest.py"),
        'diff --git "a/d\\303\\274/conftest.py" "b/d\\303\\274/conftest.py"\n'
        "new file mode 100644\nGIT binary patch\nliteral 1\nIcmZ\n\n",
        "diff --git a/conftest.py b/conftest.py\nold mode 100644\nnew mode 100755\n",
        "diff --git a/conftest.py b/conftest.py\ndeleted file mode 100644\n",
        "--- a/conftest.py\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+x\n",
        "diff --git a/x b/x\nrename from x\nrename to ./tests/unit/test_calc.py\n",
        "diff --git a/. b/.\nold mode 100644\nnew mode 100755\n",
        "*** a/conftest.py\n--- b/conftest.py\n***************\n*** 1 ****\n! x\n--- 1 ----\n! y\n",
        "Index: a/conftest.py\n1c1\n< x\n---\n> y\n",
        "--- a/conftest.py\n1c1\n< x\n---\n> y\n",
        "--- old/./conftest.py\t2000\n+++ new/./conftest.py\t2001\n@@ -0,0 +1 @@\n+x\n",
    ],
)
def test_no_spelling_of_a_header_escapes(patch: str) -> None:
    assert accept(TASK, patch).patch == ""
    assert accept(TASK, section("calc.py") + patch).patch == section("calc.py")


@pytest.mark.parametrize(
    ("path", "target", "is_kept"),
    [
        ("docs/link", "../calc.py", True),
        ("link", "calc.py", True),
        ("link", "/etc/passwd", False),
        ("docs/link", "../../outside", False),
        ("link", ".git/config", False),
    ],
)
def test_links_lead_nowhere_outside(path: str, target: str, is_kept: bool) -> None:
    link = (
        f"diff --git a/{path} b/{path}\nnew file mode 120000\nindex 0000000..1111111\n"
        f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+{target}\n\\ No newline at end of file\n"
    )
    assert bool(accept(TASK, link).patch) is is_kept


@pytest.mark.parametrize("path", ["pytest.py", "unittest/__init__.py", "_pytest/main.py"])
def test_no_new_module_shadows_a_test_runner(path: str) -> None:
    made = section(path, extra="new file mode 100644\n")
    assert accept(TASK, made).dropped == (path,)
    assert accept(TASK, section(path)).dropped == (), "the repository is the runner's own"


@pytest.mark.parametrize(
    "path",
    [
        "json.py",
        "src/difflib.py",
        "lib/json/__init__.py",
        "iniconfig/__init__.py",
        "difflib.cpython-311-x86_64-linux-gnu.so",
        "tools/bin/python3",
    ],
)
def test_no_new_module_shadows_an_import_of_a_runner(path: str) -> None:
    made = section(path, extra="new file mode 100644\n")
    assert accept(TASK, made).dropped == (path,)
    assert accept(TASK, section(path)).dropped == (), "the repository has its own"


@pytest.mark.parametrize(
    "path", ["pkg/json.py", "types/shop.ts", "html/page.html", "src/platform/unix.py", "bin/till"]
)
def test_other_new_files_of_such_names_stay(path: str) -> None:
    made = section(path, extra="new file mode 100644\n")
    assert accept(TASK, made).patch == made


def commanded(command: str, **spec: str) -> Task:
    return replace(TASK, grading=replace(TASK.grading, test_command=command, **spec))


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("make -s test", "Makefile"),
        ("make check", "GNUmakefile"),
        ("bundle exec rake spec", "Rakefile"),
        ("python3 run_all.py --fast", "run_all.py"),
        (". ./env/common && pytest", "env/common"),
        ("node check.mjs", "check.mjs"),
        ("invoke test", "tasks.py"),
    ],
)
def test_scripts_that_the_test_command_runs_are_dropped(command: str, path: str) -> None:
    assert accept(commanded(command), section(path)).dropped == (path,)


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("make -j4 && ./run", "Makefile"),
        ("python3 setup.py test", "setup.py"),
        ("pytest tests", "tasks.py"),
        ("npm test", "package.json"),
    ],
)
def test_files_that_only_build_are_kept(command: str, path: str) -> None:
    assert accept(commanded(command), section(path)).patch == section(path)


def test_scripts_that_scripts_run_are_dropped_too() -> None:
    scripts = {"ci/run.sh": ". env/common\nmake test\n", "env/common": "python3 tool.py\n"}
    for path in ("env/common", "Makefile", "tool.py"):
        assert accept(TASK, section(path), scripts).dropped == (path,)
        assert accept(TASK, section(path)).dropped == ()


@pytest.mark.parametrize(
    "made",
    [
        section("pytest.py", old="x.py", extra="rename from x.py\nrename to pytest.py\n"),
        section("pytest.py", old="x.py", extra="copy from x.py\ncopy to pytest.py\n"),
        "--- /dev/null\n+++ b/pytest.py\n@@ -0,0 +1 @@\n+x\n",
    ],
)
def test_no_renamed_module_shadows_a_test_runner(made: str) -> None:
    assert accept(TASK, made).patch == ""


@pytest.mark.parametrize(
    ("quoted", "name"),
    [
        (r'"b/\u"', "u"),
        (r'"b/\N{DIGIT ONE}"', "N{DIGIT ONE}"),
        (r'"b/\303\274\t.py"', "ü\t.py"),
        (r'"b/ü\".py"', 'ü".py'),
    ],
)
def test_quoted_names_are_read_as_git_reads_them(quoted: str, name: str) -> None:
    assert paths(f"--- /dev/null\n+++ {quoted}\n@@ -0,0 +1 @@\n+x\n") == (name,)


def test_headers_inside_content_are_content() -> None:
    patch = (
        "diff --git a/doc.txt b/doc.txt\n--- a/doc.txt\n+++ b/doc.txt\n@@ -1,2 +1,2 @@\n"
        "--- a/conftest.py\n+++ b/conftest.py\n x\x0cdiff --git a/conftest.py b/conftest.py\n"
    )
    assert paths(patch) == ("doc.txt",)
    assert accept(TASK, patch).patch == patch


def test_no_file_is_added_beside_the_hidden_tests_of_r2e() -> None:
    spec = replace(TASK.grading, test_files={"r2e_tests/test_1.py": ""})
    beside = section("r2e_tests/calc.py", extra="new file mode 100644\n")
    assert accept(replace(TASK, grading=spec), beside).dropped == ("r2e_tests/calc.py",)


def test_plain_diffs_are_split_at_each_file() -> None:
    plain = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-x\n+y\n"
    result = accept(TASK, plain.format("calc.py") + plain.format("conftest.py"))
    assert result.patch == plain.format("calc.py")
    assert result.dropped == ("conftest.py",)


BINARY = """\
diff --git a/logo b/logo
new file mode 100644
index 0000000000000000000000000000000000000000..47e5e5a4b9de0bf6ca6bfc4c9aeb7a8cc1cbbf5c
GIT binary patch
literal 4
LcmZQzWMT#Y01f~L

literal 0
HcmV?d00001

"""


@pytest.mark.parametrize("patch", [BINARY, BINARY + section("conftest.py")])
def test_a_binary_part_keeps_the_blank_line_that_ends_it(patch: str) -> None:
    assert accept(TASK, patch).patch == BINARY


def test_an_installed_packages_entry_points_are_dropped() -> None:
    path = "cheat-1.0.dist-info/entry_points.txt"
    assert accept(TASK, section(path, extra="new file mode 100644\n")).dropped == (path,)


def test_the_agent_may_change_files_that_the_solution_changes() -> None:
    task = replace(TASK, gold_patch=section("tox.ini") + section("tests/unit/test_calc.py"))
    assert accept(task, section("tox.ini")).dropped == ()
    assert accept(task, section("tests/unit/test_calc.py")).dropped != ()


@pytest.mark.parametrize("name", ["swebench_verified_v5", "swebench_lite_v5", "swebench_full_dev"])
def test_every_known_solution_is_accepted_whole(shared_dir: Path, name: str) -> None:
    to_task = find_converter("swe-bench").to_task
    with (shared_dir / "rows" / f"{name}.jsonl").open() as lines:
        tasks = [to_task(json.loads(line)) for line in lines]
    for task in tasks:
        result = accept(task, task.gold_patch)
        assert result.dropped == ()
        assert result.patch.rstrip("\n") == task.gold_patch.rstrip("\n")
