"""What agents write down themselves is kept, within bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from swerl.core.contracts import Sandbox
from swerl.harnesses import _cli as _records
from swerl.sandboxes import local

from .helpers import LIMITS, WORKDIR, shell


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with local.build(local.Options()).open("host", LIMITS, workdir=WORKDIR) as opened:
        yield opened


async def test_all_sessions_of_a_folder_are_gathered(sandbox: Sandbox) -> None:
    await shell(
        sandbox,
        'mkdir -p ~/.agent/a/b; cd ~/.agent; echo 1 >a/x.jsonl; echo 2 >"a/b/y z.jsonl"; '
        "echo no >a/settings.json",
    )
    gathered = await _records.gather(sandbox, ".agent")
    assert sorted(gathered.split()) == [b"1", b"2"]
    assert await _records.gather(sandbox, ".nothing") == b""


async def test_traps_among_the_files_cost_neither_time_nor_room(sandbox: Sandbox) -> None:
    await shell(
        sandbox,
        "mkdir -p ~/.agent; cd ~/.agent; mkfifo pipe.jsonl; ln -s /dev/zero endless.jsonl; "
        "mkdir folder.jsonl; ln -s / root; head -c 9M /dev/zero >big.jsonl",
    )
    assert len(await _records.gather(sandbox, ".agent")) == _records.MAX_BYTES
