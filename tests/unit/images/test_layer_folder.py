"""Unpacked layers hide in a real overlay what they should, for root and for ordinary users."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swerl.images.store import Store
from tests.unit.images.layers import Entry, add_image, folder

LOW = [Entry("gone", b"x"), Entry("d/old", b"x"), Entry("e/old", b"x"), Entry("kept", b"x")]
HIGH = [
    Entry(".wh.gone"), folder("d"), Entry("d/.wh..wh..opq"), Entry("d/new", b"x"),
    Entry(".wh.e"), Entry("e/new", b"x"),
]  # fmt: skip
NOBODY = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user reaches."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("user", "unshare", "options"),
    [
        (0, ["unshare", "--mount"], ""),
        (NOBODY, ["unshare", "--user", "--map-root-user", "--mount"], ",userxattr"),
    ],
    ids=["root", "ordinary user"],
)
def test_overlay_shows_the_image(place: Path, user: int, unshare: list[str], options: str) -> None:
    if os.geteuid():
        pytest.skip("becoming root and nobody takes root")
    (place / "seen").mkdir(mode=0o777)

    def look() -> str:
        store = Store(place / "store")
        add_image(store, "docker.io/swe/task:latest", LOW, HIGH)
        lower = ":".join(str(path) for path in reversed(store.find("swe/task").layers))
        mount = f"mount -t overlay -o lowerdir={lower}{options} overlay {place}/seen"
        command = f"{mount} && cd {place}/seen && find . -type f | sort"
        done = subprocess.run(
            [*unshare, "sh", "-c", command], capture_output=True, text=True, cwd="/"
        )
        return done.stdout if done.returncode == 0 else f"cannot mount: {done.stderr}"

    seen = as_user(user, look)
    if seen.startswith("cannot mount"):
        pytest.skip(seen.strip())
    assert seen.split() == ["./d/new", "./e/new", "./kept"]


def as_user(user: int, call: Callable[[], str]) -> str:
    """Return what `call` returns in a child process of this user, or how it failed."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            answer = call()
        except BaseException:  # noqa: BLE001  told by the parent
            answer = traceback.format_exc()
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    os.wait()
    with os.fdopen(reading) as file:
        return file.read()
