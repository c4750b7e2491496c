"""`swerl convert` and `swerl tasks` as typed: what they print, and what they say to wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from swerl.cli.main import typer_app
from swerl.core.errors import InputError

PATCH = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x\n+y\n"


def gym_row(number: int) -> dict[str, object]:
    return {
        "instance_id": f"getmoto__moto-{number}",
        "repo": "getmoto/moto",
        "base_commit": "c0ffee",
        "version": "1.0",
        "problem_statement": "It is [bold]broken[/].",
        "patch": PATCH,
        "test_patch": PATCH,
        "FAIL_TO_PASS": ["t"] if number else [],
        "PASS_TO_PASS": [],
    }


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(gym_row(number)) + "\n" for number in range(30)))
    (tmp_path / "hub").mkdir()
    for split in ("dev", "test"):
        (tmp_path / "hub" / f"{split}.jsonl").write_text(json.dumps(gym_row(1)))
    return path


@pytest.fixture
def tasks(rows: Path) -> Path:
    swerl("convert swe-gym --rows rows.jsonl")
    return rows.with_name("tasks.jsonl")


def swerl(command: str) -> Result:
    return CliRunner().invoke(typer_app, command.split(), catch_exceptions=False)


def said(result: Result) -> str:
    assert result.exit_code == 0
    return " ".join(result.output.split())


def test_a_conversion_ends_with_a_table_and_what_to_do_next(rows: Path) -> None:
    text = said(swerl("convert swe-gym --rows rows.jsonl -o out.jsonl"))
    assert "29 tasks 1 rejected: FAIL_TO_PASS is empty" in text
    assert text.endswith("tasks: out.jsonl next: swerl tasks show out.jsonl")


@pytest.mark.parametrize("to", ["slime", "verl-parquet"])
def test_rows_become_what_another_trainer_reads(rows: Path, to: str) -> None:
    text = said(swerl(f"convert swe-gym --rows rows.jsonl --format {to} -o out.jsonl"))
    assert "tasks: out.tasks.jsonl" in text and text.endswith("29 tasks: out.jsonl")

    said(swerl(f"convert out.tasks.jsonl --format {to} -o again.jsonl"))
    assert Path("out.jsonl").read_bytes() == Path("again.jsonl").read_bytes()


def test_datasets_are_listed(rows: Path) -> None:
    text = said(swerl("convert list"))
    assert "swe-gym SWE-Gym/SWE-Gym train" in text and "harbor (task folders)" in text


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("convert swe-gym --rows rows.jsonl --split test", "has no splits"),
        ("convert swe-gym --rows rows.jsonl --repo-id a/b", "--rows names a file"),
        ("convert swe-gym --rows hub", "has the splits dev, test"),
        ("convert swe-gym --rows hub --split train", "has no split train"),
        ("convert swe-gym --rows rows.jsonl --format slimy -o o", "unknown format"),
        ("convert swe-gym --rows rows.jsonl --format slime", "needs the name of its file"),
        ("convert swe-gym --rows rows.jsonl --format slime -o rows.jsonl", "exists already"),
        ("convert swe-gym --rows none.jsonl -o new.jsonl", "cannot read rows"),
        ("convert swe-gym --rows rows.jsonl --assets none", "is not a folder"),
        ("convert swe-gym --rows rows.jsonl --assets . -o n.jsonl", "need no assets"),
        ("convert swe-gym --rows rows.jsonl -o none/x.jsonl", "cannot write none/x.jsonl"),
        ("convert swe-smith --rows rows.jsonl -o new.jsonl", "no row could be converted"),
        ("tasks show rows.jsonl", "rows.jsonl:1: a task row has a missing or unknown field"),
        ("tasks show none.jsonl", "cannot read task file"),
        ("tasks filter tasks.jsonl -o x", "no condition is given"),
        ("tasks filter tasks.jsonl --solve-rate 0.9:0.1 -o x", "is not an interval"),
        ("tasks filter tasks.jsonl --split 0.9 -o x", "is not an interval"),
        ("convert tasks.jsonl --format slim -o x", "unknown format 'slim'"),
        ("convert tasks.jsonl --format slime -o rows.jsonl", "exists already"),
        ("convert tasks.jsonl --format slime -o tasks.jsonl --force", "is the task file itself"),
        ("convert swe-gym --rows rows.jsonl -o rows.jsonl --force", "is one of the input files"),
        ("convert swe-gym --rows hub --split dev -o hub/dev.jsonl --force", "one of the input"),
    ],
)
def test_wrong_input_is_one_error_with_a_hint(tasks: Path, command: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        swerl(command)
    assert message in str(caught.value)
    assert caught.value.hint


def test_show_lists_tasks_and_shows_one(tasks: Path) -> None:
    text = said(swerl("tasks show tasks.jsonl --limit 2"))
    assert "getmoto__moto-1 swebench 1 0 2" in text and "and 27 more tasks" in text
    one = said(swerl("tasks show tasks.jsonl getmoto__moto-3"))
    assert "It is [bold]broken[/]." in one and "+++ b/a.py" not in one
    assert "+++ b/a.py" in said(swerl("tasks show tasks.jsonl getmoto__moto-3 --hidden"))


def test_show_counts_as_table_and_as_json(tasks: Path) -> None:
    text = said(swerl("tasks show tasks.jsonl"))
    assert "29 tasks in tasks.jsonl, 29 images" in text and "getmoto/moto 29" in text
    counts = json.loads(swerl("tasks show tasks.jsonl --json").stdout)
    assert counts["groups"]["repo"] == {"getmoto/moto": 29} and len(counts["tasks"]) == 20


def test_fewer_tasks_are_chosen_and_exported(tasks: Path) -> None:
    command = "tasks filter tasks.jsonl --max-files 1 --repo getmoto/moto"
    assert "29 of 29 tasks" in said(swerl(f"{command} -o f.jsonl"))
    assert "5 of 29 tasks: s.jsonl" in said(swerl(f"{command} --sample 5 -o s.jsonl"))
    assert "5 tasks: h" in said(swerl("convert s.jsonl --format slime -o h"))
    assert len(Path("h").read_text().splitlines()) == 5


def test_control_characters_of_a_task_file_do_not_reach_the_terminal(tasks: Path) -> None:
    Path("evil.jsonl").write_text(tasks.read_text().replace("broken", "\\u001b]0;x\\u0007 broken"))
    assert "\x1b" not in said(swerl("tasks show evil.jsonl getmoto__moto-3 --hidden"))
    Path("evil.jsonl").write_text(tasks.read_text().replace("moto-3", "moto-\\u001b[2J"))
    assert "\x1b" not in said(swerl("tasks show evil.jsonl"))
