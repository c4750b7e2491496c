"""The faults of `bench/why.py`, each with the cause that `swerl why` must name first."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from _why_records import collapse, give_experts, solve_all, strip_thoughts

from swerl.core.chat import ParsedReply
from swerl.core.episode import Episode
from swerl.core.errors import SandboxLostError
from swerl.core.grade import Grade, TestStatus, Verdict
from swerl.core.task import Task
from swerl.core.turn import seed_of
from swerl.engines import _sglang_client
from swerl.engines.families import tiny
from swerl.engines.families.tiny import TinyFamily
from swerl.grading.flow import FlowGrader
from swerl.harnesses.builtin import Builtin
from swerl.rollout import episode, wiring
from swerl.rollout.step import choose_tasks
from swerl.sandboxes._local.sandbox import LocalSandbox
from swerl.tasks import twin
from swerl.training import loop
from swerl.training.algorithms._policy_gradient import PolicyGradient

Evals = dict[str, list[Task]]


@dataclass(frozen=True)
class Case:
    """One run: a planted fault, or a healthy seed."""

    name: str
    cause: str = ""
    """The cause that must be named first; empty for a healthy run."""
    number: int = 0
    """The fault's place in the issue's list."""
    seed: int = 0
    how: str = "run"
    """`run`: the twin ran with the fault; `record`: a healthy run's records were changed."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    patches: Callable[[], Sequence[AbstractContextManager[Any]]] = tuple
    """Returns what plants the fault in the controller's process."""
    tasks: Callable[[list[Task], Evals, Path], None] = lambda train, evals, folder: None
    """Changes the Tasks."""
    mutate: Callable[[Path], None] = lambda root: None
    """Changes the records of the healthy run."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a trainer of its own."""
    second_engine: bool = False
    """Whether half of the sessions go to an engine that gets no new weights."""

    @property
    def folder(self) -> str:
        """Name of its run."""
        return self.name.replace(" ", "-").replace(",", "")


def _no_calls(self: TinyFamily, ids: Sequence[int]) -> ParsedReply:
    return ParsedReply(self.text(ids), "", (), 0)


def _endless(*args: Any, **settings: Any) -> dict[str, Any]:
    body = _BODY(*args, **settings)
    body["sampling_params"] |= {"ignore_eos": True, "stop_token_ids": []}
    return body


_BODY = _sglang_client.generate_body


def _turned(sign: float) -> Callable[..., list[list[float]]]:
    honest = PolicyGradient.advantages

    def advantages(self: Any, groups: Any) -> list[list[float]]:
        return [[sign * value for value in row] for row in honest(self, groups)]

    return advantages


async def _accepts(self: Any, task: Task, patch: Any, open_clean: Any) -> Grade:
    tests = (*task.grading.fail_to_pass, *task.grading.pass_to_pass)
    return Grade(Verdict.SOLVED, tests=dict.fromkeys(tests, TestStatus.PASSED))


def _hard(train: list[Task], evals: Evals, folder: Path) -> None:
    """Replace each Task by one whose right expression the policy has never seen."""
    variants = twin.make_variants(split="train", count=len(train), seed=0)
    for place, variant in enumerate(variants):
        first, second = variant.function.operands
        good = f"({first} + 3) * ({second} + 5) - 1"
        names = dict.fromkeys(variant.function.params, 0)
        calls = []
        for call in (*variant.failing, *variant.passing):
            if call.function == variant.function.name:
                values = names | dict(zip(names, call.args, strict=True))
                call = replace(call, want=eval(good, {}, values))
                calls.append(call)
        told = calls[0]
        prompt = f"Fix {variant.file}: {told.text} should be {told.want}."
        hard = replace(variant, good=good, prompt=prompt, failing=tuple(calls), passing=())
        train[place] = twin._task(folder, hard)


def _losing(share: float) -> Callable[..., Any]:
    honest, count = Builtin.run, iter(range(10**9))

    async def run(self: Any, *args: Any, **settings: Any) -> Any:
        done = await honest(self, *args, **settings)
        if next(count) % round(1 / share) == 0:
            raise SandboxLostError("the sandbox died: its machine is gone")
        return done

    return run


def _as_unsolved(error: Exception) -> Grade:
    return Grade(Verdict.UNSOLVED, f"{type(error).__name__}: {error}")


def _new_schema() -> Sequence[AbstractContextManager[Any]]:
    """From the second step on, prompts begin with a system message."""
    collect, render, steps = loop.collect, TinyFamily.render, [0]

    def counted(*args: Any) -> Any:
        steps[0] += 1
        return collect(*args)

    def changed(self: TinyFamily, request: Any) -> list[int]:
        ids = render(self, request)
        text = "system\ntools: bash(command), edit(path, old, new)\n"
        return [*self._tokenizer.encode([tiny.START, text, tiny.END, "\n"] * (steps[0] > 0)), *ids]

    return (
        mock.patch.object(loop, "collect", counted),
        mock.patch.object(TinyFamily, "render", changed),
    )


