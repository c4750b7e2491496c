"""Tasks are chosen by what they are or by a chance that the seed alone decides."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from swerl.core.errors import InputError, TaskError
from swerl.core.task import GradingSpec, Task, read_tasks, write_tasks
from swerl.grading.log_parsers import unsupported
from swerl.tasks import select
from swerl.tasks.select import compile_where, count

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


def ids(path: Path) -> list[str]:
    return [each.id for each in read_tasks(path)]


@pytest.mark.parametrize(
    ("where", "fits"),
    [
        ('repo == "acme/b7"', True),
        ('repo != "acme/b7"', False),
        ('repo in ["acme/b7", "x"] and not (patch_lines > 3)', True),
        ('"acme" in repo', True),
        ('"acme" not in repo or 1 < prompt_chars <= 7', True),
        ("patch_lines == 3 and patch_files == 1 and num_pass_to_pass == 1", True),
        ("solve_rate > 0.2", True),
        ("0 < solve_rate < 0.25", False),
        ("solve_rate == None", False),
        ('difficulty == "hard"', False),
        ("difficulty < 3", False),
        ("not difficulty < 3", True),
        ("difficulty == None", True),
        ('meta.kind == "odd" and meta.other == None', True),
        ("solve_rate > -1", True),
    ],
)
def test_expressions_choose(where: str, fits: bool) -> None:
    assert compile_where(where)(task(7, solve_rate=0.25, kind="odd")) is fits


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("", "is not an expression"),
        ("repo = 'a'", "is not an expression"),
        ("repos == 'a'", "unknown name 'repos'"),
        ("__import__('os').system('true')", "is not allowed in an expression"),
        ("repo.__class__ == 1", "is not allowed in an expression"),
        ("[x for x in repo]", "is not allowed in an expression"),
        ("repo is None", "is not allowed in an expression"),
        ("repo == f'{id}'", "is not allowed in an expression"),
        ("(" * 9000 + "1" + ")" * 9000, "is not an expression"),
    ],
)
def test_what_is_no_expression_is_one_clear_error(where: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        compile_where(where)
    assert caught.value.hint


def test_text_and_numbers_have_no_order() -> None:
    with pytest.raises(InputError, match="t-7 cannot be compared"):
        compile_where("repo < 3")(task(7))


def test_a_filter_keeps_lines_as_they_are(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    found = select.filter_tasks(path, out, compile_where('repo == "acme/b7"'))
    assert found == (20, 200)
    whole = path.read_bytes().splitlines()
    assert out.read_bytes().splitlines() == whole[7::10]
    assert select.filter_tasks(out, out, lambda each: each.id == "t-17") == (1, 20)
    assert ids(out) == ["t-17"]


def test_a_filter_that_fails_leaves_the_last_result(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(TaskError, match=r"tasks\.jsonl:201"):
        select.filter_tasks(path, out, lambda each: True)
    assert out.read_text() == "old"
    assert {each.name for each in tmp_path.iterdir()} == {"tasks.jsonl", "out.jsonl"}


def test_a_larger_sample_holds_a_smaller_one(path: Path, tmp_path: Path) -> None:
    outs = [tmp_path / f"{number}.jsonl" for number in (5, 50, 500)]
    for out in outs:
        select.sample_tasks(path, out, int(out.stem), seed=3)
    small, large, whole = map(ids, outs)
    assert len(small) == 5 and len(large) == 50 and len(whole) == 200
    assert set(small) < set(large)
    assert [name for name in whole if name in set(large)] == large


def test_the_seed_alone_decides_a_sample(path: Path, tmp_path: Path) -> None:
    turned, out = tmp_path / "turned.jsonl", tmp_path / "out.jsonl"
    write_tasks(turned, list(read_tasks(path))[::-1])
    chosen = []
    for source, seed in ((path, 0), (turned, 0), (path, 1)):
        select.sample_tasks(source, out, 20, seed=seed)
        chosen.append(set(ids(out)))
    assert chosen[0] == chosen[1] != chosen[2]


def test_parts_of_a_split_hold_every_task_once(path: Path) -> None:
    done = select.split_tasks(path, {"train": 0.7, "dev": 0.2, "test": 0.1}, by_repo=False, seed=0)
    found = {name: ids(out) for name, (out, _) in done.items()}
    assert sorted(chain.from_iterable(found.values())) == sorted(ids(path))
    assert {name: len(each) for name, each in found.items()} == {
        name: number for name, (_, number) in done.items()
    }
    assert 110 < len(found["train"]) < 170
    assert done["train"][0] == path.with_name("tasks.train.jsonl")


def test_no_repository_is_in_two_parts(path: Path) -> None:
    done = select.split_tasks(path, {"train": 0.5, "test": 0.5}, by_repo=True, seed=1)
    train, test = ({each.repo for each in read_tasks(out)} for out, _ in done.values())
    assert train and test and not train & test


def test_shares_that_do_not_add_up_are_refused(path: Path) -> None:
    with pytest.raises(InputError, match="add up to 1"):
        select.split_tasks(path, {"train": 0.9, "test": 0.2}, by_repo=False, seed=0)


def test_stats_count_what_a_file_holds() -> None:
    tasks = [task(1), task(2, solve_rate=0.5, difficulty="hard"), task(3, solve_rate=1.0)]
    stats = count(tasks)
    assert stats.num_tasks == 3 and stats.num_images == 1
    assert stats.groups["repo"] == {"acme/b1": 1, "acme/a2": 1, "acme/b3": 1}
    assert stats.groups["difficulty"] == {"": 2, "hard": 1}
    assert stats.numbers["prompt_chars"] == [1, 2, 2, 3]
    assert stats.solve_rates == [0.5, 1.0]
    assert unsupported(stats.kinds) == {}
