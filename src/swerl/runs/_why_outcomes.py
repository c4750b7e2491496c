"""Rules of `why.py` about outcomes: verdicts, rewards, budgets, tasks, metrics of learning."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from statistics import fmean

from swerl.runs.evidence import Evidence, SeenEpisode, SeenStep, Symptom

_BAD = frozenset({"failed", "error", "missing"})
_LOST = re.compile(
    r"\b(?:SandboxLost|SandboxUnavailable|EngineLost|Engine|Cluster|Image|BrokenImage|Sandbox)Error:"
    r"|the sandbox failed:|an unexpected error:|test command did not start"
)
"""Reasons that only infrastructure gives. A plain SandboxError may be the agent's own."""
_NO_GIT = re.compile(
    r"git: (?:command )?not found|git: No such file|No such file or directory: '?git\b"
    r"|executable file '?git'? not found"
)
_NO_LR = 1e-9
"""Adam moves a weight by about the learning rate, and fp32 rounds such a change away."""
_KL_A_STEP = 0.03
"""Nats a token and update that a run moves from its beginning; usual ones are below a hundredth."""
_SAME_BY_CHANCE = 0.01
"""Share of evaluated Tasks whose first prompt a trained one may repeat."""
_BUDGET = re.compile(r"\b(\w+_s) = ([\d.]+) s")


def impossible_solutions(run: Evidence) -> Symptom | None:
    """Find solved Episodes that cannot be: without a change, or with a failed test."""
    for step in run.steps:
        solved = [each for each in step.episodes if each.verdict == "solved"]
        empty = [each.id for each in solved if not each.patch.strip()]
        failing = [each.id for each in solved if {*each.tests.values()} & _BAD]
        odd = [*dict.fromkeys((*empty, *failing))]
        if len(odd) >= 2 and len(odd) > 0.05 * len(solved):
            told = (
                f"of {len(solved)} solved Episodes {len(empty)} changed nothing and "
                f"{len(failing)} have a failed test, such as {odd[0]}"
            )
            return Symptom(step.number, (told, step.told("solve_rate")))
    return None


def no_learning_rate(run: Evidence) -> Symptom | None:
    """Find a learning rate of nothing."""
    rates = run.series("lr")
    if not rates or any(value > _NO_LR for _, value in rates):
        return None
    norms = [value for _, value in run.series("grad_norm")]
    told = f"lr is at most {max(value for _, value in rates):.1g} in all {len(rates)} steps"
    norm = f"the gradient's norm is {fmean(norms):.2g}" if norms else "no gradient was recorded"
    return Symptom(rates[0][0], (told, norm))


def nothing_solved(run: Evidence) -> Symptom | None:
    """Find a run without solved Episodes, although the agent works and the tests run."""
    seen = [each for step in run.steps for each in step.learnable if not each.fork]
    solved = sum(each.verdict == "solved" for each in seen)
    if len(seen) < 16 or solved > 0.02 * len(seen):
        return None
    tried = [each for each in seen if each.patch.strip()]
    some = sum(any(s in ("passed", "xfail") for s in each.tests.values()) for each in tried)
    told = f"{solved} of {len(seen)} Episodes are solved; {len(tried)} changed the repository"
    return Symptom(run.steps[0].number, (told, f"{some} of these pass some of the tests"))


def late_attempts(run: Evidence) -> Symptom | None:
    """Find attempts that a time budget ends."""
    for step in run.steps:
        late = [each for each in step.learnable if each.verdict == "timeout"]
        if len(late) >= 3 and len(late) > 0.3 * len(step.learnable):
            reason = _most(each.reason for each in late)
            name = found.group(1) if (found := _BUDGET.search(reason)) else "agent_s"
            name = "model_call_s" if "gave no reply within" in reason else name
            told = f"{len(late)} of {len(step.learnable)} Episodes: {reason}"
            says = f"attempts end because {name} runs out"
            return Symptom(
                step.number, (told, step.told("timeout_rate")), says=says, key=f"budgets.{name}"
            )
    return None


