"""Real rows of every dataset at hand become right Tasks, or are refused with the right reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from swerl.core.errors import TaskError
from swerl.core.task import from_row, to_row
from swerl.grading.log_parsers import PARSERS
from swerl.tasks.convert import convert
from swerl.tasks.datasets import Row, find_converter
from swerl.tasks.rows import file_rows

FITTING = {
    "multi_swe_bench_java": "multi-swe-rl",
    "r2e_gym_derived": "r2e-gym",
    "r2e_swebench_verified": "r2e-gym",
    "swe_rebench_v2": "swe-rebench",
    "swebench_full_dev": "swe-bench",
    "swebench_lite_classic": "swe-bench",
    "swebench_lite_v5": "swe-bench",
    "swebench_multilingual": "swe-bench",
    "swebench_pro_nemo_full": "swe-bench-pro",
    "swebench_verified_classic": "swe-bench",
    "swebench_verified_v5": "swe-bench",
    "sweagent_swe_bench_dev_easy": "swe-bench",
    "sweagent_swe_bench_lite_test": "swe-bench",
    "swegym": "swe-gym",
    "swegym_nemotron_swerl_gen": "swe-gym",
}
REFUSED = {
    "deepswe_harbor": ("harbor", "column files is missing"),
    "nemotron_swerl_llm_judge": ("swe-gym", "column repo is missing"),
    "r2e_partial_aiohttp": ("r2e-gym", "column commit_hash is missing"),
    "swebench_multimodal_dev": ("swe-bench", "a local build|an empty log would count as a pass"),
    "swebench_pro": ("swe-bench-pro", "the row lacks run_script: pass --assets"),
    "swebench_pro_suite27": ("swe-bench-pro", "column before_repo_set_cmd is missing"),
}
OTHER = {
    "multi_swe_bench_java": ("swe-bench", "column instance_id|FAIL_TO_PASS is missing"),
    "swe_rebench_v2": ("swe-bench", "repository Unidata/netcdf-c is unknown"),
    "swebench_pro": ("swe-bench", "column FAIL_TO_PASS is missing"),
    "swegym": ("swe-smith", "is not one of SWE-smith's"),
    "swebench_lite_classic": ("multi-swe-rl", "column org is missing"),
    "swebench_full_dev": ("scale-swe", "column workdir is missing"),
}
"""Rows that another dataset's converter refuses."""


OWN_PARSERS = re.compile(r"multi_swe/[\w-]+/[\w-]+|")
"""Parsers by a dataset's own name; Pro's rows have a script instead."""


def rows_of(shared_dir: Path, name: str) -> list[Row]:
    with (shared_dir / "rows" / f"{name}.jsonl").open() as lines:
        return [json.loads(line) for line in lines]


def classic(row: Row) -> Row:
    new = {"image", "eval_script", "log_parser", "eval_type"}
    return {column: value for column, value in row.items() if column not in new}


@pytest.mark.parametrize(("name", "dataset"), FITTING.items())
def test_rows_convert_and_round_trip(shared_dir: Path, name: str, dataset: str) -> None:
    for row in rows_of(shared_dir, name):
        task = find_converter(dataset).to_task(row)
        assert from_row(json.loads(json.dumps(to_row(task)))) == task
        assert task.gold_patch.startswith("diff --git")
        assert task.image and task.workdir.startswith("/")
        parser = task.grading.log_parser
        assert parser in PARSERS or OWN_PARSERS.fullmatch(parser)


@pytest.mark.parametrize(("name", "dataset"), FITTING.items())
def test_prompt_keeps_what_the_agent_must_not_know(
    shared_dir: Path, name: str, dataset: str
) -> None:
    for row in rows_of(shared_dir, name):
        task = find_converter(dataset).to_task(row)
        problem = str(row.get("problem_statement") or row["resolved_issues"])
        for secret in (task.id, task.image, str(row.get("hints_text") or task.id)):
            assert secret in problem or secret not in task.prompt


