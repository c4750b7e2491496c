"""`swerl eval` on real attempts: resumes after a kill, stops early, writes SWE-bench's files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from swerl.core.errors import InputError
from swerl.core.task import Task, read_tasks, write_tasks
from swerl.rollout.evaluation import swebench_report
from swerl.runs.evaluation import read
from swerl.tasks import twin
from tests.unit.engines.test_openai import COMPLETION, answering
from tests.unit.grading.agreement import packages


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of three tasks; output goes to this test, and no table is wrapped."""
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, twin.make_tasks(tmp_path / "twin", split="heldout", count=3, seed=0))
    return path


def call(file: Path, *arguments: object, code: int = 0) -> str:
    command = ["eval", *map(str, arguments), "--runs", str(file.parent / "runs")]
    done = CliRunner().invoke(typer_app, command)
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout


def evaluated(file: Path, *arguments: object) -> list[dict[str, Any]]:
    return json.loads(call(file, file, *arguments, "--json"))


def refused(file: Path, *arguments: object) -> InputError:
    command = ["eval", *map(str, arguments), "--runs", str(file.parent / "runs")]
    done = CliRunner().invoke(typer_app, command)
    assert isinstance(done.exception, InputError), (done.output, done.exception)
    return done.exception


def finished(file: Path) -> dict[Path, int]:
    """Return when each Episode under the run folders was finished."""
    return {path: path.stat().st_mtime_ns for path in file.parent.rglob("episode.json")}


def test_many_policies_are_evaluated_and_compared(file: Path) -> None:
    engines = ("--engine", "scripted:gold", "--engine", "scripted:noop")
    gold, noop = evaluated(file, *engines, "-k", 2)
    assert (gold["pass_at_1"]["mean"], noop["pass_at_1"]["mean"]) == (1.0, 0.0)
    assert (gold["num_attempts"], gold["num_lost"], gold["verdicts"]) == (6, 0, {"solved": 6})
    assert gold["prompt_tokens"] > gold["sampled_tokens"] > 0 < gold["seconds"]
    assert (gold["dollars"], gold["missing"]) == (None, [])
    task: Task = next(iter(read_tasks(file)))
    assert read(Path(gold["path"])).results[task.id].repo == task.repo
    shown = call(file, "compare", noop["name"], gold["name"])
    assert "+100.0" in shown
    assert "noise floor" in shown
    found = json.loads(call(file, "compare", noop["path"], gold["name"], "--json"))
    assert (found["num_tasks"], found["num_b_better"], found["p_value"]) == (3, 3, 0.25)


