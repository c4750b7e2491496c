"""Attacks by `read` and `write`: paths that could lead the controller outside the sandbox."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from swerl.core.errors import SandboxError, SandboxLostError
from tests.attacks._targets import new_word
from tests.attacks.attack import (
    AttackContext,
    AttackFinding,
    CannotError,
    attack,
    failed,
    judge,
    passed,
)

_UP = "../" * 12
_RACE_S = 1.0
_PATIENCE_S = 4.0
_GIANT_MIB, _GIANT_S = 1024, 6.0
_ODD_NAMES = (
    "new\nline", "-rf", "a b", "quote'\"", "$(touch /tmp/swerl-probe-hit)", "back\\slash",
    "`touch /tmp/swerl-probe-hit`", "; touch /tmp/swerl-probe-hit;", "é漢😀", "*", "x" * 250,
)  # fmt: skip


@attack("Creates links to a host file, and makes the controller read and write through them.")
async def links_out(ctx: AttackContext) -> AttackFinding:
    with _host_folder() as (folder, word):
        target = f"{folder}/secret"
        links = {
            "an absolute link": target,
            "a climbing link": f"{_UP}{target[1:]}",
            "a link by /proc/self/root": f"/proc/self/root{target}",
            "a link by /proc/1/root": f"/proc/1/root{target}",
            "a link by /proc/self/cwd": f"/proc/self/cwd/{_UP}{target[1:]}",
        }
        holes = []
        for number, (name, leads) in enumerate(links.items()):
            path = f"{ctx.workdir}/link{number}"
            done = await ctx.box.run(["ln", "-s", leads, path])
            if done.exit_code != 0:
                raise CannotError(f"cannot create a link: {done.text.strip()[:100]}")
            holes += await _touch(ctx, path, word, name)
        holes += _changes(folder, word)
    return judge(holes, f"none of {len(links)} links leads outside")


@attack("Makes the controller use paths that climb above the root or pass through /proc.")
async def climbing_paths(ctx: AttackContext) -> AttackFinding:
    with _host_folder() as (folder, word):
        target = f"{folder}/secret"
        paths = [
            target, f"/{_UP}{target[1:]}", f"{ctx.workdir}/{_UP}{target[1:]}", f"{_UP}{target[1:]}",
            f"/proc/self/root{target}", f"/proc/1/root{target}", f"//..//..{target}",
        ]  # fmt: skip
        holes = []
        for path in paths:
            holes += await _touch(ctx, path, word, path)
        holes += _changes(folder, word)
    return judge(holes, f"none of {len(paths)} paths leads outside")


@attack("Swaps a folder for a link to a host folder while the controller writes into it.")
async def folder_swap_race(ctx: AttackContext) -> AttackFinding:
    with _host_folder() as (folder, word):
        swapping = asyncio.ensure_future(
            ctx.box.attack("race.swap", ctx.workdir, str(folder), _RACE_S)
        )
        holes: list[str] = []
        num_tried = 0
        while not swapping.done():
            num_tried += 1
            path = f"{ctx.workdir}/spot/{num_tried}"
            with _refusals():
                await ctx.box.sandbox.write(path, b"x")
            with _refusals():
                if word.encode() in await ctx.box.sandbox.read(f"{ctx.workdir}/spot/secret"):
                    holes.append("the host's file was read")
            await asyncio.sleep(0)
        swaps = (await swapping)["swaps"]
        holes += _changes(folder, word)
    if not holes and not int(swaps):
        raise CannotError("the folder could not be swapped")
    return judge(holes, f"{num_tried} writes and reads in {swaps} swaps, none of them outside")


@attack("Makes the controller read and write pipes and endless devices, to hang it.")
async def files_that_hang(ctx: AttackContext) -> AttackFinding:
    made = await ctx.box.sh(f"mkfifo {ctx.workdir}/pipe")
    if made.exit_code != 0:
        raise CannotError(f"cannot create a pipe: {made.text.strip()[:100]}")
    sandbox = ctx.box.sandbox
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "reading a pipe": lambda: sandbox.read(f"{ctx.workdir}/pipe"),
        "writing a pipe": lambda: sandbox.write(f"{ctx.workdir}/pipe", b"x"),
        "reading a device": lambda: sandbox.read("/dev/urandom"),
        "reading a folder": lambda: sandbox.read(ctx.workdir),
    }
    holes = []
    for name, call in calls.items():
        try:
            async with asyncio.timeout(_PATIENCE_S / 2):
                await call()
        except TimeoutError:
            holes.append(f"{name} hangs")
        except (SandboxError, FileNotFoundError):
            continue
    return judge(holes, "all are refused or end at once")


@attack("Makes the controller read a sparse file larger than its disk, to fill its memory.")
async def giant_file(ctx: AttackContext) -> AttackFinding:
    made = await ctx.box.sh(f"truncate -s {_GIANT_MIB}M {ctx.workdir}/giant")
    if made.exit_code != 0:
        return passed(f"it cannot be created: {made.text.strip()[:100]}")
    try:
        async with asyncio.timeout(_GIANT_S):
            data = await ctx.box.sandbox.read(f"{ctx.workdir}/giant")
    except TimeoutError:
        return failed(f"the read had not ended after {_GIANT_S:.0f} s")
    except (SandboxError, FileNotFoundError) as error:
        return passed(f"refused: {error}"[:160])
    size = len(data) >> 20
    return failed(
        f"{size} MiB were read into memory, from a sandbox with {ctx.limits.disk_mib} MiB of disk"
    )


@attack("Makes the controller use file names with shell commands and special characters.")
async def odd_names(ctx: AttackContext) -> AttackFinding:
    holes = []
    for name in _ODD_NAMES:
        path = f"{ctx.workdir}/{name}"
        try:
            await ctx.box.sandbox.write(path, name.encode())
            if await ctx.box.sandbox.read(path) != name.encode():
                holes.append(f"{name[:30]!r} has other content")
        except (SandboxError, FileNotFoundError) as error:
            holes.append(f"{name[:30]!r}: {error}"[:120])
    done = await ctx.box.run(["ls", "/tmp"])
    if b"swerl-probe-hit" in done.stdout:
        holes.append("a file name was run as a command")
    return judge(holes, f"{len(_ODD_NAMES)} names, none changed or run")


@contextmanager
def _host_folder() -> Iterator[tuple[Path, str]]:
    """Create a host folder with a secret file; yield the folder and the secret."""
    folder, word = Path(tempfile.mkdtemp(prefix="swerl-probe-")), new_word()
    try:
        folder.chmod(0o755)
        (folder / "secret").write_text(word)
        yield folder, word
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _touch(ctx: AttackContext, path: str, word: str, name: str) -> list[str]:
    """Read and write a path; return a hole if the read returned the secret."""
    holes = []
    with _refusals():
        if word.encode() in await ctx.box.sandbox.read(path):
            holes.append(f"{name} is read")
    with _refusals():
        await ctx.box.sandbox.write(path, b"overwritten")
    return holes


@contextmanager
def _refusals() -> Iterator[None]:
    """Ignore refusals. A lost sandbox is no refusal and raises."""
    try:
        yield
    except SandboxLostError:
        raise
    except (SandboxError, OSError):
        return


def _changes(folder: Path, word: str) -> list[str]:
    holes = [
        f"{path.name} was written to the host" for path in folder.iterdir() if path.name != "secret"
    ]
    if (folder / "secret").read_text() != word:
        holes.append("the host's file was written")
    return holes
