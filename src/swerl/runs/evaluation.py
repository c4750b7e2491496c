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
        sampled_tokens=sum(each.trajectory.num_sampled_tokens for each in counted),
        prompt_tokens=sum(each.trajectory.num_prompt_tokens for each in counted),
        turns=sum(len(each.trajectory.turns) for each in counted),
        seconds=round(sum(each.timings.get("total", 0.0) for each in counted), 2),
    )


def summary(results: Sequence[TaskResult], k: int) -> dict[str, Any]:
    """Return pass@1 and pass@k with their intervals, the costs and each Task's result, as JSON.

    A Task without a learnable attempt is in neither mean; one with fewer than k is not in pass@k.
    """
    counted = [each for each in results if each.attempts]
    full = [each for each in counted if each.attempts >= k]
    return {
        "k": k,
        "pass_at_1": asdict(rate([each.value for each in counted])),
        "pass_at_k": asdict(rate([pass_at_k(each.attempts, each.solved, k) for each in full])),
        "verdicts": dict(Counter(verdict for each in results for verdict in each.verdicts)),
        "num_attempts": sum(each.attempts for each in results),
        "num_lost": sum(each.num_lost for each in results),
        "noise_floor": noise_floor((each.attempts, each.solved) for each in counted),
        "sampled_tokens": sum(each.sampled_tokens for each in results),
        "prompt_tokens": sum(each.prompt_tokens for each in results),
        "seconds": round(sum(each.seconds for each in results), 2),
        "tasks": [asdict(each) for each in results],
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
    found = [path for name, path in files.items() if which in ("", name, name.rpartition("-")[2])]
    if len(found) == 1:
        return read(found[0])
    known = [f"{run}@{name}" for name, path in files.items() if path in found or not found]
    raise InputError(
        f"{text} names {len(found)} finished evaluations",
        hint=f"name one: {', '.join(known[-6:])}" if known else "the command that began it resumes",
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
        numbers = [getattr(each, name) for each in results for name in _NUMBERS]
        if odd := [each for each in numbers if not isinstance(each, int | float)]:
            raise TypeError(f"{odd[0]!r} is no number")
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path} is not an evaluation: {error!r}", hint="name a file that `swerl eval` wrote"
        ) from error
    counted = {each.task: each for each in results if each.attempts}
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
    found = _compared(paired)
    sides = [[(pair[n].attempts, pair[n].solved) for pair in paired] for n in (0, 1)]
    known = [floor for side in sides if (floor := noise_floor(side)) is not None]
    return {
        "a": str(a.path),
        "b": str(b.path),
        **found,
        "num_only_a": len(a.results) - len(paired),
        "num_only_b": len(b.results) - len(paired),
        "num_lost_tasks": [a.num_lost_tasks, b.num_lost_tasks],
        # Half of each floor's variance is one side's.
        "noise_floor": sqrt(fmean(each**2 for each in known)) if len(known) == 2 else None,
        "cost": _costs(a, b, paired, found["difference"]["mean"]),
        "repos": [{"repo": repo, **_compared(pairs)} for repo, pairs in sorted(by_repo.items())],
    }


def _compared(paired: Sequence[tuple[TaskResult, TaskResult]]) -> dict[str, Any]:
    differences = [b.value - a.value for a, b in paired]
    return {
        "num_tasks": len(paired),
        "pass_at_1": [fmean(a.value for a, _ in paired), fmean(b.value for _, b in paired)],
        "difference": asdict(difference(differences)),
        "p_value": exact_p_value(differences),
        "num_b_better": sum(each > 0 for each in differences),
        "num_a_better": sum(each < 0 for each in differences),
    }


def _costs(
    a: Evaluation, b: Evaluation, paired: Sequence[tuple[TaskResult, TaskResult]], gain: float
) -> dict[str, Any]:
    """Return each cost of an attempt for A and B, and its increase for each point gained."""
    sides = [[pair[side] for pair in paired] for side in (0, 1)]
    found: dict[str, Any] = {"dollars": (a.dollars_per_attempt, b.dollars_per_attempt)}
    for name in ("sampled_tokens", "prompt_tokens", "seconds"):
        found[name] = [
            sum(getattr(each, name) for each in side) / sum(each.attempts for each in side)
            for side in sides
        ]
    rows = {}
    for name, (low, high) in found.items():
        is_known = gain and None not in (low, high)
        point = (high - low) / (100 * gain) if is_known else None
        rows[name] = {"a": low, "b": high, "per_point": point}
    return rows
