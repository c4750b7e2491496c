"""Probes of powers that only the machine's own administrator should have."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket

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