def endless_attempts(run: Evidence) -> Symptom | None:
    """Find a policy that goes on after its fix until the limit of replies stops it."""
    if run.key("rollout.shaping.unfinished", 0.0) or run.key("rollout.max_turns", 0) < 2:
        return None
    for step in run.steps:
        capped = _capped(run, step)
        solved = sum(each.verdict == "solved" for each in capped)
        if solved >= 8 and solved > 0.25 * len(step.learnable):
            told = f"{len(capped)} of {len(step.learnable)} Episodes ended at the limit of replies"
            return Symptom(step.number, (f"{told}, {solved} of them solved",))
    return None


def _capped(run: Evidence, step: SeenStep) -> list[SeenEpisode]:
    most = run.key("rollout.max_turns", 0)
    return [
        each for each in step.learnable if each.status == "limit" and len(each.turns) >= most > 0
    ]


def cut_attempts(run: Evidence) -> Symptom | None:
    """Find attempts that the limit of replies, or of a reply's tokens, ends."""
    most, longest = run.key("rollout.max_turns", 0), run.key("rollout.max_new_tokens", 0)
    for step in run.steps:
        seen = step.learnable
        if len(seen) < 8:
            continue
        capped = _capped(run, step)
        if len(capped) > 0.6 * len(seen):
            told = f"{len(capped)} of {len(seen)} Episodes ended after {most} replies"
            return Symptom(step.number, (told,))
        cut = [each for each in seen if each.turns and _is_cut(each, longest)]
        if len(cut) > 0.5 * len(seen):
            told = (
                f"the last reply of {len(cut)} of {len(seen)} Episodes was cut at {longest} tokens"
            )
            return Symptom(step.number, (told,), key="rollout.max_new_tokens")
    return None


def _is_cut(episode: SeenEpisode, longest: int) -> bool:
    last = episode.turns[-1]
    return last.finish == "length" and len(last.output_ids) >= longest > 0


def infra_counted(run: Evidence) -> Symptom | None:
    """Find failures of infrastructure that are trained on as if the policy had failed."""
    for step in run.steps:
        in_rows = {sample.episode for sample in step.samples}
        lost = [
            each
            for each in step.episodes
            if (each.learnable and each.verdict != "solved" and _LOST.search(each.reason))
            or (not each.learnable and each.id in in_rows)
        ]
        if len(lost) >= 2 and len(lost) > 0.05 * len(step.episodes):
            verdict = _most(each.verdict for each in lost)
            told = (
                f"{len(lost)} of {len(step.episodes)} Episodes are {verdict!r}, "
                f"such as {lost[0].id}: {lost[0].reason[:120]}"
            )
            return Symptom(step.number, (told,))
    return None


def evaluated_training(run: Evidence) -> Symptom | None:
    """Find Tasks that are trained on and evaluated, by name and by first prompt.

    Short prompts of different repositories coincide now and then.
    """
    trained = {each.root: each.task for step in run.steps for each in step.episodes if each.root}
    names = {each.task for step in run.steps for each in step.episodes}
    shared = [
        (task, trained.get(prompt, task))
        for task, prompt in run.eval_prompts.items()
        if task in names or prompt in trained
    ]
    by_name = any(task in names for task, _ in shared)
    if not by_name and len(shared) <= _SAME_BY_CHANCE * len(run.eval_prompts):
        return None
    told = (
        f"{len(shared)} of {len(run.eval_prompts)} evaluated tasks are trained in the steps that "
        f"were read, such as {shared[0][0]} as {shared[0][1]}"
    )
    return Symptom(run.steps[0].number, (told,))


