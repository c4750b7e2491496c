"""What only the `local` backend does: its images, its way to work anywhere, and its end."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from swerl.errors import ImageError, SandboxError, SandboxUnavailableError
from swerl.interfaces import Limits, Sandbox
from swerl.sandboxes import _cgroup as cgroup
from swerl.sandboxes import local
from swerl.sandboxes._image import image_folder, write_image

LIMITS = Limits(memory_mib=256, num_processes=32, disk_mib=64, lifetime_s=60)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=["bwrap", "unshare"])
def backend(request: pytest.FixtureRequest) -> local.LocalBackend:
    if request.param == "bwrap" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    return local.build(local.Options(isolator=request.param))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))


async def sh(sandbox: Sandbox, script: str) -> str:
    done = await sandbox.run(["sh", "-c", script], timeout_s=20)
    assert done.exit_code == 0, done
    return done.stdout.decode()


# Images


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "odd, name: repo"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "a.py").write_text("a = 1\n")
    (folder / "link").symlink_to("pkg/a.py")
    return folder


async def test_a_folder_fills_the_workdir_and_is_never_changed(
    backend: local.LocalBackend, repository: Path
) -> None:
    for _ in range(2):
        async with backend.open(f"dir:{repository}", LIMITS, workdir="/work/repo") as sandbox:
            assert await sh(sandbox, "pwd; cat link") == "/work/repo\na = 1\n"
            await sh(sandbox, "echo b > pkg/a.py && rm link && rm -r pkg && mkdir pkg && ls -A pkg")
            await sandbox.write("/work/repo/new", b"")
            assert await sh(sandbox, "ls -A") == "new\npkg\n"
    assert (repository / "pkg" / "a.py").read_text() == "a = 1\n"
    assert sorted(path.name for path in repository.iterdir()) == ["link", "pkg"]


async def test_a_built_image_lays_its_layers_over_the_host(
    backend: local.LocalBackend, tmp_path: Path
) -> None:
    folder = image_folder("demo__demo-1")
    for layer, text in (("low", "low"), ("high", "high")):
        (folder / layer / "testbed").mkdir(parents=True)
        (folder / layer / "testbed" / "f").write_text(text)
    (folder / "low" / "opt").mkdir()
    tool = tmp_path / "tool"
    tool.mkdir()
    (tool / "t").write_text("tool")
    write_image("demo__demo-1", ["low", "high"], [tool], {"PATH": "/opt:/usr/bin:/bin", "X": "1"})
    async with backend.open("built:demo__demo-1", LIMITS, workdir="/testbed") as sandbox:
        assert await sh(sandbox, "cat f; echo $X $PATH") == "high1 /opt:/usr/bin:/bin\n"
        assert await sh(sandbox, f"cat {tool}/t && id -un && git --version >&2") == "toolagent\n"
        await sh(sandbox, "echo x > f; touch /opt/x /top; rm -r /testbed/f")
    assert (folder / "high" / "testbed" / "f").read_text() == "high"
    assert not (folder / "low" / "opt" / "x").exists()


async def test_what_was_changed_can_become_a_layer(backend: local.LocalBackend) -> None:
    write_image("base", [])
    folder = image_folder("base")
    async with backend.open("built:base", LIMITS, workdir="/testbed") as sandbox:
        await sh(sandbox, "mkdir -p /opt/tool && echo 1 > /opt/tool/keep && echo 2 > gone")
        await sh(sandbox, "echo temporary > /tmp/f")
        await sandbox.capture(folder / "first")
    write_image("base", ["first"])
    assert not (folder / "first" / "tmp").exists()
    async with backend.open("built:base", LIMITS, workdir="/testbed") as sandbox:
        await sh(sandbox, "rm gone && rm -r /opt/tool && mkdir /opt/tool && echo 3 > /opt/tool/new")
        await sandbox.capture(folder / "second")
    write_image("base", ["first", "second"])
    async with backend.open("built:base", LIMITS, workdir="/testbed") as sandbox:
        assert await sh(sandbox, "ls -A . /opt/tool") == ".:\n\n/opt/tool:\nnew\n"


async def test_a_sandbox_without_an_overlay_has_nothing_to_capture(
    backend: local.LocalBackend, tmp_path: Path
) -> None:
    async with backend.open("host", LIMITS, workdir="/testbed") as sandbox:
        with pytest.raises(SandboxError, match="no list of its changes"):
            await sandbox.capture(tmp_path / "layer")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("built:absent", "not on this machine"),
        ("built:../up", "cannot name an image"),
        ("dir:/no/such/folder", "no folder"),
        ("dir:relative", "cannot open image"),
        ("ubuntu:22.04", "cannot open image"),
    ],
)
async def test_an_image_that_is_not_there_is_one_clear_error(image: str, message: str) -> None:
    with pytest.raises(ImageError, match=message) as raised:
        async with local.build(local.Options()).open(image, LIMITS, workdir="/testbed"):
            pass
    assert raised.value.hint


@pytest.mark.parametrize(
    "body", ["not json", "{}", '{"layers": ["absent"], "binds": [], "env": {}}']
)
async def test_a_broken_image_names_its_folder(body: str) -> None:
    folder = write_image("broken", [])
    (folder / "image.json").write_text(body)
    with pytest.raises(ImageError) as raised:
        async with local.build(local.Options()).open("built:broken", LIMITS, workdir="/testbed"):
            pass
    assert str(folder) in raised.value.hint


# Anywhere


def test_a_named_isolator_that_is_missing_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailableError) as raised:
        local.build(local.Options(isolator="bwrap"))
    assert "unshare" in raised.value.hint
    local.build(local.Options())


def test_a_machine_without_user_namespaces_is_told_what_to_do() -> None:
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec python -c "$0"'
    child = """
