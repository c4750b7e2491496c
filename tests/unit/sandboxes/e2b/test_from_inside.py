"""A swerl server reports failures caused from inside, and its client accepts the report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Limits
from swerl.sandboxes import e2b, local

from ..e2b_server.helpers import KEY, serving

LIMITS = Limits(memory_mib=512, num_processes=128, disk_mib=512, lifetime_s=120)
FULL = SandboxError("no space for a command", hint="", from_inside=True)
LOST = SandboxLostError("it wrote too much", hint="", from_inside=True)


class Spoiled:
    """The backend `local`, whose sandboxes start no command once there is an error to raise."""

    error: SandboxError | None = None

    @asynccontextmanager
    async def open(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        async with local.build(local.Options()).open(*args, **options) as sandbox:
            start = sandbox.start

            @asynccontextmanager
            async def spoiled(argv: Sequence[str], **given: Any) -> AsyncIterator[Any]:
                if self.error:
                    raise self.error
                async with start(argv, **given) as process:
                    yield process

            sandbox.start = spoiled  # type: ignore[method-assign]
            yield sandbox


@pytest.fixture
def backend() -> Spoiled:
    return Spoiled()


@asynccontextmanager
async def _opened(backend: Spoiled) -> AsyncIterator[Any]:
    with serving(backend) as service:  # type: ignore[arg-type]
        options = e2b.Options(api_url=service.url, sandbox_url=service.url)
        client = e2b.connect(options, KEY)
        async with client.open("base", LIMITS, workdir="/w") as sandbox:
            yield sandbox


async def test_a_sandbox_without_space_for_a_command_fails_from_inside(backend: Spoiled) -> None:
    async with _opened(backend) as sandbox:
        backend.error = FULL
        with pytest.raises(SandboxError, match="no space for a command") as error:
            await sandbox.run(["true"])
        assert error.value.from_inside
        backend.error = None
        assert (await sandbox.run(["true"])).exit_code == 0


async def test_a_sandbox_lost_from_inside_is_so_for_every_command(
    backend: Spoiled,
) -> None:
    async with _opened(backend) as sandbox, sandbox.start(["sleep", "600"]) as sleeping:
        backend.error = LOST
        for failing in (sandbox.run(["true"]), sleeping.wait(), sandbox.run(["true"])):
            with pytest.raises(SandboxLostError) as error:
                async with asyncio.timeout(60):
                    await failing
            assert error.value.from_inside
