"""Rows stream from a hub; here from a fake one on this machine that keeps to its wire contract."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from swerl.core.task import read_tasks

from .fake_hub import COMMIT, Hub, serve

pytest.importorskip("datasets")
parquet = pytest.importorskip("pyarrow.parquet")


SWERL = Path(sys.executable).with_name("swerl")
DIFF = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x\n+y\n"


def gym_rows(count: int) -> list[dict[str, object]]:
    return [
        {
            "instance_id": f"getmoto__moto-{number}",
            "repo": "getmoto/moto",
            "base_commit": "c0ffee",
            "problem_statement": "It is broken.",
            "patch": DIFF,
            "test_patch": DIFF,
            "FAIL_TO_PASS": ["a.py::test_a"] if number % 10 else [],
            "PASS_TO_PASS": ["a.py::test_b"],
        }
        for number in range(count)
    ]


def as_parquet(rows: list[dict[str, object]]) -> bytes:
    import pyarrow

    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), out, row_group_size=50)
    return out.getvalue()


def swerl(hub: Hub, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "COLUMNS": "200",
    }
    command = [SWERL, "convert", *map(str, arguments), "-o", "tasks.jsonl"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_split_streams_from_the_hub_at_one_commit(tmp_path: Path) -> None:
    files = {
        "README.md": b"# Rows\n",
        "data/train-00000-of-00002.parquet": as_parquet(gym_rows(120)),
        "data/train-00001-of-00002.parquet": as_parquet(gym_rows(200)[120:]),
        "data/test-00000-of-00001.parquet": as_parquet(gym_rows(3)),
    }
    with serve("SWE-Gym/SWE-Gym", files) as hub:
        done = swerl(hub, tmp_path, "swe-gym")
        assert done.returncode == 0, done.stderr
        test = swerl(hub, tmp_path, "swe-gym", "--split", "test", "--force")
        resolved = [line for line in hub.asked if line.endswith(".parquet")]
    assert "180 tasks" in words(done.stdout)
    assert "20 rejected: FAIL_TO_PASS is empty" in words(done.stdout)
    assert "2 tasks" in words(test.stdout)
    assert resolved and all(f"/resolve/{COMMIT}/" in line for line in resolved)


def test_files_of_the_hub_stream_one_by_one(tmp_path: Path) -> None:
    def row(number: int, **columns: object) -> bytes:
        tests = {f"{kind}2p_tests": {} for kind in "fsp"}
        issue = {"number": 1, "title": "Broken", "body": "It is."}
        base = {"org": "a", "repo": "b", "number": number, "base": {"sha": "c0ffee"}, **tests}
        told = {"fix_patch": DIFF, "test_patch": DIFF, "resolved_issues": [issue]}
        return json.dumps({**base, **told, **columns}).encode() + b"\n"

    passing = {"run": "PASS", "test": "FAIL", "fix": "PASS"}
    files = {
        "c/one.jsonl": row(1, n2p_tests={"a": passing}) + row(2, n2p_tests={}),
        "go/two.jsonl": row(3, n2p_tests={"b": passing, "c": {**passing, "fix": "FAIL"}}),
        "README.md": b"x",
    }
    with serve("ByteDance-Seed/Multi-SWE-RL", files) as hub:
        done = swerl(hub, tmp_path, "multi-swe-rl")
    assert done.returncode == 0, done.stderr
    assert [task.id for task in read_tasks(tmp_path / "tasks.jsonl")] == ["a__b-1", "a__b-3"]


def test_an_archive_of_tasks_streams_from_the_hub(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number in range(3):
            for name in ("instruction.md", "image.txt", "tests/test.sh"):
                info = tarfile.TarInfo(f"./task_{number}/{name}")
                info.size = 5
                archive.addfile(info, io.BytesIO(b"text\n"))
    files = {"task-data.tar.gz": gzip.compress(out.getvalue()), "data/a.parquet": b"x"}
    with serve("some/tasks", files) as hub:
        done = swerl(hub, tmp_path, "open-instruct", "--repo-id", "some/tasks")
    assert done.returncode == 0, done.stderr
    tasks = list(read_tasks(tmp_path / "tasks.jsonl"))
    assert [task.id for task in tasks] == ["task_0", "task_1", "task_2"]
    assert tasks[0].grading.files == {"/tests/test.sh": "text\n"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["swe-gym", "--repo-id", "no/body"], "cannot read no/body from the hub"),
        (["swe-gym", "--split", "none"], "none"),
        (["multi-swe-rl", "--repo-id", "SWE-Gym/SWE-Gym"], "has no file *.jsonl"),
        (["multi-swe-rl", "--split", "x"], "have no splits"),
        (["harbor"], "no dataset on the hub"),
    ],
)
def test_what_the_hub_does_not_have_is_one_clear_error(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    with serve("SWE-Gym/SWE-Gym", {"train.parquet": as_parquet(gym_rows(3))}) as hub:
        done = swerl(hub, tmp_path, *arguments)
    assert done.returncode == 2
    assert said in done.stderr and "hint:" in done.stderr
    assert "Traceback" not in done.stderr
