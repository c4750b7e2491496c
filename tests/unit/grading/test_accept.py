"""The part of Changes that grading accepts: no hidden test file, no file that steers tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.core.changes import Changes, FileKind, TreeFile, touched
from swerl.core.sandbox import Exec
from swerl.core.task import GradingSpec, Task
from swerl.grading.accept import Accepted, CleanTree, accept
from swerl.grading.prepare import _clean_tree
from swerl.tasks.datasets import find_converter
from tests.unit.grading._folder_sandbox import FolderSandbox

OLD, NEW = TreeFile(b"x\n"), TreeFile(b"y\n")


def section(path: str) -> str:
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-x\n+y\n"


TASK = Task(
    id="t",
    repo="r",
    image="host",
    workdir="/w",
    prompt="p",
    grading=GradingSpec(
        "command",
        fail_to_pass=("pkg/test_declared.py::test_it[a b]",),
        test_patch=section("tests/unit/test_calc.py"),
        test_files={"hidden/run.py": "open(f'{EXAMPLES}/bill.json')"},
        test_command="pip install -e . && bash ./ci/run.sh",
    ),
)
ALL = CleanTree()


def edited(*names: str) -> Changes:
    """Changes of existing files."""
    return Changes(dict.fromkeys(names, NEW), dict.fromkeys(names, OLD))


def made(*names: str, file: TreeFile = NEW) -> Changes:
    """Changes that add files."""
    return Changes(dict.fromkeys(names, file), dict.fromkeys(names))


def link(path: str, target: str) -> Changes:
    return made(path, file=TreeFile(target.encode(), FileKind.LINK))


def both(*changes: Changes) -> Changes:
    files = {path: file for each in changes for path, file in each.files.items()}
    before = {path: file for each in changes for path, file in (each.before or {}).items()}
    return Changes(files, before)


def kept(found: Accepted) -> set[str]:
    return set(found.changes.files)


PROTECTED = [
    *("tests/unit/test_calc.py", "hidden/run.py", "conftest.py", "deep/down/conftest.py"),
    *("pytest.ini", "tox.ini", "sitecustomize.py", "lib/x.pth", "tests/unit/helpers.py"),
    *(
        "examples/bill.json",
        "tests/data/answers.json",
        "pkg/test_declared.py",
        "ci/run.sh",
        ".gitattributes",
    ),
    *(".github/workflows/test.yml", "web/jest.config.ts", "web/babel.config.js"),
    *("pkg/__pycache__/test_declared.cpython-311.pyc", "pkg/calc.pyc", "vite.config.ts"),
    *("sitecustomize/__init__.py", "lib/usercustomize.pyc", "venv/bin/activate", ".npmrc"),
    *(".venv/lib/python3.11/site-packages/_pytest/runner.py", "web/node_modules/m/index.js"),
    *(".rspec-local", "web/.swcrc", "test/mocha.opts", "unittest.cfg", ".config/nextest.toml"),
    *("web/.yarnrc.yml", ".mvn/jvm.config", "cheat-1.0.dist-info/entry_points.txt"),
    *("pkg/testdata/golden.txt", "web/__snapshots__/till.snap", "web/__mocks__/fs.js"),
]
OUTSIDE = [
    *(".git/hooks/post-checkout", "sub/.GIT/config", "a/../../outside.py", "/etc/x", "a//b", "./a"),
    *(".git", "a/.git/config", "git~1/config", ".g\u200cit/config", ".git./config", ""),
]


@pytest.mark.parametrize("path", [*PROTECTED, *OUTSIDE])
def test_protected_paths_are_dropped_and_named(path: str) -> None:
    for changes in (edited(path), made(path), Changes({path: None}, {path: OLD})):
        found = accept(TASK, both(changes, edited("calc.py")))
        assert (kept(found), found.dropped) == ({"calc.py"}, (path,))


@pytest.mark.parametrize("path", ["tests", "tests/unit", "hidden", "pkg"])
def test_no_file_or_link_takes_the_place_of_a_folder_of_hidden_tests(path: str) -> None:
    assert accept(TASK, made(path)).dropped == (path,)
    assert accept(TASK, link(path, "own")).dropped == (path,)


IN_PLACE = [
    *("hidden.py", "pkg.abi3.so", "tests/unit.py", "hidden/run/__init__.py", "hidden/run.so"),
    *("pkg/test_declared/__init__.py", "pkg/test_declared/__init__.abi3.so"),
    "src/tests/__init__.py",
]


@pytest.mark.parametrize("path", IN_PLACE)
def test_python_imports_no_new_file_in_place_of_hidden_tests(path: str) -> None:
    """A package hides a module; a module, or a package of `src`, hides a folder of tests."""
    assert accept(TASK, made(path), ALL).dropped == (path,)


def test_no_link_takes_the_place_of_the_module_of_a_hidden_test() -> None:
    assert accept(TASK, link("pkg/test_declared", "own"), ALL).dropped == ("pkg/test_declared",)


def test_no_folder_takes_the_place_of_a_hidden_test() -> None:
    changes = both(
        made("hidden/run.py/x"), Changes({"hidden/run.py": None}, {"hidden/run.py": OLD})
    )
    assert kept(accept(TASK, changes)) == set()


def test_other_files_are_kept() -> None:
    names = ("calc.py", "pkg/tests_of_time.py", "docs/testing/run.md", "bin/run", "a b/ü.py")
    assert accept(TASK, edited(*names)) == Accepted(edited(*names), ())


@pytest.mark.parametrize(
    ("path", "target", "is_kept"),
    [
        ("docs/link", "../calc.py", True),
        ("link", "calc.py", True),
        ("docs/link", "/w/calc.py", True),
        ("link", "/w/../etc/passwd", False),
        ("link", "/w/.git/config", False),
        ("link", "/w", False),
        ("link", "/etc/passwd", False),
        ("docs/link", "../../outside", False),
        ("link", "pkg/../../outside", False),
        ("link", ".git/config", False),
        ("conftest.py", "calc.py", False),
        ("tests/unit/x", "../../calc.py", False),
        ("json.py", "calc.py", False),
        ("json", "pkg", False),
        ("setup.cfg", "calc.py", False),
    ],
)
def test_links_lead_nowhere_outside_and_replace_nothing_protected(
    path: str, target: str, is_kept: bool
) -> None:
    assert bool(accept(TASK, link(path, target)).changes.files) is is_kept


def test_a_folder_with_a_protected_file_is_not_replaced_by_a_link() -> None:
    gone = Changes(
        {"own/conftest.py": None, "own/a.py": None}, {"own/conftest.py": OLD, "own/a.py": OLD}
    )
    found = accept(TASK, both(gone, link("own", "other"), made("other/x.py")))
    assert kept(found) == {"own/a.py", "other/x.py"}
    assert set(found.dropped) == {"own/conftest.py", "own"}


SHADOWS = [
    *("pytest.py", "unittest/__init__.py", "_pytest/__init__.py"),
    *("json.py", "src/difflib.py", "lib/json/__init__.py", "iniconfig/__init__.py"),
    *("difflib.cpython-311-x86_64-linux-gnu.so", "tools/bin/python3"),
]


@pytest.mark.parametrize("path", SHADOWS)
def test_no_new_module_shadows_a_test_runner_or_its_imports(path: str) -> None:
    assert accept(TASK, made(path), ALL).dropped == (path,)
    assert accept(TASK, edited(path), ALL).dropped == (), "the repository has its own"


@pytest.mark.parametrize(
    "path", ["_hypothesis_pytestplugin.py", "src/pytest_benchmark/__init__.py", "lib/attr.py"]
)
def test_no_new_module_shadows_an_installed_package(path: str) -> None:
    name = {"lib/attr.py": "attr", "src/pytest_benchmark/__init__.py": "pytest_benchmark"}
    found = CleanTree(installed=frozenset({name.get(path, "_hypothesis_pytestplugin")}))
    assert accept(TASK, made(path), found).dropped == (path,)
    assert accept(TASK, made(path), ALL).dropped == ()
    own = replace(found, owned=frozenset({("", each) for each in found.installed}))
    assert accept(TASK, made(path), own).dropped == (), "the project is that package"


HARMLESS = [
    # beside hidden tests
    *("pkg/__init__.py", "pkg/test_declared/data.py", "pkg/hidden.py", "hidden.txt"),
    *("src/a/tests.py", "tests_own/json.py"),
    # named like a module of a runner, where no import of it looks
    *("pkg/json.py", "types/shop.ts", "html/page.html", "src/platform/unix.py", "bin/till"),
    *("queue.py", "pkg/queue.py", "deep/lib/json.py", "pkg/coverage/m.py", "pkg/conf.py"),
    *("py/shop.py", "doctest/parts/shop.h", "coverage/index.html"),
]


@pytest.mark.parametrize("path", HARMLESS)
def test_other_new_files_of_such_names_stay(path: str) -> None:
    assert kept(accept(TASK, made(path), ALL)) == {path}


def test_a_source_folder_that_python_does_not_search_may_hold_any_module() -> None:
    assert kept(accept(TASK, made("lib/calendar.py"), CleanTree(searched=frozenset({"src"}))))
    assert not kept(accept(TASK, made("lib/calendar.py"), CleanTree(searched=frozenset({"lib"}))))


@pytest.mark.parametrize("path", ["coverage/new.py", "tox/session/new.py"])
def test_a_runners_own_project_may_add_modules(path: str) -> None:
    folder = path.split("/")[0]
    own = CleanTree(owned=frozenset({("", folder)}))
    assert kept(accept(TASK, made(path), own)) == {path}
    assert not kept(accept(TASK, made(f"{folder}/__init__.py"), ALL))


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
    assert accept(commanded(command), edited(path)).dropped == (path,)


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("make -j4 && ./run", "Makefile"),
        ("python3 setup.py test", "setup.py"),
        ("pytest tests", "tasks.py"),
        ("npm test", "docs/package.json"),
    ],
)
def test_files_that_only_build_are_kept(command: str, path: str) -> None:
    changes = edited(path)
    if path.endswith(".json"):
        changes = Changes({path: TreeFile(b'{"a": 1}')}, {path: TreeFile(b"{}")})
    assert accept(commanded(command), changes).changes == changes


def test_scripts_that_scripts_run_are_dropped_too() -> None:
    scripts = {"ci/run.sh": ". env/common\nmake test\n", "env/common": "python3 tool.py\n"}
    for path in ("env/common", "Makefile", "tool.py"):
        assert accept(TASK, edited(path), CleanTree(scripts)).dropped == (path,)
        assert accept(TASK, edited(path)).dropped == ()


def test_no_file_is_added_beside_the_hidden_tests_of_r2e() -> None:
    spec = replace(TASK.grading, test_files={"r2e_tests/test_1.py": ""})
    task = replace(TASK, grading=spec)
    assert accept(task, made("r2e_tests/calc.py")).dropped == ("r2e_tests/calc.py",)


def test_a_helper_may_move_out_of_the_tests() -> None:
    gone = Changes({"tests/helper.py": None}, {"tests/helper.py": OLD})
    assert kept(accept(TASK, both(gone, made("pkg/helper.py")))) == {"pkg/helper.py"}


def test_the_agent_may_change_files_that_the_solution_changes() -> None:
    task = replace(TASK, gold_patch=section("tox.ini") + section("tests/unit/test_calc.py"))
    assert accept(task, edited("tox.ini")).dropped == ()
    assert accept(task, edited("tests/unit/test_calc.py")).dropped != ()


CFG = "[metadata]\nname = a\n\n[tool:pytest]\naddopts = -q\n"


def cfg(old: str | None, new: str | None) -> Mapping[str, TreeFile | None]:
    changes = Changes(
        {"setup.cfg": None if new is None else TreeFile(new.encode())},
        {"setup.cfg": None if old is None else TreeFile(old.encode())},
    )
    return accept(TASK, both(changes, made("setup.cfg.d/x"))).changes.files


def test_settings_of_test_runners_are_those_of_the_clean_tree() -> None:
    forged = cfg(CFG, CFG.replace("-q", "-p forge"))["setup.cfg"]
    assert forged and forged.data.split() == CFG.encode().split()
    assert cfg(CFG, CFG.replace("= a", "= b"))["setup.cfg"] == TreeFile(
        CFG.replace("= a", "= b").encode()
    )
    assert cfg(None, CFG)["setup.cfg"] == TreeFile(b"[metadata]\nname = a\n")
    assert cfg(CFG, None)["setup.cfg"] == TreeFile(b"[tool:pytest]\naddopts = -q\n")
    assert cfg("[metadata]\nname = a\n", None)["setup.cfg"] is None


@pytest.mark.parametrize("name", ["setup.cfg", "pyproject.toml", "docs/package.json"])
def test_a_folder_in_place_of_settings_is_refused(name: str) -> None:
    gone = Changes({name: None}, {name: TreeFile(b"[tool:pytest]\nx = 1\n[tool.pytest]\nx = 1\n")})
    found = accept(TASK, both(gone, made(f"{name}/x")))
    assert set(found.dropped) == {name, f"{name}/x"}
    assert f"{name}/x" not in kept(found)


@pytest.mark.parametrize(
    "text", ["[" * 300_000, "a=" + "[" * 100_000, '{"a":' * 100_000, "[" + " " * 250_000]
)
@pytest.mark.parametrize("name", ["setup.cfg", "pyproject.toml", "package.json"])
def test_hostile_settings_take_no_time(name: str, text: str) -> None:
    base = TreeFile(b"[tool:pytest]\naddopts = -q\n[tool.pytest]\nx = 1\n")
    accept(TASK, Changes({name: TreeFile(text.encode())}, {name: base}))


@pytest.mark.parametrize("name", ["swebench_verified_v5", "swebench_lite_v5", "swebench_full_dev"])
def test_every_known_solution_is_accepted_whole(shared_dir: Path, name: str) -> None:
    to_task = find_converter("swe-bench").to_task
    with (shared_dir / "rows" / f"{name}.jsonl").open() as lines:
        tasks = [to_task(json.loads(line)) for line in lines]
    for task in tasks:
        assert accept(task, edited(*touched(task.gold_patch))).dropped == ()
        assert accept(task, made(*touched(task.gold_patch))).dropped == ()


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
    assert touched(f"--- /dev/null\n+++ {quoted}\n@@ -0,0 +1 @@\n+x\n") == (name,)


def test_headers_inside_content_are_content() -> None:
    patch = (
        "diff --git a/doc.txt b/doc.txt\n--- a/doc.txt\n+++ b/doc.txt\n@@ -1,2 +1,2 @@\n"
        "--- a/conftest.py\n+++ b/conftest.py\n x\x0cdiff --git a/conftest.py b/conftest.py\n"
    )
    assert touched(patch) == ("doc.txt",)


async def test_many_new_modules_hide_no_installed_one_among_them() -> None:
    """More names than fit into one command line; without an answer, all count as installed."""
    names = [f"{'a' * 150}{number}.py" for number in range(1_200)]

    class Short(FolderSandbox):
        async def run(self, argv: Sequence[str], **options: Any) -> Exec:
            assert sum(map(len, argv)) < 2**17, "some systems accept no longer command line"
            answer = b"" if "attr" in argv else b"installed . yaml\n"
            return Exec(126 if "attr" in argv else 0, answer, b"")

    clean = await _clean_tree(TASK, made("attr.py", "yaml.py", *names), Short())
    assert {"attr", "yaml"} <= clean.installed
