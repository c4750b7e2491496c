"""The file system of one sandbox, and the host user that owns it.

The tree is built in its own mount namespace. All files that a sandbox writes are in one memory file
system of fixed size, mounted in that namespace only. Nothing remains on the host after the last
process, even after a crash. The mount point is /sys: it exists everywhere and no sandbox needs it.

If an ordinary user runs swerl, the sandbox's processes are that user on the host. If root runs it,
each sandbox has its own user id that nothing else on the machine has. Root's folders (layers,
content of the workdir, mounts) then appear through idmapped mounts, which give them that owner. If
the kernel or a file system has no idmapped mounts, the processes are root without privileges.
"""

from __future__ import annotations

import errno
import functools
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from swerl.sandboxes import _kernel as kernel
from swerl.sandboxes._local import files
from swerl.sandboxes._local.wire import SandboxPlan

STAGE = "/sys"
ROOT = STAGE + "/root"
HOSTNAME = "sandbox"

_FOLDERS = (
    *("/proc", "/dev", "/sys", "/run", "/var", "/var/tmp", "/home", "/home/agent", "/root"),
    *("/etc", "/tmp"),
)
_INODES_PER_MIB = 128
"""One for two blocks: an empty file uses kernel memory that the block count does not include."""
_MAX_TERMINALS = 64
"""The machine has 4,096 for all."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = (
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
)
_PROC_FILES = ("cpuinfo", "meminfo", "stat", "loadavg")
_SETTINGS = (
    "kernel/osrelease", "kernel/pid_max", "kernel/threads-max", "kernel/cap_last_cap",
    "kernel/ngroups_max", "kernel/random/boot_id", "vm/overcommit_memory", "vm/max_map_count",
    "fs/file-max", "fs/nr_open",
)  # fmt: skip
_CONSTANT = frozenset({
    "acpi", "bus", "cmdline", "config.gz", "consoles", "devices", "dma", "execdomains",
    "filesystems", "iomem", "ioports", "kallsyms", "misc", "mtrr", "sysvipc", "tty", "version",
})  # fmt: skip
"""Entries of /proc that count nothing, or in namespaces of the sandbox's own."""
_SETTING_FOLDERS = ("sys", "sys/kernel", "sys/kernel/random", "sys/vm", "sys/fs", "sys/net")
_UUID = "sys/kernel/random/uuid"
"""Random, as `sys/net` is of the network namespace: they count nothing of the machine."""
_FIRST_ID, _NUM_IDS = 0x7000_0000, 0x0FFF_FFFF
"""A range that systemd's list of user ids marks as unused, above the ids of containers."""


@dataclass(frozen=True, slots=True)
class HostUser:
    """The host user of a sandbox's processes; the group has the same id."""

    uid: int
    views: Mapping[str, int] = field(default_factory=dict)
    """Host folder -> descriptor of an idmapped mount of it, in which `uid` is its owner."""


def host_id_of(name: str) -> int:
    """Return the host user id for the sandbox of this name."""
    return _FIRST_ID + zlib.crc32(name.encode()) % _NUM_IDS


def can_change_user() -> bool:
    """Return whether a process here can become another user and still make namespaces."""
    if os.geteuid() != 0:
        return False
    # A child tries it, because the change of user cannot be undone.
    pid = os.fork()
    if pid == 0:
        _try_other_user()
    return os.waitpid(pid, 0)[1] == 0


def choose_user(plan: SandboxPlan) -> HostUser:
    """Return the sandbox's host user with its idmapped mounts, or this process's own user."""
    own = HostUser(os.geteuid())
    if not plan.host_id:
        return own
    spaces: dict[tuple[int, int], int] = {}
    views: dict[str, int] = {}
    try:
        sources = [*plan.layers, *filter(None, [plan.content]), *plan.over]
        for source in [*sources, *(source for source, _ in plan.mounts)]:
            status = os.stat(source)
            owner = status.st_uid, status.st_gid
            if owner not in spaces:
                spaces[owner] = kernel.user_namespace(owner, plan.host_id)
            views[source] = kernel.view(source, spaces[owner], recursive=source not in sources)
    except OSError:
        # Without idmapped mounts the sandbox runs as this process's own user.
        for fd in views.values():
            os.close(fd)
        return own
    finally:
        for fd in spaces.values():
            os.close(fd)
    return HostUser(plan.host_id, views)


def become(uid: int) -> None:
    """Change to this user and group permanently."""
    if os.getresuid() != (uid, uid, uid):
        # The group changes first: afterwards the right to change it is gone.
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # it still owns /proc/self


def build(plan: SandboxPlan, user: HostUser) -> int | None:
    """Build the tree at ROOT; return a descriptor of the folder with its changes.

    There is such a folder if the root or the workdir is an overlay. Raises OSError.
    """
    # Mounts of the sandbox must not propagate to the host.
    kernel.mount("none", "/", flags=kernel.MS_PRIVATE | kernel.MS_REC)
    _mount_stage(plan, user.uid)
    upper = _Builder(plan, user).build()
    kernel.mount(ROOT, ROOT, flags=kernel.MS_BIND | kernel.MS_REC)
    return upper


