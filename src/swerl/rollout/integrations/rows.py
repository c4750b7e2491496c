"""The Samples of a run's steps, each with what became of its Episode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from swerl.core.errors import InputError, RunError
from swerl.core.sample import Sample
from swerl.runs import sample_table
from swerl.runs.layout import RunFolder


@dataclass(frozen=True, slots=True)
class StepRow:
    """One Sample of one step."""

    step: int
    group: int
    """Number of its Task in the step."""
    rollout: int
    """Number of its Episode in the step; the rows of one Episode share it."""
    sample: Sample
    reward: float
    verdict: str
    is_truncated: bool
    """Whether the Episode's last reply was cut off at its length."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first one that is trained."""
        return self.sample.mask.index(1)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of an Episode."""

    reward: float
    verdict: str
    is_truncated: bool


def steps_of(run: Path) -> list[int]:
    """Return the steps whose Samples a run folder holds. Raises InputError where there are none."""
    found = sorted(int(path.stem) for path in RunFolder(run).samples(0).parent.glob("*.parquet"))
    if not found:
        raise InputError(
            f"{run} holds no samples", hint="give the folder of a run that has finished a step"
        )
    return found


def step_rows(run: Path, steps: Sequence[int]) -> Iterator[StepRow]:
    """Yield the rows of these steps, a row group at a time.

    Raises InputError on a step that is not there, RunError on damaged files.
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
        groups: dict[str, int] = {}
        rollouts: dict[str, int] = {}
        for sample in sample_table.read(path):
            if not (outcome := outcomes.get(sample.episode)):
                raise RunError(
                    f"the turns of step {step} know no episode {sample.episode}",
                    hint="turns/ and samples/ must be of the same run",
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
    """Read what became of each Episode from its last Turn."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=["episode", "reward", "verdict", "finish"])
    except (OSError, pa.ArrowException) as error:
        raise RunError(
            f"cannot read the turns {path}: {error}",
            hint="rewards stand in turns/, beside samples/",
        ) from error
    return {
        turn["episode"]: _Outcome(turn["reward"], turn["verdict"], turn["finish"] == "length")
        for turn in table.to_pylist()
    }


def _shown(steps: Sequence[int]) -> str:
    """Write steps as ranges."""
    runs = [
        [step for _, step in group]
        for _, group in groupby(enumerate(steps), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
