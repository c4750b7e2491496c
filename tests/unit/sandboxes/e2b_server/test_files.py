"""Files and folders through the SDK."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from e2b import FileNotFoundException, FileType, InvalidArgumentException, Sandbox
from e2b.exceptions import SandboxException

from swerl.sandboxes import local

from .helpers import serving


def test_what_cannot_be_read_listed_or_written_is_said(sandbox: Sandbox) -> None:
    assert not sandbox.files.exists("nothing")
    for ask in (sandbox.files.read, sandbox.files.get_info, sandbox.files.list):
        with pytest.raises(FileNotFoundException):
            ask("nothing")
    sandbox.files.write("file", "x")
    with pytest.raises(InvalidArgumentException, match="not a directory"):
        sandbox.files.list("file")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.read("/tmp")
    with pytest.raises(SandboxException):
        sandbox.files.write("/tmp", "x")
    with pytest.raises(InvalidArgumentException, match="home"):
        sandbox.files.read("~other/file")


def test_a_link_leads_nowhere_outside(sandbox: Sandbox, tmp_path_factory: object) -> None:
    sandbox.commands.run("ln -s / out; ln -s ../../../../../../../proc/1/root up")
    with pytest.raises(FileNotFoundException):
        sandbox.files.read(f"out{__file__}")
    with pytest.raises((FileNotFoundException, SandboxException)):
        sandbox.files.read(f"up{__file__}")


def test_a_file_over_the_maximum_is_neither_written_nor_read() -> None:
    with serving(local.build(local.Options()), max_file_mib=1) as small:
        sandbox = Sandbox.create(**small.sdk)
        for octets in (True, False):
            with pytest.raises(SandboxException, match="larger"):
                sandbox.files.write("big", b"\0" * (2 << 20), use_octet_stream=octets)
        with pytest.raises(SandboxException, match="larger"):
            sandbox.files.write("bomb", b"\0" * (64 << 20), gzip=True)
        assert sandbox.commands.run("du -sm . | cut -f1").stdout in ("1\n", "2\n", "3\n")
        sandbox.commands.run("head -c 2000000 /dev/zero >made; truncate -s 1T sparse")
        for name in ("made", "sparse"):
            with pytest.raises(SandboxException, match="larger"):
                sandbox.files.read(name)
        sandbox.kill()


def test_a_large_file_passes_without_a_copy_of_it_in_memory(sandbox: Sandbox) -> None:
    peak = "VmHWM"

    def peak_mib() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.partition(f"{peak}:")[2].split()[0]) >> 10

    sandbox.commands.run("truncate -s 300M big")
    before = peak_mib()
    size = sum(len(piece) for piece in sandbox.files.read("big", format="stream"))
    assert size == 300 << 20
    assert peak_mib() - before < 64  # the server and the client are this process


@pytest.mark.parametrize("path", ["/proc/kallsyms", "/proc/self/maps", "/sys/kernel/notes"])
def test_files_of_the_kernel_are_refused(sandbox: Sandbox, path: str) -> None:
    sandbox.commands.run(f"ln -s {path} link; ln -s /proc/self deep")
    for name in (path, "link", "deep/environ"):
        with pytest.raises(SandboxException):
            sandbox.files.read(name)
    for name in ("/proc/self/oom_score_adj", "deep/oom_score_adj", "/proc/new"):
        with pytest.raises(SandboxException):
            sandbox.files.write(name, "1")


@pytest.mark.parametrize("name", ["pipe", "device", "loop", "folder", "file/below"])
def test_a_path_that_is_no_plain_file_is_refused(sandbox: Sandbox, name: str) -> None:
    script = "mkfifo pipe; ln -s /dev/zero device; ln -s loop loop; mkdir folder; echo x >file"
    sandbox.commands.run(script)
    with pytest.raises(SandboxException):
        sandbox.files.read(name, request_timeout=20)
    with pytest.raises(SandboxException):
        sandbox.files.write(name, "x", request_timeout=20)
    assert sandbox.files.read("file") == "x\n"


def test_a_list_tells_kinds_sizes_owners_and_links(sandbox: Sandbox) -> None:
    sandbox.commands.run("mkdir d; printf 12345 > f; chmod 640 f; ln -s f to-f; ln -s no to-no")
    found = {entry.name: entry for entry in sandbox.files.list(".")}
    assert {name: entry.type for name, entry in found.items()} == {
        "d": FileType.DIR, "f": FileType.FILE, "to-f": FileType.SYMLINK, "to-no": FileType.SYMLINK
    }  # fmt: skip
    file = found["f"]
    assert (file.size, file.mode, file.permissions) == (5, 0o640, "-rw-r-----")
    assert (file.path, file.owner) == ("/home/user/f", "agent")
    assert abs(file.modified_time.timestamp() - time.time()) < 60


def test_rename_and_remove(sandbox: Sandbox) -> None:
    sandbox.files.write("old", "content")
    assert sandbox.files.rename("old", "deep/new").path == "/home/user/deep/new"
    assert sandbox.files.read("deep/new") == "content"
    assert not sandbox.files.exists("old")
    with pytest.raises(FileNotFoundException):
        sandbox.files.rename("old", "elsewhere")
    sandbox.files.remove("deep")
    sandbox.files.remove("deep")
    assert not sandbox.files.exists("deep")
