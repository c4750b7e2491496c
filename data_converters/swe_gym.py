"""SWE-Gym, SWE-Gym Lite and SWE-Gym Raw: SWE-bench's columns for eleven other repositories."""

from __future__ import annotations

import re

from swerl.core.errors import TaskError
from swerl.core.task import GradingSpec, Task

from ._common import (
    Row,
    commit,
    diff,
    fail_to_pass,
    log_artefacts,
    optional_text,
    prompt,
    test_files,
    tests_to_keep,
    text,
)
from ._swe_bench_commands import ACTIVATE

SOURCE = "SWE-Gym/SWE-Gym"
ALSO = ("SWE-Gym/SWE-Gym-Lite",)
SPLITS = ("train",)

WORKDIR = "/testbed"
TIMEOUT_S = 1800.0
"""The official harness's limit."""

_LONG = "pytest -rA --tb=long"
_COMMANDS = {
    "Project-MONAI/MONAI": "pytest -rA",
    "bokeh/bokeh": "pytest -rA -n0",
    "conan-io/conan": "export PYTHONPATH=${PYTHONPATH:-}:$(pwd)\npytest -n0 -rA",
    "dask/dask": "rm -rf ~/.config/dask\npytest -n0 -rA --color=no",
    "facebookresearch/hydra": _LONG,
    "getmoto/moto": "pytest -n0 -rA",
    "iterative/dvc": "pytest -rA",
    "modin-project/modin": "pytest -n0 -rA",
    "pandas-dev/pandas": _LONG,
    "pydantic/pydantic": (
        "pytest -rA --tb=short -vv -o console_output_style=classic --no-header"
    ),
    "python/mypy": "pytest -rA -k",
}  # fmt: skip


def to_task(row: Row) -> Task:
    """Turn a row into a Task."""
    task_id, repo = text(row, "instance_id"), text(row, "repo")
    test_patch = diff(row, "test_patch")
    spec = GradingSpec(
        grader="swebench",
        fail_to_pass=fail_to_pass(row),
        pass_to_pass=tests_to_keep(row),
        test_patch=test_patch,
        test_command=f"{ACTIVATE}\n{_command(repo, test_patch)}",
        log_parser="pytest",
        timeout_s=TIMEOUT_S,
    )
    return Task(
        id=task_id,
        repo=repo,
        image=image(task_id),
        workdir=WORKDIR,
        prompt=prompt(text(row, "problem_statement"), WORKDIR),
        grading=spec,
        base_commit=commit(row, "base_commit"),
        gold_patch=diff(row, "patch"),
        dataset=SOURCE,
        metadata={"version": optional_text(row, "version"), **log_artefacts(row)},
    )


def image(task_id: str) -> str:
    """Return the image name under which the dataset's authors publish this task."""
    return f"xingyaoww/sweb.eval.x86_64.{task_id.lower().replace('__', '_s_')}:latest"


def _command(repo: str, test_patch: str) -> str:
    if repo not in _COMMANDS:
        raise TaskError(f"repository {repo} is unknown: it is not one of SWE-Gym's eleven")
    if repo == "python/mypy":
        # mypy's tests are cases in data files; pytest selects them by name.
        cases = dict.fromkeys(re.findall(r"\[case ([^\]]+)\]", test_patch))
        if cases:
            return f'{_COMMANDS[repo]} "{" or ".join(cases)}"'
        return " ".join(["pytest -rA", *test_files(test_patch)])
    return " ".join([_COMMANDS[repo], *test_files(test_patch)])
