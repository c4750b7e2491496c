"""Scale-SWE: a script or a patch of tests per row; and the rows that slime's example reads."""

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
"""What slime's example allows."""
SCRIPT = "test_fail_to_pass.py"
"""Where the script goes, in the repository's own folder."""


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
    """Return the columns of a row that holds them under `metadata`, as slime's rows do."""
    outer = row.get("metadata")
    if not isinstance(outer, dict):
        return row
    inner = outer.get("remote_env_info")
    problem = {"problem_statement": row.get("prompt"), "repo": "unknown"}
    return {**problem, **outer, **(inner if isinstance(inner, dict) else {})}


def _spec(row: Row) -> GradingSpec:
    mend, keep = _ids(row, "FAIL_TO_PASS"), _ids(row, "PASS_TO_PASS")
    if command := optional_text(row, "eval_cmd"):
        return GradingSpec("command", mend, keep, test_command=command, timeout_s=TIMEOUT_S)
    script = optional_text(row, "f2p_script")
    patch = diff(row, "f2p_patch") if row.get("f2p_patch") else ""
    if not script and not patch:
        raise TaskError("columns f2p_script, f2p_patch and eval_cmd are empty: nothing to grade by")
    if not script:
        needed(mend, "FAIL_TO_PASS")
    return GradingSpec(
        grader="script",
        fail_to_pass=mend,
        pass_to_pass=keep,
        test_patch=patch,
        test_files={SCRIPT: script} if script else {},
        test_command=_command(bool(script), (*mend, *keep)),
        log_parser="pytest",
        env={"PYTEST_ADDOPTS": "-rA"},
        timeout_s=TIMEOUT_S,
    )


def _ids(row: Row, column: str) -> tuple[str, ...]:
    return test_ids(row, column) if row.get(column) is not None else ()


def _command(has_script: bool, ids: tuple[str, ...]) -> str:
    """Return the script's run, and pytest's on the files of the tests that it does not hold."""
    files = list(dict.fromkeys(name.split("::")[0] for name in ids))
    others = [name for name in files if not (has_script and name.endswith(SCRIPT))]
    steps = [f"python {SCRIPT}"] if has_script else []
    if others:
        steps.append(f"python -m pytest {shlex.join(others)}")
    return "\n".join(steps)
