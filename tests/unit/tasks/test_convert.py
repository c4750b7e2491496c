"""Rows become Tasks or rejects; a killed conversion goes on where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swerl.core.errors import InputError, TaskError
from swerl.core.task import GradingSpec, Task, read_tasks
from swerl.grading.log_parsers import unsupported
from swerl.tasks.convert import Settings, Summary, convert, rejects_path
from swerl.tasks.datasets import Converter, Row
from swerl.tasks.rows import RowSource, file_rows, listed

SWERL = Path(sys.executable).with_name("swerl")


def to_task(row: Row) -> Task:
    if "id" not in row:
        raise TaskError("column id is missing")
    spec = GradingSpec("command")
    image, prompt = str(row.get("image", "i")), str(row.get("text", "fix"))
    return Task(str(row["id"]), "r", image, "/w", prompt, spec)


CONVERTER = Converter("small", "nobody/small", ("train",), to_task)


def run(rows: list[Row | TaskError], out: Path) -> Summary:
    return convert(CONVERTER, listed(rows), out)


def rejects(out: Path) -> list[Row]:
    return [json.loads(line) for line in rejects_path(out).open()]


def broken_after(rows: list[Row | TaskError], number: int) -> RowSource:
    """Return rows whose reading is broken off after `number` of them."""

    def read(start: int) -> Iterator[Row | TaskError]:
        yield from rows[start:number]
        raise KeyboardInterrupt

    whole = listed(rows)
    return RowSource(whole.name, read, whole.count)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"id": "a\nb"}, "control character"),
        ({"id": "\u00e9" * 101}, "over 200 bytes"),
        ({"id": "a", "text": "x\0y"}, "NUL character"),
        ({"id": "a", "image": "x y:latest"}, "'x y:latest' is not an image name"),
        ({"id": "a", "image": "Upper/case"}, "is not an image name"),
    ],
)
def test_a_task_that_no_machine_could_run_is_a_reject(
    tmp_path: Path, row: Row, reason: str
) -> None:
    good: Row = {"id": "x::y [z]", "image": f"h:5/a__b/c@sha256:{'0' * 64}"}
    summary = run([row, good], tmp_path / "tasks.jsonl")
    assert (summary.num_tasks, summary.num_rejects) == (1, 1)
    assert reason in next(iter(summary.reasons))


def test_every_row_is_a_task_or_a_reject_with_its_reason(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    summary = run([{"id": "a"}, {}, {"id": "a"}, {"id": "b"}], out)
    assert [task.id for task in read_tasks(out)] == ["a", "b"]
    assert summary.reasons == {"column id is missing": 1, "another row has the same id": 1}
    assert [reject["row"] for reject in rejects(out)] == [2, 3]


def test_lines_that_are_no_rows_are_rejected(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'{"id": "a"}\n\n{"id": \n[1]\n{"id": "\xff"}\n')
    summary = convert(CONVERTER, file_rows(rows), tmp_path / "tasks.jsonl")
    assert (summary.num_tasks, summary.num_rejects) == (1, 3)


def test_text_that_is_no_unicode_is_rejected(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    summary = run([{"id": "a", "text": "\ud800"}, {"instance_id": "\ud800"}], out)
    assert summary.reasons == {
        "a column holds text that is not valid Unicode": 1,
        "column id is missing": 1,
    }


def test_a_broken_off_conversion_leaves_the_last_result(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    run([{"id": "old"}], out)
    with pytest.raises(KeyboardInterrupt):
        convert(CONVERTER, broken_after([{"id": "new"}], 1), out)
    assert [task.id for task in read_tasks(out)] == ["old"]


def test_a_conversion_without_a_single_task_leaves_the_last_result(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    run([{"id": "old"}], out)
    assert run([{}], out).num_tasks == 0
    assert [task.id for task in read_tasks(out)] == ["old"]
    assert [reject["row"] for reject in rejects(out)] == [1]
    assert sorted(tmp_path.iterdir()) == [out, rejects_path(out)]


@pytest.mark.parametrize("out", ["rows.jsonl", "other/../rows.jsonl"])
@pytest.mark.parametrize("source", ["rows.jsonl", "."])
def test_rows_are_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    Path("rows.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(InputError, match="one of the input files"):
        convert(CONVERTER, file_rows(Path(source)), Path(out))
    assert Path("rows.jsonl").read_text() == '{"id": "a"}\n'


def test_a_folder_in_place_of_the_file_is_an_error_before_any_row(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        run([{"id": "a"}], tmp_path / "tasks")
    assert list(tmp_path.iterdir()) == [tmp_path / "tasks"]


@pytest.mark.parametrize("number", range(8))
def test_a_broken_off_conversion_goes_on(tmp_path: Path, number: int) -> None:
    out, whole = tmp_path / "tasks.jsonl", tmp_path / "whole.jsonl"
    rows: list[Row | TaskError] = [{"id": "a"}, {}, {"id": "b"}, {"id": "a"}, {}, {}, {"id": "c"}]
    with pytest.raises(KeyboardInterrupt):
        convert(CONVERTER, broken_after(rows, number), out)
    summary, expected = run(rows, out), run(rows, whole)
    assert summary.num_resumed == number
    assert (summary.num_tasks, summary.reasons) == (expected.num_tasks, expected.reasons)
    assert out.read_bytes() == whole.read_bytes()
    assert rejects_path(out).read_bytes() == rejects_path(whole).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {
        "tasks.jsonl", "tasks.rejects.jsonl", "whole.jsonl", "whole.rejects.jsonl",
    }  # fmt: skip


@pytest.mark.parametrize("num_bytes", [1, 40, 400, 900])
@pytest.mark.parametrize("cut", [0, 1, 60])
def test_lines_lost_in_a_kill_are_written_again(tmp_path: Path, num_bytes: int, cut: int) -> None:
    out, whole = tmp_path / "tasks.jsonl", tmp_path / "whole.jsonl"
    rows: list[Row | TaskError] = [{"id": "a"}, {}, {"id": "b"}, {}, {"id": "c"}, {}]
    with pytest.raises(KeyboardInterrupt):
        convert(CONVERTER, broken_after(rows, 6), out)
    for name, lost in (("tasks.jsonl.part", num_bytes), ("tasks.rejects.jsonl.part", cut)):
        part = tmp_path / name
        os.truncate(part, part.stat().st_size - lost)
    run(rows, out)
    run(rows, whole)
    assert out.read_bytes() == whole.read_bytes()
    assert rejects_path(out).read_bytes() == rejects_path(whole).read_bytes()


def test_half_a_file_of_other_rows_is_not_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    with pytest.raises(KeyboardInterrupt):
        convert(CONVERTER, broken_after([{"id": "x"}, {"id": "y"}], 1), out)
    summary = run([{"id": "a"}], out)
    assert summary.num_resumed == 0
    assert [task.id for task in read_tasks(out)] == ["a"]


def test_two_conversions_do_not_write_one_file(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"

    def read(start: int) -> Iterator[Row | TaskError]:
        yield {"id": "a"}
        with pytest.raises(InputError, match="another conversion"):
            run([{"id": "b"}], out)

    convert(CONVERTER, RowSource("rows", read, lambda: 1), out)
    assert [task.id for task in read_tasks(out)] == ["a"]


def test_images_come_from_the_mirror(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    settings = Settings(images={"i": "mirror.example/i@sha256:0"})
    convert(CONVERTER, listed([{"id": "a"}]), out, settings=settings)
    assert next(read_tasks(out)).image == "mirror.example/i@sha256:0"
    settings = Settings(images={"other": "mirror.example/i@sha256:0"})
    summary = convert(CONVERTER, listed([{"id": "a"}]), out, settings=settings)
    assert summary.reasons == {"the mirror's lock file does not have its image": 1}


def test_missing_graders_and_parsers_are_said(tmp_path: Path) -> None:
    def named(row: Row) -> Task:
        spec = GradingSpec(str(row["grader"]), log_parser=str(row.get("parser", "")))
        return Task(str(row["id"]), "r", "i", "/w", "fix", spec)

    rows: list[Row | TaskError] = [
        {"id": "a", "grader": "command", "parser": "status_lines"},
        {"id": "b", "grader": "from_nowhere"},
        {"id": "c", "grader": "command", "parser": "from_nowhere"},
    ]
    converter = Converter("named", "", ("train",), named)
    summary = convert(converter, listed(rows), tmp_path / "tasks.jsonl")
    assert summary.num_tasks == 3
    assert unsupported(summary.kinds) == {
        "no grader from_nowhere is installed": 1,
        "no log parser from_nowhere is installed": 1,
    }


def test_an_output_folder_that_does_not_exist_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        run([{"id": "a"}], tmp_path / "none" / "tasks.jsonl")


def gym_row(number: int, text: str) -> str:
    patch = f"diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-{text}\n+y\n"
    row = {
        "instance_id": f"getmoto__moto-{number}",
        "repo": "getmoto/moto",
        "base_commit": "c0ffee",
        "problem_statement": "It is broken.",
        "patch": patch,
        "test_patch": patch.replace("a.py", "tests/test_a.py"),
        "FAIL_TO_PASS": [] if number % 10 == 3 else ["tests/test_a.py::test_a"],
        "PASS_TO_PASS": [],
    }
    return json.dumps(row) + "\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_conversion_survives_its_end(tmp_path: Path, number: int, code: int) -> None:
    rows, out, whole = (tmp_path / name for name in ("rows.jsonl", "tasks.jsonl", "whole.jsonl"))
    with rows.open("w") as file:
        file.writelines(gym_row(number, "x" * 2000) for number in range(30_000))
    command = [SWERL, "convert", "swe-gym", "--rows", rows, "-o"]
    process = subprocess.Popen([*command, out], stderr=subprocess.PIPE, text=True)
    part = tmp_path / "tasks.jsonl.part"
    while process.poll() is None and not (part.is_file() and part.stat().st_size > 4 << 20):
        time.sleep(0.002)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == code
    assert "Traceback" not in said
    assert (code == 130) == ("run the same command again" in said)
    again = subprocess.run([*command, out], capture_output=True, text=True, check=True)
    assert "done by an earlier run" in again.stdout
    subprocess.run([*command, whole], capture_output=True, check=True)
    assert out.read_bytes() == whole.read_bytes()
    assert rejects_path(out).read_bytes() == rejects_path(whole).read_bytes()
    assert len(rejects(out)) == 3000
