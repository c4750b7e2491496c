"""Experts in files: what was written is read and nothing else; a spool for open Sessions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swerl.core import experts
from swerl.core.errors import RunError
from swerl.core.experts import ExpertSpool, open_spool
from swerl.core.turn import RoutedExperts, StoredBytes


def piece(start: int, data: bytes) -> RoutedExperts:
    return RoutedExperts(start, 2, 1, 1, data)


PIECES = [piece(0, b"\x00\xff\x80\x01"), piece(2, b""), piece(4, bytes(range(200)))]


def test_records_are_read_as_they_were_given(tmp_path: Path) -> None:
    stored = experts.store(tmp_path / "e.bin", PIECES)
    assert [bytes(data) for data in experts.read(stored)] == [one.data for one in PIECES]
    assert [one.num_positions for one in stored] == [2, 0, 100]
    assert [one.start for one in stored] == [0, 2, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["e.bin"]
    mixed = [stored[2], PIECES[0]]
    assert [bytes(data) for data in experts.read(mixed)] == [PIECES[2].data, PIECES[0].data]


def test_records_that_one_file_holds_are_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    spooled = [experts.append(path, one) for one in PIECES]
    stored = experts.store(tmp_path / "e.bin", spooled)
    assert (tmp_path / "e.bin").samefile(path)
    path.unlink()
    assert [bytes(data) for data in experts.read(stored)] == [one.data for one in PIECES]
    assert experts.store(tmp_path / "e.bin", stored) == stored


def test_records_of_several_places_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spooled = [experts.append(tmp_path / "a", PIECES[0]), PIECES[1]]
    spooled.append(experts.append(tmp_path / "b", PIECES[2]))
    stored = experts.store(tmp_path / "e.bin", spooled)
    assert [bytes(data) for data in experts.read(stored)] == [one.data for one in PIECES]

    def refused(*_: object) -> None:
        raise OSError("this disk knows no links")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    copied = experts.store(tmp_path / "c.bin", stored)
    assert [bytes(data) for data in experts.read(copied)] == [one.data for one in PIECES]


def test_a_file_that_cannot_be_finished_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "e.bin"
    stored = experts.store(path, PIECES)
    missing = piece(9, StoredBytes(tmp_path / "gone", 0, 4, 0))
    with pytest.raises(RunError, match="gone"):
        experts.store(path, [PIECES[0], missing])
    assert [bytes(data) for data in experts.read(stored)] == [one.data for one in PIECES]
    assert [found.name for found in tmp_path.iterdir()] == ["e.bin"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut, "it has 203 bytes of 204"),
        (change, "the checksum of the 200 bytes at 4 differs"),
        (Path.unlink, "No such file"),
    ],
)
def test_a_record_that_is_gone_or_changed_is_one_error(
    tmp_path: Path, harm: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "t.0" / experts.NAME
    path.parent.mkdir()
    stored = experts.store(path, PIECES)
    harm(path)
    with pytest.raises(RunError, match=message) as error:
        experts.read(stored)
    assert str(path) in str(error.value)
    assert f"delete {path.parent}" in error.value.hint
    if harm is not change:
        with pytest.raises(RunError, match=message):
            experts.check(stored)


FIRST, SECOND = piece(0, b"abcd"), piece(2, b"ef")


def test_a_session_has_one_file_that_is_dropped_alone(tmp_path: Path) -> None:
    with open_spool(tmp_path / "spool") as spool:
        kept = [spool.keep("00000/t.0", FIRST), spool.keep("00000/t.0+1", SECOND)]
        kept.append(spool.keep("00000/t.0", SECOND))
        assert all(isinstance(piece.data, StoredBytes) for piece in kept)
        assert [bytes(data) for data in experts.read(kept)] == [b"abcd", b"ef", b"ef"]
        spool.drop("00000/t.0")
        spool.drop("00000/t.0")
        assert [bytes(data) for data in experts.read(kept[1:2])] == [b"ef"]
    assert not (tmp_path / "spool").exists()


def test_replies_of_one_session_are_kept_at_once(tmp_path: Path) -> None:
    pieces = [piece(n, bytes([n]) * (1 + n % 50)) for n in range(200)]
    with open_spool(tmp_path / "spool") as spool, ThreadPoolExecutor(8) as threads:
        kept = list(threads.map(lambda piece: spool.keep("00000/t.0", piece), pieces))
        read = experts.read(kept)
    assert [bytes(data) for data in read] == [piece.data for piece in pieces]


def test_what_a_killed_run_left_is_gone(tmp_path: Path) -> None:
    ExpertSpool(tmp_path).keep("00000/t.0", FIRST)
    with open_spool(tmp_path) as spool:
        assert not list(tmp_path.rglob("*.bin"))
        [data] = experts.read([spool.keep("00000/t.0", SECOND)])
    assert bytes(data) == b"ef"


def test_experts_that_the_disk_refuses_stay_in_memory(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("no folder")
    assert ExpertSpool(tmp_path / "spool").keep("00000/t.0", FIRST) == FIRST
