"""A repository's history becomes certified Tasks, and every other commit has a reason."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from swerl.cli.tasks_from_repo import _candidates, _Maker, _Place
from swerl.core.errors import InputError
from swerl.core.task import GradingSpec, read_tasks
from swerl.grading.accept import is_test
from swerl.tasks.bugs import bugs
from swerl.tasks.from_repo import Candidate, Commits, Dropped, candidates, prompt_of

RUNNER = """\
import runpy, sys, traceback
for path in ["tests/test_sum.py", "tests/test_mean.py"]:
    try:
        names = runpy.run_path(path)
    except Exception:
        traceback.print_exc()
        continue
    for name, test in names.items():
        if name.startswith("test_"):
            try:
                test()
                print("PASSED", name)
            except Exception:
                print("FAILED", name)
"""
CODE = "def add(a, b):\n    return a + b\n\n\ndef mean(values):\n    return add(*values) / 2\n"
FIXED = CODE.replace("add(*values) / 2", "sum(values) / len(values)")
HEAD = "import sys\nsys.path.insert(0, '.')\nimport calc\n"
SUM = f"{HEAD}def test_add():\n    assert calc.add(1, 2) == 3\n"
MEAN = f"""{HEAD}def test_mean():
    assert calc.mean([3, 3, 3]) == 3
def test_two():
    assert calc.mean([1, 3]) == 2
"""


class Repo:
    """A git repository that a test fills."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "-q", "-b", "main")
        self.commit("Start", {"calc.py": CODE, "run.py": RUNNER, "tests/test_sum.py": SUM})

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(self.root), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, message: str, files: dict[str, str | bytes | None]) -> str:
        for name, content in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
        self.git("add", "-A")
        self.git("commit", "-qm", message)
        return self.git("rev-parse", "HEAD")

    def found(self, commits: Commits = Commits()) -> list[Candidate | Dropped]:  # noqa: B008
        return list(candidates(self.root, commits, is_test))


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    settings = "[diff]\nnoprefix = true\n[clone]\ndefaultRemoteName = a\n[init]\ntemplateDir = /a\n"
    (tmp_path / "gitconfig").write_text(settings)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    return Repo(tmp_path / "calc")


@pytest.mark.parametrize(
    ("message", "files", "reason"),
    [
        ("x", {"calc.py": FIXED}, "it changes no test"),
        ("x", {"tests/test_mean.py": MEAN}, "it changes no source file"),
        ("x", {"README.md": "x", "tests/test_mean.py": MEAN}, "it changes no source file"),
        ("x", {"vendor/a.py": "x", "tests/test_mean.py": MEAN}, "it changes no source file"),
        ("Revert it", {"calc.py": FIXED, "tests/test_mean.py": MEAN}, "it is a revert"),
        ("x", {"a.so": b"\0\1", "tests/test_mean.py": MEAN}, "it changes a binary file"),
        ("x", {"a.py": "x\n" * 1001, "tests/test_mean.py": MEAN}, "more than 1000 lines"),
        (
            "x",
            {**{f"{n}.py": "x" for n in range(21)}, "tests/test_mean.py": MEAN},
            "more than 20 source files",
        ),
        ("x", {"calc.py": None, "b.py": CODE, "tests/test_mean.py": MEAN}, "it only moves files"),
    ],
)
def test_a_commit_that_makes_no_task_has_a_reason(
    repo: Repo, message: str, files: dict[str, str | bytes | None], reason: str
) -> None:
    repo.commit(message, files)
    newest, first = repo.found()
    assert isinstance(newest, Dropped) and reason in newest.reason
    assert isinstance(first, Dropped) and first.reason == "it has no parent"


