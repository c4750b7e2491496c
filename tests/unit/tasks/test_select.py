"""Tasks are chosen by a few facts, or at random by the seed only."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.core.errors import TaskError
from swerl.core.task import GradingSpec, Task, read_tasks, write_tasks
from swerl.grading.log_parsers import unsupported
from swerl.tasks import select
from swerl.tasks.select import Choice, count

PATCH = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1,2 @@\n-x\n+y\n+z\n"


def task(number: int, **metadata: str | float) -> Task:
    repo = f"acme/{'ab'[number % 2]}{number % 10}"
    spec = GradingSpec("command", ("t",) * (number % 3), ("p",))
    return Task(
        f"t-{number}", repo, "i", "/w", "x" * number, spec, gold_patch=PATCH, metadata=metadata
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, (task(number) for number in range(200)))
    return path


def chosen(path: Path, **conditions: object) -> list[str]:
    out = path.with_name("out.jsonl")
    num_chosen, num_all = select.filter_tasks(path, out, Choice(**conditions))  # type: ignore[arg-type]
    ids = [task.id for task in read_tasks(out)]
    assert (num_chosen, num_all) == (len(ids), 200)
    assert set(out.read_bytes().splitlines()) <= set(path.read_bytes().splitlines())
    return ids


@pytest.mark.parametrize(
    ("conditions", "fits"),
    [
        ({"repos": ("acme/b7", "x")}, True),
        ({"repos": ("x",)}, False),
        ({"max_files": 1}, True),
        ({"max_files": 0}, False),
        ({"solve_rate": (0.25, 0.5)}, True),
        ({"solve_rate": (0.0, 0.2)}, False),
        ({"repos": ("acme/b7",), "solve_rate": (0.3, 1.0)}, False),
        ({"split": (0.0, 1.0)}, True),
        ({"split": (0.5, 0.5)}, False),
    ],
)
def test_every_condition_must_hold(conditions: dict[str, object], fits: bool) -> None:
    assert Choice(**conditions).fits(task(7, solve_rate=0.25)) is fits  # type: ignore[arg-type]


def test_a_task_without_a_solve_rate_has_none() -> None:
    assert not Choice(solve_rate=(0.0, 1.0)).fits(task(1))


def test_a_larger_sample_contains_a_smaller_one(path: Path) -> None:
    small, large, whole = (chosen(path, sample=number, seed=3) for number in (5, 50, 500))
    assert (len(small), len(large), len(whole)) == (5, 50, 200)
    assert set(small) < set(large)
    assert [name for name in whole if name in set(large)] == large


def test_the_seed_decides_a_sample_whatever_the_order(path: Path) -> None:
    first, other = chosen(path, sample=20), chosen(path, sample=20, seed=1)
    write_tasks(path, list(read_tasks(path))[::-1])
    assert set(chosen(path, sample=20)) == set(first) != set(other)


def test_the_parts_of_a_split_have_every_task_once(path: Path) -> None:
    train, test = chosen(path, split=(0.0, 0.7)), chosen(path, split=(0.7, 1.0))
    assert sorted([*train, *test]) == sorted(task.id for task in read_tasks(path))
    assert 110 < len(train) < 170


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}\n", r"tasks\.jsonl:201: a task row has a missing or unknown field"),
        ("[]\n", "201: the line is not a JSON object"),
        ("{\n", "201: "),
        (None, r"tasks\.jsonl:201: task 't-0' is also in line 1"),
        ("/", r"tasks\.jsonl:202: task 'a_b' is also in line 201"),
    ],
)
def test_a_bad_line_leaves_the_last_result(path: Path, line: str | None, message: str) -> None:
    out = path.with_name("out.jsonl")
    out.write_text("old")
    first = path.read_text().splitlines()[0]
    if line == "/":
        line = "".join(first.replace("t-0", name) + "\n" for name in ("a/b", "a_b"))
    with path.open("a") as file:
        file.write(line or first)
    with pytest.raises(TaskError, match=message):
        select.filter_tasks(path, out, Choice())
    assert out.read_text() == "old"
    assert set(path.parent.iterdir()) == {path, out}


def test_stats_count_the_tasks_of_a_file() -> None:
    tasks = [task(1), task(2, solve_rate=0.5, difficulty="hard"), task(3, solve_rate=1.0)]
    stats = count(tasks)
    assert stats.num_tasks == 3 and stats.num_images == 1
    assert stats.groups["repo"] == {"acme/b1": 1, "acme/a2": 1, "acme/b3": 1}
    assert stats.groups["difficulty"] == {"": 2, "hard": 1}
    assert stats.numbers["prompt_chars"] == [1, 2, 2, 3]
    assert stats.solve_rates == [0.5, 1.0]
    assert unsupported(stats.kinds) == {}