def _new_tools() -> Sequence[AbstractContextManager[Any]]:
    """From the second step on, the agent offers one tool under another name."""
    collect, settings, steps = loop.collect, Builtin._settings, [0]

    def counted(*args: Any) -> Any:
        steps[0] += 1
        return collect(*args)

    def changed(self: Any) -> dict[str, Any]:
        found = settings(self)
        if steps[0]:
            found["tools"] = [{**found["tools"][0], "name": "shell"}, *found["tools"][1:]]
        return found

    return (
        mock.patch.object(loop, "collect", counted),
        mock.patch.object(Builtin, "_settings", changed),
    )


def _duplicated(train: list[Task], evals: Evals, folder: Path) -> None:
    first = choose_tasks(train, 0, 6, 0)
    evals["heldout"][:3] = [replace(task, id=f"other__{task.id}") for task in first[:3]]


def _shifted(step: int, groups: Any, algorithm: Any) -> Any:
    """Collect a Batch and move its masks by one token."""
    made = _COLLECT(step, groups, algorithm)
    rows = tuple(replace(row, mask=array("b", [*row.mask[1:], 0])) for row in made.batch.samples)
    return replace(made, batch=replace(made.batch, samples=rows))


_COLLECT = loop.collect


async def _rejects(self: Any, task: Task, patch: Any, open_clean: Any) -> Grade:
    found = await _GRADE(self, task, patch, open_clean)
    failed = dict.fromkeys(task.grading.fail_to_pass, TestStatus.FAILED)
    reason = f"{len(failed)} declared tests do not pass"
    return replace(found, verdict=Verdict.UNSOLVED, reason=reason, tests={**found.tests, **failed})


async def _finds_cheats(self: Any, task: Task, patch: Any, open_clean: Any) -> Grade:
    """Call every fourth attempt a cheat: the twin's policy makes none."""
    found = await _GRADE(self, task, patch, open_clean)
    if next(_COUNT) % 4:
        return found
    return replace(found, verdict=Verdict.CHEAT, reason="a test did not notice a swap: forged")


_GRADE, _COUNT = FlowGrader.grade, iter(range(10**9))


def _pays_cheats(name: str) -> Callable[[Any], float]:
    return lambda attempt: float(attempt.grade.verdict in (Verdict.SOLVED, Verdict.CHEAT))


def _one_seed(seed: int, name: str) -> int:
    return seed_of(seed, name.rpartition(".")[0])


_FIND_ALL_BUT_GIT = """
mkdir -p /tmp/bin
for file in /bin/* /usr/bin/*; do [ -e "/tmp/bin/${file##*/}" ] || ln -s "$file" /tmp/bin/; done
rm /tmp/bin/git*
"""


def _without_git(train: list[Task], evals: Evals, folder: Path) -> None:
    for tasks in (train, *evals.values()):
        tasks[:] = [replace(task, setup=_FIND_ALL_BUT_GIT) for task in tasks]


async def _poor_path(self: Any, argv: Sequence[str], **settings: Any) -> Any:
    """Run a command in a sandbox with a search path that lacks git; the setup makes that path."""
    if list(argv) != ["bash", "-s"]:
        settings["env"] = {**(settings.get("env") or {}), "PATH": "/tmp/bin"}
    return await _RUN(self, argv, **settings)


_RUN = LocalSandbox.run


def _llama(self: TinyFamily, request: Any) -> list[int]:
    text = "".join(
        f"<|start_header_id|>{each.role}<|end_header_id|>\n\n{each.text}<|eot_id|>"
        for each in request.messages
    )
    return self._tokenizer.encode([f"{text}<|start_header_id|>assistant<|end_header_id|>\n\n"])


def _malformed(self: TinyFamily, ids: Sequence[int]) -> ParsedReply:
    text = self.text(ids)
    return ParsedReply(text, "", (), text.count("<tool_call>"))


def _sampled_at(temperature: float) -> Callable[..., dict[str, Any]]:
    def body(*args: Any, **settings: Any) -> dict[str, Any]:
        made = _BODY(*args, **settings)
        made["sampling_params"] |= {"temperature": temperature}
        return made

    return body


def _shifted_right(step: int, groups: Any, algorithm: Any) -> Any:
    made = _COLLECT(step, groups, algorithm)
    rows = [replace(row, mask=array("b", [0, *row.mask[:-1]])) for row in made.batch.samples]
    return replace(made, batch=replace(made.batch, samples=tuple(rows)))


def _evaluated(train: list[Task], evals: Evals, folder: Path) -> None:
    evals["heldout"][:2] = choose_tasks(train, 1, 6, 0)[:2]


