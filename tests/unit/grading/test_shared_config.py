"""Files that hold test settings beside others: only the test settings are restored."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.grade import Verdict
from swerl.core.task import Task
from swerl.grading.graders import command
from swerl.grading.steering import holds_steering, without_steering
from tests.unit.grading._folder_sandbox import opener
from tests.unit.grading.conftest import GOLD

SETUP_CFG = """\
[metadata]
name = calc

[tool:pytest]
addopts = -q
testpaths = tests

[flake8]
max-line-length = 100
"""
PYPROJECT = """\
[project]
name = "calc"
dependencies = []

[tool.pytest.ini_options]
addopts = "-q"

[tool.black]
line-length = 100
"""
PACKAGE = '{\n  "name": "calc",\n  "scripts": {"test": "jest"},\n  "dependencies": {}\n}\n'


@pytest.mark.parametrize(
    ("name", "base", "old", "new"),
    [
        ("setup.cfg", SETUP_CFG, "max-line-length = 100", "max-line-length = 120"),
        ("pyproject.toml", PYPROJECT, "dependencies = []", 'dependencies = ["attrs"]'),
        ("package.json", PACKAGE, '"dependencies": {}', '"dependencies": {"a": "1"}'),
    ],
)
def test_other_settings_are_kept_to_the_byte(name: str, base: str, old: str, new: str) -> None:
    changed = base.replace(old, new)
    assert changed != base
    assert without_steering(name, base, changed) == changed


@pytest.mark.parametrize(
    ("name", "base", "old", "new"),
    [
        ("setup.cfg", SETUP_CFG, "addopts = -q", "addopts = -p forge"),
        ("setup.cfg", SETUP_CFG, "testpaths = tests\n", ""),
        ("setup.cfg", SETUP_CFG, "[flake8]", "[aliases]\ntest = true\n[flake8]"),
        ("pyproject.toml", PYPROJECT, '"-q"', '"-p forge"'),
        ("pyproject.toml", PYPROJECT, "[tool.black]", '["tool"."pytest"]\nx = 1\n[tool.black]'),
        (
            "pyproject.toml",
            PYPROJECT,
            "[tool.black]",
            '[project.entry-points.pytest11]\nforge = "calc"\n[tool.black]',
        ),
    ],
)
def test_settings_of_test_runners_are_restored(name: str, base: str, old: str, new: str) -> None:
    changed = base.replace(old, new).replace("100", "120")
    restored = without_steering(name, base, changed)
    assert "120" in restored
    assert sorted(restored.replace("120", "100").split()) == sorted(base.split())


def test_keys_of_a_package_are_restored() -> None:
    transforms = '"babel": {"plugins": ["./forge"]}, "dependencies"'
    changed = PACKAGE.replace("jest", "true").replace("{}", '{"a": "1"}')
    changed = changed.replace('"dependencies"', transforms)
    found = json.loads(without_steering("package.json", PACKAGE, changed))
    assert found == {"name": "calc", "dependencies": {"a": "1"}, "scripts": {"test": "jest"}}


@pytest.mark.parametrize(
    ("name", "base", "changed"),
    [
        ("pyproject.toml", PYPROJECT, "tool = {pytest = {ini_options = {addopts = '-p x'}}}\n"),
        ("pyproject.toml", PYPROJECT, "tool.pytest.ini_options.addopts = '-p x'\n"),
        ("pyproject.toml", PYPROJECT, "not toml ["),
        ("setup.cfg", SETUP_CFG, "no section\n"),
        ("package.json", PACKAGE, "[]"),
        ("package.json", PACKAGE, "{"),
        ("pyproject.toml", "", f"a = {'9' * 5000}\n[tool.pytest]\nb = 1\n"),
        ("setup.cfg", "", "[a]\nkey\n  more\n"),
        ("package.json", "", '{"name": "\\ud800", "scripts": {"test": "true"}}'),
    ],
)
def test_a_file_that_cannot_be_split_is_restored_whole(name: str, base: str, changed: str) -> None:
    assert without_steering(name, base, changed) == base


@pytest.mark.parametrize("name", ["setup.cfg", "deep/pyproject.toml", "package.json"])
def test_a_new_file_adds_no_settings_of_test_runners(name: str) -> None:
    assert holds_steering(name)
    texts = {"setup.cfg": SETUP_CFG, "deep/pyproject.toml": PYPROJECT, "package.json": PACKAGE}
    made = without_steering(name, "", texts[name])
    assert "calc" in made
    assert "pytest" not in made and "jest" not in made


async def test_grading_restores_them_and_reports_it(task: Task) -> None:
    cfg = "[metadata]\nname = calc\n\n[tool:pytest]\naddopts = -p forge\n"
    new = "".join(f"+{line}\n" for line in cfg.splitlines())
    patch = (
        "diff --git a/setup.cfg b/setup.cfg\nnew file mode 100644\n--- /dev/null\n+++ b/setup.cfg\n"
        f"@@ -0,0 +1,5 @@\n{new}"
    )
    task = replace(task, grading=replace(task.grading, mutated=(), not_run=()))
    result = await command.build().grade(task, GOLD + patch, opener(task))
    assert (result.verdict, result.restored) == (Verdict.SOLVED, ("setup.cfg",))
    assert (Path(task.workdir) / "setup.cfg").read_text() == "[metadata]\nname = calc\n"


@pytest.mark.parametrize(
    ("name", "base", "added"),
    [
        ("setup.cfg", SETUP_CFG, "[options.entry_points]\npytest11 =\n    forger = forger\n"),
        ("pyproject.toml", PYPROJECT, "[tool.poetry.plugins]\npytest11 = {forger = 'forger'}\n"),
        ("pyproject.toml", PYPROJECT, "[tool.flit.entrypoints.pytest11]\nforger = 'forger'\n"),
    ],
)
def test_no_build_tool_adds_a_pytest_plugin(name: str, base: str, added: str) -> None:
    assert "pytest11" not in without_steering(name, base, base + added)


def test_a_program_may_be_added_to_entry_points() -> None:
    programs = SETUP_CFG + "[options.entry_points]\nconsole_scripts =\n    calc = calc:main\n"
    assert without_steering("setup.cfg", SETUP_CFG, programs) == programs


@pytest.mark.parametrize("tool", ["tool.poe.tasks", "tool.taskipy.tasks", "tool.pixi.tasks"])
def test_tasks_that_start_tests_are_restored(tool: str) -> None:
    base = f'[project]\nname = "till"\n\n[{tool}]\ntest = "pytest"\n'
    changed = base.replace('"pytest"', '"true"').replace("till", "shop")
    kept = without_steering("pyproject.toml", base, changed)
    assert tomllib.loads(kept) == tomllib.loads(base.replace("till", "shop"))
