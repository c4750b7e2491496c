"""Name the cause of a sick run: fourteen rules over the run's records.

A rule looks at the `Evidence` and returns a Symptom, or None. RULES are ordered: first the reward
that falls, because all other causes may explain it; then contradictions in the records, such as a
solved Episode with a failed test; last the outcomes that several causes share.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, median

from swerl.runs.evidence import Evidence, RecordedEpisode, RecordedStep, RecordedTurn, Symptom, read
from swerl.runs.index import DAMAGE

_REASON_CHARS = 200
_TURNS = 256
"""Turns of a step whose text a rule reads."""
_FAILED = frozenset({"failed", "error", "missing"})


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause and the function that finds its effects."""

    cause: str
    """Short name, the same in every release."""
    look: Callable[[Evidence], Symptom | None]
    says: str
    """One sentence for people."""
    key: str
    """Recipe key to change; empty if there is none."""
    fix: str
    """The next thing to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause with its evidence; the fields are those of Rule and Symptom."""

    cause: str
    says: str
    evidence: tuple[str, ...]
    key: str
    fix: str
    step: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings of a run, the most certain first; none for a healthy run."""

    run: str
    findings: tuple[Finding, ...]
    steps: tuple[int, ...]
    """Steps whose Episodes were read."""
    read: str
    """The records that were read, in words; empty if there are none."""
    problems: tuple[str, ...]
    """Records that could not be read."""

    def lines(self) -> Iterator[str]:
        """Yield one to three lines of text: the first cause, its evidence, its remedy."""
        if not self.findings:
            nothing = "no step is finished, so there is nothing to judge"
            yield f"no fault found in the records of {self.read}" if self.read else nothing
            return
        first = self.findings[0]
        yield f"{first.cause}: {first.says}"
        yield f"{first.evidence[0]} (step {first.step})"
        yield f"{first.key}: {first.fix}" if first.key else first.fix


def diagnose(root: Path) -> Diagnosis:
    """Apply every rule to a run's records. Raises RunError without a recipe."""
    run = read(root)
    findings = []
    is_supervised = bool(run.key("sft.sources"))
    if is_supervised:
        run.problems.append("no rule applies: they judge new Episodes, and this run's are recorded")
    for rule in () if is_supervised else RULES:
        try:
            symptom = rule.look(run)
        except DAMAGE as error:
            run.problems.append(f"rule {rule.cause}: {type(error).__name__}: {error}")
            continue
        if symptom:
            findings.append(
                Finding(
                    cause=rule.cause,
                    says=symptom.says or rule.says,
                    evidence=symptom.evidence,
                    key=symptom.key or rule.key,
                    fix=symptom.fix or rule.fix,
                    step=symptom.step,
                )
            )
    steps = tuple(step.number for step in run.steps)
    numbers = ", ".join(map(str, steps))
    records = f"{len(run.metrics)} steps, with the Episodes of steps {numbers}" if steps else ""
    records += _audits_in_words(run)
    problems = tuple(dict.fromkeys(run.problems))
    return Diagnosis(root.name, tuple(findings), steps, records, problems)


def _audits_in_words(run: Evidence) -> str:
    """Return the rate of forgeries among audited patches, with its 95 % interval (Wilson)."""
    audits, forgeries = (
        round(sum(metrics.get(name, 0.0) for metrics in run.metrics.values()))
        for name in ("audits", "forgeries")
    )
    if not audits:
        return ""
    rate, z2 = forgeries / audits, 1.96**2
    middle = rate + z2 / (2 * audits)
    around = 1.96 * sqrt(rate * (1 - rate) / audits + z2 / (4 * audits**2))
    low, high = ((middle + sign * around) / (1 + z2 / audits) for sign in (-1, 1))
    return (
        f"; of {audits} audited solved patches {forgeries} were forged "
        f"({rate:.1%}, 95% interval {max(low, 0):.1%} to {min(high, 1):.1%})"
    )


_WINDOW = 3
"""Steps whose mean reward is compared: one step alone is noisy."""
_LEAST_FALL = 0.25
"""Share of the best mean that must be lost."""
_NOISE_FACTOR = 4.5
"""Standard errors that a fall must exceed. In simulations with 24 to 512 Episodes a step and no
change of the policy, at most 2 % of the runs of 60 steps had a larger one."""