def collapsed_entropy(run: Evidence) -> Symptom | None:
    """Find a policy that became nearly deterministic without having learned.

    Entropy falls in healthy runs, too, while more and more Tasks are solved.
    """
    series = run.series("entropy")
    most = max((len({task for task, _ in s.groups}) for s in run.steps), default=0)
    sure: list[int] = []
    for step, value in series[1:]:
        if value >= min(0.35 * series[0][1], 0.25):
            continue
        sure = [*sure, step][-3:]
        signal = [run.metrics[each].get("groups_with_signal", 0.0) for each in sure]
        early, late = (
            [run.metrics[n].get("reward", 0.0) for n in steps]
            for steps in ([first for first, _ in series[:3] if first < step], sure)
        )
        if fmean(signal) <= 0.25 * most and fmean(late) < fmean(early) + 0.1:
            told = f"entropy fell from {series[0][1]:.3g} to {value:.3g} nats a token"
            counts = " ".join(f"{n:.0f}" for _, n in run.series("groups_with_signal")[-8:])
            return Symptom(step, (told, f"Groups with a signal, by step: {counts}"))
    return None


def refused_solutions(run: Evidence) -> Symptom | None:
    """Find unsolved attempts with the known solution's change, or with every test passed."""
    for step in run.steps:
        seen = [each for each in step.learnable if each.patch.strip()]
        if len(seen) < 8 or any(each.verdict == "solved" for each in step.learnable):
            continue
        unsolved = [each for each in seen if each.verdict == "unsolved"]
        passed = [each.id for each in unsolved if each.tests and not {*each.tests.values()} & _BAD]
        gold = run.solutions
        right = [
            each.id for each in unsolved if _change(each.patch) == _change(gold.get(each.task))
        ]
        unread = [e for e in unsolved if e.tests and not set(e.tests.values()) - {"missing"}]
        if odd := [*dict.fromkeys((*right, *passed))]:
            told = (
                f"no attempt is solved, but {len(right)} of {len(seen)} made the known solution's "
                f"change and {len(passed)} passed every test, such as {odd[0]}"
            )
            return Symptom(step.number, (told, step.told("solve_rate")))
        if len(unread) > 0.9 * len(seen):
            told = f"of {len(unread)} of {len(seen)} attempts, no declared test has a result"
            says = "the grader finds no test in the log"
            return Symptom(step.number, (told, _most(each.reason for each in unread)), says=says)
    return None


def _change(patch: str | None) -> frozenset[str]:
    """Return the removed and added lines of a patch; a set of its own for none."""
    lines = (patch or "\0").splitlines()
    return frozenset(
        line.rstrip() for line in lines if line[:1] in "+-\0" and line[1:3] not in _HEAD
    )


_HEAD = ("--", "++")


def wild_steps(run: Evidence) -> Symptom | None:
    """Find a policy that left its beginning within a few steps.

    One step far above its neighbours is a rare token, not another policy.
    """
    entropy, rates = run.series("entropy"), dict(run.series("lr"))
    begin = entropy[0][0] if entropy else 0
    moved = run.series("kl")
    for (step, value), (_, later) in zip(moved, [*moved[1:], *moved[-1:]], strict=True):
        least = min(value, later)
        if least > _KL_A_STEP * (step - begin + 1) and least > 0.1:
            told = f"kl is {value:.2g} nats a token; updates so far: {step - begin}"
            return Symptom(step, (told, f"lr {rates.get(step, 0.0):.2g}"))
    rewards = dict(run.series("reward"))
    for step, value in entropy[1:]:
        if value > 3 * entropy[0][1] and rewards.get(step, 0.0) < 0.5 * rewards.get(begin, 0.0):
            told = f"entropy rose from {entropy[0][1]:.2g} to {value:.2g} while the reward halved"
            return Symptom(step, (told, f"lr {rates.get(step, 0.0):.2g}"))
    return None


def equal_rewards(run: Evidence) -> Symptom | None:
    """Find rewards that never differ in a Group, although not all Episodes have one outcome."""
    groups = [each for step in run.steps for each in step.groups.values() if len(each) > 1]
    seen = [each for group in groups for each in group]
    solved = sum(each.verdict == "solved" for each in seen)
    if len(groups) < 4 or not 0.02 * len(seen) < solved < 0.98 * len(seen):
        return None
    if any(len({each.reward for each in group}) > 1 for group in groups):
        return None
    mixed = sum(len({each.verdict for each in group}) > 1 for group in groups)
    told = f"in none of {len(groups)} Groups do rewards differ; {solved} of {len(seen)} are solved"
    verdicts = f"in {mixed} Groups verdicts differ"
    key = "rollout.reward" if mixed else ""
    return Symptom(run.steps[0].number, (told, verdicts), key=key)


