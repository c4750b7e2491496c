"""SWE-bench (full, Lite, Verified, Multilingual), with the original columns or those of 2026-08."""

from __future__ import annotations

from swerl.core.errors import TaskError
from swerl.core.task import GradingSpec, Task

from ._common import (
    Row,
    commit,
    diff,
    difficulty,
    fail_to_pass,
    log_artefacts,
    optional_text,
    prompt,
    script_commands,
    tests_to_keep,
    text,
)
from ._swe_bench_commands import log_parser, runner, test_command

SOURCE = "SWE-bench/SWE-bench"
ALSO = (
    "SWE-bench/SWE-bench_Lite",
    "SWE-bench/SWE-bench_Verified",
    "SWE-bench/SWE-bench_Multilingual",
)
SPLITS = ("test", "dev", "train")

WORKDIR = "/testbed"
OFFLINE_PIP = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
"""Lets the scripts' install step run without a network. For pip, "0" disables isolation."""
TIMEOUT_S = 1800.0
"""The official harness's limit."""


def to_task(row: Row) -> Task:
    """Turn a row with original or new columns into a Task."""
    task_id, repo = text(row, "instance_id"), text(row, "repo")
    test_patch = diff(row, "test_patch")
    spec = GradingSpec(
        grader="swebench",
        fail_to_pass=fail_to_pass(row),
        pass_to_pass=tests_to_keep(row),
        test_patch=test_patch,
        test_command=_command(row, repo, test_patch),
        log_parser=_parser(row, repo),
        env=OFFLINE_PIP,
        timeout_s=TIMEOUT_S,
    )
    return Task(
        id=task_id,
        repo=repo,
        image=_image(row, task_id),
        workdir=WORKDIR,
        prompt=prompt(text(row, "problem_statement"), WORKDIR),
        grading=spec,
        base_commit=commit(row, "base_commit"),
        gold_patch=diff(row, "patch"),
        dataset=SOURCE,
        metadata={
            "version": optional_text(row, "version"),
            **difficulty(row),
            **log_artefacts(row),
        },
    )


def image(task_id: str) -> str:
    """Return the image name under which the dataset's authors publish this task."""
    return f"swebench/sweb.eval.x86_64.{task_id.lower().replace('__', '_1776_')}:latest"


def _image(row: Row, task_id: str) -> str:
    name = optional_text(row, "image")
    if name and "/" not in name:
        raise TaskError("column image names a local build, which no registry has")
    return name or image(task_id)


def _command(row: Row, repo: str, test_patch: str) -> str:
    if optional_text(row, "eval_type") == "fail_only":
        raise TaskError("eval_type fail_only is not supported: an empty log would count as a pass")
    if script := optional_text(row, "eval_script"):
        return script_commands(script)
    return test_command(repo, optional_text(row, "version"), test_patch)


def _parser(row: Row, repo: str) -> str:
    name = optional_text(row, "log_parser")
    return log_parser(name, text(row, "instance_id")) if name else runner(repo).parser
