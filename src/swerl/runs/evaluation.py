"""An evaluation as data: each Task's result, the summary of all, and the comparison of two.

`swerl eval` and the evaluations inside training write the same file, `evals/<name>.json`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from swerl.core.episode import Group
from swerl.core.errors import InputError, RunError
from swerl.core.files import read_json
from swerl.core.grade import Verdict
from swerl.runs.index import require_open
from swerl.runs.statistics import difference, exact_p_value, noise_floor, pass_at_k, rate

_NUMBERS = ("attempts", "solved", "sampled_tokens", "prompt_tokens", "turns", "seconds")


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The attempts at one Task. Only learnable attempts are counted, in the costs too."""

    task: str
    attempts: int
    solved: int
    verdicts: tuple[str, ...]
    """Of every attempt, the lost ones included."""
    repo: str = ""
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of every request, cached ones included."""
    turns: int = 0
    seconds: float = 0.0

    @property
    def value(self) -> float:
        """Share of the counted attempts that solved the Task."""
        return self.solved / self.attempts

    @property
    def num_lost(self) -> int:
        """Attempts that the infrastructure lost for good."""
        return len(self.verdicts) - self.attempts

    @property
    def solve_rate(self) -> dict[str, float | None]:
        """The solve rate with the means of its attempts, None without a counted attempt."""
        count = self.attempts
        means = {"tokens": self.sampled_tokens, "turns": self.turns, "seconds": self.seconds}
        return {
            "solve_rate": round(self.value, 4) if count else None,
            "attempts": count,
            "lost": self.num_lost,
            "solved": self.solved,
            **{name: round(total / max(count, 1), 2) for name, total in means.items()},
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation."""

    path: Path
    results: Mapping[str, TaskResult]
    """By Task id, without Tasks whose attempts were all lost."""
    num_lost_tasks: int
    dollars_per_attempt: float | None = None


def result_of(group: Group, repo: str = "") -> TaskResult:
    """Sum up the Episodes of a Task."""
    counted = [episode for episode in group.episodes if episode.learnable]
    return TaskResult(
        task=group.task_id,
        attempts=len(counted),
        solved=sum(episode.verdict is Verdict.SOLVED for episode in counted),
        verdicts=tuple(str(episode.verdict) for episode in group.episodes),
        repo=repo,
        sampled_tokens=sum(episode.trajectory.num_sampled_tokens for episode in counted),
        prompt_tokens=sum(episode.trajectory.num_prompt_tokens for episode in counted),
        turns=sum(len(episode.trajectory.turns) for episode in counted),
        seconds=round(sum(episode.timings.get("total", 0.0) for episode in counted), 2),
    )


def summary(results: Sequence[TaskResult], k: int) -> dict[str, Any]:
    """Return pass@1 and pass@k with their intervals, the costs and each Task's result, as JSON.

    A Task without a learnable attempt is in neither mean; one with fewer than k is not in pass@k.
    """
    counted = [result for result in results if result.attempts]
    full = [result for result in counted if result.attempts >= k]
    return {
        "k": k,
        "pass_at_1": asdict(rate([result.value for result in counted])),
        "pass_at_k": asdict(
            rate([pass_at_k(result.attempts, result.solved, k) for result in full])
        ),
        "verdicts": dict(Counter(verdict for result in results for verdict in result.verdicts)),
        "num_attempts": sum(result.attempts for result in results),
        "num_lost": sum(result.num_lost for result in results),
        "noise_floor": noise_floor((result.attempts, result.solved) for result in counted),
        "sampled_tokens": sum(result.sampled_tokens for result in results),
        "prompt_tokens": sum(result.prompt_tokens for result in results),
        "seconds": round(sum(result.seconds for result in results), 2),
        "tasks": [asdict(result) for result in results],
    }


def find(text: str, runs: Path) -> Evaluation:
    """Read the evaluation that a user names; `runs` is the folder of all runs.

    It is a file, the only one of a run (its name or folder), `RUN@STEP`, or `RUN@SPLIT-STEP` if a
    step has several. Raises InputError, RunError.
    """
    is_whole = Path(text).exists() or (runs / text).exists() or "@" not in text
    run, _, which = (text, "", "") if is_whole else text.rpartition("@")
    root = Path(run) if Path(run).exists() else runs / run
    if not root.is_dir():
        return read(root)
    require_open(root)
    files = {_label(path.stem): path for path in sorted(root.glob("evals/*.json"))}
    paths = [path for name, path in files.items() if which in ("", name, name.rpartition("-")[2])]
    if len(paths) == 1:
        return read(paths[0])
    names = [f"{run}@{name}" for name, path in files.items() if path in paths or not paths]
    raise InputError(
        f"{text} names {len(paths)} finished evaluations",
        hint=f"name one: {', '.join(names[-6:])}" if names else "the command that began it resumes",
    )


