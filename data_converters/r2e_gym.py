"""R2E-Gym (V1, Lite, Subset) with 14 columns, and its version with SWE-bench's columns."""

from __future__ import annotations

import re

from swerl.core.chat import Json
from swerl.core.errors import TaskError
from swerl.core.task import GradingSpec, Task

from . import swe_bench
from ._common import Row, json_object, prompt, script_commands, text
from ._r2e_diff import solution

SOURCE = "R2E-Gym/R2E-Gym-Subset"
ALSO = ("R2E-Gym/R2E-Gym-Lite", "R2E-Gym/R2E-Gym-V1", "R2E-Gym/SWE-Bench-Verified")
SPLITS = ("train", "dev_10pr_v1")

WORKDIR = "/testbed"
TIMEOUT_S = 300.0
"""The official harness's limit."""

_PYTEST = (
    "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' "
    "{display}.venv/bin/python -W ignore -m pytest -rA r2e_tests"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def to_task(row: Row) -> Task:
    """Turn a row of either version into a Task."""
    if "FAIL_TO_PASS" in row:
        return _swe_bench_task(row)
    repo, commit = text(row, "repo_name"), text(row, "commit_hash")
    problem = text(row, "problem_statement").strip()
    problem = problem.removeprefix("[ISSUE]").removesuffix("[/ISSUE]")
    spec = GradingSpec(
        grader="r2e",
        expected=_expected(row),
        test_files=_test_files(row),
        test_command=_command(repo),
        log_parser="r2e",
        timeout_s=TIMEOUT_S,
    )
    return Task(
        id=f"{repo}__{commit[:12]}",
        repo=repo,
        image=text(row, "docker_image"),
        workdir=WORKDIR,
        prompt=prompt(problem, WORKDIR),
        grading=spec,
        gold_patch=solution(json_object(row, "parsed_commit_content")),
        dataset=SOURCE,
        metadata={"commit_hash": commit},
    )


def _swe_bench_task(row: Row) -> Task:
    script = script_commands(text(row, "run_tests"))
    columns = {k: v for k, v in row.items() if k not in {"eval_script", "log_parser"}}
    columns["image"] = text(row, "docker_image")
    return swe_bench.to_task({**columns, "eval_script": script})


def _expected(row: Row) -> dict[str, str]:
    report = json_object(row, "expected_output_json")
    cleaned = {_COLOUR.sub("", name).split(" - ")[0]: status for name, status in report.items()}
    cleaned.pop("", None)
    if not cleaned:
        raise TaskError("expected_output_json is empty: every patch would count as a solution")
    if bad := {str(s) for s in cleaned.values()} - {"PASSED", "FAILED", "ERROR"}:
        raise TaskError(f"expected_output_json has the unknown status {sorted(bad)[0]!r:.40}")
    return {name: str(status) for name, status in cleaned.items()}


def _test_files(row: Row) -> dict[str, str]:
    result = json_object(row, "execution_result_content")
    names, codes = _texts(result, "test_file_names"), _texts(result, "test_file_codes")
    if not names or len(names) != len(codes):
        raise TaskError("execution_result_content has no hidden tests")
    if bad := [name for name in names if "/" in name or name in {"", ".", ".."}]:
        raise TaskError(f"execution_result_content has the invalid test file name {bad[0]!r:.80}")
    return {f"r2e_tests/{name}": code for name, code in zip(names, codes, strict=True)}


def _texts(result: dict[str, Json], key: str) -> list[str]:
    value = result.get(key)
    return [str(item) for item in value] if isinstance(value, list) else []


def _command(repo: str) -> str:
    if repo == "tornado":
        raise TaskError("tornado's rows use a test runner without a log parser")
    if repo == "orange3":
        return _PYTEST.format(display="QT_QPA_PLATFORM=minimal xvfb-run --auto-servernum ")
    return _PYTEST.format(display="")
