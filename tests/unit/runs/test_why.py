"""Each cause has planted faults that name it, and healthy runs that look alike and do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from swerl.core.chat import Finish
from swerl.core.episode import Episode, Status
from swerl.core.errors import RunError
from swerl.core.files import write_json
from swerl.core.grade import TestStatus, Verdict
from swerl.core.turn import Turn
from swerl.runs import prompts, why
from tests.unit.runs._why_records import CALL, RECIPE, ids, make_run, turn

Change = Callable[[Episode], Episode]
Metrics = Callable[[int], Mapping[str, float]]


def same(episode: Episode) -> Episode:
    return episode


def with_turns(episode: Episode, *turns: Turn) -> Episode:
    return replace(episode, trajectory=replace(episode.trajectory, turns=turns))


def graded(episode: Episode, verdict: Verdict, reason: str = "", **facts: object) -> Episode:
    grade = replace(episode.grade, verdict=verdict, reason=reason, **facts)
    return replace(episode, grade=grade, reward=float(verdict is Verdict.SOLVED))


def saying(turn_: Turn, text: str, **facts: object) -> Turn:
    said = ids(text)
    return replace(turn_, output_ids=said, logprobs=(-0.3,) * len(said), **facts)


def only(end: str, change: Change) -> Change:
    """Change only the attempts with this number."""
    return lambda episode: change(episode) if episode.id.endswith(end) else episode


def unread_call(episode: Episode) -> Episode:
    return with_turns(episode, replace(episode.trajectory.turns[0], finish=Finish.STOP))


def malformed(reply: str) -> Change:
    def change(episode: Episode) -> Episode:
        begin, last = episode.trajectory.turns
        said = reply or None
        changed = saying(begin, f"{episode.id}{said}") if said else begin
        return with_turns(episode, replace(changed, malformed_calls=1), last)

    return change


def torn_call(episode: Episode) -> Episode:
    reply = turn(0, None, "<|im_start|>user\nRepair.", f"{CALL.format(episode.id)}<|im_end|>")
    return with_turns(episode, reply)


def after_the_end(episode: Episode) -> Episode:
    begin, last = episode.trajectory.turns
    text = f"Done with {episode.id}.<|im_end|><|im_start|>user\nMore."
    return with_turns(episode, begin, saying(last, text))


def solved_without_change(episode: Episode) -> Episode:
    return replace(judged("solved", "passed")(episode), patch="")


def cheat(reward: float) -> Change:
    return lambda e: replace(graded(e, Verdict.CHEAT, "forged"), reward=reward)


def judged(verdict: str, new: str, old: str = "") -> Change:
    """Set the verdict and the status of the new and the old test."""
    tests = {"test_new": TestStatus(new), "test_old": TestStatus(old or new)}
    return lambda episode: graded(episode, Verdict(verdict), "judged", tests=tests)


def foreign_prompt(episode: Episode) -> Episode:
    begin, *rest = episode.trajectory.turns
    prompt = ids(f"[INST] Repair {episode.task_id}. [/INST]")
    return with_turns(episode, replace(begin, prompt_ids=prompt), *rest)


def stripped(episode: Episode) -> Episode:
    first, last = episode.trajectory.turns
    said = (*ids("<think>\nHm.\n</think>\n\n"), *first.output_ids)
    repeated = (*first.prompt_ids, *first.output_ids, *last.prompt_ids)
    thinking = replace(first, output_ids=said, logprobs=(-0.3,) * len(said))
    return with_turns(episode, thinking, replace(last, parent=None, prompt_ids=repeated))


def older_weights(episode: Episode) -> Episode:
    turns = [replace(t, weight_version="older") for t in episode.trajectory.turns]
    return with_turns(episode, *turns)


def copies(least: float) -> Change:
    """Let all attempts be the same few tokens, one of them with this log-probability."""

    def change(episode: Episode) -> Episode:
        logprobs = (least, *(-0.1 if least else 0.0,) * 3)
        turns = [
            replace(t, output_ids=t.output_ids[:4], logprobs=logprobs, finish=Finish.STOP)
            for t in episode.trajectory.turns
        ]
        is_solved = episode.task_id.endswith(("0", "2"))
        verdict = Verdict.SOLVED if is_solved else Verdict.UNSOLVED
        status = TestStatus.PASSED if is_solved else TestStatus.FAILED
        return graded(with_turns(episode, *turns), verdict, tests={"test": status})

    return change


def late(reason: str) -> Change:
    return lambda e: e if e.id.endswith(".0") else graded(e, Verdict.TIMEOUT, reason)


def at_limit(episode: Episode) -> Episode:
    return replace(episode, status=Status.LIMIT)


def cut_reply(episode: Episode) -> Episode:
    text = f"{episode.id[-1]} look" * 9
    return with_turns(episode, turn(0, None, "Repair.", text, finish=Finish.LENGTH))


def collapsing(step: int) -> Mapping[str, float]:
    return {"entropy": 0.3 / 4**step, "groups_with_signal": 4.0 - 3 * min(step, 1)}


def at(*rewards: float) -> Metrics:
    return lambda step: {"reward": rewards[step]}


def rollout(**keys: object) -> Mapping[str, object]:
    return {**RECIPE, "rollout": keys}


@dataclass(frozen=True)
class Case:
    """A change of a healthy run, and the first cause that it must show: empty for none."""

    cause: str
    key: str = ""
    episode: Change = same
    metrics: Metrics = lambda step: {}
    recipe: Mapping[str, object] | None = None
    steps: int = 3


FALL = (0.5, 0.7, 0.86, 0.9, 0.92, 0.9, 0.81, 0.7, 0.6, 0.52, 0.47, 0.44)
CASES: Mapping[str, Case] = {
    "healthy": Case(""),
    "falls": Case("reward-fell", metrics=at(*FALL), steps=12),
    "falls at once": Case("reward-fell", metrics=at(*[0.8, 0.82] * 3, *[0.3] * 4), steps=10),
    "falls and recovers": Case("", metrics=at(*FALL, 0.7, 0.8, 0.9, 0.9), steps=16),
    "noisy": Case("", metrics=at(*[0.3, 0.7, 0.4, 0.6, 0.65, 0.35] * 3), steps=18),
    "solved without a change": Case(
        "grader-accepts-all", episode=only(".1", solved_without_change)
    ),
    "solved with a failed test": Case(
        "grader-accepts-all", episode=judged("solved", "failed", "passed")
    ),
    "paid cheats": Case("grader-accepts-all", "rollout.reward", episode=only(".1", cheat(1.0))),
    "unpaid cheats": Case("", episode=only(".1", cheat(0.0))),
    "foreign markup": Case("foreign-template", "model.family", episode=foreign_prompt),
    "no stop id": Case("stop-id-missing", "model.family", episode=after_the_end),
    "all tests passed": Case("grader-rejects-all", episode=judged("unsolved", "passed")),
    "no test read": Case("grader-rejects-all", episode=judged("unsolved", "missing")),
    "calls ended as stop": Case("wrong-parser", "model.family", episode=unread_call),
    "whole calls malformed": Case("wrong-parser", "model.family", episode=malformed("")),
    "broken calls": Case("", episode=malformed("<tool_call>\n</function>\n</tool_call><|im_end|>")),
    "calls without an end": Case("", episode=torn_call),
    "lost": Case("infrastructure", episode=only(".1", lambda e: graded(e, Verdict.INFRA, "gone"))),
    "lost counts as unsolved": Case(
        "infrastructure",
        episode=only(".1", lambda e: graded(e, Verdict.UNSOLVED, "SandboxLostError: gone")),
    ),
    "no git": Case("infrastructure", episode=lambda e: replace(e, log="bash: git: not found")),
    "thinking stripped": Case("thinking-stripped", "gateway.history", episode=stripped),
    "template history": Case(
        "", episode=stripped, recipe={**RECIPE, "gateway": {"history": "template"}}
    ),
    "two versions": Case(
        "engine-trainer-mismatch", "cluster.weight_sync", episode=only(".1", older_weights)
    ),
    "two versions of an asynchronous run": Case(
        "", episode=only(".1", older_weights), recipe={**RECIPE, "schedule": {"mode": "async"}}
    ),
    "a stale engine": Case(
        "engine-trainer-mismatch",
        "cluster.weight_sync",
        metrics=lambda step: {"mismatch": 0.01, "mismatch_spread": 2.0},
    ),
    "other kernels": Case(
        "engine-trainer-mismatch",
        "algorithm.mismatch",
        metrics=lambda step: {"mismatch": 0.1, "mismatch_spread": 0.2},
    ),
    "bf16": Case("", metrics=lambda step: {"mismatch": 0.004, "mismatch_spread": 0.3}),
    "no learning rate": Case("learning-rate", "trainer.lr", metrics=lambda step: {"lr": 0.0}),
    "a rate that fades": Case("", metrics=lambda step: {"lr": 0.0 if step else 1e-4}),
    "large steps": Case("learning-rate", metrics=lambda step: {"kl": 0.8 * step}),
    "a rare token": Case("", metrics=lambda step: {"kl": 6.0 * (step == 1)}, steps=4),
    "small steps": Case("", metrics=lambda step: {"kl": 0.01 * step}, steps=12),
    "wild entropy": Case(
        "learning-rate",
        metrics=lambda step: {"entropy": 2.0, "reward": 0.0} if step else {"reward": 0.5},
    ),
    "entropy": Case("entropy-collapse", "algorithm.entropy_coef", metrics=collapsing),
    "entropy with a signal": Case("", metrics=lambda step: {"entropy": 0.3 / 4**step}),
    "entropy with learning": Case(
        "", metrics=lambda step: {**collapsing(step), "reward": 0.2 + 0.3 * step}
    ),
    "slow tests": Case(
        "budget-too-small", "budgets.grading_s", episode=late("budgets.grading_s = 2 s ran out")
    ),
    "slow engine": Case(
        "infrastructure",
        "budgets.model_call_s",
        episode=lambda e: graded(
            e, Verdict.INFRA, "EngineTimeoutError: the engine gave no reply within 1 s"
        ),
    ),
    "few replies": Case(
        "budget-too-small", "rollout.max_turns", episode=at_limit, recipe=rollout(max_turns=2)
    ),
    "short replies": Case(
        "budget-too-small",
        "rollout.max_new_tokens",
        episode=cut_reply,
        recipe=rollout(max_new_tokens=len(ids("I look" * 9))),
    ),
    "full context": Case(
        "budget-too-small", "rollout.max_context_tokens", recipe=rollout(max_context_tokens=100)
    ),
    "nothing solved": Case(
        "no-signal",
        "tasks.solve_rate",
        episode=judged("unsolved", "failed", "passed"),
    ),
    "all solved": Case("no-signal", "tasks.solve_rate", episode=judged("solved", "passed")),
    "equal rewards": Case("no-signal", "rollout.reward", episode=lambda e: replace(e, reward=0.5)),
    "greedy": Case("no-signal", "rollout.temperature", episode=copies(0.0)),
    "copied draws": Case("no-signal", "rollout.temperature", episode=copies(-4.0)),
    "certain": Case("no-signal", "tasks.solve_rate", episode=copies(-0.05)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_named_first(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    root = make_run(
        tmp_path / "run",
        episode=case.episode,
        metrics=case.metrics,
        recipe=case.recipe,
        steps=case.steps,
    )
    diagnosis = why.diagnose(root)
    assert not diagnosis.problems
    assert [finding.cause for finding in diagnosis.findings][:1] == (
        [case.cause] if case.cause else []
    )
    for finding in diagnosis.findings[:1]:
        assert finding.says and finding.fix and all(finding.evidence)
        assert case.key in ("", finding.key)


def test_every_rule_has_a_planted_fault() -> None:
    planted = {case.cause for case in CASES.values()} | {"run-failed"}
    assert planted - {""} == {rule.cause for rule in why.RULES}
    assert len(why.RULES) == 14


def test_a_healthy_run_names_the_records_that_were_read(tmp_path: Path) -> None:
    audits = {"audits": 10.0, "forgeries": 1.0}
    diagnosis = why.diagnose(make_run(tmp_path / "run", metrics=lambda step: audits))
    records = "3 steps, with the Episodes of steps 0, 1, 2; of 30 audited solved patches 3 were "
    records += "forged (10.0%, 95% interval 3.5% to 25.6%)"
    assert diagnosis == why.Diagnosis("run", (), (0, 1, 2), records, ())
    assert list(diagnosis.lines()) == [f"no fault found in the records of {records}"]


def test_a_fall_names_steps_tasks_metrics_and_the_way_back(tmp_path: Path) -> None:
    def metrics(step: int) -> Mapping[str, float]:
        return {"reward": FALL[step], "entropy": 0.4 if step < 6 else 0.05, "step_s": 10.0}

    root = make_run(tmp_path / "run", metrics=metrics, steps=12)
    rates = {"hard": (2, 2), "easy": (4, 0)}
    entries = []
    for step in range(12):
        for task, ends in rates.items():
            num_solved = ends[step >= 9]
            verdicts = ("solved",) * num_solved + ("unsolved",) * (4 - num_solved)
            fate = prompts.Fate.TRAINED
            entries.append(prompts.GroupEntry(step, task, "", fate, verdicts=verdicts))
    prompts.append(root / "prompts.jsonl", entries)
    finding = why.diagnose(root).findings[0]
    assert (finding.cause, finding.step) == ("reward-fell", 9)
    assert finding.says == "the reward fell from 0.91 to 0.48"
    assert finding.evidence == (
        "reward 0.91 in steps 3 to 5, 0.48 in steps 9 to 11, 0.48 in the last 3 steps",
        "changed with it: entropy 0.4 → 0.05",
        "1 of 2 tasks of both are solved less often: easy 24/24 → 0/12",
    )
    assert finding.key == "algorithm.entropy_coef"
    assert f"`swerl train rewind {root} --step 6`" in finding.fix


def test_an_error_that_ended_the_run(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", steps=1)
    for error, cause in (
        ("step 3 is not finite", "run-failed"),
        ("6 of 6 episodes were lost: SandboxLostError: gone", "infrastructure"),
    ):
        write_json(root / "process.json", {"error": error})
        finding = why.diagnose(root).findings[0]
        assert (finding.cause, finding.evidence) == (cause, (error,))


def test_a_rule_that_fails_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: object) -> None:
        raise KeyError("odd")

    root = make_run(tmp_path / "run", metrics=lambda step: {"lr": 0.0})
    rules = [replace(why.RULES[0], cause="odd", look=broken), *why.RULES]
    monkeypatch.setattr(why, "RULES", rules)
    diagnosis = why.diagnose(root)
    assert diagnosis.findings[0].cause == "learning-rate"
    assert diagnosis.problems == ("rule odd: KeyError: 'odd'",)


def test_damaged_records_cost_only_their_own_part(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    (root / "turns" / "00001.parquet").write_bytes(b"PAR1")
    (root / "episodes" / "00000" / "task-0-0.0" / "grade.json").write_text('{"verdict": ')
    (root / "episodes" / "00000" / "task-0-0.1" / "episode.json").write_text("[]")
    (root / "episodes" / "00000" / "task-0-0.2" / "episode.json").unlink()
    diagnosis = why.diagnose(root)
    assert not diagnosis.findings
    assert len(diagnosis.problems) == 3
    assert any("00001.parquet" in problem for problem in diagnosis.problems)


def test_a_run_without_turns_and_one_without_steps(tmp_path: Path) -> None:
    bare = make_run(tmp_path / "bare", metrics=lambda step: {"lr": 0.0})
    for path in (*bare.glob("turns/*"), *bare.glob("samples/*"), *bare.glob("initial_model/*")):
        path.unlink()
    assert why.diagnose(bare).findings[0].cause == "learning-rate"
    new = tmp_path / "new"
    new.mkdir()
    (new / "recipe.resolved.json").write_text("{}")
    (line,) = why.diagnose(new).lines()
    assert line == "no step is finished, so there is nothing to judge"
    with pytest.raises(RunError):
        why.diagnose(tmp_path / "nothing")