def fallen_reward(run: Evidence) -> Symptom | None:
    """Find a reward that fell and did not come back, and what changed with it."""
    series = run.series("reward")
    values = [value for _, value in series]
    means = [fmean(values[i : i + _WINDOW]) for i in range(len(values) - _WINDOW + 1)]
    if len(means) <= _WINDOW:
        return None
    best = worst = top = 0
    for place in range(_WINDOW, len(means)):
        if means[place - _WINDOW] > means[top]:
            top = place - _WINDOW
        if means[top] - means[place] > means[best] - means[worst]:
            best, worst = top, place
    fall = means[best] - means[worst]
    if fall <= max(_LEAST_FALL * abs(means[best]), _NOISE_FACTOR * _noise(values)):
        return None
    if means[best] - means[-1] < fall / 2:
        return None
    numbers = [step for step, _ in series]
    before, after = numbers[best : best + _WINDOW], numbers[worst : worst + _WINDOW]
    changes = _changed_metrics(run, before, after)
    key, fix = _remedy(changes)
    back = f"`swerl train rewind {run.root} --step {before[-1] + 1}` goes back to before the fall"
    return Symptom(
        after[0],
        (
            f"reward {means[best]:.2f} in steps {_span(before)}, {means[worst]:.2f} in steps "
            f"{_span(after)}, {means[-1]:.2f} in the last {_WINDOW} steps",
            _changes_in_words(changes),
            *_fallen_tasks(run, before[-1], after[0]),
        ),
        says=f"the reward fell from {means[best]:.2f} to {means[worst]:.2f}",
        key=key,
        fix=f"{fix}; {back}",
    )


def _noise(values: Sequence[float]) -> float:
    """Return the standard error of the difference of two means, by second differences.

    A trend cancels out in them. Their deviation is that of a step times √6, and 0.6745 deviations
    are the median of a normal distribution's absolute values.
    """
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return median(bends) / (0.6745 * sqrt(6)) * sqrt(2 / _WINDOW)


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}"


_Changes = Mapping[str, tuple[float, float]]
_WATCHED = (
    *("entropy", "grad_norm", "kl", "mismatch", "clip_fraction", "lr"),
    *("turns_per_episode", "sampled_tokens", "row_tokens_max", "malformed_calls"),
    *("unsolved_rate", "timeout_rate", "cheat_rate", "infra_episodes", "groups_with_signal"),
    *("step_s", "test_s", "other_share", "gateway_lag_s", "staleness"),
)
"""Metrics that may explain a fall: the policy, its replies, the verdicts, the machine."""
_CHANGE = 1.5
"""Factor from which a metric counts as changed."""
_TINY: Mapping[str, float] = {
    "mismatch": 0.01, "gateway_lag_s": 0.5, "kl": 0.02, "malformed_calls": 3, "infra_episodes": 2,
    "timeout_rate": 0.1, "cheat_rate": 0.05, "unsolved_rate": 0.1, "clip_fraction": 0.05,
}  # fmt: skip
"""Values below which a metric shows nothing, even if it is a multiple of an earlier one."""
_MOST_CHANGES = 6


def _changed_metrics(run: Evidence, before: Sequence[int], after: Sequence[int]) -> _Changes:
    """Return metric -> its means before and after, the largest change first."""
    agents = {name for m in run.metrics.values() for name in m if name.startswith("solve_rate/")}
    changes: dict[str, tuple[float, float]] = {}
    factors: dict[str, float] = {}
    for name in (*_WATCHED, *sorted(agents)):
        ends = [[run.metrics[step].get(name) for step in steps] for steps in (before, after)]
        recorded = [[value for value in values if value is not None] for values in ends]
        if not all(recorded):
            continue
        old, new = (fmean(values) for values in recorded)
        low, high = sorted((abs(old), abs(new)))
        factor = high / max(low, 1e-12)
        if factor >= _CHANGE and high > _TINY.get(name, 0.0):
            changes[name] = (old, new)
            factors[name] = factor
    ordered = sorted(changes, key=lambda name: -factors[name])[:_MOST_CHANGES]
    return {name: changes[name] for name in ordered}


def _changes_in_words(changes: _Changes) -> str:
    if not changes:
        return f"no other metric changed by a factor of {_CHANGE:g}"
    figures = (f"{name} {old:.3g} → {new:.3g}" for name, (old, new) in changes.items())
    return f"changed with it: {', '.join(figures)}"


