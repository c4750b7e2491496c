"""Probes of the kernel's own doors: settings, files, devices, control groups, memory."""

from __future__ import annotations

from swerl.checks.attacks._targets import new_word
from swerl.checks.attacks.attack import AttackContext, AttackFinding, failed, judge, passed, probe

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