def test_a_merge_is_one_change_whose_two_diffs_make_its_tree(repo: Repo) -> None:
    repo.git("checkout", "-q", "-b", "topic")
    repo.commit("code", {"calc.py": FIXED, 'odd "name".txt': "x"})
    repo.commit("tests", {"tests/test_mean.py": MEAN, "tests/z": b"\0", "conftest.py": ""})
    repo.git("checkout", "-q", "main")
    repo.commit("other", {"other.txt": "x"})
    repo.git("merge", "-q", "--no-ff", "-m", "Merge pull request #7 from a/topic", "topic")
    merge, *rest = repo.found()
    assert isinstance(merge, Candidate)
    assert [type(found) for found in rest] == [Dropped, Dropped]
    assert "conftest.py" in merge.tests and "calc.py" in merge.solution
    assert "calc.py" not in merge.tests and "tests/" not in merge.solution
    repo.git("checkout", "-q", merge.base)
    for number, text in enumerate((merge.solution, merge.tests)):
        patch = repo.root.parent / f"{number}.diff"
        patch.write_text(text)
        repo.git("apply", "--index", str(patch))
    assert repo.git("write-tree") == repo.git("rev-parse", f"{merge.commit}^{{tree}}")


def test_the_runner_gets_files_that_hold_tests_and_exist(repo: Repo) -> None:
    repo.commit("Data", {"tests/test_old.py": ""})
    tests = {
        "tests/test_mean.py": MEAN,
        "tests/test_old.py": None,
        "tests/a.json": "",
        "tox.ini": "",
    }
    repo.commit("Fix", {"calc.py": FIXED, **tests})
    repo.commit("No test", {"calc.py": CODE, ".github/workflows/ci.yml": "x"})
    [fix], dropped = _candidates(repo.root, Commits(), 9)
    assert dropped[0].reason == "it changes no test"
    spec = GradingSpec("swebench", test_command="run {tests}")
    maker = _Maker(_Place(repo.root, "calc", "", "an/image", ""), spec, {}, None)  # type: ignore[arg-type]
    assert maker._draft(fix).grading.test_command == "run tests/test_mean.py"


def test_commits_are_selected(repo: Repo) -> None:
    first = repo.git("rev-parse", "HEAD")
    second = repo.commit("second", {"calc.py": FIXED})
    repo.commit("third", {"calc.py": CODE})
    assert len(repo.found()) == 3
    assert [found.commit for found in repo.found(Commits(second))] == [second]
    between = Commits(f"{first}..{second}")
    assert [found.commit for found in repo.found(between)] == [second]
    assert repo.found(Commits(since="2090-01-01")) == []


def test_a_folder_without_history_is_refused_in_one_line(repo: Repo, tmp_path: Path) -> None:
    repo.commit("second", {"calc.py": FIXED})
    shallow = tmp_path / "shallow"
    repo.git("clone", "-q", "--depth", "1", f"file://{repo.root}", str(shallow))
    (tmp_path / "empty").mkdir()
    for folder, message in ((shallow, "is a shallow clone"), (tmp_path / "empty", "not a git")):
        with pytest.raises(InputError, match=message):
            list(candidates(folder, Commits(), is_test))


@pytest.mark.parametrize(
    ("message", "source", "has", "doubts"),
    [
        ("Fix the mean (#3)", "issue", "The mean of three numbers is wrong.", []),
        (
            "As NEWS.md says, the mean of more than two numbers is wrong. (#4)\n\n---------\n"
            "Signed-off-by: A <a@b>",
            "message",
            "two numbers is wrong.\n</issue>",
            [],
        ),
        ("Fix it", "template", "- test_mean", ["too short"]),
        (
            "In calc.py use sum(values) / len(values) where it divides by two, not more",
            "message",
            "calc.py",
            ["it names calc.py", "it has code of the solution"],
        ),
    ],
)
def test_a_prompt_comes_from_issue_message_or_tests(
    message: str, source: str, has: str, doubts: list[str]
) -> None:
    diff = "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1 +1 @@\n-x\n"
    diff = f"{diff.replace('calc.py', 'NEWS.md')}+x\n{diff}+sum(values) / len(values)\n"
    candidate = Candidate("c", "b", message, diff, "")
    issues = {"3": "The mean of three numbers is wrong."}
    prompt, about = prompt_of(candidate, ("test_mean",), issues)
    assert about["prompt_source"] == source
    assert has in prompt and not any(part in prompt for part in ("Signed-off", "(#", "----"))
    found = about["prompt_doubts"]
    assert isinstance(found, list) and len(found) == len(doubts)
    assert all(part in str(doubt) for part, doubt in zip(doubts, found, strict=True))


