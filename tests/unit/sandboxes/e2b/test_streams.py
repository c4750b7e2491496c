"""Commands in `e2b` sandboxes with broken streams, printing profiles and silent providers."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.sandboxes._e2b import runner
from swerl.sandboxes._e2b import sandbox as e2b_sandbox

from ..e2b_faults import Faults, failing
from ..e2b_server.helpers import Service
from ..helpers import WORKDIR, processes, sh, until
from .provider import backend

pytest.importorskip("e2b", reason="the package `e2b` is not installed")


async def test_a_broken_stream_repeats_no_command_and_loses_no_output(
    faults: Faults, sandbox: Sandbox
) -> None:
    script = "echo once >> runs; for n in 1 2 3 4 5 6 7 8; do echo $n; sleep 0.05; done; exit 7"
    running = asyncio.ensure_future(sandbox.run(["sh", "-c", script], timeout_s=20))
    for _ in range(3):
        await asyncio.sleep(0.12)
        faults.cut()
    done = await running
    assert (done.exit_code, done.stdout.split()) == (7, [b"%d" % n for n in range(1, 9)])
    assert await sandbox.read(f"{WORKDIR}/runs") == b"once\n"


async def test_output_that_was_cut_in_the_middle_arrives_whole(
    faults: Faults, sandbox: Sandbox
) -> None:
    running = asyncio.ensure_future(
        sandbox.run(["python3", "-c", "print('0123456789' * 400000, end='')"], timeout_s=20)
    )
    while not running.done():
        await asyncio.sleep(0.1)
        faults.cut()
    assert running.result().stdout == b"0123456789" * 400000


async def test_a_running_command_survives_a_broken_stream(faults: Faults, sandbox: Sandbox) -> None:
    said = b""
    async with sandbox.start(["cat"]) as process:
        for line in (b"one\n", b"two\n", b"three\n"):
            await process.send(line)
            async for chunk in process.output():
                said += chunk.data
                if said.endswith(line):
                    break
            assert faults.cut()
        await process.end_input()
        assert await process.wait() == 0
    assert said == b"one\ntwo\nthree\n"


async def test_a_timeout_applies_while_the_provider_does_not_answer(
    faults: Faults, sandbox: Sandbox
) -> None:
    running = asyncio.ensure_future(sandbox.run(["sleep", "66"], timeout_s=2.0))
    await until(sandbox, "sleep 66", 1)
    faults.answer = lambda _: "drop"
    faults.cut()
    await asyncio.sleep(2.1)
    faults.answer = lambda _: None
    done = await running
    assert (done.exit_code, done.timed_out) == (124, True)
    assert await processes(sandbox, "sleep 66") == 0


async def test_a_provider_that_stays_unreachable_is_a_lost_sandbox(
    faults: Faults, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_GIVE_UP_S", 0.3)
    running = asyncio.ensure_future(sandbox.run(["sleep", "60"]))
    await until(sandbox, "sleep 60", 1)
    faults.answer = lambda _: "drop"
    faults.cut()
    with pytest.raises(SandboxLostError, match="cannot be reached") as caught:
        await running
    assert caught.value.hint
    faults.answer = lambda _: None


async def test_a_sandbox_killed_outside_is_lost(service: Service, sandbox: Sandbox) -> None:
    running = asyncio.ensure_future(sandbox.run(["sleep", "60"]))
    await until(sandbox, "sleep 60", 1)
    await backend(service.url)._provider.kill(sandbox.id)
    with pytest.raises(SandboxLostError, match="killed outside"):
        await running
    with pytest.raises(SandboxLostError):
        await sandbox.read("/etc/passwd")


async def test_output_of_a_shell_profile_is_ignored(sandbox: Sandbox) -> None:
    home = (await sh(sandbox, "echo ~")).strip()
    noise = b"echo hello; echo trouble >&2; printf half; export PATH=/nowhere:$PATH A=1\n"
    for name in (".profile", ".bash_profile"):
        await sandbox.write(f"{home}/{name}", noise)
    done = await sandbox.run(["sh", "-c", "echo out; echo err >&2; echo $A; echo $PATH"])
    assert done.stderr == b"err\n"
    assert done.stdout.startswith(b"out\n\n")
    assert b"nowhere" not in done.stdout


async def test_no_process_of_ours_carries_the_command_on_its_command_line(
    sandbox: Sandbox,
) -> None:
    done = await sandbox.run(["sh", "-c", "grep -lsa telltale /proc/[0-9]*/cmdline; echo $0", "x"])
    assert len(done.stdout.split()) == 2, done  # the command itself, and what it printed


async def test_a_command_has_the_users_umask_and_no_file_of_ours(sandbox: Sandbox) -> None:
    assert await sh(sandbox, "umask; ls /proc/self/fd | wc -l") == "0022\n4\n"


async def test_a_stopped_command_uses_no_cpu_and_times_out(sandbox: Sandbox) -> None:
    script = "kill -STOP $$"
    running = asyncio.ensure_future(sandbox.run(["sh", "-c", script, "stopped"], timeout_s=0.6))
    await until(sandbox, f"sh -c {script} stopped", 1)
    spent = "cat /proc/[0-9]*/stat | awk '{ sum += $14 + $15 } END { print sum }'"
    before = int(await sh(sandbox, spent))
    assert (await running).timed_out
    assert int(await sh(sandbox, spent)) - before < 30


@pytest.mark.parametrize("timeout_s", [0.001, 0.02, 0.05])
async def test_a_very_short_timeout_applies(sandbox: Sandbox, timeout_s: float) -> None:
    done = await sandbox.run(["sleep", "60"], timeout_s=timeout_s)
    assert done.timed_out
    assert await processes(sandbox, "sleep 60") == 0


async def test_a_killed_supervisor_counts_as_a_killed_command(sandbox: Sandbox) -> None:
    running = asyncio.ensure_future(sandbox.run(["sleep", "67"], timeout_s=20))
    await until(sandbox, "sleep 67", 1)
    await sh(sandbox, "kill -9 $(cut -d' ' -f1 /tmp/.swerl-*/pids | grep -vx $PPID); :")
    assert (await running).exit_code == 137


@pytest.mark.parametrize("again", ["", "while :; do kill -STOP $PPID; done"])
async def test_a_command_that_stops_its_supervisor_still_times_out(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    monkeypatch.setattr(e2b_sandbox, "_OVERTIME_S", 0.2)
    script = f"kill -STOP $PPID; {again or 'sleep 68'}"
    done = await sandbox.run(["sh", "-c", script], timeout_s=0.3)
    assert (done.exit_code, done.timed_out) == (124, True)
    if not again:
        await until(sandbox, "sleep 68", 0)


async def test_an_image_without_the_usual_tools_is_reported_and_not_retried_for_ever(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RUN", "echo no base64 here; exit 127")
    with pytest.raises(SandboxError, match=r"does not run commands: no base64 here.*") as caught:
        await sandbox.run(["true"])
    assert "coreutils" in caught.value.hint


async def test_a_temporary_refusal_of_the_data_plane_is_retried(
    faults: Faults, sandbox: Sandbox
) -> None:
    answers = [429, 503, 502]

    def refuse(request: web.BaseRequest) -> web.Response | None:
        if request.path.endswith("/Start") and answers:
            return failing(answers.pop(), "busy")(request)  # type: ignore[return-value]
        return None

    faults.answer = refuse
    assert await sh(sandbox, "echo up") == "up\n"
    assert not answers
