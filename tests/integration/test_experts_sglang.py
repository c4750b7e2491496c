"""Models with experts in real SGLang: what it records of them, replay, and weights that change.

The choices of every position are held against transformers'. Needs an interpreter with SGLang in
SWERL_SGLANG_PYTHON; skips without.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from swerl.core.contracts import EngineSetup
from swerl.core.learning import Batch
from swerl.core.sample import Sample, to_samples
from swerl.core.turn import Completion, Sampling, Trajectory
from swerl.engines import sglang
from swerl.engines._sglang_client import HttpEngine
from swerl.engines.families import tiny
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer
from tests.sglang_cpu.interpreter import sglang_python
from tests.unit.engines._updates import TrainerSource, receive
from tests.unit.engines.families.lines import build
from tests.unit.gateway.test_server import body, post
from tests.unit.training.rank.references import blocks, record_experts, records
from tests.unit.training.weight_sync._live_servers import until
from tests.unit.training.weight_sync.served_lines import write_line

pytestmark = pytest.mark.asyncio(loop_scope="module")

START_S = 600
MORE_EXPERTS = {"num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 3}
"""So many that two positions seldom have the same ones."""
PROMPTS = [tuple(random.Random(n).choices(range(3, 300), k=40)) for n in range(16)]
PROMPT = PROMPTS[0]
EXACT = ("glm4_moe", "qwen3_5_moe")
"""Served in fp32, as they are trained."""
ROUNDED = "qwen3_moe"
"""Served in bf16 and trained in fp32: now and then the engine chooses other experts."""


@dataclass(frozen=True)
class Live:
    """A line, served and trained, and the same in transformers."""

    line: str
    model: torch.nn.Module
    engine: HttpEngine
    trainer: MegatronTrainer


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[*EXACT, ROUNDED])
async def live(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Live]:
    """Start a server and a trainer of one line."""
    line: str = request.param
    python, root = sglang_python(), tmp_path_factory.mktemp(line)
    model = build(line, **MORE_EXPERTS)
    folder = write_line(model, root / "model")
    options = sglang.Options(
        python=python,
        routed_experts=True,
        start_timeout_s=START_S,
        flags=("--dtype=bfloat16",) if line == ROUNDED else (),
    )
    setup = EngineSetup(family=None, log_dir=root, model=folder)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        trainer = MegatronTrainer(
            model=folder, family="tiny", algorithm="gspo", options=trainer_options(root)
        )
        engine, _ = await asyncio.gather(
            stack.enter_async_context(sglang.open(options, setup)),
            stack.enter_async_context(trainer),
        )
        yield Live(line, model, engine, trainer)


def trainer_options(root: Path) -> TrainerOptions:
    """Return options of one rank that replays."""
    return TrainerOptions(
        routing_replay=True,
        checkpoint_dir=root / "checkpoints",
        publish_dir=root / "weights",
        log_dir=root,
        lr=1e-3,
        warmup_steps=0,
    )


async def converse(engine: HttpEngine) -> Trajectory:
    """Hold a conversation of three turns through a gateway, and begin its second turn again."""
    async with Gateway(engine=engine, family=tiny.build(None)) as gateway:
        session = gateway.open("s", sampling=Sampling(40), limits=SessionLimits())
        messages: list[dict[str, str]] = []
        for ask in ("Fix the parser.", "Run the tests.", "Say what you did."):
            messages.append({"role": "user", "content": ask})
            status, reply = await post(session, json=body(*messages))
            assert status == 200, reply
            text = "".join(part.get("text", "") for part in reply["content"])
            messages.append({"role": "assistant", "content": text or "(nothing)"})
        await post(session, json=body(*messages[:2], {"role": "user", "content": "Read it first."}))
        return await session.close()


def rows_of(trajectory: Trajectory) -> list[Sample]:
    """Return the rows, each of which has to have a record of every position."""
    rows = to_samples(trajectory, episode="e", task="t")
    assert all(row.num_routed == len(row.ids) - 1 for row in rows)
    return [replace(row, advantage=1.0) for row in rows]


def choices(chosen_NLK: torch.Tensor) -> torch.Tensor:
    """Return experts in one order: the order in which they were chosen says nothing."""
    return chosen_NLK.sort(-1).values


def agreement(ours_NLK: torch.Tensor, theirs_NLK: torch.Tensor) -> float:
    """Return the share of positions and layers whose experts are the same."""
    return float((choices(ours_NLK) == choices(theirs_NLK)).all(-1).float().mean())


async def mismatch(trainer: MegatronTrainer, rows: Sequence[Sample]) -> float:
    """Return the mean absolute difference of sampled tokens' log-probabilities."""
    known = await trainer.logprobs(Batch(0, tuple(rows), round(sum(row.share for row in rows))))
    gaps = [
        abs(ours - theirs)
        for row, logprobs in zip(rows, known, strict=True)
        for ours, theirs in zip(logprobs, itertools.compress(row.logprobs, row.mask), strict=True)
    ]
    return sum(gaps) / len(gaps)