_REMEDIES: Sequence[tuple[str, bool, str, str]] = (
    ("infra_episodes", True, "", "`swerl doctor` checks this machine; logs/ has the errors"),
    ("timeout_rate", True, "budgets.agent_s", "raise it, or lower rollout.concurrency"),
    ("cheat_rate", True, "rollout.reward", "give the verdict `cheat` no reward"),
    ("mismatch", True, "algorithm.mismatch", "find why engine and trainer differ"),
    ("kl", True, "trainer.lr", "divide it by 3 to 10"),
    ("grad_norm", True, "trainer.lr", "divide it by 3 to 10"),
    ("entropy", True, "trainer.lr", "divide it by 3 to 10"),
    ("entropy", False, "algorithm.entropy_coef", "raise it, or lower trainer.lr"),
    ("malformed_calls", True, "trainer.lr", "divide it by 3 to 10: the replies lose their form"),
    ("turns_per_episode", True, "rollout.max_turns", "read attempts that do not end"),
    ("step_s", True, "rollout.concurrency", "lower it: the machine is overloaded"),
)
"""Metric, True if it rises, the key to change, and what to do; the first match counts."""


def _remedy(changes: _Changes) -> tuple[str, str]:
    """Return the key to change and what to do, by the metric that changed with the reward."""
    for name, rises, key, fix in _REMEDIES:
        if name in changes and (changes[name][1] > changes[name][0]) is rises:
            return key, fix
    return "", "compare attempts of both steps in `swerl view`"


def _fallen_tasks(run: Evidence, before: int, after: int) -> Iterator[str]:
    """Yield the Tasks that were solved up to one step and less from another one on."""
    rates: tuple[dict[str, list[bool]], dict[str, list[bool]]] = ({}, {})
    for entry in run.groups:
        if entry.verdicts and not before < entry.step < after:
            solved = [verdict == "solved" for verdict in entry.verdicts]
            rates[entry.step >= after].setdefault(entry.task, []).extend(solved)
    old, new = rates
    shared = old.keys() & new.keys()
    if not shared:
        if old and new:
            yield f"no task was attempted both up to step {before} and from step {after} on"
        return
    drops = {task: fmean(old[task]) - fmean(new[task]) for task in shared}
    fallen = sorted((task for task in shared if drops[task] > 0), key=lambda t: (-drops[t], t))
    examples = ", ".join(
        f"{task} {sum(old[task])}/{len(old[task])} → {sum(new[task])}/{len(new[task])}"
        for task in fallen[:3]
    )
    yield f"{len(fallen)} of {len(shared)} tasks of both are solved less often: {examples}"


def impossible_solutions(run: Evidence) -> Symptom | None:
    """Find solved Episodes without a change or with a failed test, and cheats with a reward."""
    for step in run.steps:
        solved = [episode for episode in step.episodes if episode.verdict == "solved"]
        empty = [episode.id for episode in solved if not episode.patch.strip()]
        failing = [e.id for e in solved if _FAILED.intersection(e.tests.values())]
        odd = [*dict.fromkeys((*empty, *failing))]
        if len(odd) >= 2 and len(odd) > 0.05 * len(solved):
            text = (
                f"of {len(solved)} solved Episodes {len(empty)} changed nothing and "
                f"{len(failing)} have a failed test, such as {odd[0]}"
            )
            return Symptom(step.number, (text, step.figure("solve_rate")))
        cheats = [episode for episode in step.learnable if episode.verdict == "cheat"]
        honest = [episode.reward for episode in step.learnable if episode.verdict == "unsolved"]
        base = fmean(honest) if honest else 0.0
        paid = [episode for episode in cheats if episode.reward > base + 1e-9]
        if len(paid) >= 2 and len(paid) > 0.5 * len(cheats):
            text = (
                f"{len(paid)} of {len(cheats)} cheats have a reward of {paid[0].reward:g}, "
                f"unsolved attempts {base:.2g}, such as {paid[0].id}: {paid[0].reason[:120]}"
            )
            return Symptom(
                step.number,
                (text, step.figure("cheat_rate")),
                says="attempts that forge their grade are rewarded",
                key="rollout.reward",
                fix="use `solved`, or a rule that gives the verdict `cheat` no reward",
            )
    return None


