"""Name the cause of a sick run: a table of rules over the run's records.

A rule looks at the `Evidence` and returns a Symptom, or None. A contradiction in the records, such
as a solved Episode with a failed test, is nearly certain. An outcome that several causes share,
such as no solved Episode, has a lower confidence. The most certain Finding is first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swerl.core.errors import shortened
from swerl.runs import _why_outcomes as outcomes
from swerl.runs import _why_tokens as tokens
from swerl.runs.evidence import Evidence, Symptom, read
from swerl.runs.index import DAMAGE

_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause and the function that sees its effects."""

    cause: str
    """Short name, the same in every release."""
    confidence: float
    """From 0 to 1, to order findings; 0.9 and above is a contradiction in the records."""
    look: Callable[[Evidence], Symptom | None]
    says: str
    """One sentence for people."""
    key: str
    """Recipe key to change; empty if none can."""
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
    confidence: float
    step: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings of a run, the most certain first; none for a healthy run."""

    run: str
    findings: tuple[Finding, ...]
    steps: tuple[int, ...]
    """Steps whose Episodes were read; none if no step trains them."""
    read: str
    """The records that were read, in words; empty if there are none."""
    problems: tuple[str, ...]
    """Records that could not be read."""

    def lines(self) -> Iterator[str]:
        """Yield one to three lines of text: the first cause, its evidence, its remedy."""
        if not self.findings:
            none = "no step and no Episode is finished, so there is none to judge"
            yield f"no fault found in the records of {self.read}" if self.read else none
            return
        first = self.findings[0]
        yield f"{first.cause}: {first.says}"
        yield f"{first.evidence[0]} (step {first.step})" if self.steps else first.evidence[0]
        yield f"{first.key}: {first.fix}" if first.key else first.fix


def diagnose(root: Path, *, until: int | None = None) -> Diagnosis:
    """Apply every rule to a run's records, of its first `until` steps if that is given.

    Raises RunError if there is neither a recipe nor an Episode.
    """
    run = read(root, until=until)
    found = []
    recorded = bool(run.key("sft.sources"))
    if recorded:
        run.problems.append("no rule applies: they judge new Episodes, and this run's are recorded")
    rules = [rule for rule in RULES if run.trains or rule.cause not in _OF_TRAINING]
    for rule in () if recorded else rules:
        try:
            seen = rule.look(run)
        except DAMAGE as error:
            run.problems.append(f"rule {rule.cause}: {type(error).__name__}: {error}")
            continue
        if seen:
            found.append(_finding(rule, seen))
    found.sort(key=lambda each: -each.confidence)
    # Two rules may see one cause; the more certain one tells it.
    first = {each.cause: each for each in reversed(found)}
    found = [each for each in found if first[each.cause] is each]
    steps = tuple(step.number for step in run.steps) if run.trains else ()
    problems = tuple(dict.fromkeys(run.problems))
    return Diagnosis(root.name, tuple(found), steps, _in_words(run), problems)


def _in_words(run: Evidence) -> str:
    """Return the steps that were read, or the outcomes of Episodes that no step trains."""
    seen = [each for step in run.steps for each in step.episodes]
    if run.trains and run.steps:
        return f"steps {', '.join(str(each.number) for each in run.steps)}"
    if not seen:
        return ""
    counts = Counter(each.verdict or "not graded" for each in seen)
    told = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    reasons = Counter(each.reason for each in seen if each.reason and each.verdict != "solved")
    most = (
        f"; most often: {shortened(reasons.most_common(1)[0][0], _REASON_CHARS)}" if reasons else ""
    )
    noun = "Episode" if len(seen) == 1 else "Episodes"
    return f"{len(seen)} {noun} ({told}{most})"


def _finding(rule: Rule, seen: Symptom) -> Finding:
    says, key = seen.says or rule.says, seen.key or rule.key
    about = (key, rule.fix, rule.confidence, seen.step)
    return Finding(rule.cause, says, seen.evidence, *about)


RULES: Sequence[Rule] = (
    Rule(
        "wrong-parser",
        0.95,
        tokens.unread_calls,
        "the replies' tool calls are not read as calls",
        "model.family",
        "choose the model's own family",
    ),
    Rule(
        "stop-id-missing",
        0.96,
        tokens.past_the_end,
        "the engine samples on after the end of a turn",
        "model.family",
        "choose the model's own family, and check eos_token_id in its config.json",
    ),
    Rule(
        "advantage-sign",
        0.98,
        tokens.turned_advantages,
        "better attempts have lower advantages, so the run unlearns what is rewarded",
        "algorithm.type",
        "correct the sign in the algorithm's `advantages`",
    ),
    Rule(
        "experts-shuffled",
        0.93,
        tokens.foreign_experts,
        "the recorded experts are not those of their tokens",
        "trainer.routing_replay",
        "set it to false until the engine's records are right; compare SGLang's version",
    ),
    Rule(
        "grader-accepts-all",
        0.97,
        outcomes.impossible_solutions,
        "the grader calls attempts solved that cannot be",
        "tasks.source",
        "correct the grader, then `swerl tasks vet`: without a change a task must fail",
    ),
    Rule(
        "lr-zero",
        0.98,
        outcomes.no_learning_rate,
        "the learning rate is 0, so the weights never change",
        "trainer.lr",
        "raise it; check trainer.warmup_steps and trainer.lr_end, too",
    ),
    Rule(
        "tasks-too-hard",
        0.5,
        outcomes.nothing_solved,
        "no attempt solves its task, so no Group has a signal",
        "tasks.solve_rate",
        "`swerl tasks solve-rate` measures it; train on tasks between 0.1 and 0.9",
    ),
    Rule(
        "budget-too-small",
        0.92,
        outcomes.late_attempts,
        "attempts end because a time budget runs out",
        "budgets.agent_s",
        "raise it; `swerl train RECIPE --dry-run` checks the budgets against each other",
    ),
    Rule(
        "never-ends",
        0.8,
        outcomes.endless_attempts,
        "the policy works on after its fix until a limit stops it, which costs tokens and time",
        "rollout.shaping.unfinished",
        "set it to 0.5: an attempt that does not end by itself then earns less",
    ),
    Rule(
        "budget-too-small",
        0.75,
        outcomes.cut_attempts,
        "attempts end because they have used up their replies or tokens",
        "rollout.max_turns",
        "raise it, or choose shorter tasks",
    ),
    Rule(
        "infra-as-failure",
        0.95,
        outcomes.infra_counted,
        "failures of the infrastructure count as failures of the policy",
        "",
        "correct the code that gives these a verdict: `infra` enters no mean and no loss",
    ),
    Rule(
        "prompt-changed",
        0.94,
        tokens.changed_prompts,
        "the system prompt or the tools changed during the run",
        "harness.type",
        "pin the agent's version and its tools; start the run again",
    ),
    Rule(
        "train-in-eval",
        0.9,
        outcomes.evaluated_training,
        "tasks are trained on and evaluated, so the evaluation is too good",
        "tasks.heldout",
        "remove them from one of the two files: `swerl tasks filter`",
    ),
    Rule(
        "entropy-collapse",
        0.8,
        outcomes.collapsed_entropy,
        "the policy became nearly deterministic, so attempts no longer differ",
        "algorithm.entropy_coef",
        "raise it, or lower trainer.lr; algorithm.type = 'dapo' clips less above",
    ),
    Rule(
        "thinking-stripped",
        0.93,
        tokens.stripped_thinking,
        "the replayed history lacks the model's thinking, so each reply begins a new row",
        "gateway.history",
        "keep it `exact`, and check that the agent sends replies back unchanged",
    ),
    Rule(
        "mask-shifted",
        0.99,
        tokens.shifted_mask,
        "the trained tokens are not the sampled ones",
        "",
        "correct the code that builds the rows: mask, ids and logprobs have one entry a token",
    ),
    Rule(
        "engine-not-updated",
        0.94,
        tokens.stale_engine,
        "some engines sample from other weights than the rest",
        "cluster.weight_sync",
        'use "disk", and compare the servers\' weight_version and checksums in logs/',
    ),
    Rule(
        "engine-trainer-mismatch",
        0.88,
        tokens.any_mismatch,
        "engine and trainer give the same tokens different probabilities",
        "algorithm.mismatch",
        "compare number formats and kernels of both; a correction bounds the damage",
    ),
    Rule(
        "grader-rejects-all",
        0.96,
        outcomes.refused_solutions,
        "the grader calls right attempts unsolved",
        "tasks.source",
        "correct the grader or its log parser, then `swerl tasks vet`: the solution must pass",
    ),
    Rule(
        "lr-too-high",
        0.86,
        outcomes.wild_steps,
        "a few updates destroyed the policy",
        "trainer.lr",
        "divide it by 10 to 100, and start again from the first checkpoint",
    ),
    Rule(
        "groups-equal",
        0.91,
        tokens.repeated_attempts,
        "the attempts at a task are copies of each other, so no Group has a signal",
        "seed",
        "check the engine: each attempt is sampled with a seed of its own",
    ),
    Rule(
        "groups-equal",
        0.85,
        outcomes.equal_rewards,
        "all attempts at a task have one reward, so no Group has a signal",
        "tasks.solve_rate",
        "check the reward rule; train on tasks that are solved sometimes",
    ),
    Rule(
        "tasks-too-easy",
        0.5,
        outcomes.everything_solved,
        "every attempt solves its task, so no Group has a signal",
        "tasks.solve_rate",
        "`swerl tasks solve-rate` measures it; train on tasks between 0.1 and 0.9",
    ),
    Rule(
        "context-overflow",
        0.92,
        outcomes.full_contexts,
        "conversations reach the context limit before the work is done",
        "rollout.max_context_tokens",
        "raise it, or lower the agent's output limits",
    ),
    Rule(
        "git-missing",
        0.96,
        outcomes.missing_git,
        "the sandboxes have no git",
        "tasks.source",
        "use images with git; `swerl sandbox smoke` checks one",
    ),
    Rule(
        "infrastructure",
        0.7,
        outcomes.lost_episodes,
        "the infrastructure loses many Episodes",
        "",
        "`swerl doctor` checks this machine; the same command resumes",
    ),
    Rule(
        "run-failed",
        0.4,
        outcomes.failed_run,
        "an error ended the run",
        "",
        "`swerl train status` prints the error with its hint; the same command resumes the run",
    ),
    Rule(
        "foreign-template",
        0.97,
        tokens.foreign_template,
        "prompts are written in the chat template of another family",
        "model.family",
        "leave it out: swerl finds the family by config.json and chat template",
    ),
    Rule(
        "temperature-zero",
        0.94,
        tokens.greedy_sampling,
        "replies are not sampled: every attempt takes the likeliest token",
        "rollout.temperature",
        "set it to 1.0, and check that nothing between gateway and engine changes it",
    ),
    Rule(
        "rewarded-cheat",
        0.97,
        outcomes.rewarded_cheats,
        "attempts that forge their grade are rewarded",
        "rollout.reward",
        "use `solved`, or a rule that gives the verdict `cheat` no reward",
    ),
)
"""Every rule. Their order does not matter: the confidence orders the findings."""
_OF_TRAINING = ("groups-equal", "tasks-too-easy", "temperature-zero")
"""Causes that are faults only if the Episodes are trained on."""
