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
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from swerl.sandboxes._local import files, kernel
from swerl.sandboxes._local.identity import Identity
from swerl.sandboxes._local.wire import Plan

STAGE = "/sys"
ROOT = STAGE + "/root"

_FOLDERS = ("/proc", "/dev", "/sys", "/run", "/var/tmp", "/home/agent", "/root", "/etc", "/tmp")
_KERNEL_SETTINGS = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "mtrr", "driver")
_INODES_PER_MIB = 128
"""One for two blocks: an empty file costs the kernel memory that no block counts."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = (
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
)


def build(plan: Plan, identity: Identity, device: int) -> int | None:
    """Build the tree at ROOT; return a descriptor of the folder that collects its changes.

    There is such a folder where the root or the workdir is an overlay. Raises OSError.
    """
    kernel.mount("none", "/", flags=kernel.MS_PRIVATE | kernel.MS_REC)
    _mount_stage(plan, identity.uid, device)
    upper = _Builder(plan, identity).build()
    kernel.mount(ROOT, ROOT, flags=kernel.MS_BIND | kernel.MS_REC)
    return upper


def _mount_stage(plan: Plan, uid: int, device: int) -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    if device >= 0:
        kernel.mount(f"/proc/self/fd/{device}", STAGE, "ext4", flags=flags)
    elif plan.scratch:
        kernel.mount(plan.scratch, STAGE, flags=kernel.MS_BIND)
    else:
        size_mib = max(plan.disk_mib, 1)
        options = f"size={size_mib}m,nr_inodes={size_mib * _INODES_PER_MIB},mode=755"
        options += f",uid={uid},gid={uid}"
        kernel.mount("tmpfs", STAGE, "tmpfs", flags=flags, data=options)
    if plan.scratch:
        os.chown(STAGE, uid, uid)


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


@dataclass(slots=True)
class _Builder:
    """Builds the tree: files are made as the sandbox's user, mounts as who opens it."""

    plan: Plan
    identity: Identity
    root: int = -1
    """Descriptor of the tree's root."""

    def build(self) -> int | None:
        with self._owner():
            Path(ROOT).mkdir()
        upper = self._make_base()
        self.root = os.open(ROOT, os.O_PATH | os.O_DIRECTORY)
        self._make_apart("tmp", 0o1777)
        self._make_apart("sys", 0o555)  # an image's own would show another machine
        shm_mib = max(1, min(64, self.plan.memory_mib // 16))
        _fill_devices(self._make_apart("dev", 0o755), shm_mib)
        for source, target in (*self.plan.binds, *self.plan.mounts):
            self._bind(source, target)
        if self.plan.content:
            upper = self._make_content()
        else:
            os.close(self._make_place(self.plan.workdir))
        os.close(self.root)
        return upper

    def _make_base(self) -> int | None:
        plan = self.plan
        base = Path(STAGE, "base") if plan.layers else Path(ROOT)
        with self._owner():
            base.mkdir(exist_ok=True)
            _write_base(base, plan)
        if not plan.layers:
            return None
        layers = self._shown(plan.layers)
        lowers = [*layers, str(base)] if plan.is_whole else [str(base), *layers]
        return self._overlay(lowers, ROOT, "root")

    def _make_content(self) -> int | None:
        fd = self._make_place(self.plan.workdir)
        place = f"/proc/self/fd/{fd}"
        content = self._shown([self.plan.content])
        try:
            return self._overlay(content, place, "content")
        except OSError:  # a kernel without overlays in user namespaces, or without attributes
            with self._owner():
                shutil.copytree(content[0], place, symlinks=True, dirs_exist_ok=True)
            return None
        finally:
            os.close(fd)

    def _bind(self, source: str, target: str) -> None:
        fd = self._make_place(target, is_folder=Path(source).is_dir())
        place = f"/proc/self/fd/{fd}"
        if source in self.identity.views:
            kernel.attach(self.identity.views[source], place)
        else:
            kernel.mount(source, place, flags=kernel.MS_BIND | kernel.MS_REC)
        os.close(fd)
        fd = kernel.openat2(self.root, target, os.O_PATH)
        attributes = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV
        kernel.restrict(f"/proc/self/fd/{fd}", attributes)
        os.close(fd)

    def _make_apart(self, name: str, mode: int) -> Path:
        """Keep a top-level folder out of the changes that `capture` collects."""
        folder = Path(STAGE, name)
        with self._owner():
            folder.mkdir()
            folder.chmod(mode)
        fd = self._make_place(f"/{name}")
        kernel.mount(str(folder), f"/proc/self/fd/{fd}", flags=kernel.MS_BIND)
        os.close(fd)
        return Path(ROOT, name)

    def _make_place(self, path: str, *, is_folder: bool = True) -> int:
        with self._owner():
            make = files.make_folder if is_folder else files.make_file
            return make(self.root, path)

    def _shown(self, folders: Sequence[str]) -> list[str]:
        """Return where folders can be seen as the sandbox's user's own."""
        shown = []
        for number, folder in enumerate(folders):
            if folder in self.identity.views:
                place = Path(STAGE, f"{Path(folder).name}.{number}")
                place.mkdir()
                kernel.attach(self.identity.views[folder], str(place))
                folder = str(place)
            shown.append(folder)
        return shown

    def _overlay(self, lowers: Sequence[str], target: str, name: str) -> int:
        """Mount folders over each other, lowest first, writable; return where changes go.

        Folders are named by descriptor, so that no path in them needs escapes or exceeds a limit.
        """
        upper, work = Path(STAGE, name + ".upper"), Path(STAGE, name + ".work")
        with self._owner():
            for folder in (upper, work):
                folder.mkdir()
        if _in_user_namespace() and not _keeps_attributes(upper):
            message = "memory keeps no user attributes here: set scratch to a folder on disk"
            raise OSError(errno.EOPNOTSUPP, message)
        fds = [os.open(lower, os.O_PATH | os.O_DIRECTORY) for lower in reversed(lowers)]
        names = ":".join(f"/proc/self/fd/{fd}" for fd in fds)
        data = f"lowerdir={names},upperdir={upper},workdir={work}"
        if _in_user_namespace():
            data += ",userxattr"
        try:
            kernel.mount("overlay", target, "overlay", data=data)
        finally:
            for fd in fds:
                os.close(fd)
        return os.open(upper, os.O_RDONLY | os.O_DIRECTORY)

    def _owner(self) -> AbstractContextManager[None]:
        return kernel.acting_as(self.identity.uid)


def _write_base(base: Path, plan: Plan) -> None:
    for name in _FOLDERS:
        Path(f"{base}{name}").mkdir(parents=True)
    (base / "var/tmp").chmod(0o1777)
    for name, target in plan.links:
        Path(f"{base}{name}").symlink_to(target)
    for name, text in plan.files:
        Path(f"{base}{name}").write_text(text)


def _fill_devices(folder: Path, shm_mib: int) -> None:
    for name in _DEVICES:
        (folder / name).touch()
        with suppress(FileNotFoundError):
            kernel.mount(f"/dev/{name}", str(folder / name), flags=kernel.MS_BIND)
    for name, target in _DEVICE_LINKS:
        (folder / name).symlink_to(target)
    for name in ("pts", "shm"):
        (folder / name).mkdir()
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    options = f"mode=1777,size={shm_mib}m,nr_inodes={shm_mib * _INODES_PER_MIB}"
    kernel.mount("tmpfs", str(folder / "shm"), "tmpfs", flags=flags, data=options)
    kernel.mount("devpts", str(folder / "pts"), "devpts", data="newinstance,ptmxmode=0666,mode=620")


def _in_user_namespace() -> bool:
    return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]


def _keeps_attributes(folder: Path) -> bool:
    with tempfile.TemporaryDirectory(dir=folder) as probe:
        try:
            os.setxattr(probe, "user.overlay.probe", b"y")
        except OSError:
            return False
    return True