def _label(stem: str) -> str:
    """Return the short name of an evaluation inside training: `heldout-10`."""
    name, _, step = stem.removeprefix("eval-").rpartition("-")
    return f"{name}-{int(step)}" if step.isdecimal() else stem


def read(path: Path) -> Evaluation:
    """Read an evaluation's file. Raises InputError, RunError."""
    if not path.exists():
        raise InputError(f"there is no evaluation {path}", hint="`swerl eval` prints its folder")
    value = read_json(path)
    try:
        results = [
            TaskResult(**{**row, "verdicts": tuple(row["verdicts"])}) for row in value["tasks"]
        ]
        dollars, attempts = value.get("dollars"), value["num_attempts"]
        numbers = [getattr(result, name) for result in results for name in _NUMBERS]
        if odd := [number for number in numbers if not isinstance(number, int | float)]:
            raise TypeError(f"{odd[0]!r} is no number")
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path} is not an evaluation: {error!r}", hint="name a file that `swerl eval` wrote"
        ) from error
    counted = {result.task: result for result in results if result.attempts}
    each_dollars = None if dollars is None or not attempts else dollars / attempts
    return Evaluation(path, counted, len(results) - len(counted), each_dollars)


def compare(a: Evaluation, b: Evaluation) -> dict[str, Any]:
    """Return the paired comparison of two evaluations as JSON; differences are B - A.

    Only Tasks with a counted attempt on both sides are paired. Raises InputError if there is none.
    """
    paired = [(a.results[name], b.results[name]) for name in a.results if name in b.results]
    if not paired:
        hint = "both must evaluate the same tasks; lost attempts are repeated by the same command"
        raise InputError(f"{a.path} and {b.path} have no task in common", hint=hint)
    by_repo: dict[str, list[tuple[TaskResult, TaskResult]]] = {}
    for pair in paired:
        by_repo.setdefault(pair[1].repo or pair[0].repo, []).append(pair)
    overall = _compared(paired)
    sides = [[(pair[n].attempts, pair[n].solved) for pair in paired] for n in (0, 1)]
    floors = [floor for side in sides if (floor := noise_floor(side)) is not None]
    return {
        "a": str(a.path),
        "b": str(b.path),
        **overall,
        "num_only_a": len(a.results) - len(paired),
        "num_only_b": len(b.results) - len(paired),
        "num_lost_tasks": [a.num_lost_tasks, b.num_lost_tasks],
        # Half of each floor's variance is one side's.
        "noise_floor": sqrt(fmean(floor**2 for floor in floors)) if len(floors) == 2 else None,
        "cost": _costs(a, b, paired, overall["difference"]["mean"]),
        "repos": [{"repo": repo, **_compared(pairs)} for repo, pairs in sorted(by_repo.items())],
    }


def _compared(paired: Sequence[tuple[TaskResult, TaskResult]]) -> dict[str, Any]:
    differences = [b.value - a.value for a, b in paired]
    return {
        "num_tasks": len(paired),
        "pass_at_1": [fmean(a.value for a, _ in paired), fmean(b.value for _, b in paired)],
        "difference": asdict(difference(differences)),
        "p_value": exact_p_value(differences),
        "num_b_better": sum(value > 0 for value in differences),
        "num_a_better": sum(value < 0 for value in differences),
    }


def _costs(
    a: Evaluation, b: Evaluation, paired: Sequence[tuple[TaskResult, TaskResult]], gain: float
) -> dict[str, Any]:
    """Return each cost of an attempt for A and B, and its increase for each point gained."""
    sides = [[pair[side] for pair in paired] for side in (0, 1)]
    costs: dict[str, Any] = {"dollars": (a.dollars_per_attempt, b.dollars_per_attempt)}
    for name in ("sampled_tokens", "prompt_tokens", "seconds"):
        costs[name] = [
            sum(getattr(result, name) for result in side) / sum(result.attempts for result in side)
            for side in sides
        ]
    rows = {}
    for name, (low, high) in costs.items():
        is_known = gain and None not in (low, high)
        point = (high - low) / (100 * gain) if is_known else None
        rows[name] = {"a": low, "b": high, "per_point": point}
    return rows
