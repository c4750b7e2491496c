"""Commands in `e2b` sandboxes with broken streams, printing profiles and silent providers."""

from __future__ import annotations

import asyncio

import pytest

from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxError, SandboxFileError, SandboxLostError
from swerl.sandboxes import _e2b_sandbox, _e2b_sdk

from ..e2b_faults import Faults
from ..e2b_server.helpers import Service
from ..helpers import sh, until

pytest.importorskip("e2b", reason="the package `e2b` is not installed")


async def test_a_command_whose_stream_breaks_is_a_lost_sandbox_and_no_result(
    faults: Faults, sandbox: Sandbox
) -> None:
    running = asyncio.ensure_future(sandbox.run(["sh", "-c", "echo begun; sleep 60"], timeout_s=20))
    await until(sandbox, "sleep 60", 1)
    assert faults.cut()
    with pytest.raises(SandboxLostError) as error:
        await running
    assert not error.value.from_inside
    with pytest.raises(SandboxLostError):
        await sandbox.read("/etc/passwd")


async def test_a_provider_that_stays_unreachable_is_a_lost_sandbox(
    faults: Faults, sandbox: Sandbox
) -> None:
    async with sandbox.start(["sleep", "60"]) as process:
        faults.answer = lambda _: "drop"
        faults.cut()
        with pytest.raises(SandboxLostError) as error:
            await process.wait()
        assert error.value.hint and not error.value.from_inside
        with pytest.raises(SandboxError):
            await process.send(b"x")
    faults.answer = lambda _: None


async def test_a_command_that_cannot_be_killed_is_a_lost_sandbox(
    faults: Faults, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_e2b_sandbox, "_OVERTIME_S", 0.3)
    monkeypatch.setattr(_e2b_sandbox, "_SIGNAL_S", 0.3)
    running = asyncio.ensure_future(sandbox.run(["sleep", "66"], timeout_s=1.0))
    await until(sandbox, "sleep 66", 1)
    faults.answer = lambda _: "drop"  # each request; the stream stays
    with pytest.raises(SandboxLostError):
        await running
    faults.answer = lambda _: None


async def test_a_silent_provider_loses_a_sandbox_whose_lifetime_is_over(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_e2b_sandbox, "_GRACE_S", 0.0)
    silent = asyncio.Event()

    class Remote:
        id = "s"

        async def start(self, *_: object, **__: object) -> None:
            await silent.wait()

    sandbox = _e2b_sandbox.E2BSandbox(
        _e2b_sdk.E2BProvider("key", 1.0, {"api_url": service.url}),
        Remote(),  # type: ignore[arg-type]
        workdir="/",
        lifetime_s=0.2,
    )
    with pytest.raises(SandboxLostError, match=r"its lifetime of 0\.2 s is over"):
        await sandbox.run(["true"])


async def test_a_file_that_is_too_large_to_read_is_the_doing_of_code_inside(
    sandbox: Sandbox,
) -> None:
    await sh(sandbox, "truncate -s 1T sparse; head -c 5000000 /dev/urandom >large")
    with pytest.raises(SandboxFileError, match="larger than 256 MiB"):
        await sandbox.read("/testbed/sparse")
    assert len(await sandbox.read("/testbed/large")) == 5_000_000
