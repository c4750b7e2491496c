"""Export Tasks for other trainers: slime's JSONL, verl's Parquet, Harbor's task folders.

Each output is written atomically. A Task that a format cannot express is left out and counted with
its reason.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from swerl import __version__
from swerl.core.certificate import objection
from swerl.core.changes import touched
from swerl.core.chat import Json
from swerl.core.errors import InputError, TaskError
from swerl.core.files import replacing
from swerl.core.task import Task, file_bytes, to_row

_SLIME_SCRIPT = "test_fail_to_pass.py"
"""slime's key of the script with the deciding exit code."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Number of written Tasks, and reasons for the others."""

    num_tasks: int
    reasons: Mapping[str, int]


def task_card(tasks: Sequence[Task]) -> str:
    """Return the README.md of a task file on the hub: its sources and what vetting found."""
    sources = Counter(task.dataset or "none" for task in tasks)
    certified = [task for task in tasks if not objection(task)]
    strengths = Counter(str(task.certificate.get("strength", "none")) for task in certified)
    num_repos = len({task.repo for task in tasks})
    return f"""---
tags:
- reinforcement-learning
- swerl
---
# Tasks for coding agents

{len(tasks):,} Tasks of {num_repos:,} repositories, written by swerl {__version__}.

- Sources: {_listed(sources)}
- Certified by `swerl tasks vet`: {len(certified):,}; strength of their tests: {_listed(strengths)}

`hf download` fetches `tasks.jsonl`; then set `tasks.source` in a recipe, or pass the file to `swerl
eval`. Each Task has its prompt, image, tests and known solution, under the licences of its
repository.
"""


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"


def export_slime(tasks: Iterable[Task], out: Path) -> Exported:
    """Write the rows of slime's coding-agent example, without swerl's own fields.

    Raises RunError if `out` cannot be written.
    """
    reasons: Counter[str] = Counter()
    num_tasks = 0
    with replacing(out) as part, part.open("wb") as file:
        for task in tasks:
            try:
                file.write(orjson.dumps(_slime_row(task), option=orjson.OPT_APPEND_NEWLINE))
                num_tasks += 1
            except TaskError as error:
                reasons[str(error)] += 1
    return Exported(num_tasks, reasons)


def export_verl(tasks: Iterable[Task], out: Path) -> Exported:
    """Write verl's columns as Parquet; `extra_info.task` is the whole Task as JSON.

    All Tasks are held in memory. Raises RunError if `out` cannot be written.
    """
    import pyarrow
    from pyarrow.parquet import write_table

    rows = [_verl_row(task, index) for index, task in enumerate(tasks)]
    with replacing(out) as part:
        write_table(pyarrow.Table.from_pylist(rows), part)
    return Exported(len(rows), {})


def export_harbor(tasks: Iterable[Task], out: Path) -> Exported:
    """Write one task folder per Task into a new folder."""
    if out.exists():
        raise InputError(f"{out} exists already", hint="name a new folder with -o")
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by a killed export
    part.mkdir()
    reasons: Counter[str] = Counter()
    num_tasks = 0
    for task in tasks:
        try:
            write(task, part)
            num_tasks += 1
        except TaskError as error:
            reasons[str(error)] += 1
    part.replace(out)
    return Exported(num_tasks, reasons)


FORMATS: Mapping[str, Callable[[Iterable[Task], Path], Exported]] = {
    "slime": export_slime,
    "harbor": export_harbor,
    "verl-parquet": export_verl,
}


def _slime_row(task: Task) -> dict[str, Json]:
    """Return a row with slime's grading keys: a test patch, a script or a command."""
    row = to_row(task)
    metadata, spec = row["metadata"], task.grading
    assert isinstance(metadata, dict)
    extra, info = metadata.pop("swerl"), metadata["remote_env_info"]
    assert isinstance(extra, dict) and isinstance(info, dict)
    metadata["problem_statement"] = info["problem_statement"] = task.prompt
    info["image"] = task.image
    info["pre_commands"] = task.setup
    version = task.metadata.get("version", "")
    if spec.grader == "swebench" and version:
        info |= {"version": version, "environment_setup_commit": "", "hints_text": ""}
    elif spec.grader == "script" and _SLIME_SCRIPT in spec.test_files:
        info["f2p_script"] = spec.test_files[_SLIME_SCRIPT]
    elif spec.grader == "command" and not spec.log_parser:
        metadata["eval_cmd"] = spec.test_command
    else:
        raise TaskError(f"slime has no grader for these tasks of {spec.grader}")
    return row


def _verl_row(task: Task, index: int) -> dict[str, Json]:
    return {
        "data_source": task.dataset,
        "prompt": [{"role": "user", "content": task.prompt}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": task.id},
        "extra_info": {
            "index": index,
            "instance_id": task.id,
            "repo": task.repo,
            "image": task.image,
            "workdir": task.workdir,
            "task": orjson.dumps(to_row(task)).decode(),
        },
    }


JUDGE = Path(__file__).parent / "_harbor" / "judge.py"
_JUDGED = {"pytest", "pytest_options", "status_lines"}
"""Log parsers with summary lines that the judge reads, too."""
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
    """Write the Task's folder. Raises TaskError if Harbor cannot judge it."""
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
                raise TaskError("its tests are outside of /tests")
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
        env="".join(f"export {name}={shlex.quote(text)}\n" for name, text in spec.env.items()),
        command=spec.test_command,
    )


def _restore(task: Task) -> str:
    spec = task.grading
    copied = "cp -a /tests/files/. .\n" if spec.test_files else ""
    if not spec.test_patch:
        return copied
    paths = shlex.join(touched(spec.test_patch))
    return _RESTORE.format(paths=paths, base=task.base_commit or "HEAD") + copied


def _solution(task: Task) -> Iterator[tuple[str, bytes]]:
    solution = task.metadata.get("solution")
    if isinstance(solution, dict):
        for path, text in solution.items():
            yield path.removeprefix("/"), file_bytes(str(text))
    elif task.gold_patch:
        yield "solution/solution.patch", task.gold_patch.encode()
        script = f"cd {shlex.quote(task.workdir)} && git apply /solution/solution.patch\n"
        yield "solution/solve.sh", f"#!/bin/bash\n{script}".encode()
