"""The twin's tasks: small broken Python repositories with hidden tests, generated from a seed.

A repository is a folder named for the hash of its content: one module, a README and a git history
of one commit. It is written once under a temporary name and renamed, so that a second call, or two
at a time, find it ready; a sandbox starts on it as it is.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import random
import shutil
import subprocess
from pathlib import Path

from swerl.core.errors import ImageError, InputError
from swerl.core.secrets import child_environment
from swerl.core.task import GradingSpec, Task
from swerl.tasks._twin_templates import Call, Split, Variant, draw

WORKDIR = "/repo"
TEST_FILE = "tests/run_tests.py"
TEST_COMMAND = f"python3 -I -S -B {TEST_FILE}"
_TEST_TIMEOUT_S = 20.0
_TRIES_PER_TASK = 200
_COMMITTER = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "twin",
    "GIT_AUTHOR_EMAIL": "twin@localhost",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "twin",
    "GIT_COMMITTER_EMAIL": "twin@localhost",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
}
_RUNNER = '''"""Runs the hidden tests; prints one status line a test.

The code under test runs in a child that holds neither the report nor what the tests want.
"""
import importlib, marshal, os, sys

CASES = {cases}


def answer(calls, pipe):
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(1, 2)
    sys.path.insert(0, os.getcwd())
    answers = []
    for module, function, args in calls:
        try:
            got = getattr(importlib.import_module(module), function)(*args)
            answers.append(marshal.dumps(got))
        except BaseException:
            answers.append(None)
    with os.fdopen(pipe, "wb") as out:
        out.write(marshal.dumps(answers))
    os._exit(0)


def passes(answer, want):
    try:
        got = marshal.loads(answer)
    except (TypeError, ValueError, EOFError):
        return False
    return type(got) is type(want) and got == want


os.unlink(__file__)
names, wants = [case[0] for case in CASES], [case[4] for case in CASES]
calls = [case[1:4] for case in CASES]
read, write = os.pipe()
if not os.fork():
    os.close(read)
    CASES.clear()
    wants.clear()
    answer(calls, write)
os.close(write)
with os.fdopen(read, "rb") as answers:
    try:
        found = list(marshal.loads(answers.read()))
    except (TypeError, ValueError, EOFError):
        found = []
found += [None] * (len(names) - len(found))
good = [passes(*pair) for pair in zip(found, wants)]
for name, is_good in zip(names, good):
    print("PASSED" if is_good else "FAILED", name)
sys.exit(not all(good))
'''


def make_tasks(folder: Path, *, split: str, count: int, seed: int) -> list[Task]:
    """Draw `count` different Tasks of a split and write their repositories under `folder`.

    `split` is `train`, `heldout` or `unseen`. The same arguments give the same Tasks, and only
    missing repositories are written. Raises InputError on an unknown split or a count beyond what
    the templates can make, ImageError where a repository cannot be written.
    """
    variants = make_variants(split=split, count=count, seed=seed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_task(folder.resolve(), variant) for variant in variants]
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        raise ImageError(
            f"cannot write a twin repository under {folder}: {said}".strip(),
            hint="is git installed, and the disk not full?",
        ) from error


def make_variants(*, split: str, count: int, seed: int) -> list[Variant]:
    """Draw the variants behind `make_tasks`, without writing anything."""
    if split not in set(Split):
        raise InputError(f"unknown split {split!r}", hint=f"choose one of {', '.join(Split)}")
    rng = random.Random(f"{split}/{seed}")
    found: dict[str, Variant] = {}
    for _ in range(count * _TRIES_PER_TASK):
        if len(found) == count:
            break
        variant = draw(rng, Split(split))
        found.setdefault(_digest(variant), variant)
    if len(found) < count:
        raise InputError(
            f"the twin has fewer than {count} different {split} tasks",
            hint=f"ask for {len(found)} or fewer",
        )
    return list(found.values())


def _task(folder: Path, variant: Variant) -> Task:
    digest = _digest(variant)
    repository = folder / digest
    if not repository.is_dir():
        _write(repository, variant)
    failing = [_name(call) for call in variant.failing]
    passing = [_name(call) for call in variant.passing]
    return Task(
        id=f"twin__{variant.template}-{digest}",
        repo=f"twin/{variant.template}",
        image=f"dir:{repository}",
        workdir=WORKDIR,
        prompt=variant.prompt,
        grading=GradingSpec(
            grader="command",
            fail_to_pass=tuple(failing),
            pass_to_pass=tuple(passing),
            test_files={TEST_FILE: _tests(variant)},
            test_command=TEST_COMMAND,
            log_parser="status_lines",
            timeout_s=_TEST_TIMEOUT_S,
        ),
        base_commit=(repository / ".git/refs/heads/main").read_text().strip(),
        gold_patch=_gold_patch(variant),
        dataset="twin",
        metadata={"template": variant.template},
    )


def _digest(variant: Variant) -> str:
    """Name the variant by everything that the agent sees and the tests say."""
    parts = [variant.file, variant.source, variant.prompt, _readme(variant), _tests(variant)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _write(repository: Path, variant: Variant) -> None:
    part = repository.with_name(f".{repository.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    (part / variant.file).write_text(variant.source)
    (part / "README.md").write_text(_readme(variant))
    environment = child_environment(**_COMMITTER)
    for command in (
        ["init", "--quiet", "--template=", "--initial-branch=main"],
        ["add", "--all"],
        ["commit", "--quiet", "--message=Start"],
    ):
        subprocess.run(
            ["git", "-c", "core.fsync=none", *command],
            cwd=part,
            env=environment,
            check=True,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    try:
        part.rename(repository)
    except OSError:
        shutil.rmtree(part)
        if not repository.is_dir():
            raise


def _readme(variant: Variant) -> str:
    return f"# {Path(variant.file).stem}\n\nSmall helpers, all in `{variant.file}`.\n"


def _tests(variant: Variant) -> str:
    module = Path(variant.file).stem
    cases = [
        (_name(call), module, call.function, call.args, call.want)
        for call in (*variant.failing, *variant.passing)
    ]
    rows = "".join(f"    {case!r},\n" for case in cases)
    return _RUNNER.format(cases=f"[\n{rows}]")


def _name(call: Call) -> str:
    return "_".join(["test", call.function, *map(str, call.args)])


def _gold_patch(variant: Variant) -> str:
    diff = difflib.unified_diff(
        variant.source.splitlines(keepends=True),
        variant.fixed.splitlines(keepends=True),
        f"a/{variant.file}",
        f"b/{variant.file}",
    )
    return f"diff --git a/{variant.file} b/{variant.file}\n" + "".join(diff)