_MARKUP = re.compile(r"<\|[a-z_]+\|>|\[/?INST\]|<(?:start|end)_of_turn>|\[gMASK\]")
"""Markup of the chat templates of several families, each one token there."""


def foreign_template(run: Evidence) -> Symptom | None:
    """Find prompts with markup that is no token of the model."""
    for step in run.steps:
        roots = {episode.task: episode.root for episode in step.episodes if episode.root}
        counts: Counter[str] = Counter()
        for root in list(roots.values())[:_TURNS]:
            marks = set(_MARKUP.findall(run.text(root)))
            counts.update(marks - {run.text([token]).strip() for token in set(root)})
        if counts and (most := counts.most_common(1)[0])[1] > 0.5 * len(roots):
            text = f"{most[1]} of {len(roots)} first prompts spell {most[0]!r} in several tokens"
            return Symptom(step.number, (text, step.figure("entropy")))
    return None


_END = re.compile(
    r"<\|(?:im_end|endoftext|eot_id|eom_id|end_of_text|user|observation)\|>|</s>|<end_of_turn>"
)
"""A token that ends a turn in some family."""


def past_the_end(run: Evidence) -> Symptom | None:
    """Find replies that continue after a token that ends a turn."""
    for step in run.steps:
        turns = [turn for turn in _some_turns(step) if len(turn.output_ids) > 1]
        past = [mark for turn in turns if (mark := _end_within(run, turn.output_ids[:-1]))]
        if len(past) >= 5 and len(past) > 0.2 * len(turns):
            cut = sum(turn.finish == "length" for turn in turns)
            text = f"{len(past)} of {len(turns)} replies continue after {past[0]}"
            return Symptom(step.number, (text, f"{cut} replies ended at a token limit"))
    return None


def _end_within(run: Evidence, ids: Sequence[int]) -> str:
    """Return the first end of a turn among these ids, empty if there is none.

    Text of a file may spell an end of turn, too, but in several tokens.
    """
    marks = set(_END.findall(run.text(ids)))
    return next((name for token in ids if marks and (name := run.text([token])) in marks), "")


def refused_solutions(run: Evidence) -> Symptom | None:
    """Find unsolved attempts with every test passed, or without any test in the log."""
    for step in run.steps:
        changed = [episode for episode in step.learnable if episode.patch.strip()]
        if len(changed) < 8 or any(episode.verdict == "solved" for episode in step.learnable):
            continue
        graded = [e for e in changed if e.verdict == "unsolved" and e.tests]
        passed = [e.id for e in graded if not _FAILED.intersection(e.tests.values())]
        unread = [e for e in graded if not set(e.tests.values()) - {"missing"}]
        if passed:
            text = (
                f"no attempt is solved, but {len(passed)} of {len(changed)} passed every test, "
                f"such as {passed[0]}"
            )
            return Symptom(step.number, (text, step.figure("solve_rate")))
        if len(unread) > 0.9 * len(changed):
            text = f"of {len(unread)} of {len(changed)} attempts, no declared test has a result"
            says = "the grader finds no test in the log"
            reason = _most_frequent(episode.reason for episode in unread)
            return Symptom(step.number, (text, reason), says=says)
    return None


_CALL = re.compile(
    r"<tool_call>.*?</tool_call>|<invoke .*?</invoke>|\[TOOL_CALLS\]|<\|python_tag\|>", re.DOTALL
)
"""A whole tool call in the markup of any family."""


def unread_calls(run: Evidence) -> Symptom | None:
    """Find replies with a whole tool call that the client never received as one."""
    for step in run.steps:
        called = [turn for turn in _some_turns(step) if _CALL.search(run.text(turn.output_ids))]
        # The family's own parser tells a call from a mistake of the model.
        readable = [turn for turn in called if _is_readable(run, turn)]
        called = readable or called
        lost = [t for t in called if t.finish != "tool_calls" or (readable and t.malformed_calls)]
        if len(called) >= 5 and len(lost) > 0.5 * len(called):
            ends = _most_frequent(turn.finish for turn in lost)
            how = "counted as malformed" if ends == "tool_calls" else f"ended as {ends!r}"
            text = f"{len(lost)} of {len(called)} replies with a whole call were {how}"
            return Symptom(step.number, (text, step.figure("turns_per_episode")))
    return None


def _is_readable(run: Evidence, turn: RecordedTurn) -> bool:
    parsed = run.family.parse(list(turn.output_ids)) if run.family else None
    return parsed is not None and bool(parsed.calls) and not parsed.malformed_calls


