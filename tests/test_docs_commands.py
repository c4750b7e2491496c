"""The commands of README and docs: all of them parse, and those that can run here do run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from typer.testing import CliRunner

from swerl.cli.main import typer_app, whole_command
from swerl.core.files import write_json
from swerl.core.task import Task, write_tasks
from swerl.recipe.load import load
from swerl.runs.evaluation import TaskResult, summary
from swerl.tasks import twin

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ("reference", "measurements")
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name not in GENERATED),
]
NOT_RUN = {
    r"swerl train (?!.*--dry-run)": "trains, or needs a run in work",
    r"swerl (export|why|reward) ": "needs a trained run",
    r"--model|--from runs": "needs a model or a trained run",
    r"swerl (serve|sandbox serve)$|swerl view ": "serves until Ctrl-C",
    r"swerl sandbox reap|swerl doctor": "own tests run it",
    r"swerl agents fetch|--agent (claude-code|codex)": "downloads an agent",
    r"swerl convert (?!list)": "needs a dataset's rows or a hub",
    r"swerl images (pull|mirror|build)": "needs a registry or sources",
    r"e2b|--backend docker|type=docker|type=kubernetes": "needs E2B, a Docker daemon or a cluster",
    r"replacer|one-line-bugs": "needs the example package; tests/unit/examples runs it",
    r"--format slime": "leaves out tasks without a registry's image, as these are",
    r"tasks from-repo": "tests/unit/tasks/test_from_repo.py runs it",
    r"tasks vet": "minutes of grading; tests/unit/cli/test_tasks_vet.py runs it",
}
"""Pattern of a command -> why it is not run here."""


def _commands() -> Iterator[tuple[Path, str]]:
    """Yield every `swerl` command in a shell block, without comments and line breaks."""
    for page in PAGES:
        for block in re.findall(r"```(?:sh|bash)\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.sub(r"\s#.*", "", line).split("&&"):
                    if part.strip().startswith("swerl "):
                        yield page, re.sub(r"\s+", " ", part.strip())


COMMANDS = list(dict.fromkeys(_commands()))
NAMES = [f"{page.relative_to(ROOT)}: {command}" for page, command in COMMANDS]
RUN = [command for _, command in COMMANDS if not any(re.search(p, command) for p in NOT_RUN)]


@pytest.fixture(scope="module")
def whole() -> Any:
    return whole_command()


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=NAMES)
def test_a_command_has_the_options_that_the_docs_name(
    page: Path, command: str, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)[1:]
    found, parent = whole, None
    # Groups parse their own options and leave the rest to the command that comes next.
    while isinstance(found, click.Group) or hasattr(found, "commands"):
        context = found.make_context(found.name, list(words), parent=parent)
        words = [*context._protected_args, *context.args]
        name, found, words = found.resolve_command(context, words)
        assert found is not None, name
        parent = context
    context = found.make_context(found.name, list(words), parent=parent)
    settings = context.params.get("settings") or []
    if "recipes" in context.params and words and "cost" not in command:
        recipes = [Path(str(each)) for each in context.params["recipes"] or ()]
        assert load(recipes, settings).name


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    folder = tmp_path_factory.mktemp("twin")
    made = twin.make_tasks(folder, split="heldout", count=2, seed=0)
    return [replace(made[0], id="pallets__flask-4045"), replace(made[1], id="ID")]


@pytest.fixture
def folder(some: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages assume."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWERL_STATE", str(tmp_path / "state"))
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    write_tasks(Path("tasks.jsonl"), some)
    rated = [replace(task, metadata={**task.metadata, "solve_rate": 0.5}) for task in some]
    write_tasks(Path("tasks.certified.probed.jsonl"), rated)
    results = summary([TaskResult("ID", 2, 1, ("solved", "unsolved"))], 2)
    for run, name in (
        *(("eval-tasks-builtin-base", "eval"), ("eval-tasks-builtin-runs-mine", "eval")),
        *(("twin", f"eval-heldout-000{step}") for step in ("00", "40", "60")),
    ):
        Path("runs", run, "evals").mkdir(parents=True, exist_ok=True)
        write_json(Path("runs", run, "evals", f"{name}.json"), results)
    guide = (ROOT / "docs" / "guides" / "plug-ins.md").read_text()
    match = re.search(r"cat > mine.py <<'END'\n(.*?)END", guide, re.DOTALL)
    assert match is not None
    Path("mine.py").write_text(match[1])
    return tmp_path


@pytest.mark.parametrize("command", RUN)
def test_a_command_of_the_docs_runs(command: str, folder: Path) -> None:
    done = CliRunner().invoke(typer_app, shlex.split(command)[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def test_many_commands_run_and_every_reason_is_in_use() -> None:
    assert len(RUN) >= 30
    every = [command for _, command in COMMANDS]
    assert not [p for p in NOT_RUN if not any(re.search(p, command) for command in every)]


@pytest.mark.integration
def test_the_tests_of_the_vetting_page_are_judged_as_it_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "guides" / "vetting.md").read_text()
    _, _, section = page.partition("## Write tests that vetting accepts")
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert block is not None
    monkeypatch.setenv("SWERL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    command = block[1].replace("&& swerl tasks vet", "> convert.log && swerl tasks vet").rstrip()
    words = ["bash", "-ec", f"{command} --json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["task"]: row["certificate"] for row in json.loads(done.stdout)}
    assert found["empty"]["findings"][0]["defect"] == "solved by nothing"
    assert not found["weak"]["findings"] and not found["strong"]["findings"]
    judged = [(found[name]["strength"], found[name]["share"]) for name in ("weak", "strong")]
    assert judged == [("some", 0), ("strong", 1)]
