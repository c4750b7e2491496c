"""Faults of `bench/why.py` that change the records of a healthy run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from swerl.core.chat import Finish
from swerl.core.sample import Sample, to_samples
from swerl.core.turn import RoutedExperts, Trajectory, Turn
from swerl.engines.families import tiny
from swerl.runs import tables


def solve_all(root: Path) -> None:
    """Let every attempt be solved, one without a change by the change of its neighbour."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in sorted((root / "episodes").glob("0*/*/episode.json")):
        patches = [each.read_text() for each in sorted(path.parents[1].glob("*/patch.diff"))]
        patch = path.with_name("patch.diff")
        patch.write_text(patch.read_text() or next(filter(None, patches)))
        facts = {"verdict": "solved", "reward": 1.0}
        path.write_text(json.dumps(json.loads(path.read_text()) | facts))
        grade = json.loads(path.with_name("grade.json").read_text())
        passed = dict.fromkeys(grade["tests"], "passed")
        grade |= {"verdict": "solved", "reason": "all declared tests pass", "tests": passed}
        path.with_name("grade.json").write_text(json.dumps(grade))
    for path in (root / "turns").glob("*.parquet"):
        table = pq.read_table(path)
        rows = [row | {"verdict": "solved", "reward": 1.0} for row in table.to_pylist()]
        pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    _rewrite_samples(root, lambda row, number: replace(row, advantage=0.0))
    _rewrite_metrics(
        root,
        solve_rate=lambda step, old: 1.0,
        reward=lambda step, old: 1.0,
        groups_with_signal=lambda step, old: 0.0,
    )


def strip_thoughts(root: Path) -> None:
    """Give each reply a thought, and begin a new root without the earlier ones at each reply."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    recipe = json.loads((root / "recipe.resolved.json").read_text())
    family = tiny.build(Path(recipe["model"]["path"]))
    thought = family._tokenizer.encode([tiny.THINK, "\nI look.\n", tiny.THINK_END, "\n\n"])
    for path in (root / "turns").glob("*.parquet"):
        table = pq.read_table(path)
        rows, past, made = table.to_pylist(), {}, {}
        for row in rows:
            before = past.get((row["episode"], row["parent"]), [])
            prompt = before + row["prompt_ids"]
            past[row["episode"], row["index"]] = prompt + row["output_ids"]
            row["prompt_ids"], row["parent"] = prompt, None
            row["output_ids"] = thought + row["output_ids"]
            row["logprobs"] = [-0.1] * len(thought) + row["logprobs"]
            ids = {name: tuple(row[name]) for name in ("prompt_ids", "output_ids", "logprobs")}
            turn = Turn(row["index"], None, finish=Finish.STOP, weight_version="0", **ids)
            made.setdefault((row["episode"], row["task"]), []).append(turn)
        pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
        file = root / "samples" / path.name
        advantages = {each.episode: each.advantage for each in tables.read_samples(file)}
        samples = [
            replace(sample, advantage=advantages[name])
            for (name, task), turns in made.items()
            for sample in to_samples(Trajectory(name, tuple(turns)), episode=name, task=task)
        ]
        about = tables.read_metadata(file)
        tables.write_samples(file, samples, [1 / len(samples)] * len(samples), about)


def _rewrite_samples(root: Path, change: Callable[[Sample, int], Sample]) -> None:
    """Write the Samples of every step again; `change` gets a row and its number."""
    for path in sorted((root / "samples").glob("*.parquet")):
        about = tables.read_metadata(path)
        rows = [change(row, number) for number, row in enumerate(tables.read_samples(path))]
        tables.write_samples(path, rows, [1 / len(rows)] * len(rows), about)


def _rewrite_metrics(root: Path, **changes: Callable[[int, float], float]) -> None:
    """Change metrics of each step in the events: name -> function of step and old value."""
    lines = (root / "events.jsonl").read_text().splitlines()
    for place, line in enumerate(lines):
        event = json.loads(line)
        if event["event"] == "StepEnded":
            for name, change in changes.items():
                event["metrics"][name] = change(event["step"], event["metrics"].get(name, 0.0))
            lines[place] = json.dumps(event)
    (root / "events.jsonl").write_text("\n".join(lines) + "\n")


def give_experts(root: Path, *, shuffled: bool) -> None:
    """Add experts as a router gives them: by token with some noise in the first of two layers."""
    import random

    rng = random.Random(0)

    def change(row: Sample, number: int) -> Sample:
        places = [
            [(token * 7 + k * 3 + (rng.random() < 0.2)) % 16 for k in range(2)]
            for token in row.ids[:-1]
        ]
        if shuffled:
            rng.shuffle(places)
        data = bytes(expert for place in places for expert in (*place, *place[::-1]))
        return replace(row, routed=(RoutedExperts(0, 2, 2, 1, data),))

    _rewrite_samples(root, change)
    _rewrite_metrics(
        root,
        routed_share=lambda step, old: 1.0,
        mismatch=lambda step, old: 0.08 if shuffled else 1e-4,
    )


def collapse(root: Path) -> None:
    """Make each step's policy surer than the one before, until all attempts are alike."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in (*(root / "turns").glob("*.parquet"), *(root / "samples").glob("*.parquet")):
        table = pq.read_table(path)
        place = table.schema.get_field_index("logprobs")
        surer = [
            [value * 0.2 ** int(path.stem) for value in row]
            for row in table["logprobs"].to_pylist()
        ]
        column = pa.array(surer, table.schema.field(place).type)
        pq.write_table(table.set_column(place, table.schema.field(place), column), path)
    _rewrite_metrics(
        root,
        entropy=lambda step, old: old * 0.2**step,
        groups_with_signal=lambda step, old: max(old - 2 * step, 0),
    )
