"""The slime example, installed: real sandboxes, gateway and grading, SGLang's contract."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swerl.core.changes import edits
from swerl.core.chat import Finish, Message, Role
from swerl.core.episode import Episode, Status
from swerl.core.errors import InputError
from swerl.core.grade import Grade, Verdict
from swerl.core.task import Task, to_row
from swerl.core.turn import RoutedExperts, Trajectory, Turn
from swerl.engines.families import tiny
from swerl.harnesses import builtin
from tests.unit.examples.packages import ROOT, install
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway._wire_engine import WireEngine, wired
from tests.unit.rollout.conftest import task as task

slime = SimpleNamespace()
"""The installed package's hooks."""
RECIPE = """
name = "for-slime"
[model]
family = "tiny"
[rollout]
max_context_tokens = 8000
max_turns = 8
[budgets]
model_call_s = 20
tool_s = 30
agent_s = 60
grading_s = 90
episode_s = 180
sandbox_s = 300
"""
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 800}
DONE = Message(Role.ASSISTANT, "Nothing to do.")

# A stand-in for slime: its Sample, and its use of the hooks' results. Written to slime's contract
# as of August 2026 (slime/utils/types.py, slime/ray/rollout.py, slime/rollout/sglang_rollout.py):
# the fields, how a group is rolled out, how rewards are normalised where no hook does it, and how
# samples become training data.


@dataclass
class Sample:
    """One row of slime's; the fields that this test needs, under slime's names and types."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    non_generation_time: float = 0.0


def arguments(**more: Any) -> Namespace:
    """Return the arguments that hooks read, with slime's defaults."""
    return Namespace(**{
        "hf_checkpoint": "", "sglang_router_ip": "127.0.0.1", "sglang_router_port": 0,
        "advantage_estimator": "grpo", "rewards_normalization": True,
        "grpo_std_normalization": True, "n_samples_per_prompt": 2, "rollout_batch_size": 1,
        "custom_reward_post_process_path": "swerl_slime.hooks.normalize",
        "rollout_max_context_len": None, "partial_rollout": False, "group_rm": False,
        "use_rollout_routing_replay": False,
    } | more)  # fmt: skip


async def rolled_out(
    args: Namespace, group: Sequence[Sample], generate: Callable[..., Any], params: dict[str, Any]
) -> list[list[Sample]]:
    """Roll out a prompt's samples as `generate_and_rm_group` does, in training."""
    assert "evaluation" in inspect.signature(generate).parameters
    calls = (generate(args, one, dict(params), evaluation=False) for one in group)
    found = await asyncio.gather(*calls)
    return [one if isinstance(one, list) else [one] for one in found]


def own_normalisation(args: Namespace, samples: Sequence[Sample]) -> list[float]:
    """Normalise rewards as slime does without a hook: one group where a count differs."""
    rewards: list[float] = [one.reward for one in samples]  # type: ignore[misc]
    size = args.n_samples_per_prompt
    if len(rewards) != size * args.rollout_batch_size:
        size = len(rewards)
    out: list[float] = []
    for start in range(0, len(rewards), size):
        row = rewards[start : start + size]
        out += [(reward - fmean(row)) / (stdev(row) + 1e-6) for reward in row]
    return out


def train_data(
    args: Namespace, samples: Sequence[Sample], normalize: Callable[..., Any]
) -> dict[str, list[Any]]:
    """Convert samples as `_convert_samples_to_train_data` does, with its assertions."""
    raw, rewards = normalize(args, samples)
    assert len(raw) == len(rewards) == len(samples)
    for one in samples:
        assert one.loss_mask is not None
        assert len(one.loss_mask) == one.response_length <= len(one.tokens)
        assert one.rollout_log_probs is not None
        assert len(one.rollout_log_probs) == one.response_length
        assert one.rollout_id is not None
    masks = [[0] * one.response_length if one.remove_sample else one.loss_mask for one in samples]
    return {"rewards": rewards, "raw_reward": raw, "loss_masks": masks}


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the package into a folder of its own, and import its hooks from there."""
    site = install(ROOT / "examples" / "slime", tmp_path_factory.mktemp("slime"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        vars(slime).update(vars(importlib.import_module("swerl_slime.hooks")))
        yield


@pytest.fixture
async def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
async def wire(engine: RecordingEngine) -> AsyncIterator[WireEngine]:
    async with wired(engine) as served:
        yield served


@pytest.fixture
async def args(wire: WireEngine, tmp_path: Path) -> AsyncIterator[Namespace]:
    """slime's arguments, with a router that is one server; what is opened is closed again."""
    tiny.save_tokenizer(tiny.byte_tokenizer(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 512}))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    port = int(wire.url.rpartition(":")[2])
    yield arguments(hf_checkpoint=str(tmp_path), swerl_recipe=str(recipe), sglang_router_port=port)
    await slime.close()


