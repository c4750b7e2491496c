"""Export a run's Samples to one Parquet file: in swerl's columns, or as slime's or verl's rows.

Rows are converted one by one and written in row groups of some megabytes, so memory does not grow
with the run. docs/reference/samples.md lists the columns and how their meaning differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
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
ExportRow: TypeAlias = Mapping[str, Any]


class ExportFormat(StrEnum):
    PARQUET = "parquet"
    """swerl's columns, with the step, the reward and the verdict."""
    SLIME = "slime"
    """The fields of slime's Sample."""
    VERL = "verl"
    """The tensors of verl's DataProto, without padding."""


@dataclass(frozen=True, slots=True)
class ExportSize:
    num_rows: int
    num_steps: int
    damaged: tuple[str, ...] = ()
    """Reasons why steps were left out."""


def export(run: Path, output: Path, format: ExportFormat, step: int | None = None) -> ExportSize:
    """Write the rows of one step, or of all that can be read. Raises InputError, RunError.

    If nothing can be read, `output` is left unchanged.
    """
    import pyarrow.parquet as pq

    columns, convert = _columns(format), _CONVERTERS[format]
    steps, damaged = _readable(run, steps_of(run) if step is None else [step])
    if not steps:
        raise RunError(damaged[0], hint="no step of the run can be read")
    num_rows = 0
    with replacing(output) as temporary:
        output.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(temporary, columns, compression="zstd") as writer:
            for rows in _groups(step_rows(run, steps)):
                writer.write_table(_table([convert(row) for row in rows], columns))
                num_rows += len(rows)
    return ExportSize(num_rows, len(steps), tuple(damaged))


def _readable(run: Path, steps: Sequence[int]) -> tuple[list[int], list[str]]:
    """Return the steps whose files are whole, and the errors of the others."""
    found, damaged = [], []
    for step in steps:
        try:
            for _ in step_rows(run, [step]):
                pass
            found.append(step)
        except RunError as error:
            damaged.append(str(error))
    return found, damaged


def to_swerl(row: StepRow) -> ExportRow:
    sample = row.sample
    return {
        "step": row.step,
        "episode": sample.episode,
        "task": sample.task,
        "agent": sample.agent,
        "reward": row.reward,
        "verdict": row.verdict,
        "ids": _numbers(sample.ids, "int32"),
        "mask": _numbers(sample.mask, "int8"),
        "logprobs": _numbers(sample.logprobs, "float32"),
        "advantage": sample.advantage,
        "share": sample.share,
        "versions": sample.weight_versions,
    }


def to_slime(row: StepRow) -> ExportRow:
    """Return the fields of slime's Sample; its response begins with the first trained token."""
    sample, start = row.sample, row.prompt_length
    return {
        "group_index": row.group,
        "index": row.rollout,
        "rollout_id": row.rollout,
        "prompt": "",
        "tokens": _numbers(sample.ids, "int32"),
        "response": "",
        "response_length": len(sample.ids) - start,
        "label": sample.task,
        "reward": row.reward,
        "loss_mask": _numbers(sample.mask[start:], "int8"),
        "weight_versions": sample.weight_versions,
        "rollout_log_probs": _numbers(sample.logprobs[start:], "float32"),
        "remove_sample": False,
        "status": "truncated" if row.is_truncated else "completed",
        "metadata": {
            "step": row.step,
            "episode": sample.episode,
            "task": sample.task,
            "verdict": row.verdict,
            "advantage": sample.advantage,
            "share": sample.share,
        },
    }


def to_verl(row: StepRow) -> ExportRow:
    """Return the tensors and other columns of one row of verl's DataProto."""
    import numpy as np

    sample, start, length = row.sample, row.prompt_length, len(row.sample.ids)
    scores = np.zeros(length - start, "float32")
    # The last token carries the whole reward.
    scores[-1] = row.reward
    return {
        "prompts": _numbers(sample.ids[:start], "int64"),
        "responses": _numbers(sample.ids[start:], "int64"),
        "input_ids": _numbers(sample.ids, "int64"),
        "attention_mask": np.ones(length, "int64"),
        "position_ids": np.arange(length, dtype="int64"),
        "response_mask": _numbers(sample.mask[start:], "int64"),
        "rollout_log_probs": _numbers(sample.logprobs[start:], "float32"),
        "rm_scores": scores,
        "uid": f"{row.step}/{sample.task}",
        "rollout_uid": sample.episode,
        "share": sample.share,
        "advantage": sample.advantage,
        "verdict": row.verdict,
    }


