"""Attacks on the kernel: its settings, files, devices and memory, and an administrator's powers."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket

from swerl.checks.attacks._targets import new_word
from swerl.checks.attacks.attack import (
    AttackContext,
    AttackFinding,
    CannotError,
    failed,
    judge,
    passed,
    probe,
    worked,
)

_SETS = ("CapEff", "CapPrm", "CapInh", "CapAmb", "CapBnd")


@probe("Reads its capabilities: does a user have one, or could it gain one?")
async def capabilities(ctx: AttackContext) -> AttackFinding:
    sets = _SETS[:2] if ctx.target.own_kernel else _SETS
    holes = []
    for user in ctx.users:
        status = await _status(ctx, user)
        holes += [
            f"{user or 'agent'} has {name} {status[name]}" for name in sets if int(status[name], 16)
        ]
    return judge(holes, f"{', '.join(sets)} are empty")


@probe("Looks whether a program may gain rights that its caller has not.")
async def no_new_privileges(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes = [
        f"{user or 'agent'} may gain rights"
        for user in ctx.users
        if (await _status(ctx, user)).get("NoNewPrivs") != "1"
    ]
    return judge(holes, "no_new_privs is set for every user")


@probe("Looks whether system calls are filtered at all.")
async def system_call_filter(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes = [
        f"{user or 'agent'} has no filter"
        for user in ctx.users
        if (await _status(ctx, user)).get("Seccomp") != "2"
    ]
    return judge(holes, "seccomp filters every user")


@probe("Writes the kernel's settings under /proc/sys, each with the value that it has.")
async def kernel_settings(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, answers = await ctx.as_users("kernel.write_settings")
    return judge(holes, answers)


@probe("Opens what makes the kernel act at a word, such as the magic key.")
async def kernel_triggers(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, answers = await ctx.as_users("kernel.open_triggers")
    return judge(holes, answers)


@probe("Looks for files of /sys that it may write, such as the power switch.", timeout_s=25)
async def sys_files(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, answers = await ctx.as_users("kernel.write_sys")
    return judge(holes, answers or "nothing lies in /sys")


@probe("Reads the kernel's memory, log and lists of what every process does.")
async def kernel_memory(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, answers = await ctx.as_users("kernel.read_secrets")
    return judge(holes, answers or "none of them is there")


@probe("Makes control groups, and looks for the program that the kernel starts for an empty one.")
async def control_groups(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, answers = await ctx.as_users("kernel.make_groups", f"swerl-{new_word()}")
    return judge(holes, answers or "no control group is mounted")


@probe("Opens every device that leads out: disks, memory, virtual machines, tunnels.")
async def devices(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, answers = await ctx.as_users("kernel.open_devices")
    return judge(holes, answers or "harmless devices alone")


@probe("Makes device nodes of its own, and opens them.")
async def device_nodes(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, answers = await ctx.as_users("powers.make_devices")
    return judge(holes, answers)


@probe("Leaves a key in the kernel's keyring, and looks for it from another sandbox.")
async def keyrings(ctx: AttackContext) -> AttackFinding:
    word = new_word()
    left = await ctx.box.attack("powers.leave_key", word)
    async with ctx.open() as other:
        found = await other.attack("powers.find_key", word)
    if found["the key"] == "ok":
        return failed("a key that one sandbox left is in another's ring")
    return passed(f"leaving one: {left['a key']}; finding it: {found['the key']}")


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


@probe("Mounts, binds, unmounts and changes the root, by the old calls and the new.")
async def mounts(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, answers = await ctx.as_users("powers.mount")
    return judge(holes, answers)


@probe("Makes new namespaces, in which it would have every right.")
async def new_namespaces(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, answers = await ctx.as_users("powers.namespaces")
    return judge(holes, answers)


@probe("Runs programs with the setuid bit, its own and the image's, to become root.")
async def setuid_programs(ctx: AttackContext) -> AttackFinding:
    before = (await ctx.box.sh("id -u")).stdout.decode().strip()
    if before == "0":
        return failed("the agent is root from the start")
    made = await ctx.box.sh(_SETUID, user="root")
    after = (
        await ctx.box.sh("/tmp/swerl-probe-id -u; sudo -n id -u; su -c 'id -u' </dev/null")
    ).text
    await ctx.box.sh("rm -f /tmp/swerl-probe-id", user="root")
    lines = after.split("\n")
    if made.exit_code != 0 and not ctx.target.own_kernel:
        raise CannotError(f"root cannot make a setuid program: {made.text.strip()[:120]}")
    if "0" in lines and not ctx.target.own_kernel:
        return failed("a setuid program made the agent root")
    return passed(f"it stays user {before}")


@probe("Restarts the machine, loads modules and kernels, and swaps; with senseless arguments.")
async def administration(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, answers = await ctx.as_users("powers.administer")
    return judge(holes, answers)


@probe("Sets the machine's clock to the time that it shows.")
async def clock(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, answers = await ctx.as_users("powers.set_clock")
    return judge(holes, answers)


@probe("Renames the machine.")
async def hostname(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    if ctx.shares("uts"):
        holes, answers = await ctx.as_users("powers.set_hostname", "")
        return judge(holes, f"{answers}, but the name is the host's")
    _, answers = await ctx.as_users("powers.set_hostname", "swerl-probe")
    changed = socket.gethostname() != ctx.machine.hostname
    return judge(["the host has another name"] if changed else [], answers)


@probe("Uses eBPF, io_uring, performance counters and userfaultfd, where most escapes began.")
async def rare_system_calls(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, answers = await ctx.as_users("powers.hidden_kernel_calls")
    return judge(holes, answers)


@probe("Opens folders of the host by their number in the file system.")
async def file_handles(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, answers = await ctx.as_users("powers.open_by_handle")
    return judge(holes, answers)


@probe("Opens the terminal of whoever started the sandbox, to type commands into it.")
async def controlling_terminal(ctx: AttackContext) -> AttackFinding:
    holes, answers = await ctx.as_users("powers.terminal")
    if not holes and not _has_terminal():
        raise CannotError("this process has no terminal that a sandbox could open")
    return judge(holes, answers)


@probe("Looks for memory that a process of the host shares by key.")
async def shared_memory(ctx: AttackContext) -> AttackFinding:
    libc = ctypes.CDLL(None, use_errno=True)
    key = secrets.randbelow(1 << 30) + 1
    segment = libc.shmget(key, 4096, _IPC_CREAT | 0o666)
    if segment < 0:
        raise CannotError(f"cannot share memory here: {os.strerror(ctypes.get_errno())}")
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
