"""Probes of the kernel's own doors: settings, files, devices, control groups, memory."""

from __future__ import annotations

from swerl.checks.attacks._services import new_word
from swerl.checks.attacks.finding import Finding, failed, judge, passed
from swerl.checks.attacks.lab import Lab
from swerl.checks.attacks.registry import probe

_SETS = ("CapEff", "CapPrm", "CapInh", "CapAmb", "CapBnd")


@probe("Reads its capabilities: does a user have one, or could it gain one?")
async def capabilities(lab: Lab) -> Finding:
    sets = _SETS[:2] if lab.ground.own_kernel else _SETS
    holes = []
    for user in lab.users:
        status = await _status(lab, user)
        holes += [
            f"{user or 'agent'} has {name} {status[name]}" for name in sets if int(status[name], 16)
        ]
    return judge(holes, f"{', '.join(sets)} are empty")


@probe("Looks whether a program may gain rights that its caller has not.")
async def no_new_privileges(lab: Lab) -> Finding:
    lab.need_shared_kernel()
    holes = [
        f"{user or 'agent'} may gain rights"
        for user in lab.users
        if (await _status(lab, user)).get("NoNewPrivs") != "1"
    ]
    return judge(holes, "no_new_privs is set for every user")


@probe("Looks whether system calls are filtered at all.")
async def system_call_filter(lab: Lab) -> Finding:
    lab.need_shared_kernel()
    holes = [
        f"{user or 'agent'} has no filter"
        for user in lab.users
        if (await _status(lab, user)).get("Seccomp") != "2"
    ]
    return judge(holes, "seccomp filters every user")


@probe("Writes the kernel's settings under /proc/sys, each with the value that it has.")
async def kernel_settings(lab: Lab) -> Finding:
    lab.need_shared_kernel()
    holes, answers = await lab.as_users("kernel.write_settings")
    return judge(holes, answers)


@probe("Opens what makes the kernel act at a word, such as the magic key.")
async def kernel_triggers(lab: Lab) -> Finding:
    lab.need_shared_kernel()
    holes, answers = await lab.as_users("kernel.open_triggers")
    return judge(holes, answers)


@probe("Looks for files of /sys that it may write, such as the power switch.", timeout_s=25)
async def sys_files(lab: Lab) -> Finding:
    lab.need_shared_kernel()
    holes, answers = await lab.as_users("kernel.write_sys")
    return judge(holes, answers or "nothing lies in /sys")


@probe("Reads the kernel's memory, log and lists of what every process does.")
async def kernel_memory(lab: Lab) -> Finding:
    lab.need_shared_kernel()
    holes, answers = await lab.as_users("kernel.read_secrets")
    return judge(holes, answers or "none of them is there")


@probe("Makes control groups, and looks for the program that the kernel starts for an empty one.")
async def control_groups(lab: Lab) -> Finding:
    lab.need_shared_kernel()
    holes, answers = await lab.as_users("kernel.make_groups", f"swerl-{new_word()}")
    return judge(holes, answers or "no control group is mounted")


@probe("Opens every device that leads out: disks, memory, virtual machines, tunnels.")
async def devices(lab: Lab) -> Finding:
    lab.need_shared_kernel()
    holes, answers = await lab.as_users("kernel.open_devices")
    return judge(holes, answers or "harmless devices alone")


@probe("Makes device nodes of its own, and opens them.")
async def device_nodes(lab: Lab) -> Finding:
    lab.need_shared_kernel()
    holes, answers = await lab.as_users("powers.make_devices")
    return judge(holes, answers)


@probe("Leaves a key in the kernel's keyring, and looks for it from another sandbox.")
async def keyrings(lab: Lab) -> Finding:
    word = new_word()
    left = await lab.box.attack("powers.leave_key", word)
    async with lab.open() as other:
        found = await other.attack("powers.find_key", word)
    if found["the key"] == "ok":
        return failed("a key that one sandbox left is in another's ring")
    return passed(f"leaving one: {left['a key']}; finding it: {found['the key']}")


async def _status(lab: Lab, user: str | None) -> dict[str, str]:
    done = await lab.box.run(["cat", "/proc/self/status"], user=user)
    lines = done.stdout.decode(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
