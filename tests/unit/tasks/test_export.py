"""Task files reach other trainers' formats without losing what those formats can carry."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.errors import InputError, RunError, TaskError
from swerl.core.task import GradingSpec, Task, from_row
from swerl.tasks.datasets import find_converter
from swerl.tasks.export import export_harbor, export_slime, export_verl
from swerl.tasks.rows import file_rows

OLD = "def add(a, b):\n    return a - b\n"
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


def lines(path: Path) -> list[dict[str, dict[str, dict[str, str]]]]:
    return [json.loads(line) for line in path.open()]


def test_slime_gets_what_it_grades_by(tmp_path: Path) -> None:
    out = tmp_path / "slime.jsonl"
    command = replace(script_task(), id="c", grading=GradingSpec("command", test_command="make t"))
    r2e = replace(script_task(), id="r", grading=GradingSpec("r2e"))
    done = export_slime([bench_task(), script_task(), command, r2e], out)
    assert (done.num_tasks, list(done.reasons.values())) == (3, [1])
    bench, script, commanded = lines(out)
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


def test_harbor_folders_convert_back(tmp_path: Path) -> None:
    files = {"/tests/test.sh": "echo 1\n", "/tests/data/a.bin": "data:;base64,AP8="}
    spec = GradingSpec("reward_file", files=files, test_command="bash /tests/test.sh")
    metadata = {"difficulty": "easy", "solution": {"/solution/solve.sh": "true\n"}}
    task = replace(bench_task(), grading=spec, gold_patch="", metadata=metadata)
    export_harbor([task], tmp_path / "out")
    (row,) = file_rows(tmp_path / "out")
    assert not isinstance(row, TaskError)
    again = find_converter("harbor").to_task(row)
    assert again.grading.files == files
    assert (again.image, again.workdir, again.prompt) == (task.image, task.workdir, task.prompt)
    assert again.metadata == metadata


@pytest.mark.parametrize(("is_mended", "reward"), [(False, "0\n"), (True, "1\n")])
def test_harbors_script_judges_declared_tests(tmp_path: Path, is_mended: bool, reward: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "sums.py").write_text(OLD)
    (work / "test_sums.py").write_text("an agent's own")
    git = "git -c user.name=a -c user.email=a@b"
    make = f"git init -q && git add sums.py && {git} commit -qm a"
    subprocess.run(["bash", "-ec", make], cwd=work, check=True)
    export_harbor([bench_task(str(work))], tmp_path / "out")
    folder = tmp_path / "out" / "a__b-1"
    if is_mended:
        subprocess.run(["git", "apply", folder / "solution/solution.patch"], cwd=work, check=True)
    script = (folder / "tests" / "test.sh").read_text()
    moved = script.replace("/logs/", f"{tmp_path}/logs/").replace("/tests/", f"{folder}/tests/")
    subprocess.run(["bash", "-c", moved], check=True)
    assert (tmp_path / "logs" / "verifier" / "reward.txt").read_text() == reward


def test_what_harbor_cannot_judge_is_left_out(tmp_path: Path) -> None:
    spec = replace(bench_task().grading, log_parser="django")
    task = replace(bench_task(), id="d", grading=spec)
    done = export_harbor([task, bench_task(), bench_task()], tmp_path / "out")
    assert done.num_tasks == 1
    assert done.reasons == {
        "Harbor's test script cannot judge swebench with django": 1,
        "another task has the same folder": 1,
    }


def test_files_and_setup_go_into_harbors_image(tmp_path: Path) -> None:
    task = replace(bench_task(), files={"/workspace/seed": "x"}, setup="git reset")
    export_harbor([task], tmp_path / "out")
    folder = tmp_path / "out" / "a__b-1" / "environment"
    assert (folder / "files" / "workspace" / "seed").read_text() == "x"
    assert (folder / "setup.sh").read_text() == "git reset"
    assert "COPY files/ /" in (folder / "Dockerfile").read_text()
    assert "docker_image" not in (folder.parent / "task.toml").read_text()


def test_a_folder_that_is_there_is_not_written_into(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists already"):
        export_harbor([bench_task()], tmp_path)


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


def test_what_a_killed_export_left_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "h.part" / "a__b-1").mkdir(parents=True)
    assert export_harbor([bench_task()], tmp_path / "h").num_tasks == 1