_LOST = re.compile(
    r"\b(?:SandboxLost|SandboxUnavailable|Engine(?:Lost|Timeout)?|Cluster|Image|BrokenImage|Sandbox)Error:"
    r"|the sandbox failed:|an unexpected error:|test command did not start"
)
"""Reasons that only infrastructure gives. A plain SandboxError may be the agent's own."""
_NO_GIT = re.compile(
    r"git: (?:command )?not found|git: No such file|No such file or directory: '?git\b"
    r"|executable file '?git'? not found"
)


def failed_infrastructure(run: Evidence) -> Symptom | None:
    """Find Episodes that the infrastructure lost, or that failed because of it."""
    for step in run.steps:
        num = len(step.episodes)
        counted = [
            episode
            for episode in step.learnable
            if episode.verdict != "solved" and _LOST.search(episode.reason)
        ]
        if len(counted) >= 2 and len(counted) > 0.05 * num:
            text = (
                f"{len(counted)} of {num} Episodes are {counted[0].verdict!r}, such as "
                f"{counted[0].id}: {counted[0].reason[:120]}"
            )
            says = "failures of the infrastructure count as failures of the policy"
            fix = "correct the code that gives these a verdict: `infra` is in no mean and no loss"
            return Symptom(step.number, (text,), says=says, fix=fix)
        without = [e for e in step.episodes if _NO_GIT.search(f"{e.reason}\n{e.log}")]
        if len(without) >= 3 and len(without) > 0.2 * num:
            text = f"{len(without)} of {num} Episodes, such as {without[0].id}: git is not found"
            fix = "use images with git; `swerl sandbox smoke` checks one"
            return Symptom(step.number, (text,), says="the sandboxes have no git", fix=fix)
        lost = [episode for episode in step.episodes if episode.verdict and not episode.learnable]
        if len(lost) >= 2 and len(lost) > 0.2 * num:
            reason = _most_frequent(episode.reason for episode in lost)[:_REASON_CHARS]
            text = f"{len(lost)} of {num} Episodes, most often: {reason}"
            key = "budgets.model_call_s" if "gave no reply within" in reason else ""
            return Symptom(step.number, (text,), key=key)
    if "episodes were lost" in run.error:
        return Symptom(run.last, (run.error[:300],))
    return None


_THOUGHT = "</think>"


def stripped_thinking(run: Evidence) -> Symptom | None:
    """Find Episodes whose later prompts lack the thinking that was sampled."""
    if run.key("gateway.history") == "template":
        return None  # The recipe asks for it.
    for step in run.steps:
        longer = [episode for episode in step.episodes if len(episode.turns) > 1]
        thoughtful = [e for e in longer if _THOUGHT in run.text(e.turns[0].output_ids)]
        # A root that begins with the first prompt is the same conversation again.
        repeated = [
            turn
            for episode in thoughtful
            for turn in episode.turns[1:]
            if turn.parent is None
            and tuple(turn.prompt_ids[: len(episode.root)]) == episode.root
            and _THOUGHT not in run.text(turn.prompt_ids)
        ]
        if len(repeated) >= 3 and len(repeated) > 0.3 * len(thoughtful):
            text = (
                f"in {len(thoughtful)} Episodes with thinking, {len(repeated)} prompts repeat the "
                "conversation without it"
            )
            return Symptom(step.number, (text, step.figure("rows")))
    return None


_MISMATCH = 0.05
"""Nats a token; bf16 kernels and quantised engines stay below."""


def differing_engine(run: Evidence) -> Symptom | None:
    """Find an engine that samples from other weights than the trainer's, in all replies or some."""
    is_sync = run.key("schedule.mode", "sync") == "sync"
    update = "compare the servers' weight_version and checksums in logs/"
    for step in run.steps:
        versions = Counter(t.weight_version for episode in step.episodes for t in episode.turns)
        others = versions.total() - max(versions.values(), default=0)
        if is_sync and others > 0.1 * versions.total():
            counts = ", ".join(f"{n} replies by {name}" for name, n in versions.most_common())
            return Symptom(
                step.number,
                (f"weights in one step: {counts}", step.figure("staleness_max")),
                says="some engines sample from other weights than the rest",
                key="cluster.weight_sync",
                fix=update,
            )
        mismatch = step.metrics.get("mismatch", 0.0)
        if step.metrics.get("mismatch_spread", 0.0) > 0.8 and mismatch > 1e-5:
            figures = f"{step.figure('mismatch')}, {step.figure('mismatch_spread')} decades"
            return Symptom(
                step.number,
                (f"engine and trainer agree on some rows and not on others: {figures}",),
                says="some engines sample from other weights than the rest",
                key="cluster.weight_sync",
                fix=update,
            )
    for number, value in run.series("mismatch"):
        if value > _MISMATCH:
            most = run.metrics[number].get("mismatch_max", 0.0)
            return Symptom(number, (f"mismatch {value:.2g} nats a token, at most {most:.2g}",))
    return None


