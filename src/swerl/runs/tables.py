"""Turns of a step as a Parquet file: one row a Turn, in the order of the Episodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from swerl.core.episode import Episode
from swerl.core.files import disk_errors
from swerl.core.turn import Turn
from swerl.runs.arrays import list_array

if TYPE_CHECKING:
    import pyarrow as pa

_NUMBERS = {"prompt_ids": "i", "output_ids": "i", "logprobs": "d"}
_NAMES = ("episode", "task", "verdict", "finish", "weight_version")


def write_turns(path: Path, episodes: Iterable[Episode]) -> None:
    """Write every Turn of these Episodes, whole or not at all. Raises RunError.

    Columns: episode, task, verdict, reward, index, parent (null for a root), prompt_ids,
    output_ids, logprobs, finish, weight_version, weight_changes, started_s, duration_s,
    malformed_calls, num_routed (positions whose experts were recorded; the experts themselves stand
    with the Samples).
    """
    import pyarrow.parquet as pq

    turns = [(episode, turn) for episode in episodes for turn in episode.trajectory.turns]
    temporary = path.with_suffix(".part")
    with disk_errors(path):
        pq.write_table(_table(turns), temporary, compression="zstd", use_dictionary=list(_NAMES))
        temporary.replace(path)


def _table(turns: list[tuple[Episode, Turn]]) -> pa.Table:
    import pyarrow as pa

    plain = [
        {
            "episode": episode.id,
            "task": episode.task_id,
            "verdict": str(episode.verdict),
            "reward": episode.reward,
            "index": turn.index,
            "parent": turn.parent,
            "finish": str(turn.finish),
            "weight_version": turn.weight_version,
            "weight_changes": [asdict(change) for change in turn.weight_changes],
            "started_s": turn.started_s,
            "duration_s": turn.duration_s,
            "malformed_calls": turn.malformed_calls,
            "num_routed": turn.routed.num_positions if turn.routed else 0,
        }
        for episode, turn in turns
    ]
    change = pa.struct([("at", pa.int32()), ("version", pa.string())])
    columns = pa.schema(
        [
            *((name, pa.string()) for name in _NAMES),
            *((name, pa.float64()) for name in ("reward", "started_s", "duration_s")),
            *((name, pa.int32()) for name in ("index", "parent", "malformed_calls", "num_routed")),
            ("weight_changes", pa.list_(change)),
        ]
    )
    table = pa.Table.from_pylist(plain, columns)
    for name, code in _NUMBERS.items():
        table = table.append_column(name, list_array([getattr(t, name) for _, t in turns], code))
    return table
