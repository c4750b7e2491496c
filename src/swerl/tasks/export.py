"""Export Tasks for other trainers: slime's JSONL, verl's Parquet.

Each output is written atomically. A Task that a format cannot express is left out and counted with
its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from swerl import __version__
from swerl.core.certificate import objection
from swerl.core.chat import Json
from swerl.core.errors import TaskError
from swerl.core.files import replacing
from swerl.core.task import Task, to_row

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


FORMATS: Mapping[str, Callable[[Iterable[Task], Path], Exported]] = {
    "slime": export_slime,
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