_CONVERTERS: Mapping[ExportFormat, Callable[[StepRow], ExportRow]] = {
    ExportFormat.PARQUET: to_swerl,
    ExportFormat.SLIME: to_slime,
    ExportFormat.VERL: to_verl,
}


def _columns(format: ExportFormat) -> pa.Schema:
    import pyarrow as pa

    int8s, int32s, int64s = (pa.list_(kind()) for kind in (pa.int8, pa.int32, pa.int64))
    floats, texts = pa.list_(pa.float32()), pa.list_(pa.string())
    number, text = pa.float64(), pa.string()
    about = {"step": pa.int64(), "episode": text, "task": text, "verdict": text}
    kinds: dict[ExportFormat, dict[str, pa.DataType]] = {
        ExportFormat.PARQUET: about
        | {"reward": number, "ids": int32s, "mask": int8s, "logprobs": floats}
        | {"advantage": number, "share": number, "versions": texts, "agent": text},
        ExportFormat.SLIME: {
            "group_index": pa.int64(),
            "index": pa.int64(),
            "rollout_id": pa.int64(),
        }
        | {"prompt": text, "tokens": int32s, "response": text, "response_length": pa.int64()}
        | {"label": text, "reward": number, "loss_mask": int8s, "weight_versions": texts}
        | {"rollout_log_probs": floats, "remove_sample": pa.bool_(), "status": text}
        | {"metadata": pa.struct(about | {"advantage": number, "share": number})},
        ExportFormat.VERL: dict.fromkeys(("prompts", "responses", "input_ids"), int64s)
        | dict.fromkeys(("attention_mask", "position_ids", "response_mask"), int64s)
        | {"rollout_log_probs": floats, "rm_scores": floats, "uid": text, "rollout_uid": text}
        | {"share": number, "advantage": number, "verdict": text},
    }
    return pa.schema(kinds[format].items())


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


def _table(rows: list[ExportRow], columns: pa.Schema) -> pa.Table:
    import pyarrow as pa

    arrays = [pa.array([row[field.name] for row in rows], field.type) for field in columns]
    return pa.table(arrays, columns)


def _numbers(values: object, kind: str) -> Any:
    import numpy as np

    return np.array(values, kind)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One Sample of a step, with the outcome of its Episode."""

    step: int
    group: int
    """Number of its Task within the step."""
    rollout: int
    """Number of its Episode within the step, shared by the Episode's rows."""
    sample: Sample
    reward: float
    verdict: str
    is_truncated: bool
    """True if the token limit cut the Episode's last reply."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return self.sample.mask.index(1)


@dataclass(frozen=True, slots=True)
class _Outcome:
    reward: float
    verdict: str
    is_truncated: bool


def steps_of(run: Path) -> list[int]:
    """Return the steps whose Samples a run folder holds. Raises InputError if there are none."""
    found = sorted(int(path.stem) for path in RunFolder(run).samples(0).parent.glob("*.parquet"))
    if not found:
        raise InputError(
            f"{run} holds no samples", hint="give the folder of a run that has finished a step"
        )
    return found


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
                hint=f"it holds those of {_shown(steps_of(run))}",
            )
        outcomes = _outcomes(folder.turns(step))
        # Groups and rollouts are numbered in the order in which they appear.
        groups: dict[str, int] = {}
        rollouts: dict[str, int] = {}
        for sample in tables.read_samples(path):
            if not (outcome := outcomes.get(sample.episode)):
                raise RunError(
                    f"the turns of step {step} lack the episode {sample.episode}",
                    hint="turns/ and samples/ must belong to the same run",
                )
            yield StepRow(
                step,
                groups.setdefault(sample.task, len(groups)),
                rollouts.setdefault(sample.episode, len(rollouts)),
                sample,
                outcome.reward,
                outcome.verdict,
                outcome.is_truncated,
            )


def _outcomes(path: Path) -> dict[str, _Outcome]:
    """Read the outcome of each Episode from its last Turn."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=["episode", "reward", "verdict", "finish"])
    except (OSError, pa.ArrowException) as error:
        raise RunError(
            f"cannot read the turns {path}: {error}",
            hint="rewards are read from turns/, beside samples/",
        ) from error
    # Later Turns overwrite earlier ones, so the last Turn of each Episode counts.
    return {
        turn["episode"]: _Outcome(turn["reward"], turn["verdict"], turn["finish"] == "length")
        for turn in table.to_pylist()
    }


def _shown(steps: Sequence[int]) -> str:
    """Format steps as ranges."""
    # Consecutive steps have the same distance to their position in the list.
    runs = [
        [step for _, step in group]
        for _, group in groupby(enumerate(steps), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
