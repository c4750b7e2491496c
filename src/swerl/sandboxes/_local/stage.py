"""The file system of one sandbox, put together in a mount namespace of its own.

Everything that a sandbox writes lies in one memory file system of bounded size, mounted in that
namespace only. So nothing is left on the host when the last process is gone, however it went.
The mount point is /sys: it exists everywhere, and no sandbox needs what lies there.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from swerl.sandboxes._local import files, kernel
from swerl.sandboxes._local.wire import Plan

STAGE = "/sys"
ROOT = STAGE + "/root"

_FOLDERS = ("/proc", "/dev", "/sys", "/run", "/var/tmp", "/home/agent", "/root", "/etc", "/tmp")
_KERNEL_SETTINGS = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "mtrr", "driver")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = (
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
)


def build(plan: Plan) -> int | None:
    """Build the tree at ROOT; return a descriptor of the folder that collects its changes.

    There is such a folder where the root or the workdir is an overlay. Raises OSError.
    """
    kernel.mount("none", "/", flags=kernel.MS_PRIVATE | kernel.MS_REC)
    if plan.scratch:
        kernel.mount(plan.scratch, STAGE, flags=kernel.MS_BIND)
    else:
        options = f"size={plan.disk_mib}m,mode=755"
        kernel.mount(
            "tmpfs", STAGE, "tmpfs", flags=kernel.MS_NOSUID | kernel.MS_NODEV, data=options
        )
    Path(ROOT).mkdir()
    upper = _make_base(plan)
    root = os.open(ROOT, os.O_PATH | os.O_DIRECTORY)
    _make_apart(root, "tmp", 0o1777, lambda _: None)
    _make_apart(root, "sys", 0o555, lambda _: None)  # an image's own would show another machine
    if not plan.bwrap:
        _make_apart(root, "dev", 0o755, _make_devices)
    for source, target in plan.binds:
        _bind(root, source, target)
    if plan.content:
        upper = _make_content(root, plan)
    else:
        os.close(files.make_folder(root, plan.workdir))
    os.close(root)
    kernel.mount(ROOT, ROOT, flags=kernel.MS_BIND | kernel.MS_REC)
    return upper


def mount_proc() -> None:
    """Mount the /proc of this process's own process namespace, there and in the tree at ROOT.

    The kernel's settings in it are read-only: the host's root could write them without capability.
    """
    kernel.unshare(kernel.NEWNS)
    proc = f"{ROOT}/proc"
    kernel.mount("proc", proc, "proc", flags=kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    for name in _KERNEL_SETTINGS:
        path = f"{proc}/{name}"
        with suppress(FileNotFoundError):
            kernel.mount(path, path, flags=kernel.MS_BIND | kernel.MS_REC)
            kernel.restrict(path, kernel.ATTR_RDONLY)
    kernel.mount(proc, "/proc", flags=kernel.MS_BIND | kernel.MS_REC)


def _make_base(plan: Plan) -> int | None:
    if not plan.layers:
        _write_base(Path(ROOT), plan)
        return None
    base = Path(STAGE, "base")
    base.mkdir()
    _write_base(base, plan)
    own = [str(base)]
    lowers = [*plan.layers, *own] if plan.is_whole else [*own, *plan.layers]
    return _overlay(lowers, ROOT, "root")


def _write_base(base: Path, plan: Plan) -> None:
    for name in _FOLDERS:
        Path(f"{base}{name}").mkdir(parents=True)
    (base / "var/tmp").chmod(0o1777)
    for name, target in plan.links:
        Path(f"{base}{name}").symlink_to(target)
    for name, text in plan.files:
        Path(f"{base}{name}").write_text(text)


def _bind(root: int, source: str, target: str) -> None:
    make = files.make_folder if Path(source).is_dir() else files.make_file
    fd = make(root, target)
    place = f"/proc/self/fd/{fd}"
    kernel.mount(source, place, flags=kernel.MS_BIND | kernel.MS_REC)
    os.close(fd)
    fd = kernel.openat2(root, target, os.O_PATH)
    attributes = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV
    kernel.restrict(f"/proc/self/fd/{fd}", attributes)
    os.close(fd)


def _make_apart(root: int, name: str, mode: int, fill: Callable[[Path], None]) -> None:
    """Keep a top-level folder out of the changes that `capture` collects."""
    folder = Path(STAGE, name)
    folder.mkdir()
    folder.chmod(mode)
    fill(folder)
    fd = files.make_folder(root, f"/{name}")
    kernel.mount(str(folder), f"/proc/self/fd/{fd}", flags=kernel.MS_BIND | kernel.MS_REC)
    os.close(fd)


def _make_devices(folder: Path) -> None:
    for name in _DEVICES:
        (folder / name).touch()
        with suppress(FileNotFoundError):
            kernel.mount(f"/dev/{name}", str(folder / name), flags=kernel.MS_BIND)
    for name, target in _DEVICE_LINKS:
        (folder / name).symlink_to(target)
    for name in ("pts", "shm"):
        (folder / name).mkdir()
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", str(folder / "shm"), "tmpfs", flags=flags, data="mode=1777,size=64m")
    kernel.mount("devpts", str(folder / "pts"), "devpts", data="newinstance,ptmxmode=0666,mode=620")


def _make_content(root: int, plan: Plan) -> int | None:
    fd = files.make_folder(root, plan.workdir)
    place = f"/proc/self/fd/{fd}"
    try:
        return _overlay([plan.content], place, "content")
    except OSError:  # a kernel without overlays in user namespaces, or without their attributes
        shutil.copytree(plan.content, place, symlinks=True, dirs_exist_ok=True)
        return None
    finally:
        os.close(fd)


def _overlay(lowers: Sequence[str], target: str, name: str) -> int:
    """Mount folders over each other, lowest first, writable; return where changes go.

    Folders are named by descriptor, so that no path in them needs escapes or exceeds a limit.
    """
    upper, work = Path(STAGE, name + ".upper"), Path(STAGE, name + ".work")
    for folder in (upper, work):
        folder.mkdir()
    if _in_user_namespace() and not _keeps_attributes(upper):
        message = "memory keeps no user attributes here: set scratch to a folder on disk"
        raise OSError(errno.EOPNOTSUPP, message)
    fds = [os.open(lower, os.O_PATH | os.O_DIRECTORY) for lower in reversed(lowers)]
    data = (
        f"lowerdir={':'.join(f'/proc/self/fd/{fd}' for fd in fds)},upperdir={upper},workdir={work}"
    )
    if _in_user_namespace():
        data += ",userxattr"
    try:
        kernel.mount("overlay", target, "overlay", data=data)
    finally:
        for fd in fds:
            os.close(fd)
    return os.open(upper, os.O_RDONLY | os.O_DIRECTORY)


def _in_user_namespace() -> bool:
    return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]


def _keeps_attributes(folder: Path) -> bool:
    with tempfile.TemporaryDirectory(dir=folder) as probe:
        try:
            os.setxattr(probe, "user.overlay.probe", b"y")
        except OSError:
            return False
    return True
