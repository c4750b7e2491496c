"""Attacks by `read` and `write`: paths that could lead the controller outside the sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swerl.core.errors import SandboxError, SandboxLostError

from .box import Box, new_word

UP = "../" * 12
HIT = "/tmp/swerl-probe-hit"
ODD_NAMES = (
    "new\nline", "-rf", "a b", "quote'\"", f"$(touch {HIT})", "back\\slash", f"`touch {HIT}`",
    f"; touch {HIT};", "é漢😀", "*", "x" * 250,
)  # fmt: skip


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A host file that must be neither read nor changed, alone in its folder."""
    path, word = tmp_path / "secret", new_word()
    path.write_text(word)
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        folder.chmod(folder.stat().st_mode | 0o5)
    yield path
    assert path.read_text() == word
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


@contextmanager
def refusals() -> Iterator[None]:
    """Ignore refusals. A lost sandbox is no refusal and raises."""
    try:
        yield
    except SandboxLostError:
        raise
    except (SandboxError, OSError):
        return


async def touch(box: Box, path: str, secret: Path) -> None:
    """Read and write a path; the read must not return the secret."""
    with refusals():
        assert secret.read_bytes() not in await box.sandbox.read(path)
    with refusals():
        await box.sandbox.write(path, b"overwritten")


@pytest.mark.parametrize(
    "form",
    ["{path}", f"{UP}{{path}}", "/proc/self/root{path}", "/proc/1/root{path}",
     f"/proc/self/cwd/{UP}{{path}}"],
)  # fmt: skip
async def test_no_link_or_path_leads_out(box: Box, secret: Path, form: str) -> None:
    leads = form.format(path=secret)
    assert (await box.sandbox.run(["ln", "-s", leads, f"{box.workdir}/link"])).exit_code == 0
    for path in (f"{box.workdir}/link", leads, f"/{UP}{leads}", f"{box.workdir}/{UP}{leads}"):
        await touch(box, path, secret)


async def test_pipes_and_endless_files_do_not_hang_a_read(box: Box) -> None:
    await box.sh("mkfifo pipe; truncate -s 1024M giant")
    for path in (f"{box.workdir}/pipe", "/dev/urandom", box.workdir, f"{box.workdir}/giant"):
        async with asyncio.timeout(6):
            with pytest.raises((SandboxError, OSError)):
                await box.sandbox.read(path)
    async with asyncio.timeout(6):
        with refusals():
            await box.sandbox.write(f"{box.workdir}/pipe", b"x")


async def test_odd_names_are_only_names(box: Box) -> None:
    for name in ODD_NAMES:
        await box.sandbox.write(f"{box.workdir}/{name}", name.encode())
        assert await box.sandbox.read(f"{box.workdir}/{name}") == name.encode()
    assert (await box.sh(f"ls {HIT}")).exit_code != 0
    assert not Path(HIT).exists()