def _mount_stage(plan: SandboxPlan, uid: int) -> None:
    if plan.scratch:
        kernel.mount(plan.scratch, STAGE, flags=kernel.MS_BIND)
        os.chown(STAGE, uid, uid)
    else:
        size_mib = max(plan.disk_mib, 1)
        options = f"size={size_mib}m,nr_inodes={size_mib * _INODES_PER_MIB},mode=755"
        options += f",uid={uid},gid={uid}"
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("tmpfs", STAGE, "tmpfs", flags=flags, data=options)


@functools.cache  # the spawner reads them, so all its sandboxes have the same
def machine_files() -> dict[str, str]:
    """Return path below /proc -> text of the files about the machine that programs read."""
    files = {"sys/kernel/hostname": f"{HOSTNAME}\n", "vmstat": "pswpin 0\npswpout 0\n"}
    for name in (*_PROC_FILES, *(f"sys/{name}" for name in _SETTINGS)):
        with suppress(OSError):
            files[name] = Path("/proc", name).read_text()
    return files


def mount_proc(uid: int) -> None:
    """Mount /proc for this process's pid namespace, at /proc and, read-only, in the tree at ROOT.

    `uid` is the host user of the sandbox's processes.

    The host's root could write kernel settings in it without a capability, and every process its
    own `oom_score_adj`, to have the kernel kill the supervisor first.
    """
    kernel.unshare(kernel.NEWNS)
    proc = f"{ROOT}/proc"
    kernel.mount("proc", proc, "proc", flags=kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.mount(proc, "/proc", flags=kernel.MS_BIND)
    _cover_machine(proc, uid)
    kernel.restrict(proc, kernel.ATTR_RDONLY)


def _cover_machine(proc: str, uid: int) -> None:
    """Cover what changes in this /proc, except processes, by fixed texts, else by nothing.

    The kernel counts there what all sandboxes do, so code under test could leave notes.
    """
    copies, uptime_s = f"{STAGE}/proc", time.clock_gettime(time.CLOCK_BOOTTIME)
    texts = {**machine_files(), "uptime": f"{uptime_s:.2f} 0.00\n", "nothing": "", _UUID: ""}
    for folder in ("", "empty", *_SETTING_FOLDERS):
        os.mkdir(f"{copies}/{folder}")
    for name, text in texts.items():
        kernel.write(f"{copies}/{name}", text, mode=0o444)
    for name in ("sys/net", _UUID):
        kernel.mount(f"{proc}/{name}", f"{copies}/{name}", flags=kernel.MS_BIND)
    with os.scandir(proc) as entries:
        for entry in entries:
            if entry.name.isdigit() or entry.name in _CONSTANT or entry.is_symlink():
                continue
            # Only the host's root, as which a sandbox rarely runs, may read some files.
            if uid and not entry.stat().st_mode & 0o004:
                continue
            hidden = "empty" if entry.is_dir() else "nothing"
            source = entry.name if entry.name in texts or entry.name == "sys" else hidden
            kernel.mount(f"{copies}/{source}", entry.path, flags=kernel.MS_BIND | kernel.MS_REC)


def _try_other_user() -> NoReturn:
    with suppress(OSError):
        kernel.unshare(kernel.NEWNS)
        become(_FIRST_ID)
        kernel.unshare(kernel.NEWUSER | kernel.NEWNS)
        os._exit(0)
    os._exit(1)


@dataclass(slots=True)
class _Builder:
    """Builds the tree: creates files as the sandbox's user and mounts as this process's user."""

    plan: SandboxPlan
    user: HostUser
    root: int = -1
    """Descriptor of the tree's root."""

    def build(self) -> int | None:
        with kernel.acting_as(self.user.uid):
            os.mkdir(ROOT)
        upper = self._make_base()
        self.root = os.open(ROOT, os.O_PATH | os.O_DIRECTORY)
        self._make_apart("tmp", 0o1777)
        self._make_apart("sys", 0o555)  # an image's own /sys would describe another machine
        self._make_apart("dev", 0o755)
        _fill_devices(f"{ROOT}/dev", max(1, min(64, self.plan.memory_mib // 16)))
        for source, target in self.plan.binds:
            self._bind(source, target)
        for source, target in self.plan.mounts:
            self._bind(source, target)
        if self.plan.content:
            upper = self._make_content()
        else:
            os.close(self._make_target(self.plan.workdir))
        os.close(self.root)
        return upper

    def _make_base(self) -> int | None:
        plan = self.plan
        base = f"{STAGE}/base" if plan.layers else ROOT
        with kernel.acting_as(self.user.uid):
            _write_base(base, plan)
        if not plan.layers:
            return None
        layers = self._shown(plan.layers)
        lowers = [*layers, base] if plan.is_whole else [base, *layers]
        over = () if plan.content else plan.over
        return self._overlay([*lowers, *self._shown(over)], ROOT, "root")

    def _make_content(self) -> int | None:
        fd = self._make_target(self.plan.workdir)
        target = f"/proc/self/fd/{fd}"
        content = self._shown([self.plan.content, *self.plan.over])
        try:
            return self._overlay(content, target, "content")
        except OSError:  # this kernel has no overlays in user namespaces, or no user attributes
            if self.plan.over:
                raise
            import shutil

            with kernel.acting_as(self.user.uid):
                shutil.copytree(content[0], target, symlinks=True, dirs_exist_ok=True)
            return None
        finally:
            os.close(fd)

    def _bind(self, source: str, target: str) -> None:
        place = self._make_target(target, is_folder=os.path.isdir(source))
        views = self.user.views
        mount = os.dup(views[source]) if source in views else kernel.detached(source)
        kernel.restrict(mount, kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV)
        kernel.attach(mount, place)
        os.close(mount)
        os.close(place)

    def _make_apart(self, name: str, mode: int) -> None:
        """Keep a top-level folder out of the changes that `LocalSandbox.capture` copies."""
        folder = f"{STAGE}/{name}"
        with kernel.acting_as(self.user.uid):
            os.mkdir(folder)
            os.chmod(folder, mode)
            fd = files.make_folder(self.root, f"/{name}")
        kernel.mount(folder, f"/proc/self/fd/{fd}", flags=kernel.MS_BIND)
        os.close(fd)

    def _make_target(self, path: str, *, is_folder: bool = True) -> int:
        with kernel.acting_as(self.user.uid):
            make = files.make_folder if is_folder else files.make_file
            return make(self.root, path)

    def _shown(self, folders: Sequence[str]) -> list[str]:
        """Return paths at which the sandbox's user owns these folders."""
        shown = []
        for folder in folders:
            if folder in self.user.views:
                # The layers of a store and snapshots are all named `tree`.
                view = self.user.views[folder]
                target = f"{STAGE}/view.{view}"
                os.mkdir(target)
                place = os.open(target, os.O_PATH)
                kernel.attach(view, place)
                os.close(place)
                folder = target
            shown.append(folder)
        return shown

    def _overlay(self, lowers: Sequence[str], target: str, name: str) -> int:
        """Mount a writable overlay of folders, lowest first; return a descriptor of its changes.

        Folders are named by descriptor, so no path needs escapes or exceeds a length limit.
        """
        upper, work = f"{STAGE}/{name}.upper", f"{STAGE}/{name}.work"
        with kernel.acting_as(self.user.uid):
            for folder in (upper, work):
                os.mkdir(folder)
        if _in_user_namespace() and not _keeps_attributes(upper):
            message = "tmpfs has no user attributes here: set `scratch` to a folder on disk"
            raise OSError(errno.EOPNOTSUPP, message)
        # The kernel expects the highest folder first.
        fds = [os.open(lower, os.O_PATH | os.O_DIRECTORY) for lower in reversed(lowers)]
        names = ":".join(f"/proc/self/fd/{fd}" for fd in fds)
        data = f"lowerdir={names},upperdir={upper},workdir={work}"
        # In a user namespace, overlays can only use attributes of the class `user`.
        if _in_user_namespace():
            data += ",userxattr"
        try:
            kernel.mount("overlay", target, "overlay", data=data)
        finally:
            for fd in fds:
                os.close(fd)
        return os.open(upper, os.O_RDONLY | os.O_DIRECTORY)


def _write_base(base: str, plan: SandboxPlan) -> None:
    if base != ROOT:
        os.mkdir(base)
    for name in _FOLDERS:
        os.mkdir(f"{base}{name}")
    os.chmod(f"{base}/var/tmp", 0o1777)
    for name, target in plan.links:
        os.symlink(target, f"{base}{name}")
    for name, text in plan.files:
        kernel.write(f"{base}{name}", text)


def _fill_devices(folder: str, shm_mib: int) -> None:
    for name in _DEVICES:
        place = f"{folder}/{name}"
        kernel.write(place, "")
        kernel.mount(f"/dev/{name}", place, flags=kernel.MS_BIND)
        kernel.restrict(place, kernel.ATTR_RDONLY)
    for name, target in _DEVICE_LINKS:
        os.symlink(target, f"{folder}/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{folder}/{name}")
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    options = f"mode=1777,size={shm_mib}m,nr_inodes={shm_mib * _INODES_PER_MIB}"
    kernel.mount("tmpfs", f"{folder}/shm", "tmpfs", flags=flags, data=options)
    terminals = f"newinstance,ptmxmode=0666,mode=620,max={_MAX_TERMINALS}"
    kernel.mount("devpts", f"{folder}/pts", "devpts", data=terminals)


@functools.cache  # the supervisor does not leave it
def _in_user_namespace() -> bool:
    return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]


def _keeps_attributes(folder: str) -> bool:
    try:
        os.setxattr(folder, "user.swerl.probe", b"y")
        os.removexattr(folder, "user.swerl.probe")
    except OSError:
        return False
    return True