FAULTS: Sequence[Case] = (
    Case(
        "wrong parser",
        "wrong-parser",
        1,
        patches=lambda: [mock.patch.object(TinyFamily, "parse", _no_calls)],
    ),
    Case(
        "stop id missing",
        "stop-id-missing",
        3,
        patches=lambda: [mock.patch.object(_sglang_client, "generate_body", _endless)],
    ),
    Case(
        "advantage sign",
        "advantage-sign",
        5,
        patches=lambda: [mock.patch.object(PolicyGradient, "advantages", _turned(-1.0))],
    ),
    Case(
        "experts shuffled",
        "experts-shuffled",
        7,
        how="record",
        mutate=lambda root: give_experts(root, shuffled=True),
    ),
    Case(
        "grader always 1",
        "grader-accepts-all",
        9,
        patches=lambda: [mock.patch.object(FlowGrader, "grade", _accepts)],
    ),
    Case("lr 0", "lr-zero", 11, trainer={"lr": 1e-30}),
    Case("tasks too hard", "tasks-too-hard", 13, tasks=_hard),
    Case("budget too small", "budget-too-small", 15, recipe={"budgets": {"agent_s": 0.2}}),
    Case(
        "infra counted as 0",
        "infra-as-failure",
        17,
        patches=lambda: [
            mock.patch.object(Builtin, "run", _losing(1 / 3)),
            mock.patch.object(episode, "_failed_grade", _as_unsolved),
        ],
    ),
    Case("tool schema changed", "prompt-changed", 19, patches=_new_schema),
    Case("duplicated tasks", "train-in-eval", 21, tasks=_duplicated),
    Case("thinking stripped", "thinking-stripped", 2, how="record", mutate=strip_thoughts),
    Case(
        "mask off by one",
        "mask-shifted",
        4,
        patches=lambda: [mock.patch.object(loop, "collect", _shifted)],
    ),
    Case("engine not updated", "engine-not-updated", 6, second_engine=True),
    Case(
        "grader always 0",
        "grader-rejects-all",
        8,
        patches=lambda: [mock.patch.object(FlowGrader, "grade", _rejects)],
    ),
    Case("lr x 100", "lr-too-high", 10, trainer={"lr": 4e-2}),
    Case(
        "all groups equal",
        "groups-equal",
        12,
        patches=lambda: [mock.patch.object(episode, "seed_of", _one_seed)],
    ),
    Case("tasks too easy", "tasks-too-easy", 14, how="record", mutate=solve_all),
    Case(
        "context overflow",
        "context-overflow",
        16,
        recipe={"rollout": {"max_context_tokens": 80}},
    ),
    Case(
        "git missing",
        "git-missing",
        18,
        tasks=_without_git,
        patches=lambda: [mock.patch.object(LocalSandbox, "run", _poor_path)],
    ),
    Case(
        "template of another family",
        "foreign-template",
        20,
        patches=lambda: [mock.patch.object(TinyFamily, "render", _llama)],
    ),
    Case(
        "temperature 0",
        "temperature-zero",
        22,
        patches=lambda: [mock.patch.object(_sglang_client, "generate_body", _sampled_at(0.0))],
    ),
    Case(
        "rewarded cheat",
        "rewarded-cheat",
        24,
        patches=lambda: [
            mock.patch.object(FlowGrader, "grade", _finds_cheats),
            mock.patch.object(wiring, "reward_of", _pays_cheats),
        ],
    ),
    Case("entropy collapse", "entropy-collapse", 23, how="record", mutate=collapse),
)


VARIANTS: Sequence[Case] = (
    Case(
        "calls malformed",
        "wrong-parser",
        101,
        patches=lambda: [mock.patch.object(TinyFamily, "parse", _malformed)],
    ),
    Case(
        "mask off by one, right",
        "mask-shifted",
        104,
        patches=lambda: [mock.patch.object(loop, "collect", _shifted_right)],
    ),
    Case(
        "reward constant",
        "groups-equal",
        112,
        patches=lambda: [mock.patch.object(wiring, "reward_of", lambda name: lambda attempt: 0.5)],
    ),
    Case("replies cut", "budget-too-small", 115, recipe={"rollout": {"max_new_tokens": 12}}),
    Case("two replies", "budget-too-small", 115, recipe={"rollout": {"max_turns": 2}}),
    Case(
        "infra trained on",
        "infra-as-failure",
        117,
        patches=lambda: [
            mock.patch.object(Builtin, "run", _losing(1 / 3)),
            mock.patch.object(Episode, "learnable", True),
        ],
    ),
    Case("tool renamed", "prompt-changed", 119, patches=_new_tools),
    Case("tasks evaluated by name", "train-in-eval", 121, tasks=_evaluated),
    Case(
        "temperature 0.05",
        "temperature-zero",
        122,
        patches=lambda: [mock.patch.object(_sglang_client, "generate_body", _sampled_at(0.05))],
    ),
    Case(
        "engine at temperature 2",
        "engine-trainer-mismatch",
        125,
        patches=lambda: [mock.patch.object(_sglang_client, "generate_body", _sampled_at(2.0))],
    ),
)
"""Other forms of the same faults, planted after all rules were written."""
