"""Rows become Tasks or rejects with a reason; files appear whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from swerl.core.errors import InputError, TaskError
from swerl.core.task import GradingSpec, Task, read_tasks
from swerl.grading.log_parsers import unsupported
from swerl.tasks.convert import Settings, Summary, convert, rejects_path
from swerl.tasks.datasets import Converter, Row
from swerl.tasks.rows import file_rows


def to_task(row: Row) -> Task:
    if "id" not in row:
        raise TaskError("column id is missing")
    grader, parser = str(row.get("grader", "command")), str(row.get("parser", ""))
    image, prompt = str(row.get("image", "i")), str(row.get("text", "fix"))
    files = {"/tests/test.sh": str(row.get("script", ""))}
    repo, spec = str(row.get("repo", "r")), GradingSpec(grader, log_parser=parser, files=files)
    metadata = {"allow_internet": row.get("network", False)}
    return Task(str(row["id"]), repo, image, "/w", prompt, spec, metadata=metadata)


CONVERTER = Converter("small", "nobody/small", ("train",), to_task)


def run(rows: list[Row | TaskError], out: Path, **settings: object) -> Summary:
    return convert(CONVERTER, rows, out, settings=Settings(**settings))  # type: ignore[arg-type]


def ids(out: Path) -> list[str]:
    return [task.id for task in read_tasks(out)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "column id is missing"),
        ({"id": "good"}, "another row has the same id"),
        ({"id": "a\nb"}, r"'a\nb' has a control character"),
        ({"id": "a\x1b[2J"}, r"'a\x1b[2J' has a control character"),
        ({"id": "a", "repo": "r\x07"}, r"'r\x07' has a control character"),
        ({"id": "\u00e9" * 101}, "over 200 bytes"),
        ({"id": "a", "text": "x\0y"}, "NUL character"),
        ({"id": "a", "text": "\ud800"}, "not valid Unicode"),
        ({"instance_id": "\ud800"}, "column id is missing"),
        ({"id": "a", "image": "x y:latest"}, "'x y:latest' is not an image name"),
        ({"id": "a", "image": "Upper/case"}, "is not an image name"),
        (TaskError("the line is not JSON"), "the line is not JSON"),
    ],
)
def test_an_unusable_row_is_a_reject_with_its_reason(
    tmp_path: Path, row: Row | TaskError, reason: str
) -> None:
    out = tmp_path / "tasks.jsonl"
    image = f"h:5/a__b/c@sha256:{'0' * 64}"
    summary = run([{"id": "good", "image": image}, row, {"id": "x::y [z]"}], out)
    assert ids(out) == ["good", "x::y [z]"]
    (reject,) = [json.loads(line) for line in rejects_path(out).open()]
    assert reject["row"] == 2 and reason in reject["reason"]
    assert (summary.num_tasks, dict(summary.reasons)) == (2, {reject["reason"]: 1})


def test_lines_that_are_no_rows_are_rejected(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'{"id": "a"}\n\n{"id": \n[1]\n{"id": "\xff"}\n')
    summary = convert(CONVERTER, file_rows(rows), tmp_path / "tasks.jsonl")
    assert (summary.num_tasks, summary.num_rejects) == (1, 3)


def test_a_failed_conversion_leaves_the_last_result(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    run([{"id": "old"}], out)

    def interrupted() -> Iterator[Row | TaskError]:
        yield {"id": "new"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(CONVERTER, interrupted(), out)
    assert run([{}], out).num_tasks == 0
    assert ids(out) == ["old"]
    assert set(tmp_path.iterdir()) == {out, rejects_path(out)}


@pytest.mark.parametrize(
    ("name", "message"), [("folder", "is a folder"), ("none/x", "cannot write")]
)
def test_an_unusable_output_is_one_error(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=message):
        run([{"id": "a"}], tmp_path / name)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_missing_graders_and_parsers_are_counted(tmp_path: Path) -> None:
    rows: list[Row | TaskError] = [
        {"id": "a", "parser": "status_lines"},
        {"id": "b", "grader": "from_nowhere"},
        {"id": "c", "parser": "from_nowhere"},
    ]
    summary = run(rows, tmp_path / "tasks.jsonl")
    assert unsupported(summary.kinds) == {
        "no grader from_nowhere is installed": 1,
        "no log parser from_nowhere is installed": 1,
    }


def test_tasks_that_need_a_network_are_counted(tmp_path: Path) -> None:
    rows: list[Row | TaskError] = [
        {"id": "a", "script": "# curl\ncurly; ./curl"},
        {"id": "b", "script": "apt-get update && apt-get install -y curl"},
        {"id": "c", "script": "uvx pytest"},
        {"id": "d", "network": True},
    ]
    assert dict(run(rows, tmp_path / "tasks.jsonl").warnings) == {
        "the tests run `apt-get update`, and no sandbox has a network": 1,
        "the tests run `uvx`, and no sandbox has a network": 1,
        "the task allows a network, which no sandbox has": 1,
    }
