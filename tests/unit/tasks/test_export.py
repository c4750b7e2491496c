"""Task files reach other trainers' formats without losing what those formats can carry."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.errors import RunError, TaskError
from swerl.core.task import GradingSpec, Task, from_row
from swerl.tasks.datasets import find_converter
from swerl.tasks.export import export_slime, export_verl
from swerl.tasks.rows import file_rows

FIX = """diff --git a/sums.py b/sums.py
--- a/sums.py
+++ b/sums.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
TESTS = """diff --git a/test_sums.py b/test_sums.py
new file mode 100644
--- /dev/null
+++ b/test_sums.py
@@ -0,0 +1,4 @@
+from sums import add
+
+result = "PASSED" if add(1, 1) == 2 else "FAILED"
+print(result, "test_sums.py::test_add")
"""


def bench_task(workdir: str = "/testbed") -> Task:
    spec = GradingSpec(
        "swebench",
        fail_to_pass=("test_sums.py::test_add",),
        pass_to_pass=("test_sums.py::test_old",),
        test_patch=TESTS,
        test_command="echo PASSED test_sums.py::test_old\npython3 test_sums.py",
        log_parser="pytest",
        env={"A": "it's"},
    )
    return Task(
        "a__b-1", "a/b", "x/b:1", workdir, "Mend it.", spec,
        gold_patch=FIX, dataset="a/b", metadata={"version": "1.0"},
    )  # fmt: skip


def script_task() -> Task:
    files = {"test_fail_to_pass.py": "import sys\n"}
    spec = GradingSpec("script", test_files=files, test_command="python test_fail_to_pass.py")
    return replace(bench_task(), id="s", grading=spec, setup="git checkout a\ngit clean -fd")


def test_slime_gets_what_it_grades_by(tmp_path: Path) -> None:
    out = tmp_path / "slime.jsonl"
    command = replace(script_task(), id="c", grading=GradingSpec("command", test_command="make t"))
    r2e = replace(script_task(), id="r", grading=GradingSpec("r2e"))
    done = export_slime([bench_task(), script_task(), command, r2e], out)
    assert (done.num_tasks, list(done.reasons.values())) == (3, [1])
    bench, script, commanded = map(json.loads, out.open())
    info = bench["metadata"]["remote_env_info"]
    assert {"image", "base_commit", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS", "version", "repo",
            "instance_id", "problem_statement", "hints_text",
            "environment_setup_commit"} <= info.keys()  # fmt: skip
    info = script["metadata"]["remote_env_info"]
    assert info["f2p_script"] == "import sys\n"
    assert info["pre_commands"] == "git checkout a\ngit clean -fd"
    assert commanded["metadata"]["eval_cmd"] == "make t"
    assert "swerl" not in bench["metadata"] and FIX not in out.read_text()


def test_slimes_rows_convert_back(tmp_path: Path) -> None:
    export_slime([script_task()], tmp_path / "slime.jsonl")
    (row,) = file_rows(tmp_path / "slime.jsonl")
    assert not isinstance(row, TaskError)
    task = find_converter("scale-swe").to_task(row)
    assert (task.id, task.repo, task.setup) == ("s", "a/b", "git checkout a\ngit clean -fd")
    assert task.grading.test_files == script_task().grading.test_files


def test_verl_gets_its_columns_and_the_whole_task(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    tasks = [replace(bench_task(), id=f"t-{number}") for number in range(450)]
    done = export_verl(tasks, tmp_path / "tasks.parquet")
    rows = parquet.read_table(tmp_path / "tasks.parquet").to_pylist()
    assert done.num_tasks == len(rows) == 450
    assert [from_row(json.loads(row["extra_info"].pop("task"))) for row in rows] == tasks
    assert rows[300] == {
        "data_source": "a/b",
        "prompt": [{"role": "user", "content": "Mend it."}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": "t-300"},
        "extra_info": {
            "index": 300, "instance_id": "t-300", "repo": "a/b", "image": "x/b:1",
            "workdir": "/testbed",
        },
    }  # fmt: skip


def test_an_export_that_fails_leaves_the_last_result(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    with pytest.raises(RunError, match="cannot write"):
        export_slime([bench_task()], tmp_path / "none" / "out.jsonl")

    def broken() -> Task:
        raise TaskError("broken")

    with pytest.raises(TaskError):
        export_slime((broken() for _ in range(1)), out)
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl"}