@pytest.mark.parametrize(
    ("name", "dataset", "reason"), [(k, *v) for k, v in (*REFUSED.items(), *OTHER.items())]
)
def test_other_rows_are_refused(shared_dir: Path, name: str, dataset: str, reason: str) -> None:
    for row in rows_of(shared_dir, name):
        with pytest.raises(TaskError, match=reason):
            find_converter(dataset).to_task(row)


def test_every_row_file_is_covered(shared_dir: Path) -> None:
    files = {path.stem for path in (shared_dir / "rows").glob("*.jsonl")}
    assert files <= FITTING.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", ["swebench_full_dev", "swebench_lite_v5", "swebench_verified_v5"])
def test_both_generations_of_columns_make_the_same_task(shared_dir: Path, name: str) -> None:
    to_task = find_converter("swe-bench").to_task
    for row in rows_of(shared_dir, name):
        assert to_task(classic(row)) == to_task(row)


def test_swe_gym_runs_the_tests_that_its_own_harness_runs(shared_dir: Path) -> None:
    for row in rows_of(shared_dir, "swegym_nemotron_swerl_gen"):
        task = find_converter("swe-gym").to_task(row)
        script = str(row["test_script"]).strip().split("\n")[-1]
        assert task.grading.test_command.split("\n")[-1].split() == script.split()


def test_r2e_solution_is_the_commit_without_its_tests(shared_dir: Path) -> None:
    (row,) = rows_of(shared_dir, "r2e_gym_derived")
    task = find_converter("r2e-gym").to_task(row)
    assert "b/aiohttp/web_urldispatcher.py" in task.gold_patch
    assert "tests/test_urldispatch.py" not in task.gold_patch
    assert set(task.grading.test_files) == {"r2e_tests/test_1.py"}
    assert "FAILED" in task.grading.expected.values()
    assert "[ISSUE]" not in task.prompt


def test_tornado_rows_are_refused(shared_dir: Path) -> None:
    (row,) = rows_of(shared_dir, "r2e_gym_derived")
    with pytest.raises(TaskError, match="tornado"):
        find_converter("r2e-gym").to_task({**row, "repo_name": "tornado"})


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("FAIL_TO_PASS", "[]", "every patch would count"),
        ("FAIL_TO_PASS", "['a' 'b']", "not a JSON list"),
        ("FAIL_TO_PASS", [1], "not a list of test ids"),
        ("FAIL_TO_PASS", [], "every patch would count"),
        ("FAIL_TO_PASS", None, "not a list of test ids"),
        ("PASS_TO_PASS", None, "not a list of test ids"),
        ("patch", "", "column patch is empty"),
        ("patch", "no diff", "not a unified diff"),
        ("patch", "\n@@ " + "x" * 50_000_000, "over 10 MB"),
        ("problem_statement", 7, "contains int, not text"),
        ("repo", "some/where", "is unknown"),
        ("base_commit", None, "column base_commit is empty"),
    ],
)
def test_broken_columns_are_refused(
    shared_dir: Path, column: str, value: object, reason: str
) -> None:
    row = rows_of(shared_dir, "swebench_lite_classic")[0]
    with pytest.raises(TaskError, match=reason):
        find_converter("swe-bench").to_task({**row, column: value})


@pytest.mark.parametrize("written", [json.dumps, str, lambda ids: f" {ids!r}\n"])
def test_lists_of_tests_may_be_text_of_a_list(
    shared_dir: Path, written: Callable[[list[str]], str]
) -> None:
    row = rows_of(shared_dir, "swebench_lite_classic")[0]
    ids = ["a.py::b[it's]", 'a.py::b["x y', "a.py::b[\u00e9\\n]"]
    task = find_converter("swe-bench").to_task({**row, "FAIL_TO_PASS": written(ids)})
    assert list(task.grading.fail_to_pass) == ids


def test_a_whole_file_converts(shared_dir: Path, tmp_path: Path) -> None:
    rows = shared_dir / "rows" / "swebench_verified_v5.jsonl"
    summary = convert(find_converter("swe-bench"), file_rows(rows), tmp_path / "tasks.jsonl")
    assert (summary.num_tasks, summary.num_rejects) == (39, 0)