def everything_solved(run: Evidence) -> Symptom | None:
    """Find a run in which all attempts solve their Task."""
    seen = [each for step in run.steps for each in step.learnable if not each.fork]
    solved = sum(each.verdict == "solved" for each in seen)
    if len(seen) < 16 or solved < 0.95 * len(seen):
        return None
    return Symptom(run.steps[0].number, (f"{solved} of {len(seen)} Episodes are solved",))


def full_contexts(run: Evidence) -> Symptom | None:
    """Find conversations that fill the context."""
    most = run.key("rollout.max_context_tokens", 0)
    for step in run.steps:
        full = [each for each in step.learnable if _is_full(each, most)]
        if len(full) >= 3 and len(full) > 0.3 * len(step.learnable):
            told = f"{len(full)} of {len(step.learnable)} conversations reach {most} tokens"
            return Symptom(step.number, (told, step.told("solve_rate")))
    return None


def _is_full(episode: SeenEpisode, most: int) -> bool:
    ends: dict[int | None, int] = {None: 0}
    for turn in episode.turns:
        ends[turn.index] = ends[turn.parent] + len(turn.prompt_ids) + len(turn.output_ids)
    return max(ends.values()) >= most > 0 or "prompt is too long" in episode.log


def missing_git(run: Evidence) -> Symptom | None:
    """Find sandboxes without git, by the words of shells and of our own commands."""
    for step in run.steps:
        without = [e for e in step.episodes if _NO_GIT.search(e.reason) or _NO_GIT.search(e.log)]
        if len(without) >= 3 and len(without) > 0.2 * len(step.episodes):
            first = without[0]
            found = _NO_GIT.search(f"{first.reason}\n{first.log}")
            words = f"{found.group() if found else ''!r}, such as {first.id}"
            told = f"{len(without)} of {len(step.episodes)} Episodes have {words}"
            return Symptom(step.number, (told,))
    if _NO_GIT.search(run.error):
        return Symptom(run.last, (run.error[:300],))
    return None


def failed_run(run: Evidence) -> Symptom | None:
    """Find the error that ended a run."""
    return Symptom(run.last, (run.error[:300],)) if run.error else None


def lost_episodes(run: Evidence) -> Symptom | None:
    """Find a step that lost many Episodes to infrastructure."""
    for step in run.steps:
        lost = [each for each in step.episodes if each.verdict and not each.learnable]
        if len(lost) >= 2 and len(lost) > 0.2 * len(step.episodes):
            reason = _most(each.reason for each in lost)[:200]
            told = f"{len(lost)} of {len(step.episodes)} Episodes, most often: {reason}"
            return Symptom(step.number, (told,))
    if "episodes were lost" in run.error:
        return Symptom(run.last, (run.error[:300],))
    return None


def rewarded_cheats(run: Evidence) -> Symptom | None:
    """Find attempts that tried to forge their grade and got more than honest failures."""
    for step in run.steps:
        cheats = [each for each in step.learnable if each.verdict == "cheat"]
        honest = [each.reward for each in step.learnable if each.verdict == "unsolved"]
        base = fmean(honest) if honest else 0.0
        paid = [each for each in cheats if each.reward > base + 1e-9]
        if len(paid) >= 2 and len(paid) > 0.5 * len(cheats):
            told = (
                f"{len(paid)} of {len(cheats)} cheats have a reward of {paid[0].reward:g}, "
                f"unsolved attempts {base:.2g}, such as {paid[0].id}: {paid[0].reason[:120]}"
            )
            return Symptom(step.number, (told, step.told("cheat_rate")))
    return None


def _most(values: Iterable[str]) -> str:
    return Counter(values).most_common(1)[0][0]
