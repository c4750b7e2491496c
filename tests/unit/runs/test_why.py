"""Each rule names its fault and is silent on a healthy run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.chat import Finish
from swerl.core.episode import Episode, Status
from swerl.core.errors import RunError
from swerl.core.files import write_json
from swerl.core.grade import TestStatus, Verdict
from swerl.core.sample import Sample
from swerl.core.turn import RoutedExperts, Turn
from swerl.runs import why
from swerl.tasks import twin
from tests.unit.runs._why_records import (
    CALL,
    RECIPE,
    healthy_episode,
    ids,
    make_run,
    turn,
    write_episode,
)


def first(root: Path) -> why.Finding:
    found = why.diagnose(root)
    assert not found.problems
    return found.findings[0]


def with_turns(episode: Episode, turns: Sequence[Turn]) -> Episode:
    return replace(episode, trajectory=replace(episode.trajectory, turns=tuple(turns)))


def graded(episode: Episode, verdict: Verdict, reason: str = "", **facts: object) -> Episode:
    solved = verdict is Verdict.SOLVED
    grade = replace(episode.grade, verdict=verdict, reason=reason, **facts)
    return replace(episode, grade=grade, reward=float(solved))


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    found = why.diagnose(make_run(tmp_path / "run"))
    assert found == why.Diagnosis("run", (), (0, 1, 2), "steps 0, 1, 2", ())
    assert list(found.lines()) == ["no fault found in the records of steps 0, 1, 2"]


def test_calls_that_are_not_read_name_the_parser(tmp_path: Path) -> None:
    def unread(episode: Episode) -> Episode:
        return with_turns(episode, [replace(episode.trajectory.turns[0], finish=Finish.STOP)])

    found = first(make_run(tmp_path / "run", episode=unread))
    assert (found.cause, found.key) == ("wrong-parser", "model.family")
    assert found.evidence[0].startswith("16 of 16 replies")


@pytest.mark.parametrize("is_whole", [True, False])
def test_calls_that_only_the_gateways_parser_finds_malformed(
    tmp_path: Path, is_whole: bool
) -> None:
    def malformed(episode: Episode) -> Episode:
        reply = "<tool_call>\n</function>\n</tool_call><|im_end|>"
        begin, last = episode.trajectory.turns
        said = begin.output_ids if is_whole else (*ids(episode.id), *ids(reply))
        wrong = replace(begin, output_ids=said, logprobs=(-0.3,) * len(said), malformed_calls=1)
        return with_turns(episode, [wrong, last])

    found = why.diagnose(make_run(tmp_path / "run", episode=malformed)).findings
    assert [each.cause for each in found] == (["wrong-parser"] if is_whole else [])


def test_a_call_without_an_end_is_the_model_s_own_mistake(tmp_path: Path) -> None:
    def torn(episode: Episode) -> Episode:
        reply = turn(0, None, "<|im_start|>user\nRepair.", f"{CALL.format(episode.id)}<|im_end|>")
        return with_turns(episode, [reply])

    assert not why.diagnose(make_run(tmp_path / "run", episode=torn)).findings


def test_replies_after_an_end_of_turn_name_the_stop_id(tmp_path: Path) -> None:
    def endless(episode: Episode) -> Episode:
        first, last = episode.trajectory.turns
        said = (*last.output_ids, *ids("<|im_start|>user\nMore."))
        return with_turns(
            episode,
            [first, replace(last, output_ids=said, logprobs=(-0.3,) * len(said))],
        )

    assert first(make_run(tmp_path / "run", episode=endless)).cause == "stop-id-missing"


def test_better_attempts_with_lower_advantages(tmp_path: Path) -> None:
    def turned(row: Sample) -> Sample:
        return replace(row, advantage=-row.advantage)

    assert first(make_run(tmp_path / "run", sample=turned)).cause == "advantage-sign"


@pytest.mark.parametrize("is_shuffled", [True, False])
def test_experts_of_other_tokens(tmp_path: Path, is_shuffled: bool) -> None:
    rng = random.Random(0)

    def routed(row: Sample) -> Sample:
        places = [[token % 16, (token + 5) % 16] for token in row.ids[:-1]]
        if is_shuffled:
            rng.shuffle(places)
        data = bytes(expert for place in places for expert in place)
        return replace(row, routed=(RoutedExperts(0, 1, 2, 1, data),))

    found = why.diagnose(
        make_run(tmp_path / "run", sample=routed, metrics=lambda step: {"mismatch": 0.05})
    )
    assert ("experts-shuffled" in [each.cause for each in found.findings]) is is_shuffled


@pytest.mark.parametrize("has_change", [True, False])
def test_solved_without_a_change_or_with_a_failed_test(tmp_path: Path, has_change: bool) -> None:
    def accepted(episode: Episode) -> Episode:
        passed = dict.fromkeys(episode.grade.tests, TestStatus.PASSED)
        tests = episode.grade.tests if has_change else passed
        solved = graded(episode, Verdict.SOLVED, tests=tests)
        is_odd = episode.id.endswith(".1")
        return solved if has_change else replace(solved, patch="" if is_odd else episode.patch)

    assert first(make_run(tmp_path / "run", episode=accepted)).cause == "grader-accepts-all"


def test_a_learning_rate_of_nothing(tmp_path: Path) -> None:
    found = first(make_run(tmp_path / "run", metrics=lambda step: {"lr": 0.0}))
    assert (found.cause, found.key) == ("lr-zero", "trainer.lr")
    fading = make_run(tmp_path / "fading", metrics=lambda step: {"lr": 0.0 if step else 1e-4})
    assert not why.diagnose(fading).findings


def test_no_attempt_solves_its_task(tmp_path: Path) -> None:
    def unsolved(episode: Episode) -> Episode:
        tests = {"test_new": TestStatus.FAILED, "test_old": TestStatus.PASSED}
        return graded(episode, Verdict.UNSOLVED, tests=tests)

    found = first(make_run(tmp_path / "run", episode=unsolved))
    assert (found.cause, found.key) == ("tasks-too-hard", "tasks.solve_rate")


def test_a_budget_of_time(tmp_path: Path) -> None:
    def late(episode: Episode) -> Episode:
        if episode.id.endswith(".0"):
            return episode
        return graded(episode, Verdict.TIMEOUT, "budgets.grading_s = 2 s ran out")

    found = first(make_run(tmp_path / "run", episode=late))
    assert (found.cause, found.key) == ("budget-too-small", "budgets.grading_s")


@pytest.mark.parametrize(("max_turns", "unfinished"), [(2, 0.0), (2, 0.5), (1, 0.0)])
def test_a_policy_that_never_ends(tmp_path: Path, max_turns: int, unfinished: float) -> None:
    def capped(episode: Episode) -> Episode:
        return replace(episode, status=Status.LIMIT)

    rollout = {"max_turns": max_turns, "shaping": {"unfinished": unfinished}}
    root = make_run(tmp_path / "run", episode=capped, recipe={**RECIPE, "rollout": rollout})
    causes = [each.cause for each in why.diagnose(root).findings]
    assert ("never-ends" in causes) == (max_turns == 2 and not unfinished)


def test_a_budget_of_replies_and_of_tokens(tmp_path: Path) -> None:
    def capped(episode: Episode) -> Episode:
        return replace(episode, status=Status.LIMIT)

    recipe = {**RECIPE, "rollout": {"max_turns": 2, "shaping": {"unfinished": 0.5}}}
    found = first(make_run(tmp_path / "turns", episode=capped, recipe=recipe))
    assert found.key == "rollout.max_turns"

    def cut(episode: Episode) -> Episode:
        begun = turn(0, None, "Repair.", f"{episode.id[-1]} look" * 9, finish=Finish.LENGTH)
        return with_turns(episode, [begun])

    recipe = {**RECIPE, "rollout": {"max_new_tokens": len(ids("I look" * 9))}}
    found = first(make_run(tmp_path / "tokens", episode=cut, recipe=recipe))
    assert found.key == "rollout.max_new_tokens"


def test_failures_of_the_machine_that_count_as_unsolved(tmp_path: Path) -> None:
    def lost(episode: Episode) -> Episode:
        if not episode.id.endswith(".1"):
            return episode
        return graded(episode, Verdict.UNSOLVED, "SandboxLostError: its machine is gone")

    assert first(make_run(tmp_path / "run", episode=lost)).cause == "infra-as-failure"


def test_prompts_that_begin_otherwise_from_a_step_on(tmp_path: Path) -> None:
    def changed(episode: Episode) -> Episode:
        if episode.id.startswith("00000"):
            return episode
        begin, *rest = episode.trajectory.turns
        ids_ = (*ids("<|im_start|>system\nNew tools.<|im_end|>\n"), *begin.prompt_ids)
        return with_turns(episode, [replace(begin, prompt_ids=ids_), *rest])

    found = first(make_run(tmp_path / "run", episode=changed))
    assert (found.cause, found.step) == ("prompt-changed", 1)


@pytest.mark.parametrize("is_mixed", [True, False])
def test_tools_that_change_from_a_step_on(tmp_path: Path, is_mixed: bool) -> None:
    """Two agents have two sets of tools in every step."""

    def named(episode: Episode) -> Episode:
        place = episode.id[-1] if is_mixed else episode.id[4]
        return replace(episode, trajectory=replace(episode.trajectory, tools=f"digest-{place}"))

    root = make_run(tmp_path / "run", episode=named)
    if is_mixed:
        assert not why.diagnose(root).findings
    else:
        assert (first(root).cause, first(root).step) == ("prompt-changed", 1)


def test_a_model_call_that_takes_too_long(tmp_path: Path) -> None:
    def late(episode: Episode) -> Episode:
        return graded(episode, Verdict.TIMEOUT, "BudgetError: the engine gave no reply within 1 s")

    assert first(make_run(tmp_path / "run", episode=late)).key == "budgets.model_call_s"


@pytest.mark.parametrize("is_same_name", [True, False])
def test_a_trained_task_that_is_evaluated(tmp_path: Path, is_same_name: bool) -> None:
    root = make_run(tmp_path / "run")
    trained = healthy_episode(1, 2, 0)
    name = trained.task_id if is_same_name else "other"
    copied = replace(trained, id=f"eval-heldout-00000/{name}.0", task_id=name)
    write_episode(root, copied)
    assert first(root).cause == "train-in-eval"


def test_a_first_prompt_may_coincide_by_chance(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    for number in range(150):
        other = healthy_episode(1, 2, 0) if not number else healthy_episode(1, 100 + number, 0)
        copied = replace(other, id=f"eval-heldout-00000/o{number}.0", task_id=f"o{number}")
        write_episode(root, copied)
    assert not why.diagnose(root).findings


def test_entropy_that_collapses(tmp_path: Path) -> None:
    def flat(step: int) -> dict[str, float]:
        return {"entropy": 0.3 / 4**step, "groups_with_signal": 4.0 - 3 * min(step, 1)}

    found = first(make_run(tmp_path / "run", metrics=flat))
    assert (found.cause, found.step) == ("entropy-collapse", 1)
    high = make_run(tmp_path / "high", metrics=lambda s: {**flat(s), "entropy": 3.0 / 4**s})
    assert why.diagnose(high).findings[0].step == 2
    still = make_run(tmp_path / "still", metrics=lambda s: {"entropy": 0.3 / 4**s})
    assert not why.diagnose(still).findings
    learned = make_run(tmp_path / "learned", metrics=lambda s: {**flat(s), "reward": 0.2 + 0.3 * s})
    assert not why.diagnose(learned).findings


@pytest.mark.parametrize("history", ["exact", "template"])
def test_thinking_that_is_not_replayed(tmp_path: Path, history: str) -> None:
    def stripped(episode: Episode) -> Episode:
        first, last = episode.trajectory.turns
        thought = ids("<think>\nHm.\n</think>\n\n")
        said = (*thought, *first.output_ids)
        repeated = (*first.prompt_ids, *first.output_ids, *last.prompt_ids)
        turns = [
            replace(first, output_ids=said, logprobs=(-0.3,) * len(said)),
            replace(last, parent=None, prompt_ids=repeated),
        ]
        return with_turns(episode, turns)

    recipe = {**RECIPE, "gateway": {"history": history}}
    found = why.diagnose(make_run(tmp_path / "run", episode=stripped, recipe=recipe))
    causes = [each.cause for each in found.findings]
    assert causes == ([] if history == "template" else ["thinking-stripped"])


@pytest.mark.parametrize("moves_logprobs", [True, False])
def test_a_mask_that_is_off_by_one(tmp_path: Path, moves_logprobs: bool) -> None:
    def shifted(row: Sample) -> Sample:
        logprobs = (*row.logprobs[1:], 0.0) if moves_logprobs else row.logprobs
        return replace(row, mask=(*row.mask[1:], 0), logprobs=logprobs)

    assert first(make_run(tmp_path / "run", sample=shifted)).cause == "mask-shifted"


def test_two_weight_versions_in_one_step(tmp_path: Path) -> None:
    def older(episode: Episode) -> Episode:
        if episode.id.endswith(("0", "2")):
            return episode
        turns = [replace(each, weight_version="older") for each in episode.trajectory.turns]
        return with_turns(episode, turns)

    root = make_run(tmp_path / "run", episode=older)
    assert first(root).cause == "engine-not-updated"
    recipe = {**RECIPE, "schedule": {"mode": "async"}}
    mixed = make_run(tmp_path / "async", episode=older, recipe=recipe)
    assert not why.diagnose(mixed).findings


def test_an_engine_with_other_weights_and_one_with_other_kernels(tmp_path: Path) -> None:
    some = {"mismatch": 0.01, "mismatch_spread": 2.0}
    stale = make_run(tmp_path / "stale", metrics=lambda step: some)
    assert first(stale).cause == "engine-not-updated"
    every = {"mismatch": 0.1, "mismatch_spread": 0.2}
    found = first(make_run(tmp_path / "every", metrics=lambda step: every))
    assert (found.cause, found.key) == ("engine-trainer-mismatch", "algorithm.mismatch")
    usual = {"mismatch": 0.004, "mismatch_spread": 0.3}
    bf16 = make_run(tmp_path / "bf16", metrics=lambda step: usual)
    assert not why.diagnose(bf16).findings


def test_a_grader_that_refuses_what_passes_every_test(tmp_path: Path) -> None:
    def refused(episode: Episode) -> Episode:
        passed = dict.fromkeys(episode.grade.tests, TestStatus.PASSED)
        return graded(episode, Verdict.UNSOLVED, tests=passed)

    assert first(make_run(tmp_path / "run", episode=refused)).cause == "grader-rejects-all"


def test_a_grader_that_refuses_the_known_solution(tmp_path: Path) -> None:
    solutions = twin.solutions(split="train", count=4, seed=0)
    names = list(solutions)

    def solved(episode: Episode) -> Episode:
        task = names[int(episode.task_id[-1])]
        stage, _, number = episode.id.rpartition(".")
        unsolved = graded(episode, Verdict.UNSOLVED, tests={"test": TestStatus.FAILED})
        patch = solutions[task] if number == "1" else episode.patch
        name = f"{stage.split('/')[0]}/{task}.{number}"
        return replace(unsolved, id=name, task_id=task, patch=patch)

    recipe = {**RECIPE, "tasks": {"source": "twin", "num_train": 4}}
    found = first(make_run(tmp_path / "run", episode=solved, recipe=recipe))
    assert found.cause == "grader-rejects-all"
    assert "4 of 16 made the known solution" in found.evidence[0]


def test_a_log_without_any_declared_test(tmp_path: Path) -> None:
    def unread(episode: Episode) -> Episode:
        missing = dict.fromkeys(episode.grade.tests, TestStatus.MISSING)
        return graded(episode, Verdict.UNSOLVED, "no test", tests=missing)

    found = first(make_run(tmp_path / "run", episode=unread))
    assert (found.cause, found.says) == (
        "grader-rejects-all",
        "the grader finds no test in the log",
    )


def test_steps_that_are_too_large(tmp_path: Path) -> None:
    jump = make_run(tmp_path / "kl", metrics=lambda step: {"kl": 0.8 * step})
    assert (first(jump).cause, first(jump).step) == ("lr-too-high", 1)
    lost = {"entropy": 2.0, "reward": 0.0}
    wild = make_run(tmp_path / "entropy", metrics=lambda step: lost if step else {"reward": 0.5})
    assert first(wild).cause == "lr-too-high"
    spike = make_run(tmp_path / "spike", steps=4, metrics=lambda step: {"kl": 6.0 * (step == 1)})
    assert not why.diagnose(spike).findings
    slow = make_run(tmp_path / "slow", steps=12, metrics=lambda step: {"kl": 0.01 * step})
    assert not why.diagnose(slow).findings


def _by_task(episode: Episode) -> Episode:
    """Let all attempts at a Task have one outcome."""
    is_solved = episode.task_id.endswith(("0", "2"))
    status = TestStatus.PASSED if is_solved else TestStatus.FAILED
    verdict = Verdict.SOLVED if is_solved else Verdict.UNSOLVED
    return graded(episode, verdict, tests={"test": status})


def test_rewards_that_do_not_follow_the_verdict(tmp_path: Path) -> None:
    found = first(make_run(tmp_path / "run", episode=lambda each: replace(each, reward=0.5)))
    assert (found.cause, found.key) == ("groups-equal", "rollout.reward")


@pytest.mark.parametrize(
    ("least", "cause", "key"),
    [
        (-4.0, "groups-equal", "seed"),
        (-0.9, "temperature-zero", "rollout.temperature"),
        (0.0, "temperature-zero", "rollout.temperature"),
    ],
)
def test_attempts_that_are_all_the_same(tmp_path: Path, least: float, cause: str, key: str) -> None:
    def same(episode: Episode) -> Episode:
        logprobs = (least, *(-0.1 if least else 0.0,) * 3)
        turns = [
            replace(each, output_ids=each.output_ids[:4], logprobs=logprobs, finish=Finish.STOP)
            for each in episode.trajectory.turns
        ]
        return _by_task(with_turns(episode, turns))

    found = first(make_run(tmp_path / "run", episode=same))
    assert (found.cause, found.key) == (cause, key)


def test_a_policy_that_became_sure_is_not_sampled_greedily(tmp_path: Path) -> None:
    def same(episode: Episode) -> Episode:
        if episode.id.startswith("00000"):
            return episode
        begin, *_ = episode.trajectory.turns
        sure = replace(begin, output_ids=begin.output_ids[:4], logprobs=(-0.01,) * 4)
        return _by_task(with_turns(episode, [replace(sure, finish=Finish.STOP)]))

    flat = {"entropy": 0.01, "groups_with_signal": 0.0}
    root = make_run(tmp_path / "run", episode=same, metrics=lambda s: flat if s else {})
    assert [each.cause for each in why.diagnose(root).findings] == ["entropy-collapse"]


def test_every_attempt_solves_its_task(tmp_path: Path) -> None:
    def solved(episode: Episode) -> Episode:
        return graded(episode, Verdict.SOLVED, tests={"test": TestStatus.PASSED})

    assert first(make_run(tmp_path / "run", episode=solved)).cause == "tasks-too-easy"


def test_conversations_that_fill_the_context(tmp_path: Path) -> None:
    recipe = {**RECIPE, "rollout": {"max_context_tokens": 100}}
    found = first(make_run(tmp_path / "run", recipe=recipe))
    assert (found.cause, found.key) == ("context-overflow", "rollout.max_context_tokens")


@pytest.mark.parametrize("is_infra", [True, False])
def test_sandboxes_without_git(tmp_path: Path, is_infra: bool) -> None:
    words = "bash: git: command not found"

    def without(episode: Episode) -> Episode:
        if is_infra:
            return graded(episode, Verdict.INFRA, f"cannot hide the future: {words}")
        return replace(episode, log=f"$ git diff\n{words}\n")

    assert first(make_run(tmp_path / "run", episode=without)).cause == "git-missing"


def test_many_lost_episodes(tmp_path: Path) -> None:
    def lost(episode: Episode) -> Episode:
        if not episode.id.endswith(".1"):
            return episode
        return graded(with_turns(episode, ()), Verdict.INFRA, "SandboxLostError: gone")

    found = first(make_run(tmp_path / "run", episode=lost))
    assert found.cause == "infrastructure"
    assert "SandboxLostError: gone" in found.evidence[0]


def test_an_error_that_ended_the_run(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", steps=1)
    for error, cause in (
        ("step 3 is not finite", "run-failed"),
        ("6 of 6 episodes were lost: SandboxLostError: gone", "infrastructure"),
        ("6 of 6 episodes were lost: sh: git: not found", "git-missing"),
    ):
        write_json(root / "process.json", {"error": error})
        found = first(root)
        assert (found.cause, found.evidence) == (cause, (error,))


@pytest.mark.parametrize("is_greedy", [True, False])
def test_short_attempts_are_equal_by_chance(tmp_path: Path, is_greedy: bool) -> None:
    """Each first reply is the same and nearly certain, and the attempts end after it."""

    def short(episode: Episode) -> Episode:
        begin, *_ = episode.trajectory.turns
        logprobs = (-0.5 if is_greedy else -0.01,) * 4
        said = replace(begin, output_ids=begin.output_ids[:4], logprobs=logprobs)
        return _by_task(with_turns(episode, [replace(said, finish=Finish.STOP)]))

    found = why.diagnose(make_run(tmp_path / "run", episode=short)).findings
    assert ("temperature-zero" in [each.cause for each in found]) is is_greedy
    off = make_run(tmp_path / "off", episode=short, metrics=lambda step: {"mismatch": 0.04})
    assert why.diagnose(off).findings[0].cause == "temperature-zero"


def test_prompts_in_the_markup_of_another_family(tmp_path: Path) -> None:
    def foreign(episode: Episode) -> Episode:
        begin, *rest = episode.trajectory.turns
        prompt = ids(f"[INST] Repair {episode.task_id}. [/INST]")
        return with_turns(episode, [replace(begin, prompt_ids=prompt), *rest])

    assert first(make_run(tmp_path / "run", episode=foreign)).cause == "foreign-template"


def test_cheats_that_are_rewarded(tmp_path: Path) -> None:
    def cheats(episode: Episode, reward: float) -> Episode:
        if not episode.id.endswith(".1"):
            return episode
        return replace(graded(episode, Verdict.CHEAT, "forged"), reward=reward)

    paid = make_run(tmp_path / "paid", episode=lambda each: cheats(each, 1.0))
    assert first(paid).cause == "rewarded-cheat"
    unpaid = make_run(tmp_path / "unpaid", episode=lambda each: cheats(each, 0.0))
    assert not why.diagnose(unpaid).findings


def test_a_rule_that_fails_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: object) -> None:
        raise KeyError("odd")

    root = make_run(tmp_path / "run", metrics=lambda step: {"lr": 0.0})
    rules = [replace(why.RULES[0], cause="odd", look=broken), *why.RULES]
    monkeypatch.setattr(why, "RULES", rules)
    found = why.diagnose(root)
    assert found.findings[0].cause == "lr-zero"
    assert found.problems == ("rule odd: KeyError: 'odd'",)


def test_damaged_records_cost_their_own_part(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    (root / "turns" / "00001.parquet").write_bytes(b"PAR1")
    (root / "samples" / "00002.parquet").write_bytes(b"")
    (root / "episodes" / "00000" / "task-0-0.0" / "grade.json").write_text('{"verdict": ')
    (root / "episodes" / "00000" / "task-0-0.1" / "episode.json").write_text("[]")
    (root / "episodes" / "00000" / "task-0-0.2" / "episode.json").unlink()
    found = why.diagnose(root)
    assert not found.findings
    assert len(found.problems) == 4
    assert any("00001.parquet" in problem for problem in found.problems)


def test_an_old_run_without_turns_and_a_new_one_without_steps(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", metrics=lambda step: {"lr": 0.0})
    for path in (*old.glob("turns/*"), *old.glob("samples/*"), *old.glob("initial_model/*")):
        path.unlink()
    assert why.diagnose(old).findings[0].cause == "lr-zero"
    new = tmp_path / "new"
    new.mkdir()
    (new / "recipe.resolved.json").write_text("{}")
    (told,) = why.diagnose(new).lines()
    assert told == "no step and no Episode is finished, so there is none to judge"
    with pytest.raises(RunError):
        why.diagnose(tmp_path / "nothing")
