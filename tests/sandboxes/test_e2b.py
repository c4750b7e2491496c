"""The `e2b` sandbox beyond what every backend does: settings, metadata, creates, broken streams."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from pydantic import ValidationError

from swerl import plugins
from swerl.errors import ImageError, SandboxError, SandboxLostError, SandboxUnavailableError
from swerl.interfaces import Sandbox
from swerl.sandbox import Limits, Mount
from swerl.sandboxes import _relay, e2b, local
from swerl.sandboxes._e2b import create, job, runner

from ..e2b_server.helpers import KEY, Service, serving
from .e2b_faults import Faults, failing, is_create, once
from .helpers import LIMITS, WORKDIR, processes, sh, until

pytest.importorskip("e2b", reason="the package `e2b` is not installed")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving(local.build(local.Options()), limits=LIMITS, workdir=WORKDIR) as running:
        yield running


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(e2b.KEY, KEY)
    monkeypatch.setattr(create, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(runner, "_PAUSES_S", (0.01,))


@pytest.fixture
async def faults(service: Service) -> AsyncIterator[Faults]:
    async with Faults(service.url) as proxy:
        yield proxy


def backend(url: str, **settings: object) -> e2b.E2BBackend:
    options = {"api_url": url, "sandbox_url": url, "creates_per_s": 1000, **settings}
    return e2b.build(e2b.Options(**options))  # type: ignore[arg-type]


@pytest.fixture
async def sandbox(faults: Faults) -> AsyncIterator[Sandbox]:
    async with backend(faults.url).open("base", LIMITS, workdir=WORKDIR) as opened:
        yield opened


# Settings


def test_a_missing_key_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(e2b.KEY)
    with pytest.raises(SandboxUnavailableError, match="E2B_API_KEY is not set") as caught:
        e2b.build(e2b.Options())
    assert "export E2B_API_KEY" in caught.value.hint


@pytest.mark.parametrize(
    "settings", [{"way": "public"}, {"public_url": "http://a"}, {"api_key": "secret"}]
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        e2b.Options(**settings)  # type: ignore[arg-type]


def test_the_price_is_the_clouds_or_the_recipes() -> None:
    limits = Limits(num_cpus=2, memory_mib=4096)
    assert backend("http://x").price(limits) == pytest.approx(2 * 0.0504 + 4 * 0.0162)
    assert backend("http://x", price_per_hour=0.5).price(limits) == 0.5


def test_it_is_found_by_its_name() -> None:
    assert plugins.load("sandboxes", "e2b") is e2b


# Metadata


async def test_the_image_is_routed_by_metadata_where_a_gateway_wants_it(service: Service) -> None:
    made = backend(service.url, image_key="image", template="any", metadata={"pool/size": "md"})
    async with made.open("host", LIMITS, workdir=WORKDIR, name="swerl-1-routed") as opened:
        assert await sh(opened, "echo up") == "up\n"
        (found,) = await made._provider.find({"swerl": "swerl-1-routed"})
        assert found.metadata["image"] == "host"
        assert found.metadata["pool/size"] == "md"
        (live,) = [each for each in await made.live() if each.name == "swerl-1-routed"]
        assert (live.id, live.image) == (opened.id, "host")
        assert live.started_unix_s > 1e9


async def test_a_sandbox_of_a_dead_owner_is_found_and_removed_by_name(service: Service) -> None:
    context = backend(service.url).open("base", LIMITS, workdir=WORKDIR, name="swerl-2-dead")
    opened = await context.__aenter__()
    another = backend(service.url)
    assert "swerl-2-dead" in [live.name for live in await another.live()]
    await another.remove("swerl-2-dead")
    await another.remove("swerl-2-dead")
    assert "swerl-2-dead" not in [live.name for live in await another.live()]
    with pytest.raises(SandboxLostError, match="killed"):
        await opened.run(["true"])
    await context.__aexit__(None, None, None)


# Creates


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_a_create_that_fails_for_the_moment_is_tried_again(
    faults: Faults, status: int
) -> None:
    faults.answer = once(failing(status), times=2)
    made = backend(faults.url)
    async with made.open("base", LIMITS, workdir=WORKDIR) as opened:
        assert await sh(opened, "echo up") == "up\n"
    assert faults.creates == 3
    assert not await made.live()


async def test_a_create_whose_answer_is_lost_leaves_one_sandbox_and_then_none(
    faults: Faults,
) -> None:
    faults.answer = once(lambda _: "lose")
    made = backend(faults.url)
    async with made.open("base", LIMITS, workdir=WORKDIR) as opened:
        assert [live.id for live in await made.live()] == [opened.id]
    assert faults.creates == 2
    assert not await made.live()


async def test_a_create_that_is_cancelled_leaves_nothing(faults: Faults) -> None:
    made, asked = backend(faults.url), asyncio.Event()

    def lose(request: web.BaseRequest) -> None:
        if is_create(request):
            asked.set()

    faults.answer = lose
    opening = asyncio.ensure_future(
        made.open("base", LIMITS, workdir=WORKDIR).__aenter__()  # type: ignore[arg-type]
    )
    await asked.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not await made.live()


async def test_creates_end_with_their_one_limit(faults: Faults) -> None:
    faults.answer = once(failing(503, "no capacity"), times=10_000)
    with pytest.raises(SandboxError, match=r"no sandbox of 'base' within 0\.3 s.*") as caught:
        async with backend(faults.url, boot_timeout_s=0.3).open("base", LIMITS, workdir=WORKDIR):
            pass
    assert caught.value.retryable
    assert faults.creates > 2


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, ImageError), (404, ImageError), (401, SandboxUnavailableError), (402, SandboxError)],
)
async def test_a_create_that_cannot_work_is_not_tried_again(
    faults: Faults, status: int, kind: type[Exception]
) -> None:
    faults.answer = once(failing(status, "template 'x' not found"), times=10)
    with pytest.raises(kind) as caught:
        async with backend(faults.url).open("x", LIMITS, workdir=WORKDIR):
            pass
    assert caught.value.hint  # type: ignore[attr-defined]
    assert faults.creates == 1


async def test_a_wrong_key_is_one_clear_error(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(e2b.KEY, "e2b_" + "f" * 40)
    with pytest.raises(SandboxUnavailableError, match="refuses the key") as caught:
        async with backend(service.url).open("base", LIMITS, workdir=WORKDIR):
            pass
    assert "E2B_API_KEY" in caught.value.hint


async def test_an_unreachable_provider_is_one_clear_error() -> None:
    made = backend("http://127.0.0.1:9", boot_timeout_s=0.5)
    with pytest.raises(SandboxError, match="no sandbox of 'base'") as caught:
        async with made.open("base", LIMITS, workdir=WORKDIR):
            pass
    assert "reachable" in caught.value.hint
    with pytest.raises(SandboxError):
        await made.live()


async def test_creates_are_paced(faults: Faults) -> None:
    made = backend(faults.url, creates_per_s=20)
    begun: list[float] = []
    loop = asyncio.get_running_loop()
    faults.answer = lambda request: begun.append(loop.time()) if is_create(request) else None  # type: ignore[func-returns-value]

    async def one() -> None:
        async with made.open("base", LIMITS, workdir=WORKDIR):
            pass

    await asyncio.gather(one(), one(), one(), one())
    assert begun[-1] - begun[0] >= 0.1


# Streams


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


async def test_a_command_under_way_survives_a_broken_stream(
    faults: Faults, sandbox: Sandbox
) -> None:
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


async def test_a_timeout_holds_while_the_provider_is_silent(
    faults: Faults, sandbox: Sandbox
) -> None:
    running = asyncio.ensure_future(sandbox.run(["sleep", "66"], timeout_s=0.4))
    await until(sandbox, "sleep 66", 1)
    faults.answer = lambda _: "drop"
    faults.cut()
    await asyncio.sleep(0.5)
    faults.answer = lambda _: None
    done = await running
    assert (done.exit_code, done.timed_out) == (124, True)
    assert await processes(sandbox, "sleep 66") == 0


async def test_a_provider_that_stays_away_is_a_lost_sandbox(
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


async def test_a_profile_that_prints_spoils_no_output(sandbox: Sandbox) -> None:
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


async def test_a_command_gets_the_users_umask_and_no_file_of_ours(sandbox: Sandbox) -> None:
    assert await sh(sandbox, "umask; ls /proc/self/fd | wc -l") == "0022\n4\n"


async def test_a_stopped_command_costs_nothing_and_still_times_out(sandbox: Sandbox) -> None:
    script = "kill -STOP $$"
    running = asyncio.ensure_future(sandbox.run(["sh", "-c", script, "stopped"], timeout_s=0.6))
    await until(sandbox, f"sh -c {script} stopped", 1)
    spent = "cat /proc/[0-9]*/stat | awk '{ sum += $14 + $15 } END { print sum }'"
    before = int(await sh(sandbox, spent))
    assert (await running).timed_out
    assert int(await sh(sandbox, spent)) - before < 30


@pytest.mark.parametrize("timeout_s", [0.001, 0.02, 0.05])
async def test_a_timeout_that_is_over_at_once_is_kept(sandbox: Sandbox, timeout_s: float) -> None:
    done = await sandbox.run(["sleep", "60"], timeout_s=timeout_s)
    assert done.timed_out
    assert await processes(sandbox, "sleep 60") == 0


async def test_a_killed_supervisor_is_a_killed_command(sandbox: Sandbox) -> None:
    running = asyncio.ensure_future(sandbox.run(["sleep", "67"], timeout_s=20))
    await until(sandbox, "sleep 67", 1)
    await sh(sandbox, "kill -9 $(cut -d' ' -f1 /tmp/.swerl-*/pids | grep -vx $PPID); :")
    assert (await running).exit_code == 137


async def test_an_image_without_the_usual_tools_is_told_and_not_tried_for_ever(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "RUN", "echo no base64 here; exit 127")
    monkeypatch.setattr(runner, "RUN", job.RUN)
    with pytest.raises(SandboxError, match=r"does not run commands: no base64 here.*") as caught:
        await sandbox.run(["true"])
    assert "coreutils" in caught.value.hint


async def test_a_data_plane_that_refuses_for_a_moment_is_asked_again(
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


# Mounts


async def test_a_mount_is_packed_once_and_kept_from_writers(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tool"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "run").write_text("#!/bin/sh\necho ran\n")
    (folder / "bin" / "run").chmod(0o755)
    (folder / "link").symlink_to("bin/run")
    packs = []
    for _ in range(2):
        async with backend(service.url).open(
            "base", LIMITS, workdir=WORKDIR, mounts=[Mount(folder, "/opt/a tool")]
        ) as opened:
            assert await sh(opened, "'/opt/a tool/link'") == "ran\n"
            assert (await opened.run(["touch", "/opt/a tool/new"])).exit_code == 1
            with pytest.raises(SandboxError, match="read-only"):
                await opened.write("/opt/a tool/bin/run", b"x")
        packs.append([(pack, pack.stat().st_mtime_ns) for pack in tmp_path.glob("cache/e2b/*.gz")])
    assert packs[0] == packs[1]
    assert len(packs[0]) == 1
    assert tarfile.is_tarfile(packs[0][0][0])


async def test_a_mount_that_is_not_there_is_told(service: Service, tmp_path: Path) -> None:
    mounts = [Mount(tmp_path / "none", "/opt/none")]
    with pytest.raises(SandboxError, match="not there"):
        async with backend(service.url).open("base", LIMITS, workdir=WORKDIR, mounts=mounts):
            pass


# The way back


async def test_the_public_way_is_the_url_of_the_recipe(service: Service) -> None:
    made = backend(service.url, way="public", public_url="https://gateway.example:8443")
    async with made.open("base", LIMITS, workdir=WORKDIR) as opened:
        assert await opened.expose(None) == "https://gateway.example:8443"  # type: ignore[arg-type]


async def test_a_relay_that_is_gone_for_good_ends_what_the_sandbox_runs(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_relay, "_MAX_RESTARTS", 1)

    class Nobody:
        async def attach(self, sock: object) -> None: ...

    await sandbox.expose(Nobody())
    running = asyncio.ensure_future(sandbox.run(["sleep", "60"]))
    for _ in range(30):
        kill = "pkill -9 -f 'swerl-relay-[0-9a-f]'; sleep 0.3"
        try:
            await sandbox.run(["sh", "-c", kill], user="root", timeout_s=10)
        except SandboxLostError:
            break
    with pytest.raises(SandboxLostError, match="again and again"):
        async with asyncio.timeout(10):
            await running