GRADES = """\
LIMIT = 60
def grade(points, bonus=False):
    # points > 100 are "points == 100"
    if points >= LIMIT and not points > 100:
        return 1 if bonus or points == 100 else 2
    return 3
"""


def test_a_bug_changes_one_operator_and_its_solution_restores_the_file(
    repo: Repo, tmp_path: Path
) -> None:
    files = {"grades.py": GRADES, "tests/test_grades.py": "import grades\n", "other.py": GRADES}
    repo.commit("Grades", {**files, "grades.md": "1 + 1\n", "tests/grades.py": "1 + 1\n"})
    found = bugs(repo.root, tmp_path / "clone", 9, is_test)
    assert found == bugs(repo.root, tmp_path / "clone", 9, is_test)
    changed = {
        line for bug in found for line in bug.solution.splitlines() if re.match(r"[-+]\s*\w", line)
    }
    removed = {line[1:].strip() for line in changed if line[0] == "-"}
    assert removed == {
        "return a - b",
        "return add(*values) / 3",
        "LIMIT = 61",
        "def grade(points, bonus=True):",
        "if points > LIMIT and not points > 100:",
        "return 2 if bonus or points == 100 else 2",
        "return 4",
    }
    for bug in found:
        assert not bug.tests and not bug.message
        clone = str(tmp_path / "clone")
        assert repo.git("-C", clone, "rev-list", "--count", bug.base) == "1"
        repo.git("-C", clone, "checkout", "-q", bug.base)
        patch = tmp_path / "solution.diff"
        patch.write_text(bug.solution)
        repo.git("-C", clone, "apply", "--index", str(patch))
        tree = repo.git("-C", clone, "write-tree")
        assert tree == repo.git("rev-parse", "HEAD^{tree}")
        repo.git("-C", clone, "reset", "-q", "--hard")


@pytest.mark.integration
def test_synthetic_bugs_become_certified_tasks(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    repo.commit("Mean", {"calc.py": FIXED, "tests/test_mean.py": f"{MEAN}# calc\n"})
    out = tmp_path / "tasks.jsonl"
    command = ["tasks", "from-repo", str(repo.root), "--test", "python3 run.py", "-o", str(out)]
    result = CliRunner().invoke(typer_app, [*command, "--image", "host", "--mutate", "1"])
    assert result.exit_code == 0, result.output
    [task] = read_tasks(out)
    assert task.certificate and "These tests" in task.prompt
    assert task.metadata["prompt_doubts"] == []
    assert task.grading.fail_to_pass and task.grading.pass_to_pass
    assert set(task.grading.test_files) == {"tests/test_sum.py"}


@pytest.mark.integration
def test_a_history_becomes_certified_tasks_and_goes_on_after_an_end(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    message = "The mean of more than two numbers fails with a TypeError"
    commit = repo.commit(message, {"calc.py": FIXED, "tests/test_mean.py": MEAN})
    repo.commit("No fix", {"calc.py": f"{FIXED}\nx = 1\n", "tests/test_sum.py": f"{SUM}\n"})
    out = tmp_path / "tasks.jsonl"
    command = ["tasks", "from-repo", str(repo.root), "--test", "python3 run.py", "-o", str(out)]
    result = CliRunner().invoke(typer_app, [*command, "--image", "host"])
    assert result.exit_code == 0, result.output
    assert "makes no test pass that failed before" in " ".join(result.output.split())
    [task] = read_tasks(out)
    assert task.metadata["commit"] == commit
    assert task.certificate and message in task.prompt
    spec = task.grading
    assert (spec.fail_to_pass, spec.pass_to_pass) == (("test_mean",), ("test_add", "test_two"))
    journal = tmp_path / "tasks.discovered.jsonl"
    before = journal.read_bytes()
    again = CliRunner().invoke(typer_app, [*command, "--image", "host"])
    assert again.exit_code == 0, again.output
    assert journal.read_bytes() == before
