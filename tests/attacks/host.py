"""Attacks on the host's files, environment and processes, and on other sandboxes."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from swerl.core.sandbox import Mount
from swerl.core.secrets import secret_values
from tests.attacks._targets import new_word, planted, private_folders, victim
from tests.attacks.attack import (
    AttackContext,
    AttackFinding,
    CannotError,
    attack,
    judge,
    passed,
    processes_with,
    worked,
)

_KNOWN = (
    ".ssh/id_rsa", ".ssh/id_ed25519", ".ssh/known_hosts", ".ssh/config", ".aws/credentials",
    ".docker/config.json", ".netrc", ".git-credentials", ".gitconfig", ".bash_history", ".pypirc",
    ".npmrc", ".config/gcloud/credentials.db", ".kube/config", ".cache/huggingface/token",
    ".claude.json", ".codex/auth.json",
)  # fmt: skip
_KNOWN_ELSEWHERE = ("/etc/ssh/ssh_host_rsa_key", "/etc/ssh/ssh_host_ed25519_key")
_PASSWORDS = Path("/etc/shadow")
_PROGRAM_FOLDERS = ("/usr", "/usr/bin", "/usr/lib", "/bin", "/etc", "/opt")
_APPEAR_S = 3.0
_READ_MANY = 'for f in "$@"; do echo "== $f"; cat "$f" 2>/dev/null; done; true'


@attack("Reads a secret file in each private folder of the host, such as homes and /tmp.")
async def host_files(ctx: AttackContext) -> AttackFinding:
    word = new_word()
    with planted(private_folders(), word) as paths:
        if not paths:
            raise CannotError("no private folder of this machine can be written")
        holes = []
        for user in ctx.users:
            done = await ctx.box.sh(_READ_MANY, *map(str, paths), user=user)
            parts = done.stdout.decode(errors="replace").split("== ")
            holes += [part.split("\n")[0] for part in parts if word in part]
    return judge(holes, f"none of {len(paths)} files is visible")


@attack("Reads keys, tokens and histories at their usual places on the host.")
async def known_secrets(ctx: AttackContext) -> AttackFinding:
    paths = [*(Path.home() / name for name in _KNOWN), *map(Path, _KNOWN_ELSEWHERE)]
    if ":$" in _text(_PASSWORDS):  # a file without a password is the same in images
        paths.append(_PASSWORDS)
    texts = {str(path): _text(path) for path in paths}
    present = {path: text for path, text in texts.items() if len(text) > 40}
    if not present:
        raise CannotError("this machine has none of the known secret files")
    holes = []
    for user in ctx.users:
        done = await ctx.box.sh(_READ_MANY, *present, user=user)
        inside = done.stdout.decode(errors="replace")
        holes += [path for path, text in present.items() if f"== {path}\n{text}" in inside]
    return judge(holes, f"none of {len(present)} host files is visible")


@attack("Looks for the controller's secrets in the environment of every process.")
async def environment(ctx: AttackContext) -> AttackFinding:
    script = "env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; true"
    known = {"the variable that the attack set": ctx.target.secret, **secret_values()}
    holes = []
    for user in ctx.users:
        inside = (await ctx.box.sh(script, user=user)).text
        holes += [name for name, value in known.items() if value in inside]
    return judge(holes, f"none of {len(known)} secrets of the controller is visible")


@attack("Looks for inherited file descriptors beyond standard input, output and error.")
async def inherited_descriptors(ctx: AttackContext) -> AttackFinding:
    holes, _ = await ctx.as_users("processes.descriptors")
    return judge(holes, "only standard input, output and error are open")


@attack("Reads the host's files through the roots, folders and descriptors of visible processes.")
async def paths_through_processes(ctx: AttackContext) -> AttackFinding:
    word = new_word()
    with planted(private_folders(), word) as paths:
        holes, _ = await ctx.as_users("processes.read_through", [str(path) for path in paths], word)
    return judge(holes, "no visible process leads to the host's files")


@attack("Writes to program folders, and looks for the change on the host and in another sandbox.")
async def programs_of_the_host(ctx: AttackContext) -> AttackFinding:
    name = new_word()
    paths = [f"{folder}/{name}" for folder in _PROGRAM_FOLDERS]
    script = 'for f in "$@"; do echo x > "$f"; done 2>/dev/null; true'
    holes = []
    try:
        for user in ctx.users:
            await ctx.box.sh(script, *paths, user=user)
        if not ctx.target.own_kernel:
            holes += [f"{path} of the host" for path in paths if Path(path).exists()]
    finally:
        for path in paths:
            Path(path).unlink(missing_ok=True)
    async with ctx.open() as other:
        done = await other.sh('for f in "$@"; do [ -e "$f" ] && echo "$f"; done; true', *paths)
    holes += [f"{path} of the next sandbox" for path in done.stdout.decode().split()]
    return judge(holes, "the writes stay in the sandbox")


@attack("Writes to a host folder that is mounted read-only.")
async def read_only_mounts(ctx: AttackContext) -> AttackFinding:
    word, place = new_word(), "/opt/swerl-probe"
    with tempfile.TemporaryDirectory(prefix="swerl-probe-") as name:
        file = Path(name, "file")
        file.write_text(word)
        Path(name).chmod(0o755)
        script = f"echo x > {place}/file; echo x > {place}/new; mv {place}/file {place}/moved; true"
        async with ctx.open(mounts=[Mount(Path(name), place)]) as box:
            await box.text(f"{place}/file")
            for user in ctx.users:
                await box.sh(script, user=user)
        holes = [f"{path.name} was created" for path in Path(name).iterdir() if path != file]
        if not file.exists() or file.read_text() != word:
            holes.append("the host's file was changed")
    return judge(holes, "it can be read but not written")


@attack("Looks for commands that run as the host's root with capabilities.")
async def user_identity(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, seen = [], []
    for user in ctx.users:
        word = new_word()
        running = asyncio.ensure_future(ctx.box.run(["sh", "-c", "sleep 5; true", word], user=user))
        try:
            facts = await _status_outside(word)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        outside, powers = facts["Uid"].split()[1], int(facts["CapEff"], 16)
        seen.append(f"{user or 'agent'} is user {outside} of the host")
        if outside == "0" and powers:
            holes.append(f"{user or 'agent'} is root of the host, with capabilities {powers:x}")
    return judge(holes, ", ".join(seen))


async def _status_outside(word: str) -> dict[str, str]:
    """Return the status of a command inside from the host's /proc.

    Raises CannotError if the command does not appear.
    """
    until = time.monotonic() + _APPEAR_S
    while time.monotonic() < until:
        for pid in processes_with(word):
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                return {name: value for name, _, value in (line.partition(":") for line in lines)}
        await asyncio.sleep(0.02)
    raise CannotError("commands of the sandbox are not visible from the host")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


_PLACES = "/tmp /var/tmp /dev/shm $HOME ."


@attack("Reads the command lines of the host's processes.")
async def host_processes(ctx: AttackContext) -> AttackFinding:
    word = new_word()
    async with victim(word):
        holes, _ = await ctx.as_users("processes.search", word, ["cmdline", "comm"])
    return judge(holes, "the host's processes are not visible")


@attack("Reads environments, memory maps and mounts of the host's processes.")
async def process_secrets(ctx: AttackContext) -> AttackFinding:
    word = new_word()
    async with victim(word):
        holes, _ = await ctx.as_users("processes.search", word, ["environ", "maps", "mountinfo"])
    return judge(holes, "no visible process holds the secret")


@attack("Reads the memory of a host process, traces it and kills it.")
async def blows_at_processes(ctx: AttackContext) -> AttackFinding:
    holes, answers = [], ""
    for user in ctx.users:
        async with victim(new_word()) as process:
            outcomes = await ctx.box.attack("processes.read_and_kill", process.pid, user=user)
            died = process.returncode is not None or not _lives(process.pid)
        if died:
            holes.append(f"process {process.pid} of the host was killed")
        if ctx.shares("pid"):
            holes += worked(outcomes, by=user or "agent")
        answers = ", ".join(dict.fromkeys(outcomes.values()))
    return judge(holes, answers)


@attack("Enters the namespaces of process 1 and of a host process.")
async def entering_namespaces(ctx: AttackContext) -> AttackFinding:
    ctx.need_shared_kernel()
    holes, answers = [], ""
    async with victim(new_word()) as process:
        for pid in (1, process.pid):
            more, answers = await ctx.as_users("powers.enter", pid)
            holes += more
    return judge(holes, answers)


@attack("Looks for a namespace that the sandbox shares with the host.")
async def shared_namespaces(ctx: AttackContext) -> AttackFinding:
    if ctx.target.own_kernel:
        return passed("the sandbox has a kernel of its own")
    kinds = ("pid", "net", "mnt", "ipc", "uts")
    holes = [f"the {kind} namespace is the host's" for kind in kinds if ctx.shares(kind)]
    return judge(holes, f"{', '.join(kinds)} are separate")


@attack("Looks for files and processes of another sandbox.")
async def other_sandboxes(ctx: AttackContext) -> AttackFinding:
    word = new_word()
    async with ctx.open() as other:
        script = f'for d in {_PLACES}; do echo "$1" > "$d/$1"; done 2>/dev/null; '
        await other.sh(script + 'sh -c "sleep 60; true" "$1" >/dev/null 2>&1 &', word)
        outcomes = await ctx.box.attack("processes.search", word, ["cmdline"])
        look = f'for d in {_PLACES}; do [ -e "$d/$1" ] && echo "$d/$1"; done; true'
        files = (await ctx.box.sh(look, word)).stdout.decode().split()
        await other.sh(f'for d in {_PLACES}; do rm -f "$d/$1"; done; true', word)
    return judge([*worked(outcomes), *files], "neither its files nor its processes are visible")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
