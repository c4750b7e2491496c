"""Probes of the host's files, environment and open descriptors."""

from __future__ import annotations

import tempfile
from pathlib import Path

from swerl.probe._services import new_word, planted, private_folders
from swerl.probe.finding import CannotError, Finding, judge
from swerl.probe.lab import Lab
from swerl.probe.registry import probe
from swerl.sandbox import Mount
from swerl.secrets import secret_values

_KNOWN = (
    ".ssh/id_rsa", ".ssh/id_ed25519", ".ssh/known_hosts", ".ssh/config", ".aws/credentials",
    ".docker/config.json", ".netrc", ".git-credentials", ".gitconfig", ".bash_history", ".pypirc",
    ".npmrc", ".config/gcloud/credentials.db", ".kube/config", ".cache/huggingface/token",
    ".claude.json", ".codex/auth.json",
)  # fmt: skip
_KNOWN_ELSEWHERE = ("/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/ssh/ssh_host_ed25519_key")
_PROGRAM_FOLDERS = ("/usr", "/usr/bin", "/usr/lib", "/bin", "/etc", "/opt")
_READ_MANY = 'for f in "$@"; do echo "== $f"; cat "$f" 2>/dev/null; done; true'


@probe("Reads a secret file in each private folder of the host: homes, /tmp, this folder, state.")
async def host_files(lab: Lab) -> Finding:
    word = new_word()
    with planted(private_folders(), word) as paths:
        if not paths:
            message = "no private folder of this machine can be written"
            raise CannotError(message)
        holes = []
        for user in lab.users:
            done = await lab.box.sh(_READ_MANY, *map(str, paths), user=user)
            parts = done.stdout.decode(errors="replace").split("== ")
            holes += [part.split("\n")[0] for part in parts if word in part]
    return judge(holes, f"none of {len(paths)} files is there")


@probe("Reads keys, tokens and histories where people keep them on the host.")
async def known_secrets(lab: Lab) -> Finding:
    paths = [*(Path.home() / name for name in _KNOWN), *map(Path, _KNOWN_ELSEWHERE)]
    texts = {str(path): _text(path) for path in paths}
    present = {path: text for path, text in texts.items() if len(text) > 40}
    if not present:
        message = "this machine keeps none where people keep them"
        raise CannotError(message)
    holes = []
    for user in lab.users:
        done = await lab.box.sh(_READ_MANY, *present, user=user)
        inside = done.stdout.decode(errors="replace")
        holes += [path for path, text in present.items() if f"== {path}\n{text}" in inside]
    return judge(holes, f"none of {len(present)} files of the host is there")


@probe("Looks for the controller's secrets in the environment of every process.")
async def environment(lab: Lab) -> Finding:
    script = "env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; true"
    known = {"the variable that the probe set": lab.ground.secret, **secret_values()}
    holes = []
    for user in lab.users:
        inside = (await lab.box.sh(script, user=user)).text
        holes += [name for name, value in known.items() if value in inside]
    return judge(holes, f"none of {len(known)} secrets of the controller is there")


@probe("Looks for open descriptors that a command inherits, and where they lead.")
async def inherited_descriptors(lab: Lab) -> Finding:
    holes, _ = await lab.as_users("processes.descriptors")
    return judge(holes, "standard input, output and error alone")


@probe("Reads the host's files through the roots, folders and descriptors of processes in sight.")
async def paths_through_processes(lab: Lab) -> Finding:
    word = new_word()
    with planted(private_folders(), word) as paths:
        holes, _ = await lab.as_users("processes.read_through", [str(path) for path in paths], word)
    return judge(holes, "no process in sight sees the host's files")


@probe("Writes to programs and settings: does the host, or the next sandbox, see it?")
async def programs_of_the_host(lab: Lab) -> Finding:
    name = new_word()
    paths = [f"{folder}/{name}" for folder in _PROGRAM_FOLDERS]
    script = 'for f in "$@"; do echo x > "$f"; done 2>/dev/null; true'
    holes = []
    try:
        for user in lab.users:
            await lab.box.sh(script, *paths, user=user)
        if not lab.ground.own_kernel:
            holes += [f"{path} of the host" for path in paths if Path(path).exists()]
    finally:
        for path in paths:
            Path(path).unlink(missing_ok=True)
    async with lab.open() as other:
        done = await other.sh('for f in "$@"; do [ -e "$f" ] && echo "$f"; done; true', *paths)
    holes += [f"{path} of the next sandbox" for path in done.stdout.decode().split()]
    return judge(holes, "what is written stays in its sandbox")


@probe("Writes to a folder of the host that is mounted to be read only.")
async def read_only_mounts(lab: Lab) -> Finding:
    word, place = new_word(), "/opt/swerl-probe"
    with tempfile.TemporaryDirectory(prefix="swerl-probe-") as name:
        file = Path(name, "file")
        file.write_text(word)
        Path(name).chmod(0o755)
        script = f"echo x > {place}/file; echo x > {place}/new; mv {place}/file {place}/moved; true"
        async with lab.open(mounts=[Mount(Path(name), place)]) as box:
            await box.text(f"{place}/file")
            for user in lab.users:
                await box.sh(script, user=user)
        holes = [f"{path.name} was made" for path in Path(name).iterdir() if path != file]
        if not file.exists() or file.read_text() != word:
            holes.append("the host's file was changed")
    return judge(holes, "it can be read and not written")


@probe("Asks which user of the host its commands are.")
async def user_identity(lab: Lab) -> Finding:
    lab.need_shared_kernel()
    status = await lab.box.text("/proc/self/status")
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    inside = facts["Uid"].split()[1]
    outside = _outer(int(inside), await lab.box.text("/proc/self/uid_map"))
    powerful = int(facts["CapEff"], 16) != 0
    holes = [f"root of the host, with capabilities {facts['CapEff']}"]
    seen = f"user {inside} inside, {outside} for the kernel, without capabilities"
    return judge(holes if powerful and outside == 0 else [], seen)


def _outer(inside: int, uid_map: str) -> int:
    """Return the host's number of a user; the map is the whole truth one namespace down."""
    for line in uid_map.splitlines():
        first, outer, count = map(int, line.split())
        if first <= inside < first + count:
            return outer + inside - first
    return inside


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
