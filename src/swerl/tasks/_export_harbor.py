"""One Task as a Harbor task folder: instruction, environment, tests that write a reward."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from swerl.core.errors import TaskError
from swerl.core.patch import touched
from swerl.core.task import Task, file_bytes

JUDGE = Path(__file__).parent / "_harbor" / "judge.py"
_JUDGED = {"pytest", "pytest_options", "status_lines"}
"""Log parsers whose summary lines the judge reads too."""
_REWARD = "/logs/verifier/reward.txt"
_TEST = """#!/bin/bash
# Brings the hidden tests, runs them, and judges each declared test by the log.
mkdir -p /logs/verifier
echo 0 >{reward}
cd {workdir} || exit 1
{restore}{test_setup}{env}(
{command}
) >/logs/verifier/tests.log 2>&1 </dev/null
python=$(command -v python3 || command -v python)
"$python" -I /tests/judge.py /tests/spec.json /logs/verifier/tests.log >{reward}
"""
_RESTORE = """for path in {paths}; do
  if git cat-file -e "{base}:$path" 2>/dev/null
  then git checkout -q {base} -- "$path"
  else rm -rf -- "$path"
  fi
done
git apply --whitespace=nowarn /tests/test.patch || exit 1
"""


def write(task: Task, root: Path) -> None:
    """Write the Task's folder. Raises TaskError where Harbor cannot judge it."""
    files = dict(_files(task))
    folder = root / (re.sub(r"[^\w.-]+", "-", task.id).strip(".-") or "task")
    if folder.exists():
        raise TaskError("another task has the same folder")
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _files(task: Task) -> Iterator[tuple[str, bytes]]:
    yield from _tests(task)
    yield "instruction.md", f"{task.prompt}\n".encode()
    yield "task.toml", _toml(task).encode()
    yield "environment/Dockerfile", _dockerfile(task).encode()
    for path, text in task.files.items():
        yield f"environment/files{path}", file_bytes(text)
    if task.setup:
        yield "environment/setup.sh", task.setup.encode()
    yield from _solution(task)


def _toml(task: Task) -> str:
    difficulty = task.metadata.get("difficulty")
    lines = ['version = "1.0"', "", "[metadata]", f"source = {json.dumps(task.dataset)}"]
    if isinstance(difficulty, str):
        lines.append(f"difficulty = {json.dumps(difficulty)}")
    lines += ["", "[verifier]", f"timeout_sec = {task.grading.timeout_s}", "", "[environment]"]
    if not (task.files or task.setup):
        lines.append(f"docker_image = {json.dumps(task.image)}")
    lines.append(f"workdir = {json.dumps(task.workdir)}")
    return "\n".join(lines) + "\n"


def _dockerfile(task: Task) -> str:
    lines = [f"FROM {task.image}", f"WORKDIR {task.workdir}"]
    if task.files:
        lines.append("COPY files/ /")
    if task.setup:
        lines.append(
            "RUN --mount=type=bind,source=setup.sh,target=/run/setup.sh bash /run/setup.sh"
        )
    return "\n".join(lines) + "\n"


def _tests(task: Task) -> Iterator[tuple[str, bytes]]:
    spec = task.grading
    if spec.grader == "reward_file":
        for path, text in spec.files.items():
            if not path.startswith("/tests/"):
                raise TaskError("its tests stand outside /tests")
            yield path.removeprefix("/"), file_bytes(text)
        return
    lists = [*spec.fail_to_pass, *spec.pass_to_pass]
    if spec.log_parser not in _JUDGED or not lists or spec.files:
        raise TaskError(
            f"Harbor's test script cannot judge {spec.grader} with {spec.log_parser or 'it'}"
        )
    yield "tests/test.sh", _script(task).encode()
    yield "tests/judge.py", JUDGE.read_bytes()
    declared = {"fail_to_pass": spec.fail_to_pass, "pass_to_pass": spec.pass_to_pass}
    yield "tests/spec.json", json.dumps(declared, indent=1).encode()
    if spec.test_patch:
        yield "tests/test.patch", spec.test_patch.encode()
    for path, text in spec.test_files.items():
        yield f"tests/files/{path}", file_bytes(text)


def _script(task: Task) -> str:
    spec = task.grading
    return _TEST.format(
        reward=_REWARD,
        workdir=shlex.quote(task.workdir),
        restore=_restore(task),
        test_setup=f"{spec.test_setup}\n" if spec.test_setup else "",
        env=_exports(spec.env),
        command=spec.test_command,
    )


def _restore(task: Task) -> str:
    spec = task.grading
    copied = "cp -a /tests/files/. .\n" if spec.test_files else ""
    if not spec.test_patch:
        return copied
    paths = shlex.join(touched(spec.test_patch))
    return _RESTORE.format(paths=paths, base=task.base_commit or "HEAD") + copied


def _exports(env: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())


def _solution(task: Task) -> Iterator[tuple[str, bytes]]:
    solution = task.metadata.get("solution")
    if isinstance(solution, dict):
        for path, text in solution.items():
            yield path.removeprefix("/"), file_bytes(str(text))
    elif task.gold_patch:
        yield "solution/solution.patch", task.gold_patch.encode()
        script = f"cd {shlex.quote(task.workdir)} && git apply /solution/solution.patch\n"
        yield "solution/solve.sh", f"#!/bin/bash\n{script}".encode()
