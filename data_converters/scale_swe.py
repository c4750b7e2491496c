"""Scale-SWE: a test script or a test patch per row. Also reads the rows of slime's example."""

from __future__ import annotations

import shlex

from swerl.core.errors import TaskError
from swerl.core.task import GradingSpec, Task

from ._common import (
    Row,
    diff,
    lines,
    needed,
    optional_text,
    prompt,
    test_ids,
    text,
)

SOURCE = "AweAI-Team/Scale-SWE"
SPLITS = ("train",)

TIMEOUT_S = 600.0
"""The limit of slime's example."""
SCRIPT = "test_fail_to_pass.py"
"""Path of the script in the repository."""


def to_task(row: Row) -> Task:
    """Turn a row into a Task."""
    row = _flat(row)
    repo = text(row, "repo")
    workdir = text(row, "workdir")
    return Task(
        id=text(row, "instance_id"),
        repo=repo if "/" in repo or not row.get("user") else f"{row['user']}/{repo}",
        image=optional_text(row, "image_url") or text(row, "image"),
        workdir=workdir,
        prompt=prompt(text(row, "problem_statement"), workdir),
        grading=_spec(row),
        base_commit=optional_text(row, "parent_commit") or optional_text(row, "base_commit"),
        gold_patch=diff(row, "patch") if row.get("patch") else "",
        dataset=SOURCE,
        setup=lines(row, "pre_commands"),
        metadata={"language": optional_text(row, "language") or "python"},
    )


def _flat(row: Row) -> Row:
    """Return the columns of a row, also if they are under `metadata`, as in slime's rows."""
    outer = row.get("metadata")
    if not isinstance(outer, dict):
        return row
    inner = outer.get("remote_env_info")
    problem = {"problem_statement": row.get("prompt"), "repo": "unknown"}
    return {**problem, **outer, **(inner if isinstance(inner, dict) else {})}


def _spec(row: Row) -> GradingSpec:
    broken, working = _ids(row, "FAIL_TO_PASS"), _ids(row, "PASS_TO_PASS")
    if command := optional_text(row, "eval_cmd"):
        return GradingSpec("command", broken, working, test_command=command, timeout_s=TIMEOUT_S)
    script = optional_text(row, "f2p_script")
    patch = diff(row, "f2p_patch") if row.get("f2p_patch") else ""
    if not script and not patch:
        raise TaskError(
            "columns f2p_script, f2p_patch and eval_cmd are empty: the row has no tests"
        )
    if not script:
        needed(broken, "FAIL_TO_PASS")
    return GradingSpec(
        grader="script",
        fail_to_pass=broken,
        pass_to_pass=working,
        test_patch=patch,
        test_files={SCRIPT: script} if script else {},
        test_command=_command(bool(script), (*broken, *working)),
        log_parser="pytest",
        env={"PYTEST_ADDOPTS": "-rA"},
        timeout_s=TIMEOUT_S,
    )


def _ids(row: Row, column: str) -> tuple[str, ...]:
    return test_ids(row, column) if row.get(column) is not None else ()


def _command(has_script: bool, ids: tuple[str, ...]) -> str:
    """Return the commands that run the script, and pytest on test files outside the script."""
    files = list(dict.fromkeys(name.split("::")[0] for name in ids))
    others = [name for name in files if not (has_script and name.endswith(SCRIPT))]
    steps = [f"python {SCRIPT}"] if has_script else []
    if others:
        steps.append(f"python -m pytest {shlex.join(others)}")
    return "\n".join(steps)
