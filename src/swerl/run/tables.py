"""Turns of a step as a Parquet file: one row a Turn, in the order of the Episodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from swerl.episode import Episode
from swerl.run.files import disk_errors


def write_turns(path: Path, episodes: Iterable[Episode]) -> None:
    """Write every Turn of these Episodes, whole or not at all. Raises RunError.

    Columns: episode, task, verdict, reward, index, parent (null for a root), prompt_ids,
    output_ids, logprobs, finish, weight_version, weight_changes, started_s, duration_s,
    malformed_calls, routed (null where no routed experts were recorded).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "episode": episode.id,
            "task": episode.task_id,
            "verdict": str(episode.verdict),
            "reward": episode.reward,
            "index": turn.index,
            "parent": turn.parent,
            "prompt_ids": turn.prompt_ids,
            "output_ids": turn.output_ids,
            "logprobs": turn.logprobs,
            "finish": str(turn.finish),
            "weight_version": turn.weight_version,
            "weight_changes": [asdict(change) for change in turn.weight_changes],
            "started_s": turn.started_s,
            "duration_s": turn.duration_s,
            "malformed_calls": turn.malformed_calls,
            "routed": asdict(turn.routed) if turn.routed else None,
        }
        for episode in episodes
        for turn in episode.trajectory.turns
    ]
    ids = pa.list_(pa.int32())
    numbers = ("start", "num_layers", "top_k", "bytes_per_id")
    routed = pa.struct([*((name, pa.int32()) for name in numbers), ("data", pa.binary())])
    schema = pa.schema(
        [
            ("episode", pa.string()),
            ("task", pa.string()),
            ("verdict", pa.string()),
            ("reward", pa.float64()),
            ("index", pa.int32()),
            ("parent", pa.int32()),
            ("prompt_ids", ids),
            ("output_ids", ids),
            ("logprobs", pa.list_(pa.float64())),
            ("finish", pa.string()),
            ("weight_version", pa.string()),
            ("weight_changes", pa.list_(pa.struct([("at", pa.int32()), ("version", pa.string())]))),
            ("started_s", pa.float64()),
            ("duration_s", pa.float64()),
            ("malformed_calls", pa.int32()),
            ("routed", routed),
        ]
    )
    temporary = path.with_suffix(".part")
    with disk_errors(path):
        pq.write_table(pa.Table.from_pylist(rows, schema), temporary)
        temporary.replace(path)