@pytest.mark.integration
def test_a_killed_evaluation_resumes_from_its_finished_attempts(file: Path) -> None:
    runs = file.parent / "runs"
    command = [
        *(sys.executable, "-m", "swerl", "eval", str(file), "--engine", "scripted:gold"),
        *("-k", "8", "--runs", str(runs), "--set", "rollout.concurrency=1"),
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as running:
        deadline = time.monotonic() + 120
        while len(finished(file)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(running.pid, signal.SIGKILL)
    kept = finished(file)
    assert 2 <= len(kept) < 24
    [root] = runs.iterdir()
    assert refused(file, "compare", root.name, root.name).hint
    # A half-written attempt has no episode.json.
    half = min(kept).parent
    (half / "episode.json").unlink()
    arguments = ("-k", 8, "--set", "rollout.concurrency=1")
    [report] = evaluated(file, "--engine", "scripted:gold", *arguments)
    assert report["verdicts"] == {"solved": 24}
    after = finished(file)
    assert {
        path: when for path, when in kept.items() if path.parent != half
    }.items() <= after.items()


async def test_any_openai_compatible_model_is_evaluated_without_token_ids(file: Path) -> None:
    async with answering(200, COMPLETION) as url:
        command = [
            *(sys.executable, "-m", "swerl", "eval", str(file), "--json", "--model", "m"),
            *("--engine", f"openai={url}", "--runs", str(file.parent / "runs")),
        ]
        pipe = asyncio.subprocess.PIPE
        running = await asyncio.create_subprocess_exec(*command, stdout=pipe)
        out, _ = await running.communicate()
    [report] = json.loads(out)
    assert report["missing"] == ["token ids", "log-probabilities", "weight versions"]
    assert (report["prompt_tokens"], report["sampled_tokens"]) == (3 * 7, 3 * 5)
    assert report["model"] == "m"


def test_bad_input_is_one_clear_error(file: Path) -> None:
    assert "there is no evaluation" in str(refused(file, "compare", "nothing", "nothing"))
    named = ("--engine", "scripted:gold", "--engine", "scripted:noop", "--set", "name=x")
    assert "one name" in str(refused(file, file, *named))
    engines = [f"--engine=openai=http://me:secret@h:{port}/v1" for port in (9, 8)]
    assert "NONE" in str(refused(file, file, *engines, "--model=m", "--set=engine.api_key=NONE"))
    assert [*(file.parent / "runs").glob("*openai-http-h-9-v1-m")]
    task = next(iter(read_tasks(file)))
    write_tasks(file, [task, task])
    assert "is also in line 1" in str(refused(file, file, "--engine", "scripted:gold"))
    file.write_text("")
    assert "no task" in str(refused(file, file, "--engine", "scripted:gold"))


ROWS: list[dict[str, Any]] = [
    {"task": "a", "verdict": "solved", "has_patch": True, "reason": ""},
    {"task": "b", "verdict": "unsolved", "has_patch": True, "reason": ""},
    {"task": "c", "verdict": "unsolved", "has_patch": False, "reason": ""},
    {"task": "d", "verdict": "timeout", "has_patch": True, "reason": ""},
]


def test_predictions_are_what_swebench_reads(file: Path) -> None:
    evaluated(file, "--engine", "scripted:gold", "-k", 2)
    for k in (0, 1):
        [path] = file.parent.rglob(f"swebench/eval/predictions.{k}.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert {row["instance_id"] for row in rows} == {task.id for task in read_tasks(file)}
        for row in rows:
            assert row.keys() == {"instance_id", "model_name_or_path", "model_patch"}
            assert row["model_patch"].startswith("diff --git")


def test_the_report_has_the_documented_fields() -> None:
    found = swebench_report([*"abcde"], ROWS)
    assert found["total_instances"] == 5
    assert (found["submitted_instances"], found["completed_instances"]) == (4, 3)
    assert (found["resolved_ids"], found["unresolved_ids"]) == (["a"], ["b", "d"])
    assert (found["empty_patch_ids"], found["incomplete_ids"]) == (["c"], ["e"])
    assert (found["error_ids"], found["schema_version"]) == ([], 2)


OFFICIAL = """
import json, os, sys
from tests.unit.grading.agreement.referee import _package
_package(sys.argv[1])
from swebench.harness.reporting import make_run_report
predictions, tasks = json.load(sys.stdin)
os.chdir(sys.argv[2])
print(make_run_report(predictions, tasks, "attempt-0").resolve())
"""
"""Writes the report of the swebench package from its own logs."""


def test_the_report_equals_that_of_the_official_package(
    cache: pytest.Cache, tmp_path: Path
) -> None:
    folder = packages.fetch(cache, packages.NEW)
    logs = tmp_path / "logs" / "run_evaluation" / "attempt-0" / "policy"
    for row in (row for row in ROWS if row["has_patch"]):
        (logs / row["task"]).mkdir(parents=True)
        judged = {row["task"]: {"resolved": row["verdict"] == "solved"}}
        (logs / row["task"] / "report.json").write_text(json.dumps(judged))
    predictions = {
        row["task"]: {
            "instance_id": row["task"],
            "model_name_or_path": "policy",
            "model_patch": "diff" if row["has_patch"] else "",
        }
        for row in ROWS
    }
    asked = json.dumps([predictions, [{"instance_id": name} for name in "abcde"]])
    command = [sys.executable, "-c", OFFICIAL, str(folder), str(tmp_path)]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.splitlines()[-1])
    assert path.name == "policy.attempt-0.json"
    assert json.loads(path.read_text()) == swebench_report([*"abcde"], ROWS)
