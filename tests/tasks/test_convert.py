"""Rows become Tasks or rejects, whole files or none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from swerl.errors import InputError, TaskError, UnknownNameError
from swerl.task import GradingSpec, Task, read_tasks
from swerl.tasks import convert as converting
from swerl.tasks.convert import Converter, Row, convert, find_converter, read_rows


def to_task(row: Row) -> Task:
    if "id" not in row:
        raise TaskError("column id is missing")
    return Task(
        str(row["id"]), "r", "host", "/w", str(row.get("text", "fix")), GradingSpec("command")
    )


CONVERTER = Converter("small", "nobody/small", ("train",), to_task)


def test_every_row_is_a_task_or_a_reject_with_its_reason(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    summary = convert(CONVERTER, [{"id": "a"}, {}, {"id": "a"}, {"id": "b"}], out)
    assert [task.id for task in read_tasks(out)] == ["a", "b"]
    assert summary.reasons == {"column id is missing": 1, "another row has the same id": 1}
    rejects = [json.loads(line) for line in (tmp_path / "tasks.rejects.jsonl").open()]
    assert [reject["row"] for reject in rejects] == [2, 3]


def test_lines_that_are_no_rows_are_rejected(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'{"id": "a"}\n\n{"id": \n[1]\n{"id": "\xff"}\n')
    summary = convert(CONVERTER, read_rows(rows), tmp_path / "tasks.jsonl")
    assert (summary.num_tasks, summary.num_rejects) == (1, 3)


def test_text_that_is_no_unicode_is_rejected(tmp_path: Path) -> None:
    summary = convert(CONVERTER, [{"id": "a", "text": "\ud800"}], tmp_path / "tasks.jsonl")
    assert summary.reasons == {"a column holds text that is not valid Unicode": 1}


def test_a_broken_off_conversion_leaves_the_last_result(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    convert(CONVERTER, [{"id": "old"}], out)

    def broken() -> Iterator[Row]:
        yield {"id": "new"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(CONVERTER, broken(), out)
    assert [task.id for task in read_tasks(out)] == ["old"]


def test_parquet_rows_are_read_as_they_are(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"id": str(n), "FAIL_TO_PASS": ["t"]} for n in range(200)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert list(read_rows(tmp_path / "rows.parquet")) == rows


def test_broken_parquet_is_one_clear_error(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "rows.parquet").write_text("no parquet")
    with pytest.raises(InputError, match=r"rows\.parquet"):
        list(read_rows(tmp_path / "rows.parquet"))


def test_missing_rows_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read rows"):
        list(read_rows(tmp_path / "none.jsonl"))


def test_unknown_dataset_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        find_converter("swe-bensh")
    assert "swe-bench" in caught.value.hint


def test_helpers_are_no_datasets() -> None:
    with pytest.raises(UnknownNameError):
        find_converter("_common")
    assert converting.converter_names() == ["r2e-gym", "swe-bench", "swe-gym"]


def test_hub_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(InputError) as caught:
        list(converting.hub_rows("nobody/nothing", "train"))
    assert "swerl[datasets]" in caught.value.hint