import asyncio
from swerl.errors import SandboxUnavailableError
from swerl.interfaces import Limits
from swerl.sandboxes import _cgroup as cgroup
from swerl.sandboxes import local
async def main():
    try:
        async with local.build(local.Options(isolator="unshare")).open(
            "host", Limits(), workdir="/testbed"
        ):
            print("opened")
    except SandboxUnavailableError as error:
        print(error.hint)
asyncio.run(main())
"""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", script, child],
        env={"PATH": path, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    if "max_user_namespaces" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"cannot make such a machine here: {done.stderr.strip()}")
    assert "user.max_user_namespaces" in done.stdout, done


async def test_scratch_on_disk_is_used_and_cleared_away(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    dead = scratch / "swerl-999999999-dead"
    dead.mkdir()
    backend = local.build(local.Options(scratch=scratch))
    async with backend.open("host", LIMITS, workdir="/testbed") as sandbox:
        await sandbox.write("/testbed/f", b"on disk")
        assert [path.name for path in scratch.iterdir()] == [sandbox.id]
        assert await sh(sandbox, "cat f") == "on disk"
    await until(lambda: not list(scratch.iterdir()))


def test_sweep_leaves_the_folders_of_the_living(tmp_path: Path) -> None:
    for pid in (os.getpid(), 999999999):
        (tmp_path / f"swerl-{pid}-x").mkdir()
    assert local.sweep(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == [f"swerl-{os.getpid()}-x"]


RUN_ITSELF = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"


def test_the_suite_passes_as_an_unprivileged_user(tmp_path: Path) -> None:
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root, to become another user")
    python = next(
        (
            name
            for name in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}")
            if subprocess.run([*user, name, "-c", RUN_ITSELF], capture_output=True).returncode == 0
        ),
        None,
    )
    if python is None:
        pytest.skip("an unprivileged user cannot run any Python of this version here")
    done = subprocess.run(
        [
            *user,
            *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not bwrap-"),
            *("--basetemp", f"/tmp/swerl-unprivileged-{os.getpid()}", "tests/sandboxes"),
            *("--ignore", "tests/sandboxes/test_local.py"),
        ],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


# The end

CONTROLLER = """
import asyncio, sys
from swerl.interfaces import Limits
from swerl.sandboxes import local

