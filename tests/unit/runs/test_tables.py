"""Turns as a Parquet file."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from swerl.core.errors import RunError
from swerl.core.turn import RoutedExperts, WeightChange
from swerl.runs import tables
from swerl.runs.tables import read_logprobs, write_logprobs, write_turns
from tests.unit import made


def test_a_turn_keeps_its_tokens_and_its_weights(tmp_path: Path) -> None:
    routed = RoutedExperts(start=0, num_layers=1, top_k=2, bytes_per_id=1, data=bytes([0, 255] * 3))
    changes = (WeightChange(1, "v2"),)
    first = made.turn(0, None, (1, 2), (3, 4), "v1", weight_changes=changes, routed=routed)
    second = made.turn(1, 0, (5,), (6,), "v2", logprobs=(-1.0,))
    write_turns(tmp_path / "turns.parquet", [made.episode("00001/t.0", first, second)])
    rows = pq.read_table(tmp_path / "turns.parquet").to_pylist()
    assert rows[0]["weight_changes"] == [{"at": 1, "version": "v2"}]
    assert (rows[0]["prompt_ids"], rows[0]["output_ids"]) == ([1, 2], [3, 4])
    assert (rows[1]["prompt_ids"], rows[1]["logprobs"]) == ([5], [-1.0])
    assert (rows[0]["parent"], rows[1]["parent"]) == (None, 0)
    assert (rows[0]["num_routed"], rows[1]["num_routed"]) == (3, 0)
    assert rows[1]["weight_changes"] == []


def test_a_step_without_a_turn_is_an_empty_table(tmp_path: Path) -> None:
    write_turns(tmp_path / "turns.parquet", [made.episode("00001/t.0")])
    assert pq.read_table(tmp_path / "turns.parquet").num_rows == 0


def test_the_trainers_log_probabilities_are_found_by_episode_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_GROUP_BYTES", 8)  # a row group for each row
    path = tmp_path / "logprobs" / "00000.parquet"
    write_logprobs(path, [("a", [-0.5, -1.0]), ("b", [-2.0]), ("a", [-0.25, -4.0]), ("c", [])])
    assert [list(row) for row in read_logprobs(path, "a")] == [[-0.5, -1.0], [-0.25, -4.0]]
    assert [list(row) for row in read_logprobs(path, "c")] == [[]]
    assert read_logprobs(path, "d") == []
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RunError, match="cannot read"):
        read_logprobs(path, "a")
