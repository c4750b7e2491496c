"""Attacks on the kernel: settings, files, devices, memory, and administrator calls."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket

from tests.attacks._targets import new_word
from tests.attacks.attack import (
    AttackContext,
    AttackFinding,
    CannotError,
    attack,
    failed,
    judge,
    passed,
    worked,
)

_SETS = ("CapEff", "CapPrm", "CapInh", "CapAmb", "CapBnd")


@attack("Looks for capabilities that a user has or can gain.")
async def capabilities(ctx: AttackContext) -> AttackFinding:
    sets = _SETS[:2] if ctx.target.own_kernel else _SETS
    holes = []
    for user in ctx.users:
        status = await _status(ctx, user)
        holes += [
            f"{user or 'agent'} has {name} {status[name]}" for name in sets if int(status[name], 16)
        ]
    return judge(holes, f"{', '.join(sets)} are empty")


@attack("Looks for users whose programs may gain more privileges than the caller has.")
async def no_new_privileges(ctx: AttackContext) -> AttackFinding:
    holes = await _users_without(ctx, "NoNewPrivs", "1")
    return judge(
        (f"{user} may gain privileges" for user in holes), "no_new_privs is set for every user"
    )


@attack("Looks for users without a system call filter.")
async def system_call_filter(ctx: AttackContext) -> AttackFinding:
    holes = await _users_without(ctx, "Seccomp", "2")
    return judge((f"{user} has no filter" for user in holes), "seccomp filters every user")


@attack("Writes the kernel settings under /proc/sys, each with its current value.")
async def kernel_settings(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    return await ctx.judge_as_users("kernel.write_settings")


@attack("Opens files that make the kernel act on a write, such as sysrq-trigger.")
async def kernel_triggers(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    return await ctx.judge_as_users("kernel.open_triggers")


@attack("Looks for writable files in /sys, such as the power switch.", timeout_s=25)
async def sys_files(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    return await ctx.judge_as_users("kernel.write_sys", otherwise="/sys has no files")


@attack("Reads the kernel's memory, its log and its lists of processes' activity.")
async def kernel_memory(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    return await ctx.judge_as_users("kernel.read_secrets", otherwise="none of these files exists")


@attack("Creates control groups, and opens the setting for the program run on empty groups.")
async def control_groups(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    return await ctx.judge_as_users(
        "kernel.make_groups", f"swerl-{new_word()}", otherwise="no control group is mounted"
    )


@attack("Opens every device that could lead out: disks, memory, virtual machines, tunnels.")
async def devices(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    return await ctx.judge_as_users("kernel.open_devices", otherwise="only harmless devices exist")


@attack("Creates device nodes and opens them.")
async def device_nodes(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    return await ctx.judge_as_users("powers.make_devices")


@attack("Leaves a key in the kernel's keyring, and looks for it from another sandbox.")
async def keyrings(ctx: AttackContext) -> AttackFinding:
    word = new_word()
    left = await ctx.box.attack("powers.leave_key", word)
    async with ctx.open() as other:
        found = await other.attack("powers.find_key", word)
    if found["the key"] == "ok":
        return failed("a key of one sandbox is in another sandbox's keyring")
    return passed(f"adding a key: {left['a key']}; finding it: {found['the key']}")


async def _users_without(ctx: AttackContext, field: str, value: str) -> list[str]:
    """Return the users whose processes do not have this value of a status field."""
    ctx.need_shared_kernel()
    users = ctx.users
    return [user or "agent" for user in users if (await _status(ctx, user)).get(field) != value]


async def _status(ctx: AttackContext, user: str | None) -> dict[str, str]:
    done = await ctx.box.run(["cat", "/proc/self/status"], user=user)
    lines = done.stdout.decode(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


_IPC_CREAT, _IPC_RMID = 0o1000, 0
_SETUID = (
    'set -e; cp "$(command -v id)" /tmp/swerl-probe-id; '
    "chmod 4755 /tmp/swerl-probe-id; chown 0 /tmp/swerl-probe-id 2>/dev/null; "
    "chmod 4755 /tmp/swerl-probe-id"
)


@attack("Mounts, binds, unmounts and changes the root, with the old and the new system calls.")
async def mounts(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    return await ctx.judge_as_users("powers.mount")


@attack("Creates new namespaces, in which it would have every privilege.")
async def new_namespaces(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    return await ctx.judge_as_users("powers.namespaces")


@attack("Runs setuid programs, its own and the image's, to become root.")
async def setuid_programs(ctx: AttackContext) -> AttackFinding:
    before = (await ctx.box.sh("id -u")).stdout.decode().strip()
    if before == "0":
        return failed("the agent already runs as root")
    made = await ctx.box.sh(_SETUID, user="root")
    after = (
        await ctx.box.sh("/tmp/swerl-probe-id -u; sudo -n id -u; su -c 'id -u' </dev/null")
    ).text
    await ctx.box.sh("rm -f /tmp/swerl-probe-id", user="root")
    lines = after.split("\n")
    if made.exit_code != 0 and not ctx.target.own_kernel:
        raise CannotError(f"root cannot create a setuid program: {made.text.strip()[:120]}")
    if "0" in lines and not ctx.target.own_kernel:
        return failed("a setuid program made the agent root")
    return passed(f"the agent stays user {before}")


@attack("Calls reboot, module loading, kexec and swapon with invalid arguments.")
async def administration(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    return await ctx.judge_as_users("powers.administer")


@attack("Sets the machine's clock to its current time.")
async def clock(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    return await ctx.judge_as_users("powers.set_clock")


@attack("Changes the machine's host name.")
async def hostname(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    if ctx.shares("uts"):
        holes, answers = await ctx.as_users("powers.set_hostname", "")
        return judge(holes, f"{answers}, but the host name is shared")
    _, answers = await ctx.as_users("powers.set_hostname", "swerl-probe")
    changed = socket.gethostname() != ctx.machine.hostname
    return judge(["the host's name changed"] if changed else [], answers)


@attack("Uses eBPF, io_uring, performance counters and userfaultfd, the start of most escapes.")
async def rare_system_calls(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    return await ctx.judge_as_users("powers.hidden_kernel_calls")


@attack("Opens host folders by their inode number.")
async def file_handles(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    return await ctx.judge_as_users("powers.open_by_handle")


@attack("Opens the terminal of the user who started the sandbox, to type commands into it.")
async def controlling_terminal(ctx: AttackContext) -> AttackFinding:
    holes, answers = await ctx.as_users("powers.terminal")
    if not holes and not _has_terminal():
        raise CannotError("this process has no terminal that a sandbox could open")
    return judge(holes, answers)


@attack("Looks for System V shared memory of a host process.")
async def shared_memory(ctx: AttackContext) -> AttackFinding:
    libc = ctypes.CDLL(None, use_errno=True)
    key = secrets.randbelow(1 << 30) + 1
    segment = libc.shmget(key, 4096, _IPC_CREAT | 0o666)
    if segment < 0:
        raise CannotError(f"cannot create shared memory: {os.strerror(ctypes.get_errno())}")
    try:
        outcomes = await ctx.box.attack("powers.shared_memory", key)
    finally:
        libc.shmctl(segment, _IPC_RMID, None)
    return judge(worked(outcomes), outcomes["the segment"])


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