def sample_of(task: Task, index: int = 0) -> Sample:
    """Return what slime's data source makes of a row that `swerl convert` wrote."""
    row = json.loads(json.dumps(to_row(task)))
    return Sample(
        group_index=0, index=index, prompt=row["prompt"], label=row["label"],
        metadata=row["metadata"],
    )  # fmt: skip


def gold(task: Task) -> list[Any]:
    return list(builtin.build(builtin.Options()).script(edits(task.gold_patch), task.workdir))


async def test_a_solved_episode_is_one_sample_of_the_exact_tokens(
    task: Task, engine: RecordingEngine, args: Namespace
) -> None:
    engine.lines = gold(task)
    [[sample]] = await rolled_out(args, [sample_of(task)], slime.generate, PARAMS)
    last = engine.calls[-1]
    assert (sample.reward, sample.status, sample.remove_sample) == (
        1.0, Sample.Status.COMPLETED, False,
    )  # fmt: skip
    assert sample.tokens == [*last.prompt, *last.output]
    start = len(sample.tokens) - sample.response_length
    assert sample.tokens[:start] == list(engine.calls[0].prompt)
    assert sample.loss_mask and sample.rollout_log_probs
    trained = [n for n, one in enumerate(sample.loss_mask) if one]
    sampled = [one for call in engine.calls for one in call.output]
    logprobs = [one for call in engine.calls for one in call.logprobs]
    assert [sample.tokens[start + n] for n in trained] == sampled
    assert [sample.rollout_log_probs[n] for n in trained] == logprobs
    assert sample.weight_versions == ["v1"]
    assert sample.rollout_id == 0
    assert sample.metadata["swerl_episode"]["verdict"] == "solved"
    assert sample.metadata["remote_env_info"]
    assert "submit" in sample.response
    assert {call.sampling.max_new_tokens for call in engine.calls} == {800}
    train_data(args, [sample], slime.normalize)


async def test_a_rollout_that_forks_is_several_samples_of_one_rollout(
    task: Task, args: Namespace, monkeypatch: pytest.MonkeyPatch, engine: RecordingEngine
) -> None:
    monkeypatch.setattr(builtin.Builtin, "run", _two_conversations(builtin.Builtin.run))
    engine.lines = [DONE, *gold(task)]
    [samples] = await rolled_out(args, [sample_of(task, 7)], slime.generate, PARAMS)
    assert len(samples) == 2
    assert {one.rollout_id for one in samples} == {7}
    assert [one.reward for one in samples] == [1.0, 1.0]
    shares = [one.metadata["swerl_episode"]["share"] for one in samples]
    assert sum(shares) == pytest.approx(1.0)
    assert sum(sum(one.loss_mask or ()) for one in samples) == sum(
        len(call.output) for call in engine.calls
    )


def _two_conversations(run: Any) -> Any:
    """Let the agent work twice in one sandbox, the second time on other words."""

    async def twice(self: Any, sandbox: Any, task: Task, endpoint: Any, budget_s: float) -> Any:
        await run(self, sandbox, replace(task, prompt="Look around first."), endpoint, budget_s)
        return await run(self, sandbox, task, endpoint, budget_s)

    return twice


async def test_an_unsolved_rollout_is_a_zero_and_a_lost_one_is_none(
    task: Task, engine: RecordingEngine, args: Namespace
) -> None:
    engine.lines = [DONE]
    [[unsolved]] = await rolled_out(args, [sample_of(task)], slime.generate, PARAMS)
    broken = replace(task, image=f"{task.image}-gone")
    [[lost]] = await rolled_out(args, [sample_of(broken, 1)], slime.generate, PARAMS)
    assert (unsolved.reward, unsolved.status) == (0.0, Sample.Status.COMPLETED)
    assert (lost.status, lost.remove_sample) == (Sample.Status.ABORTED, True)
    assert lost.reward is not None and math.isnan(lost.reward)  # type: ignore[arg-type]
    assert lost.metadata["swerl_episode"]["verdict"] in {"infra", "invalid"}
    data = train_data(args, [unsolved, lost], slime.normalize)
    assert data["rewards"] == [0.0, 0.0]
    assert data["raw_reward"] == [0.0, 0.0]
    assert sum(data["loss_masks"][1]) == 0
    assert not slime.keep_group(args, [[unsolved], [lost]])
    assert slime.keep_group(args, [[unsolved], [unsolved]])


