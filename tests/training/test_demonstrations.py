"""Demonstrations are rows as the real agent, sandbox and gateway record them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from swerl.engines.scripted import ScriptedEngine
from swerl.families import tiny
from swerl.gateway.app import Gateway
from swerl.gateway.limits import SessionLimits
from swerl.harnesses import builtin
from swerl.interfaces import Limits
from swerl.sample import to_samples
from swerl.sandboxes import local
from swerl.tasks._twin_templates import TRAINED
from swerl.tasks.twin import make_tasks, make_variants
from swerl.training import demonstrations
from swerl.turn import Sampling


@pytest.mark.parametrize("seed", [0, 1])
async def test_a_row_is_what_a_real_scripted_episode_records(tmp_path: Path, seed: int) -> None:
    (task,) = make_tasks(tmp_path, split="train", count=1, seed=seed)
    (variant,) = make_variants(split="train", count=1, seed=seed)
    family = tiny.build(None)
    messages = demonstrations.Demonstration(variant, variant.good).messages()
    engine = ScriptedEngine(family, lambda _: messages[1::2])
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
    row = demonstrations.to_row(family, messages, "row")
    assert done.code == 0, done.log
    assert edited == variant.fixed
    assert sample.ids == row.ids
    assert sample.mask == row.mask


def test_only_the_replies_are_trained() -> None:
    family = tiny.build(None)
    (row,) = islice(demonstrations.rows(family, 0, 0.5), 1)
    (demonstration,) = islice(demonstrations.demonstrations(0, 0.5), 1)
    replies = [family.encode_reply(message) for message in demonstration.messages()[1::2]]
    trained = [index for index, kept in zip(row.ids, row.mask, strict=True) if kept]
    assert trained == [index for reply in replies for index in reply]


def test_the_wrong_share_sets_how_many_fixes_are_random() -> None:
    def right(wrong_share: float) -> float:
        some = list(islice(demonstrations.demonstrations(0, wrong_share), 300))
        return sum(one.fix == one.variant.good for one in some) / len(some)

    assert right(0.0) == 1.0
    assert 0.4 < right(0.5) < 0.65
    assert right(1.0) < 0.2


def test_demonstrations_come_from_training_templates_alone() -> None:
    some = islice(demonstrations.demonstrations(0, 0.5), 300)
    assert {one.variant.template for one in some} <= set(TRAINED)
