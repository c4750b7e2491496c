"""Probes of the host's files, environment and open descriptors."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from swerl.checks.attacks._targets import new_word, planted, private_folders
from swerl.checks.attacks.attack import (
    AttackContext,
    AttackFinding,
    CannotError,
    judge,
    probe,
    processes_with,
)
from swerl.core.sandbox import Mount
from swerl.core.secrets import secret_values

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


@probe("Reads a secret file in each private folder of the host: homes, /tmp, this folder, state.")
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
    return judge(holes, f"none of {len(paths)} files is there")


@probe("Reads keys, tokens and histories where people keep them on the host.")
async def known_secrets(ctx: AttackContext) -> AttackFinding:
    paths = [*(Path.home() / name for name in _KNOWN), *map(Path, _KNOWN_ELSEWHERE)]
    if ":$" in _text(_PASSWORDS):  # without a password in it, images have the same
        paths.append(_PASSWORDS)
    texts = {str(path): _text(path) for path in paths}
    present = {path: text for path, text in texts.items() if len(text) > 40}
    if not present:
        raise CannotError("this machine keeps none where people keep them")
    holes = []
    for user in ctx.users:
        done = await ctx.box.sh(_READ_MANY, *present, user=user)
        inside = done.stdout.decode(errors="replace")
        holes += [path for path, text in present.items() if f"== {path}\n{text}" in inside]
    return judge(holes, f"none of {len(present)} files of the host is there")


@probe("Looks for the controller's secrets in the environment of every process.")
async def environment(ctx: AttackContext) -> AttackFinding:
    script = "env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; true"
    known = {"the variable that the probe set": ctx.target.secret, **secret_values()}
    holes = []
    for user in ctx.users:
        inside = (await ctx.box.sh(script, user=user)).text
        holes += [name for name, value in known.items() if value in inside]
    return judge(holes, f"none of {len(known)} secrets of the controller is there")


@probe("Looks for open descriptors that a command inherits, and where they lead.")
async def inherited_descriptors(ctx: AttackContext) -> AttackFinding:
    holes, _ = await ctx.as_users("processes.descriptors")
    return judge(holes, "standard input, output and error alone")


@probe("Reads the host's files through the roots, folders and descriptors of processes in sight.")
async def paths_through_processes(ctx: AttackContext) -> AttackFinding:
    word = new_word()
    with planted(private_folders(), word) as paths:
        holes, _ = await ctx.as_users("processes.read_through", [str(path) for path in paths], word)
    return judge(holes, "no process in sight sees the host's files")


@probe("Writes to programs and settings: does the host, or the next sandbox, see it?")
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
    return judge(holes, "what is written stays in its sandbox")


@probe("Writes to a folder of the host that is mounted to be read only.")
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
        holes = [f"{path.name} was made" for path in Path(name).iterdir() if path != file]
        if not file.exists() or file.read_text() != word:
            holes.append("the host's file was changed")
    return judge(holes, "it can be read and not written")


@probe("Asks as which user of the host its commands run.")
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
    """Return what the host's /proc says of a command inside. Raises CannotError."""
    until = time.monotonic() + _APPEAR_S
    while time.monotonic() < until:
        for pid in processes_with(word):
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                return {name: value for name, _, value in (line.partition(":") for line in lines)}
        await asyncio.sleep(0.02)
    raise CannotError("no command inside is in sight from here")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