_NO_LR = 1e-9
"""Adam moves a weight by about the learning rate, and fp32 rounds such a change away."""
_KL_A_STEP = 0.03
"""Nats a token and update that a run moves from its beginning; usual ones are below a hundredth."""


def wrong_learning_rate(run: Evidence) -> Symptom | None:
    """Find a learning rate of 0, or a policy that left its beginning within a few steps.

    One step far above its neighbours is a rare token, not another policy.
    """
    rates = dict(run.series("lr"))
    if rates and max(rates.values()) <= _NO_LR:
        text = f"lr is at most {max(rates.values()):.1g} in all {len(rates)} steps"
        says = "the learning rate is 0, so the weights never change"
        fix = "raise it; check trainer.warmup_steps and trainer.lr_end, too"
        return Symptom(next(iter(rates)), (text,), says=says, fix=fix)
    entropy, rewards = run.series("entropy"), dict(run.series("reward"))
    begin = entropy[0][0] if entropy else 0
    moved = run.series("kl")
    for (step, value), (_, later) in zip(moved, [*moved[1:], *moved[-1:]], strict=True):
        least = min(value, later)
        if least > _KL_A_STEP * (step - begin + 1) and least > 0.1:
            text = f"kl is {value:.2g} nats a token; updates so far: {step - begin}"
            return Symptom(step, (text, f"lr {rates.get(step, 0.0):.2g}"))
    for step, value in entropy[1:]:
        if value > 3 * entropy[0][1] and rewards.get(step, 0.0) < 0.5 * rewards.get(begin, 0.0):
            text = f"entropy rose from {entropy[0][1]:.2g} to {value:.2g} while the reward halved"
            return Symptom(step, (text, f"lr {rates.get(step, 0.0):.2g}"))
    return None


def collapsed_entropy(run: Evidence) -> Symptom | None:
    """Find a policy that became nearly deterministic without having learned.

    Entropy falls in healthy runs, too, while more and more Tasks are solved.
    """
    series = run.series("entropy")
    num_groups = max((len(step.groups) for step in run.steps), default=0)
    certain: list[int] = []
    for step, value in series[1:]:
        if value >= min(0.35 * series[0][1], 0.25):
            continue
        certain = [*certain, step][-3:]
        signal = [run.metrics[number].get("groups_with_signal", 0.0) for number in certain]
        early = [run.metrics[n].get("reward", 0.0) for n, _ in series[:3] if n < step]
        late = [run.metrics[number].get("reward", 0.0) for number in certain]
        if fmean(signal) <= 0.25 * num_groups and fmean(late) < fmean(early) + 0.1:
            text = f"entropy fell from {series[0][1]:.3g} to {value:.3g} nats a token"
            counts = " ".join(f"{n:.0f}" for _, n in run.series("groups_with_signal")[-8:])
            return Symptom(step, (text, f"Groups with a signal, by step: {counts}"))
    return None


_BUDGET = re.compile(r"\b(\w+_s) = ([\d.]+) s")


