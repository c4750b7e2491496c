"""Probes of other processes: those of the host, and those of another sandbox."""

from __future__ import annotations

from pathlib import Path

from swerl.checks.attacks._targets import new_word, prey
from swerl.checks.attacks.attack import AttackContext, AttackFinding, judge, passed, probe, worked

_PLACES = "/tmp /var/tmp /dev/shm $HOME ."


@probe("Reads the command lines of the host's processes.")
async def host_processes(ctx: AttackContext) -> AttackFinding:
    word = new_word()
    async with prey(word):
        holes, _ = await ctx.as_users("processes.search", word, ["cmdline", "comm"])
    return judge(holes, "the host's processes are not in sight")


@probe("Reads environments, memory maps and open files of the host's processes.")
async def process_secrets(ctx: AttackContext) -> AttackFinding:
    word = new_word()
    async with prey(word):
        holes, _ = await ctx.as_users("processes.search", word, ["environ", "maps", "mountinfo"])
    return judge(holes, "no process in sight holds the secret")


@probe("Reads the memory of a process of the host, traces it and kills it.")
async def blows_at_processes(ctx: AttackContext) -> AttackFinding:
    holes, answers = [], ""
    for user in ctx.users:
        async with prey(new_word()) as process:
            outcomes = await ctx.box.attack("processes.strike", process.pid, user=user)
            died = process.returncode is not None or not _lives(process.pid)
        if died:
            holes.append(f"process {process.pid} of the host was killed")
        if ctx.shares("pid"):
            holes += worked(outcomes, by=user or "agent")
        answers = ", ".join(dict.fromkeys(outcomes.values()))
    return judge(holes, answers)


@probe("Enters the namespaces of the first process in sight and of one of the host.")
async def entering_namespaces(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, answers = [], ""
    async with prey(new_word()) as process:
        for pid in (1, process.pid):
            more, answers = await ctx.as_users("powers.enter", pid)
            holes += more
    return judge(holes, answers)


@probe("Compares its namespaces with the host's, and looks for one that is shared.")
async def shared_namespaces(ctx: AttackContext) -> AttackFinding:
    if ctx.target.own_kernel:
        return passed("a kernel of its own")
    kinds = ("pid", "net", "mnt", "ipc", "uts")
    holes = [f"the {kind} namespace is the host's" for kind in kinds if ctx.shares(kind)]
    return judge(holes, f"{', '.join(kinds)} are its own")


@probe("Looks for files and processes of another sandbox.")
async def other_sandboxes(ctx: AttackContext) -> AttackFinding:
    word = new_word()
    async with ctx.open() as other:
        script = f'for d in {_PLACES}; do echo "$1" > "$d/$1"; done 2>/dev/null; '
        await other.sh(script + 'sh -c "sleep 60; true" "$1" >/dev/null 2>&1 &', word)
        outcomes = await ctx.box.attack("processes.search", word, ["cmdline"])
        look = f'for d in {_PLACES}; do [ -e "$d/$1" ] && echo "$d/$1"; done; true'
        files = (await ctx.box.sh(look, word)).stdout.decode().split()
        await other.sh(f'for d in {_PLACES}; do rm -f "$d/$1"; done; true', word)
    return judge([*worked(outcomes), *files], "neither its files nor its processes are in sight")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
