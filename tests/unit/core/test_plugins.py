"""Plug-ins by entry point and by file: found, listed, and refused in two lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from swerl.cli.main import typer_app
from swerl.core import plugins
from swerl.core.contracts import Attempt
from swerl.core.episode import Status
from swerl.core.errors import InputError, PluginError, RecipeError, UnknownNameError
from swerl.core.grade import Grade, Verdict
from swerl.core.turn import Trajectory
from swerl.recipe.load import load
from swerl.rollout import wiring
from swerl.rollout.reward import reward_of
from swerl.tasks.datasets import find_converter
from tests.unit import made

TASK = made.task("a", metadata={"hard": 2.0})
ATTEMPT = Attempt(TASK, Grade(Verdict.SOLVED, "ok"), Status.COMPLETED, "+a\n+b\n", Trajectory("s"))


def package(site: Path, entries: str, module: str = "def build(*_):\n    return 1\n") -> None:
    """Write an installed package `outside` with these entry points."""
    site.mkdir(exist_ok=True)
    (site / "outside.py").write_text(module)
    info = site / "outside-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entries)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on Python's path; its module is imported again by each test."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "outside", raising=False)
    return tmp_path / "site"


def test_all_kinds_share_one_pass_over_the_installed_packages(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(site, "[swerl.algorithms]\nmine = outside\n[swerl.graders]\njudge = outside\n")
    passes = []
    read = plugins.entry_points
    monkeypatch.setattr(plugins, "entry_points", lambda: passes.append(1) or read())
    assert "mine" in plugins.names("algorithms")
    assert "judge" in plugins.names("graders")
    assert len(passes) == 1
    assert plugins.load("algorithms", "mine").build() == 1


@pytest.mark.parametrize(
    ("name", "module", "says", "hint"),
    [
        ("mine", "import nothing_of_this_name\n", "ModuleNotFoundError", "outside.py:1"),
        ("mine", "x = 1\n", "has no function `build`", ""),
        ("gspo", "x = 1\n", "has the name of a built-in one", "rename"),
    ],
)
def test_a_broken_plug_in_is_one_error_with_its_entry_point(
    site: Path, name: str, module: str, says: str, hint: str
) -> None:
    package(site, f"[swerl.algorithms]\n{name} = outside\n", module)
    with pytest.raises(InputError, match=says) as caught:
        plugins.load("algorithms", name)
    assert f"outside: swerl.algorithms: {name} = outside" in str(caught.value)
    assert hint in caught.value.hint


def test_names_are_typed_with_dashes_only() -> None:
    with pytest.raises(UnknownNameError) as caught:
        plugins.load("harnesses", "claude_code")
    assert "claude-code" in caught.value.hint


def swerl(*arguments: str) -> Result:
    return CliRunner().invoke(typer_app, list(arguments), catch_exceptions=False)


@pytest.mark.integration
def test_doctor_lists_plug_ins_and_what_is_wrong_with_them(site: Path) -> None:
    package(site, "[swerl.rewards]\nmine = outside:build\nsolved = outside:build\n")
    checks = json.loads(swerl("doctor", "--json").stdout)["checks"]
    rows = {row["name"]: row for row in checks if row["name"].startswith("plug-in")}
    assert rows["plug-in mine"]["state"] == "ok"
    assert "outside 1.2" in rows["plug-in mine"]["detail"]
    assert "has the name of a built-in one" in rows["plug-in solved"]["detail"]


def test_a_reward_in_a_file_sees_the_whole_attempt(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def short(attempt):\n"
        "    size = len(attempt.patch.splitlines()) + len(attempt.trajectory.turns)\n"
        "    assert attempt.status == 'completed' and attempt.grade.verdict == 'solved'\n"
        "    return attempt.task.metadata['hard'] / size\n"
    )
    assert reward_of(f"{file}:short")(ATTEMPT) == 1.0


@pytest.mark.parametrize(
    ("body", "says"), [("1 / 0", "ZeroDivisionError"), ("float('nan')", "returned nan")]
)
def test_a_reward_that_fails_is_one_error(tmp_path: Path, body: str, says: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def reward(attempt):\n    return {body}\n")
    with pytest.raises(PluginError, match=f"REWARD FAILED .*{says}") as caught:
        reward_of(str(file))(ATTEMPT)
    assert caught.value.hint


def test_an_algorithm_and_an_agent_may_be_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from pydantic import BaseModel\n"
        "class Options(BaseModel, extra='forbid'):\n"
        "    scale: float = 1.0\n"
        "class Agent:\n"
        "    dialect, inside, mounts, install, run = 'openai_chat', False, print, print, print\n"
        "    def __init__(self, options):\n"
        "        self.scale = options.scale\n"
    )
    recipe = load([], ["name=a", "harness.type=mine.py:Agent", "harness.scale=3"])
    assert wiring.harness_of(recipe).scale == 3  # type: ignore[attr-defined]
    # The run folder may be used from another folder.
    assert recipe.harness.type == f"{tmp_path}/mine.py:Agent"
    with pytest.raises(RecipeError, match="unknown recipe key"):
        wiring.harness_of(load([], ["name=a", "harness.type=mine.py:Agent", "harness.scle=3"]))


def test_a_converter_and_a_grader_may_be_files(tmp_path: Path) -> None:
    file = tmp_path / "parts.py"
    file.write_text("def to_task(row):\n    return row\n\ndef build():\n    return 'grader'\n")
    assert find_converter(f"{file}:to_task").to_task({"a": 1}) == {"a": 1}
    assert plugins.load("graders", str(file)).build() == "grader"


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        (None, "none.py", "does not exist"),
        ("x = ", "mine.py", "SyntaxError"),
        ("import nothing_of_this_name\n", "mine.py", "ModuleNotFoundError"),
        ("x = 1\n", "mine.py", "has no function `reward`"),
        ("x = 1\n", "mine.py:other", "has no function 'other'"),
    ],
)
def test_a_wrong_file_is_one_error(tmp_path: Path, text: str | None, name: str, says: str) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(InputError, match=says) as caught:
        reward_of(str(tmp_path / name))
    assert caught.value.hint


def test_the_command_line_prints_two_lines_for_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("1 / 0\n")
    done = subprocess.run(
        [sys.executable, "-m", "swerl", "rollout", "--set", "rollout.reward=mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2
    assert "mine.py:1" in done.stderr