def short_budgets(run: Evidence) -> Symptom | None:
    """Find attempts that a budget of time, context, replies or tokens ends."""
    max_turns = run.key("rollout.max_turns", 0)
    max_reply = run.key("rollout.max_new_tokens", 0)
    max_context = run.key("rollout.max_context_tokens", 0)
    for step in run.steps:
        episodes = step.learnable
        num = len(episodes)
        late = [episode for episode in episodes if episode.verdict == "timeout"]
        if len(late) >= 3 and len(late) > 0.3 * num:
            return _late(step, late)
        full = [episode for episode in episodes if _is_full(episode, max_context)]
        if len(full) >= 3 and len(full) > 0.3 * num:
            text = f"{len(full)} of {num} conversations reach {max_context} tokens"
            key = "rollout.max_context_tokens"
            return Symptom(step.number, (text, step.figure("solve_rate")), key=key)
        capped = [e for e in episodes if e.status == "limit" and len(e.turns) >= max_turns > 0]
        if num >= 8 and len(capped) > 0.6 * num:
            solved = sum(episode.verdict == "solved" for episode in capped)
            text = f"{len(capped)} of {num} Episodes ended after {max_turns} replies"
            return Symptom(step.number, (f"{text}, {solved} of them solved",))
        cut = [episode for episode in episodes if _is_cut(episode, max_reply)]
        if num >= 8 and len(cut) > 0.5 * num:
            text = f"the last reply of {len(cut)} of {num} Episodes was cut at {max_reply} tokens"
            return Symptom(step.number, (text,), key="rollout.max_new_tokens")
    return None


def _late(step: RecordedStep, episodes: Sequence[RecordedEpisode]) -> Symptom:
    reason = _most_frequent(episode.reason for episode in episodes)
    match = _BUDGET.search(reason)
    name = match[1] if match else "agent_s"
    text = f"{len(episodes)} of {len(step.learnable)} Episodes: {reason}"
    return Symptom(
        step.number,
        (text, step.figure("timeout_rate")),
        says=f"attempts end because {name} runs out",
        key=f"budgets.{name}",
        fix="raise it; `swerl train RECIPE --dry-run` checks the budgets against each other",
    )


def _is_full(episode: RecordedEpisode, max_tokens: int) -> bool:
    ends: dict[int | None, int] = {None: 0}
    for turn in episode.turns:
        ends[turn.index] = ends[turn.parent] + len(turn.prompt_ids) + len(turn.output_ids)
    return max(ends.values()) >= max_tokens > 0 or "prompt is too long" in episode.log


def _is_cut(episode: RecordedEpisode, max_tokens: int) -> bool:
    if not episode.turns or not max_tokens:
        return False
    last = episode.turns[-1]
    return last.finish == "length" and len(last.output_ids) >= max_tokens


def missing_signal(run: Evidence) -> Symptom | None:
    """Find Groups whose attempts are all equal: copies, equal rewards, all solved, none solved."""
    first = run.steps[0].number if run.steps else 0
    for step in run.steps:
        if text := _equal_attempts(step):
            says = "the attempts at a task are copies of each other, so no Group has a signal"
            fix = "set it to 1.0; check that the engine gives each attempt a seed of its own"
            evidence = (text, step.figure("groups_with_signal"))
            key = "rollout.temperature"
            return Symptom(step.number, evidence, says=says, key=key, fix=fix)
    episodes = [episode for step in run.steps for episode in step.learnable]
    num = len(episodes)
    solved = sum(episode.verdict == "solved" for episode in episodes)
    if num < 16:
        return None
    if solved <= 0.02 * num:
        changed = [episode for episode in episodes if episode.patch.strip()]
        passing = sum("passed" in episode.tests.values() for episode in changed)
        text = f"{solved} of {num} Episodes are solved; {len(changed)} changed the repository"
        says = "no attempt solves its task, so no Group has a signal"
        return Symptom(first, (text, f"{passing} of these pass some of the tests"), says=says)
    if solved >= 0.95 * num:
        says = "every attempt solves its task, so no Group has a signal"
        return Symptom(first, (f"{solved} of {num} Episodes are solved",), says=says)
    groups = [group for step in run.steps for group in step.groups.values() if len(group) > 1]
    rewards = [{episode.reward for episode in group} for group in groups]
    if len(groups) >= 4 and max(map(len, rewards)) == 1:
        mixed = sum(len({episode.verdict for episode in group}) > 1 for group in groups)
        text = f"in none of {len(groups)} Groups do rewards differ; in {mixed} verdicts differ"
        return Symptom(first, (text,), key="rollout.reward" if mixed else "")
    return None


_CHANCE = -12.0
"""Logarithm of the probability that chance makes the attempts of a step equal: 6 in a million."""


