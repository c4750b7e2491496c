"""The ledger survives torn lines and crashes, and stays small."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.liveness import ProcessIdentity, this_process
from swerl.sandboxes.ledger.bill import bill
from swerl.sandboxes.ledger.book import Book
from swerl.sandboxes.ledger.entry import Entry, Head
from swerl.sandboxes.ledger.lines import read_page
from swerl.sandboxes.ledger.store import Ledger

HEAD = Head("folder", {}, "r", this_process())


def entry(number: int) -> Entry:
    return Entry(f"swerl-1-{number}", "img", time.time(), 60.0, price=3.6)


def live_and_end(book: Book, number: int) -> None:
    book.intend(entry(number))
    book.opened(entry(number).name, id="x")
    book.ended(entry(number).name, why="closed")


def test_a_torn_last_line_costs_nothing_but_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    book = Book(path, HEAD)
    for number in range(3):
        book.intend(entry(number))
    whole = path.read_bytes()
    for cut in range(1, 60):
        path.write_bytes(whole[:-cut])
        page = read_page(path)
        assert page is not None
        assert len(page.entries) == (3 if cut == 1 else 2)


def test_a_file_without_its_head_holds_no_sandbox(ledger: Ledger) -> None:
    ledger.folder.mkdir(parents=True)
    (ledger.folder / "a.jsonl").write_text('{"ledger":1,"backe')
    (ledger.folder / "b.jsonl").write_bytes(b"\xff\x00[]\n3\n{}\n")
    assert ledger.pages() == []


def test_unknown_and_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    Book(path, HEAD).intend(entry(1))
    with path.open("a") as out:
        out.write('{"event":"end"}\n{"event":"open","name":"nobody","at":1}\n"x"\n{"sum":3}\n')
    page = read_page(path)
    assert page is not None
    assert [each.name for each in page.unfinished] == ["swerl-1-1"]


def test_after_a_write_that_failed_halfway_the_next_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    book = Book(path, HEAD)
    book.intend(entry(1))
    book._is_torn = True
    with path.open("a") as out:
        out.write('{"event":"end","name":"swerl-1-1","at":1')
    book.opened(entry(1).name, id="the id")
    page = read_page(path)
    assert page is not None
    assert page.entries["swerl-1-1"].id == "the id"


def test_a_full_disk_is_an_error_of_the_intent() -> None:
    with pytest.raises(OSError, match="No space left"):
        Book(Path("/dev/full"), HEAD).intend(entry(1))


def test_a_removed_file_comes_back_with_its_head(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    book = Book(path, HEAD)
    book.intend(entry(1))
    path.unlink()
    book.intend(entry(2))
    page = read_page(path)
    assert page is not None
    assert list(page.entries) == ["swerl-1-2"]


def test_a_long_life_keeps_a_small_file_and_every_cent(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    book = Book(path, HEAD, most_bytes=40_000)
    book.intend(entry(-1))
    book.opened(entry(-1).name, id="open")
    for number in range(3000):
        live_and_end(book, number)
    page = read_page(path)
    assert page is not None
    assert path.stat().st_size < 100_000
    assert [each.name for each in page.unfinished] == ["swerl-1--1"]
    assert page.unfinished[0].id == "open"
    num_ended = sum(1 for each in page.entries.values() if each.ended_s)
    assert sum(each.num_sandboxes for each in page.sums) + num_ended == 3000


def test_archiving_keeps_the_bill_and_what_is_not_over(
    ledger: Ledger, dead: ProcessIdentity, write: Callable[..., Entry]
) -> None:
    for _ in range(5):
        write(dead, opened_s=1e9, ended_s=1e9 + 3600, id="x", price=2.0)
    write(dead, opened_s=1e9)
    write(this_process(), opened_s=1e9, ended_s=1e9 + 1)
    write(replace(dead, place="000000"), opened_s=1e9, ended_s=1e9 + 1)
    before = bill(ledger)
    ledger.tidy(most_files=0)
    assert len(ledger.pages()) == 3
    assert bill(ledger).lines == before.lines
    assert sum(line.cost for line in before.lines) == pytest.approx(10.0)


def test_a_crash_while_archiving_counts_nothing_twice(
    ledger: Ledger, dead: ProcessIdentity, write: Callable[..., Entry]
) -> None:
    write(dead, opened_s=1e9, ended_s=1e9 + 3600, id="x", price=2.0)
    (path,) = ledger.folder.glob("*.jsonl")
    kept = path.read_bytes()
    ledger.tidy(most_files=0)
    path.write_bytes(kept)  # as if it died before it removed the file
    assert [line.cost for line in bill(ledger).lines] == [2.0]
    ledger.tidy(most_files=0)
    ledger.tidy(most_files=-1)
    assert [line.cost for line in bill(ledger).lines] == [2.0]
    assert list(ledger.folder.glob("*.jsonl")) == []


def test_few_files_are_left_as_they_are(
    ledger: Ledger, dead: ProcessIdentity, write: Callable[..., Entry]
) -> None:
    write(dead, ended_s=1e9)
    ledger.tidy()
    assert len(ledger.pages()) == 1