async def test_the_reward_hook_grades_a_patch_in_a_clean_sandbox(
    task: Task, args: Namespace
) -> None:
    samples = [sample_of(task), sample_of(task, 1), sample_of(task, 2)]
    samples[0].metadata["patch"] = task.gold_patch
    samples[2] = sample_of(replace(task, image=f"{task.image}-gone"), 2)
    found = await slime.reward(args, samples)
    assert isinstance(found, list)
    assert found[:2] == [1.0, 0.0]
    assert math.isnan(found[2]) and samples[2].remove_sample
    samples[0].reward = 0.25
    assert await slime.reward(args, samples[0]) == 0.25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swerl_recipe": None}, "name no swerl recipe"),
        ({"custom_reward_post_process_path": None}, "normalize rewards over samples"),
        ({"partial_rollout": True}, "partial-rollout"),
        ({"group_rm": True}, "group-rm"),
    ],
)
async def test_settings_that_would_train_on_wrong_numbers_are_refused(
    task: Task, args: Namespace, changes: dict[str, Any], message: str
) -> None:
    wrong = Namespace(**{**vars(args), **changes})
    with pytest.raises(InputError, match=message) as caught:
        await slime.generate(wrong, sample_of(task), PARAMS)
    assert caught.value.hint


# What an Episode becomes


def recorded(*turns: Turn) -> Episode:
    """Return a solved Episode of these Turns."""
    grade = Grade(Verdict.SOLVED, "")
    return Episode("e", "t", Status.COMPLETED, grade, 1.0, Trajectory("e", turns))


def experts(start: int, num_positions: int) -> RoutedExperts:
    ids = range(6 * start, 6 * (start + num_positions))
    return RoutedExperts(start, 3, 2, 1, bytes(one % 256 for one in ids))


FIRST = Turn(0, None, (1, 2), (3, 4), (-0.5, -1.0), Finish.STOP, "1", routed=experts(0, 3))
SECOND = Turn(1, 0, (5,), (6,), (-2.0,), Finish.LENGTH, "2", routed=experts(3, 2))


def test_experts_of_whole_rows_are_replayed_and_others_lose_the_rollout() -> None:
    base, family = Sample(index=4, prompt="p"), tiny.build(None)
    args = arguments(use_rollout_routing_replay=True)
    [sample] = slime.convert.to_train_samples(base, recorded(FIRST, SECOND), args, family)
    assert sample.rollout_routed_experts.dtype == np.int32
    assert sample.rollout_routed_experts.tolist() == np.arange(30).reshape(5, 3, 2).tolist()
    assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1
    [lost] = slime.convert.to_train_samples(
        base, recorded(FIRST, replace(SECOND, routed=None)), args, family
    )
    assert lost.remove_sample
    assert lost.metadata["swerl_episode"]["verdict"] == "routed experts missing"
    [plain] = slime.convert.to_train_samples(base, recorded(FIRST, SECOND), arguments(), family)
    assert plain.rollout_routed_experts is None


# Prompt A all solved, prompt B all failed, one rollout of A in two samples.


def fan_out() -> list[Sample]:
    """Return slime's flat list: two prompts of four rollouts; A's first has two samples."""
    rewards = [(0, 0, 1.0)] + [(0, k, 1.0) for k in range(4)] + [(1, k, 0.0) for k in range(4, 8)]
    return [
        Sample(group_index=group, index=k, rollout_id=k, reward=reward)
        for group, k, reward in rewards
    ]


def test_fan_out_moves_no_advantage_here_and_does_in_slime() -> None:
    args = arguments(n_samples_per_prompt=4, rollout_batch_size=2)
    raw, rewards = slime.normalize(args, fan_out())
    assert rewards == [0.0] * 9
    assert raw == [1.0] * 5 + [0.0] * 4
    own = own_normalisation(args, fan_out())
    assert own[:5] == pytest.approx([0.843] * 5, abs=1e-3)
    assert own[5:] == pytest.approx([-1.054] * 4, abs=1e-3)


def test_a_rollout_has_one_vote_and_a_lost_one_none() -> None:
    args = arguments(n_samples_per_prompt=3, grpo_std_normalization=False)
    samples = [
        Sample(group_index=0, index=0, reward=1.0),
        Sample(group_index=0, index=0, reward=1.0),
        Sample(group_index=0, index=1, reward=0.0),
        Sample(group_index=0, index=2, reward=math.nan, remove_sample=True),
    ]
    raw, rewards = slime.normalize(args, samples)
    assert rewards == [0.5, 0.5, -0.5, 0.0]
    assert raw == [1.0, 1.0, 0.0, 0.5]
    with pytest.raises(InputError, match="no group_index"):
        slime.normalize(args, [Sample(index=0, reward=1.0)])
