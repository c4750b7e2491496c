"""Demonstrations are rows as the real agent, sandbox and gateway record them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from swerl.core.chat import Message, Role
from swerl.core.sample import to_samples
from swerl.core.sandbox import Limits
from swerl.core.turn import Sampling
from swerl.engines.families import tiny
from swerl.engines.scripted import ScriptedEngine
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from swerl.harnesses import builtin
from swerl.sandboxes import local
from swerl.tasks.twin import TRAINED, make_tasks, make_variants
from swerl.training.warm_start import Demonstration, repairs, to_row


@pytest.mark.parametrize(("seed", "slip"), [(0, ""), (1, ""), (1, "c ** d")])
async def test_a_row_is_what_a_real_scripted_episode_records(
    tmp_path: Path, seed: int, slip: str
) -> None:
    (task,) = make_tasks(tmp_path, split="train", count=1, seed=seed)
    (variant,) = make_variants(split="train", count=1, seed=seed)
    family = tiny.build(None)
    demonstration = Demonstration(variant, variant.good, slip)
    replies = _replies(demonstration)
    engine = ScriptedEngine(family, lambda _: replies)
    backend = local.build(local.Options())
    async with (
        Gateway(engine=engine, family=family) as gateway,
        backend.open(task.image, Limits(), workdir=task.workdir) as sandbox,
    ):
        session = gateway.open("s", sampling=Sampling(500), limits=SessionLimits())
        agent = builtin.build(builtin.Options())
        done = await agent.run(sandbox, task, session.endpoint(session.url), 60)
        edited = (await sandbox.read(f"{task.workdir}/{variant.file}")).decode()
        (sample,) = to_samples(await session.close(), episode="s", task="t")
    row = to_row(family, demonstration, "row")
    assert done.code == 0, done.log
    assert edited == variant.fixed
    assert sample.ids == row.ids
    assert sample.mask == row.mask or slip


def _replies(demonstration: Demonstration) -> list[Message]:
    said = [one.message for one in demonstration.conversation()]
    return [message for message in said if message.role is Role.ASSISTANT]


@pytest.mark.parametrize("slip", ["", "c ** d"])
def test_every_reply_but_a_slip_is_trained(slip: str) -> None:
    family = tiny.build(None)
    (variant,) = make_variants(split="train", count=1, seed=0)
    demonstration = Demonstration(variant, variant.good, slip)
    row = to_row(family, demonstration, "row")
    replies = [family.encode_reply(message) for message in _replies(demonstration)]
    if slip:
        del replies[1]
    trained = [index for index, kept in zip(row.ids, row.mask, strict=True) if kept]
    assert trained == [index for reply in replies for index in reply]


def test_a_slip_is_never_in_the_file() -> None:
    some = list(islice(repairs(0, 0.5), 500))
    slips = [one for one in some if one.slip]
    assert 0.08 < len(slips) / len(some) < 0.22
    assert not [one for one in slips if f"return {one.slip}" in one.variant.source]


def test_the_wrong_share_sets_how_many_fixes_are_random() -> None:
    def right(wrong_share: float) -> float:
        some = list(islice(repairs(0, wrong_share), 300))
        return sum(one.fix == one.variant.good for one in some) / len(some)

    assert right(0.0) == 1.0
    assert 0.4 < right(0.5) < 0.65
    assert right(1.0) < 0.2


def test_demonstrations_come_from_training_templates_alone() -> None:
    some = islice(repairs(0, 0.5), 300)
    assert {one.variant.template for one in some} <= set(TRAINED)