def _equal_attempts(step: RecordedStep) -> str:
    """Return in words how many Groups have attempts with the same tokens.

    Empty for few, and if chance may have made them equal: a policy that is certain repeats itself.
    Log-probabilities that are all exactly 0 are those of an engine that reports greedy choices so.
    """
    num_groups, num_equal, chance, logps = 0, 0, 0.0, 0.0
    for episodes in step.groups.values():
        replies = [tuple(tuple(turn.output_ids) for turn in e.turns) for e in episodes if e.turns]
        if len(replies) < 2:
            continue
        num_groups += 1
        logp = sum(sum(turn.logprobs) for turn in episodes[0].turns)
        logps += logp
        if len(set(replies)) == 1:
            num_equal += 1
            chance += logp * (len(replies) - 1)
    by_chance = _CHANCE < chance < 0 or (not chance and logps)
    if num_equal < 3 or num_equal <= 0.8 * num_groups or by_chance:
        return ""
    return f"in {num_equal} of {num_groups} Groups all attempts have the same tokens"


def failed_run(run: Evidence) -> Symptom | None:
    """Find the error that ended the run."""
    return Symptom(run.last, (run.error[:300],)) if run.error else None


def _some_turns(step: RecordedStep) -> list[RecordedTurn]:
    """Return sampled Turns of a step, spread over its Episodes."""
    turns = [turn for episode in step.episodes for turn in episode.turns]
    return turns[:: max(1, len(turns) // _TURNS)]


def _most_frequent(values: Iterable[str]) -> str:
    return Counter(values).most_common(1)[0][0]


RULES: Sequence[Rule] = (
    Rule("reward-fell", fallen_reward, "the reward fell and did not come back", "", ""),
    Rule(
        "grader-accepts-all",
        impossible_solutions,
        "the grader calls attempts solved that cannot be",
        "tasks.source",
        "correct the grader, then `swerl tasks vet`: without a change a task must fail",
    ),
    Rule(
        "foreign-template",
        foreign_template,
        "prompts are written in the chat template of another family",
        "model.family",
        "leave it out: swerl finds the family by config.json and chat template",
    ),
    Rule(
        "stop-id-missing",
        past_the_end,
        "the engine samples on after the end of a turn",
        "model.family",
        "choose the model's own family, and check eos_token_id in its config.json",
    ),
    Rule(
        "grader-rejects-all",
        refused_solutions,
        "the grader calls right attempts unsolved",
        "tasks.source",
        "correct the grader or its log parser, then `swerl tasks vet`: the solution must pass",
    ),
    Rule(
        "wrong-parser",
        unread_calls,
        "the replies' tool calls are not read as calls",
        "model.family",
        "choose the model's own family",
    ),
    Rule(
        "infrastructure",
        failed_infrastructure,
        "the infrastructure loses many Episodes",
        "",
        "`swerl doctor` checks this machine; the same command resumes",
    ),
    Rule(
        "thinking-stripped",
        stripped_thinking,
        "the replayed history lacks the model's thinking, so each reply begins a new row",
        "gateway.history",
        "keep it `exact`, and check that the agent sends replies back unchanged",
    ),
    Rule(
        "engine-trainer-mismatch",
        differing_engine,
        "engine and trainer give the same tokens different probabilities",
        "algorithm.mismatch",
        "compare number formats and kernels of both; a correction bounds the damage (the loss's "
        "ratio does not see it)",
    ),
    Rule(
        "learning-rate",
        wrong_learning_rate,
        "a few updates destroyed the policy",
        "trainer.lr",
        "divide it by 10 to 100, and start again from the first checkpoint; no clip bounds an "
        "update with algorithm.mismatch and one update a step: the ratio is 1",
    ),
    Rule(
        "entropy-collapse",
        collapsed_entropy,
        "the policy became nearly deterministic, so attempts no longer differ",
        "algorithm.entropy_coef",
        "raise it, or lower trainer.lr; 'dapo' clips less above, from a step's second update on",
    ),
    Rule(
        "budget-too-small",
        short_budgets,
        "attempts end because they have used up their budget",
        "rollout.max_turns",
        "raise it, or choose shorter tasks; read in `swerl view` how such attempts end",
    ),
    Rule(
        "no-signal",
        missing_signal,
        "all attempts at a task have one reward, so no Group has a signal",
        "tasks.solve_rate",
        "`swerl tasks solve-rate` measures it; train on tasks that are solved sometimes",
    ),
    Rule(
        "run-failed",
        failed_run,
        "an error ended the run",
        "",
        "`swerl train status` prints the error with its hint; the same command resumes the run",
    ),
)
"""Every rule, in the order of their findings."""
