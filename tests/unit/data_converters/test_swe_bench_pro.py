"""SWE-bench Pro Tasks: two streams reach the instance's own parser, and hidden commits stay so."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from swerl.core.errors import TaskError
from swerl.core.task import Task
from swerl.tasks.datasets import find_converter

from .examples import PRO

CONVERTER = find_converter("swe-bench-pro")
RUN = "echo PASS $1; echo noise >&2; exit 3\n"
PARSER = """import json, sys
out, err, report = sys.argv[1:]
names = [line.split()[1] for line in open(out) if line.startswith("PASS ")]
assert open(err).read() == "noise\\n"
tests = [{"name": name, "status": "PASSED"} for name in names]
json.dump({"tests": tests}, open(report, "w"))
"""


def shell(command: str, folder: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    moved = command.replace("/opt/swerl-grading", str(folder))
    return subprocess.run(["bash", "-c", moved], input=stdin, capture_output=True, check=False)


def task_of(**columns: object) -> Task:
    return CONVERTER.to_task({**PRO, **columns})  # type: ignore[dict-item]


def test_the_parser_gets_both_streams_of_the_log(tmp_path: Path) -> None:
    spec = task_of(run_script=RUN, parser_script=PARSER).grading
    for path, text in spec.files.items():
        (tmp_path / Path(path).name).write_text(text)
    tests = shell(spec.test_command, tmp_path)
    assert tests.returncode == 3
    made = shell(spec.report_command, tmp_path, tests.stdout)
    assert made.returncode == 0, made.stderr
    report = (tmp_path / Path(spec.report_path).name).read_text()
    assert report == '{"tests": [{"name": "tests/test_sums.py", "status": "PASSED"}]}'


def test_the_solutions_commit_is_in_grading_alone() -> None:
    task = task_of()
    assert task.setup == "git reset --hard ba5e\ngit clean -fd\ngit checkout ba5e"
    assert task.grading.test_setup == "git checkout c0ffee -- tests/test_sums.py"
    assert task.grading.env == {"A": "1", "B": "two words"}
    assert "\nRequirements:\n- add returns the sum" in task.prompt
    assert '"' not in task.prompt


def test_scripts_come_from_the_benchmarks_repository(tmp_path: Path) -> None:
    own = {"run_script", "parser_script", "base_dockerfile", "instance_dockerfile"}
    row = {column: value for column, value in PRO.items() if column not in own}
    with pytest.raises(TaskError, match="--assets"):
        CONVERTER.to_task(row)
    name = str(PRO["instance_id"])
    for path, text in (
        (f"run_scripts/{name}/run_script.sh", PRO["run_script"]),
        (f"run_scripts/{name}/parser.py", PRO["parser_script"]),
        (f"dockerfiles/base_dockerfile/{name}/Dockerfile", PRO["base_dockerfile"]),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(str(text))
    assert CONVERTER.with_assets
    task = CONVERTER.to_task(CONVERTER.with_assets(row, tmp_path))
    assert task == task_of(instance_dockerfile="")


def test_an_id_leads_nowhere_else(tmp_path: Path) -> None:
    assert CONVERTER.with_assets
    with pytest.raises(TaskError, match="instance_id has a slash"):
        CONVERTER.with_assets({**PRO, "instance_id": "../x"}, tmp_path)


def test_a_last_line_that_brings_no_tests_is_refused() -> None:
    with pytest.raises(TaskError, match="checks out no test files"):
        task_of(before_repo_set_cmd="git reset --hard ba5e")
