"""Functions for datasets of task folders: a row's files, its image and its grading."""

from __future__ import annotations

import hashlib
import posixpath
import re
from string import Template

from swerl.core.chat import Json
from swerl.core.errors import TaskError
from swerl.core.task import GradingSpec, file_bytes

from ._common import Row, json_object, text

REWARD = "/logs/verifier/reward"
TESTS = "/tests"
_FROM = re.compile(r"^FROM\s+(?:--platform=\S+\s+)?(\S+)\s*$", re.IGNORECASE)
_WORKDIR = re.compile(r"^WORKDIR\s+(\S+)\s*$", re.IGNORECASE | re.MULTILINE)
_VARIABLE = re.compile(r"^(?:ENV|ARG)\s+(\w+)[= ](\S+)\s*$", re.IGNORECASE | re.MULTILINE)


def files_of(row: Row) -> dict[str, str]:
    """Return a task folder's files by path. Raises TaskError if the row has none."""
    files = json_object(row, "files")
    return {path: str(content) for path, content in files.items()}


def instruction(files: dict[str, str]) -> str:
    """Return the agent's prompt. Raises TaskError if instruction.md is missing or empty."""
    return text({"instruction.md": files.get("instruction.md")}, "instruction.md").strip()


def under(files: dict[str, str], folder: str, target: str) -> dict[str, str]:
    """Return the files of one folder by their absolute path in a sandbox."""
    prefix = folder + "/"
    return {
        f"{target}/{path.removeprefix(prefix)}": content
        for path, content in files.items()
        if path.startswith(prefix)
    }


def reward_spec(files: dict[str, str], timeout_s: float, env: dict[str, str]) -> GradingSpec:
    """Return the grading spec of tests that write a reward to a file."""
    tests = under(files, "tests", TESTS)
    if f"{TESTS}/test.sh" not in tests:
        raise TaskError("the task has no tests/test.sh")
    # The tests write one of two files; some also write details to the JSON.
    texts = "\n".join(tests.values())
    is_json = "reward.json" in texts and "reward.txt" not in texts
    return GradingSpec(
        grader="reward_file",
        files=tests,
        test_setup="rm -rf /logs/verifier && mkdir -p /logs/verifier",
        test_command=f"bash {TESTS}/test.sh",
        env=env,
        timeout_s=timeout_s,
        report_path=f"{REWARD}.json" if is_json else f"{REWARD}.txt",
    )


def image_of(task_id: str, files: dict[str, str], image: str) -> tuple[str, dict[str, Json]]:
    """Return the image of a task, and metadata for building it.

    A Dockerfile that only names a base image means that image. Any other Dockerfile must be built:
    the image name has a digest of the folder, so a changed folder gets another image.
    """
    if image:
        return image, {}
    dockerfile = files.get("environment/Dockerfile")
    if dockerfile is None:
        raise TaskError("the task names no image and has no environment/Dockerfile")
    if base := _bare_base(dockerfile):
        return base, {}
    name = re.sub(r"[^a-z0-9._-]+", "-", task_id.lower()).strip("-._") or "task"
    return f"localhost/{name}:{_digest(files)}", {"build": "environment"}


def workdir_of(files: dict[str, str], default: str) -> str:
    """Return the WORKDIR of the Dockerfile, or the default. Raises TaskError if it is unknown."""
    dockerfile = files.get("environment/Dockerfile", "")
    workdirs = [path.strip("\"'") for path in _WORKDIR.findall(dockerfile)]
    if not workdirs:
        return default
    values = {name: value.strip("\"'") for name, value in _VARIABLE.findall(dockerfile)}
    workdir = posixpath.join("/", *(Template(path).safe_substitute(values) for path in workdirs))
    if "$" in workdir:
        raise TaskError(f"WORKDIR {workdir} has an unknown variable: set environment.workdir")
    return posixpath.normpath(workdir)


def _bare_base(dockerfile: str) -> str:
    lines = [line.strip() for line in dockerfile.split("\n")]
    steps = [line for line in lines if line and not line.startswith("#")]
    bases = [match[1] for line in steps if (match := _FROM.match(line))]
    rest = [line for line in steps if not _FROM.match(line) and not _WORKDIR.match(line)]
    return bases[0] if len(bases) == 1 and not rest else ""


def _digest(files: dict[str, str]) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.startswith("environment/")):
        content = file_bytes(files[path])
        digest.update(f"{len(path)} {len(content)} {path}".encode("utf-8", "replace") + content)
    return digest.hexdigest()[:12]