async def hold(backend, token):
    async with backend.open("host", Limits(lifetime_s=60), workdir="/testbed") as sandbox:
        await sandbox.run(["sh", "-c", f"setsid sleep {token} & echo >/testbed/up"])
        print("up", flush=True)
        await sandbox.run(["sleep", token])

async def churn(backend, token):
    while True:
        async with backend.open("host", Limits(lifetime_s=60), workdir="/testbed") as sandbox:
            await sandbox.run(["sleep", token], timeout_s=0.01)
            print("up", flush=True)

async def main(isolator, what, token):
    backend = local.build(local.Options(isolator=isolator))
    await asyncio.gather(*(globals()[what](backend, token) for _ in range(3)))

asyncio.run(main(*sys.argv[1:]))
"""


async def until(true: Callable[[], object]) -> None:
    """Wait until a function returns something true."""
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110  no event tells
            await asyncio.sleep(0.01)


def processes(words: str) -> list[int]:
    """Return the host's processes that have these words on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if words.encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def groups(pid: int) -> list[str]:
    """Return the cgroups that sandboxes of this controller still have."""
    names = cgroup.leftovers(cgroup.find())
    return [name for name in names if name.startswith(f"swerl-{pid}-")]


@pytest.mark.parametrize("isolator", ["bwrap", "unshare"])
@pytest.mark.parametrize("delay_s", [None, 0.01, 0.017, 0.023])
async def test_a_killed_controller_leaves_nothing(isolator: str, delay_s: float | None) -> None:
    """At rest, and at moments at which it opens and closes."""
    mounts = Path("/proc/self/mountinfo").read_text()
    token = f"7{time.time():.6f}"
    child = subprocess.Popen(  # noqa: ASYNC220  it is another controller
        [sys.executable, "-c", CONTROLLER, isolator, "churn" if delay_s else "hold", token],
        stdout=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src")},
    )
    assert child.stdout
    assert [child.stdout.readline() for _ in range(3)] == [b"up\n"] * 3
    [spawner] = children(child.pid)
    if delay_s:
        await asyncio.sleep(delay_s)
    else:
        assert len(processes(token)) >= 4
    child.kill()
    child.communicate()
    await until(lambda: not processes(token) and not groups(child.pid))
    await until(lambda: b"_spawner" not in command_line(spawner))
    assert Path("/proc/self/mountinfo").read_text() == mounts


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def test_a_killed_spawner_takes_its_sandboxes_along_and_is_replaced() -> None:
    backend = local.build(local.Options())
    token = f"8{time.time():.6f}"
    async with backend.open("host", LIMITS, workdir="/testbed") as sandbox:
        running = asyncio.ensure_future(sandbox.run(["sleep", token]))
        await until(lambda: processes(token))
        os.kill(backend.spawner_pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="gone"):
            await running
    await until(lambda: not processes(token))
    async with backend.open("host", LIMITS, workdir="/testbed") as sandbox:
        assert await sh(sandbox, "echo again") == "again\n"


async def test_cancelling_while_it_opens_leaves_nothing(backend: local.LocalBackend) -> None:
    async def hold() -> None:
        async with backend.open("host", LIMITS, workdir="/testbed"):
            await asyncio.sleep(60)

    async with backend.open("host", LIMITS, workdir="/testbed"):
        pass
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    for wait_s in (0.0, 0.001, 0.005, 0.01, 0.03):
        task = asyncio.ensure_future(hold())
        await asyncio.sleep(wait_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: not children(backend.spawner_pid))
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


async def test_a_dropped_backend_ends_its_spawner() -> None:
    backend = local.build(local.Options())
    async with backend.open("host", LIMITS, workdir="/testbed"):
        pid = backend.spawner_pid
    assert Path(f"/proc/{pid}").exists()
    del backend
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


async def test_the_image_description_is_what_the_builder_writes() -> None:
    folder = write_image("plain", ["rootfs"], ["/usr/lib"], {"A": "b"})
    assert json.loads((folder / "image.json").read_text()) == {
        "layers": ["rootfs"],
        "binds": ["/usr/lib"],
        "env": {"A": "b"},
    }
