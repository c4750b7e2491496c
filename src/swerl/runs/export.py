"""Export a run's Samples to one Parquet file.

Rows are converted one by one and written in row groups of some megabytes, so memory does not grow
with the run. docs/reference/samples.md lists the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from swerl.core.errors import InputError, RunError
from swerl.core.files import replacing
from swerl.core.sample import Sample
from swerl.runs import tables
from swerl.runs.layout import RunFolder

if TYPE_CHECKING:
    import pyarrow as pa

_GROUP_TOKENS = 1 << 20
"""Tokens of a row group; its arrays take some tens of megabytes."""
Columns: TypeAlias = "Mapping[str, tuple[pa.DataType, Callable[[StepRow], Any]]]"
"""Name of a column -> its type, and the function that returns its value of a row."""


@dataclass(frozen=True, slots=True)
class ExportSize:
    num_rows: int
    num_steps: int
    damaged: tuple[str, ...] = ()
    """Reasons why steps were left out."""


def export(run: Path, output: Path, step: int | None = None) -> ExportSize:
    """Write the rows of one step, or of all that can be read. Raises InputError, RunError.

    If nothing can be read, `output` is left unchanged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = _columns()
    schema = pa.schema([(name, kind) for name, (kind, _) in columns.items()])
    steps, damaged = _readable(run, _steps_of(run) if step is None else [step])
    if not steps:
        raise RunError(damaged[0], hint="no step of the run can be read")
    num_rows = 0
    with replacing(output) as temporary:
        output.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for rows in _groups(step_rows(run, steps)):
                arrays = [pa.array(map(value, rows), kind) for kind, value in columns.values()]
                writer.write_table(pa.table(arrays, schema))
                num_rows += len(rows)
    return ExportSize(num_rows, len(steps), tuple(damaged))


def _readable(run: Path, steps: Sequence[int]) -> tuple[list[int], list[str]]:
    """Return the steps whose files are whole, and the errors of the others."""
    readable, damaged = [], []
    for step in steps:
        try:
            for _ in step_rows(run, [step]):
                pass
            readable.append(step)
        except RunError as error:
            damaged.append(str(error))
    return readable, damaged


def _columns() -> Columns:
    """Return the columns, each with its type and its value of a row."""
    import pyarrow as pa

    return {
        "step": (pa.int64(), lambda row: row.step),
        "episode": (pa.string(), lambda row: row.sample.episode),
        "task": (pa.string(), lambda row: row.sample.task),
        "verdict": (pa.string(), lambda row: row.verdict),
        "reward": (pa.float64(), lambda row: row.reward),
        "ids": (pa.list_(pa.int32()), lambda row: _numbers(row.sample.ids, "int32")),
        "mask": (pa.list_(pa.int8()), lambda row: _numbers(row.sample.mask, "int8")),
        "logprobs": (
            pa.list_(pa.float32()),
            lambda row: _numbers(row.sample.logprobs, "float32"),
        ),
        "advantage": (pa.float64(), lambda row: row.sample.advantage),
        "share": (pa.float64(), lambda row: row.sample.share),
        "versions": (pa.list_(pa.string()), lambda row: row.sample.weight_versions),
        "agent": (pa.string(), lambda row: row.sample.agent),
    }


def _numbers(values: object, kind: str) -> Any:
    import numpy as np

    return np.array(values, kind)


def _groups(rows: Iterator[StepRow]) -> Iterator[list[StepRow]]:
    group: list[StepRow] = []
    num_tokens = 0
    for row in rows:
        group.append(row)
        num_tokens += len(row.sample.ids)
        if num_tokens >= _GROUP_TOKENS:
            yield group
            group, num_tokens = [], 0
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class StepRow:
    """One Sample of a step, with the outcome of its Episode."""

    step: int
    sample: Sample
    reward: float
    verdict: str


def _steps_of(run: Path) -> list[int]:
    if steps := RunFolder(run).trained_steps():
        return steps
    hint = "give the folder of a run that has finished a step"
    raise InputError(f"{run} holds no samples", hint=hint)


def step_rows(run: Path, steps: Sequence[int]) -> Iterator[StepRow]:
    """Yield the rows of these steps, one row group at a time.

    Raises InputError on a missing step, RunError on damaged files.
    """
    folder = RunFolder(run)
    for step in steps:
        path = folder.samples(step)
        if not path.exists():
            raise InputError(
                f"{run} holds no samples of step {step}",
                hint=f"it holds those of {_shown(_steps_of(run))}",
            )
        outcomes = _outcomes(folder.turns(step))
        for sample in tables.read_samples(path):
            if not (outcome := outcomes.get(sample.episode)):
                raise RunError(
                    f"the turns of step {step} lack the episode {sample.episode}",
                    hint="turns/ and samples/ must belong to the same run",
                )
            reward, verdict = outcome
            yield StepRow(step, sample, reward, verdict)


def _outcomes(path: Path) -> dict[str, tuple[float, str]]:
    """Return each Episode's reward and verdict."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=["episode", "reward", "verdict"])
    except (OSError, pa.ArrowException) as error:
        raise RunError(
            f"cannot read the turns {path}: {error}",
            hint="rewards are read from turns/, beside samples/",
        ) from error
    return {turn["episode"]: (turn["reward"], turn["verdict"]) for turn in table.to_pylist()}


def _shown(steps: Sequence[int]) -> str:
    """Format steps as ranges."""
    # Consecutive steps have the same distance to their position in the list.
    runs = [
        [step for _, step in group]
        for _, group in groupby(enumerate(steps), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
