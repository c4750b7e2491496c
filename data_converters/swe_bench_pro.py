"""SWE-bench Pro: every instance has its own test script and log parser."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import orjson

from swerl.core.errors import TaskError
from swerl.core.task import GradingSpec, Task

from ._common import Row, commit, diff, needed, optional_text, prompt, test_ids, text

SOURCE = "ScaleAI/SWE-bench_Pro"
SPLITS = ("test",)

WORKDIR = "/app"
TIMEOUT_S = 3600.0
"""The official harness's limit."""
FOLDER = "/opt/swerl-grading"
"""Folder of the scripts in the grading sandbox; no image has this folder."""
REPORT = f"{FOLDER}/output.json"

_STDERR = "----- standard error -----"
# The parser reads stdout and stderr apart, but a grading has one log: this line separates them.
_RUN = """bash {folder}/run_script.sh {files} 2>{folder}/stderr.log
code=$?
printf '\\n%s\\n' '{mark}'
cat {folder}/stderr.log
exit $code"""
_REPORT = """cd {folder} && : >stdout.log && : >stderr.log
awk -v mark='{mark}' '$0 == mark {{ out = "stderr.log"; next }}
  {{ print > (out ? out : "stdout.log") }}'
python3 parser.py stdout.log stderr.log {report}"""

_ENV = re.compile(r"^ENV\s+(\w+)[= ](.*)$", re.MULTILINE)
_ASSETS = {
    "run_script": "run_scripts/{id}/run_script.sh",
    "parser_script": "run_scripts/{id}/parser.py",
    "base_dockerfile": "dockerfiles/base_dockerfile/{id}/Dockerfile",
    "instance_dockerfile": "dockerfiles/instance_dockerfile/{id}/Dockerfile",
}
"""Column -> file in a checkout of the benchmark's repository."""


def with_assets(row: Row, folder: Path) -> Row:
    """Add an instance's scripts, which the hub's rows lack, from the benchmark's repository."""
    name = text(row, "instance_id")
    if "/" in name:
        raise TaskError(f"column instance_id has a slash: {name!r:.80}")
    paths = {column: folder / path.format(id=name) for column, path in _ASSETS.items()}
    try:
        return {**row, **{k: path.read_text() for k, path in paths.items() if path.is_file()}}
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError("cannot read a script of the instance from the assets") from error


def to_task(row: Row) -> Task:
    """Turn a row into a Task. Its scripts are in the row or come from `--assets`."""
    task_id = text(row, "instance_id")
    reset, checkout = _split(text(row, "before_repo_set_cmd"))
    spec = GradingSpec(
        grader="swebench_pro",
        fail_to_pass=needed(_ids(row, "fail_to_pass"), "fail_to_pass"),
        pass_to_pass=_ids(row, "pass_to_pass"),
        test_patch=diff(row, "test_patch"),
        files={
            f"{FOLDER}/run_script.sh": _script(row, "run_script"),
            f"{FOLDER}/parser.py": _script(row, "parser_script"),
        },
        test_setup=checkout,
        test_command=_command(row),
        report_command=_REPORT.format(folder=FOLDER, mark=_STDERR, report=REPORT),
        env=dict(_env(row)),
        timeout_s=TIMEOUT_S,
        report_path=REPORT,
    )
    return Task(
        id=task_id,
        repo=text(row, "repo"),
        image=f"jefzda/sweap-images:{text(row, 'dockerhub_tag')}",
        workdir=WORKDIR,
        prompt=_prompt(row),
        grading=spec,
        base_commit=commit(row, "base_commit"),
        gold_patch=diff(row, "patch"),
        dataset=SOURCE,
        setup=reset,
        metadata={"language": optional_text(row, "repo_language")},
    )


def _split(commands: str) -> tuple[str, str]:
    """Return the reset commands, and the last line, which checks out the solution's tests."""
    steps = [line.strip() for line in commands.split("\n") if line.strip()]
    if not steps[-1].startswith("git checkout ") or " -- " not in steps[-1]:
        raise TaskError("the last line of before_repo_set_cmd checks out no test files")
    return "\n".join(steps[:-1]), steps[-1]


def _ids(row: Row, column: str) -> tuple[str, ...]:
    """Return the test ids of a column; its name is in upper case in older rows."""
    return test_ids(row, column if column in row else column.upper())


def _script(row: Row, column: str) -> str:
    script = optional_text(row, column)
    if not script.strip():
        raise TaskError(f"the row lacks {column}: pass --assets with the benchmark's repository")
    return script


def _command(row: Row) -> str:
    files = needed(test_ids(row, "selected_test_files_to_run"), "selected_test_files_to_run")
    return _RUN.format(folder=FOLDER, files=shlex.quote(",".join(files)), mark=_STDERR)


def _env(row: Row) -> Iterator[tuple[str, str]]:
    """Yield the variables of the image's two Dockerfiles, as the official harness sets them."""
    for column in ("base_dockerfile", "instance_dockerfile"):
        for name, value in _ENV.findall(optional_text(row, column)):
            words = shlex.split(value) if "$" not in value else []
            if len(words) == 1:
                yield name, words[0]


def _prompt(row: Row) -> str:
    parts = [_plain(text(row, "problem_statement"))]
    for column, title in (
        ("requirements", "Requirements:"),
        ("interface", "New interfaces introduced:"),
    ):
        if value := _plain(optional_text(row, column)).strip():
            parts.append(f"{title}\n{value}")
    return prompt("\n\n".join(parts), WORKDIR)


def _plain(value: str) -> str:
    """Return a text, decoded if the row has it as a quoted JSON string."""
    if not (value.startswith('"') and value.endswith('"')):
        return value
    unquoted = _quoted(value)
    return unquoted if unquoted is not None else value


def _quoted(value: str) -> str | None:
    """Return the content of a quoted JSON string; None if it is not one."""
    try:
        text = orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    return text if isinstance(text, str) else None