async def sample(engine: HttpEngine) -> list[Sample]:
    """Sample a reply to each prompt; return them as rows."""
    calls = (engine.generate(prompt, Sampling(40), f"s{n}") for n, prompt in enumerate(PROMPTS))
    replies = await asyncio.gather(*calls)
    return [as_row(prompt, reply) for prompt, reply in zip(PROMPTS, replies, strict=True)]


def as_row(prompt: tuple[int, ...], reply: Completion) -> Sample:
    """Return a reply as a row with its record."""
    assert reply.routed
    ids, mask = (*prompt, *reply.ids), (0,) * len(prompt) + (1,) * len(reply.ids)
    logprobs = (0.0,) * len(prompt) + reply.logprobs
    versions = (reply.weight_version,)
    return Sample("e", "t", ids, mask, logprobs, weight_versions=versions, routed=(reply.routed,))


async def test_a_session_is_recorded_position_by_position_as_transformers_chooses(
    live: Live,
) -> None:
    rows = rows_of(await converse(live.engine))
    assert len(rows) == 2
    layers = len(blocks(live.model))
    least = 0.9 if live.line == ROUNDED else 1.0
    for row in rows:
        recorded_NLK = records(row)[:, -layers:]  # the first ones may be dense
        own = record_experts(live.model, row, noise=0.0)
        own_NLK = records(replace(row, routed=(own,)))
        assert agreement(recorded_NLK, own_NLK) >= least
        assert agreement(recorded_NLK[1:], own_NLK[:-1]) < 0.8  # one position off


async def test_a_record_begins_at_the_requested_position_also_on_cached_prefixes(
    live: Live,
) -> None:
    first = await live.engine.generate(PROMPT, Sampling(12), "a session")
    whole = (*PROMPT, *first.ids, 7, 8, 9)
    start = len(whole) - 4
    later = await live.engine.generate(whole, Sampling(6, num_routed=start), "a session")
    assert first.routed and later.routed and later.cached_tokens >= start
    assert (first.routed.start, first.routed.num_positions) == (0, start)
    assert (later.routed.start, later.routed.num_positions) == (start, 3 + len(later.ids))
    again = await live.engine.generate(whole, Sampling(1), "a session")
    assert again.routed
    covered = len(first.routed.data)
    assert again.routed.data[:covered] == first.routed.data


async def test_replay_makes_the_trainer_match_the_engine(live: Live) -> None:
    rows = await sample(live.engine)
    plain = [replace(row, routed=()) for row in rows]
    others = [replace(row, routed=other.routed) for row, other in swapped(rows)]
    replayed, without, wrong = [
        await mismatch(live.trainer, each) for each in (rows, plain, others)
    ]
    print(f"{live.line}: mismatch {replayed:.1e} replayed, {without:.1e} without")  # noqa: T201
    if live.line == ROUNDED:
        assert replayed < without
    else:
        assert replayed <= 1e-5
    assert wrong > 2 * without


def swapped(rows: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Return each row with another one of its length, whose record would be the wrong one."""
    by_length = sorted(rows, key=lambda row: len(row.ids))
    return [
        (one, other)
        for one, other in itertools.pairwise(by_length)
        if len(one.ids) == len(other.ids)
    ]


async def test_every_parameter_is_confirmed_after_a_step_with_replay(live: Live) -> None:
    rows = rows_of(await converse(live.engine))
    stats = await live.trainer.step(Batch(0, tuple(rows), 1))
    assert stats.num_tokens == sum(row.num_trained_tokens for row in rows)
    old = await sample(live.engine)
    received = await receive(live.engine, TrainerSource(live.trainer, "tensor"))
    assert received.num_confirmed == received.num_parameters > 20
    new = await sample(live.engine)
    assert {row.weight_versions for row in new} == {(received.version,)}
    assert old[0].weight_versions != new[0].weight_versions
    now, before = [await mismatch(live.trainer, rows) for rows in (new, old)]
    assert before > 2 * now
    assert live.line == ROUNDED or now <= 1e-5


async def test_a_reply_over_an_update_is_recorded_whole(live: Live) -> None:
    under_way = asyncio.create_task(live.engine.generate(PROMPT, Sampling(300), "a session"))
    await until(lambda: bool(live.engine._flights))
    received = await receive(live.engine, TrainerSource(live.trainer, "tensor"))
    reply = await under_way
    versions = {reply.weight_version, *(change.version for change in reply.weight_changes)}
    assert received.version in versions
    assert reply.routed
    assert reply.routed.num_positions == len(PROMPT) + len(reply.ids) - 1
