"""The experts of open Sessions: on disk at once, in memory only where the disk refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from swerl.core import experts
from swerl.core.experts import ExpertSpool, open_spool
from swerl.core.turn import RoutedExperts, StoredBytes

FIRST, SECOND = RoutedExperts(0, 2, 1, 1, b"abcd"), RoutedExperts(2, 2, 1, 1, b"ef")


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
    pieces = [RoutedExperts(n, 2, 1, 1, bytes([n]) * (1 + n % 50)) for n in range(200)]
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
