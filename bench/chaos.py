"""Small runs of the twin under random faults: nothing leaks, is lost, or is trained twice.

    python bench/chaos.py                   300 faults, a night; --faults 6 takes minutes
    python bench/chaos.py --seed 3          another order of faults
    python bench/chaos.py --kinds clock     these faults alone
    python bench/chaos.py --kinds controller --kill --each 25
                                            kill -9 of the controller, never a stop

A fault kills a process of the run, or stops it for 1 to 60 s (controller, engine, trainer ranks,
spawner, supervisors, sandboxes), or squeezes the memory of the run or of one
process, fills its disk, makes its folder read-only, moves its clock, drops or delays the packets of
its loopback or cuts its connections.
Those but the clock need root: the run then has a memory cgroup, a small tmpfs and a network of its
own. The order of faults follows from the seed. After a fault that ends the run, the same command
resumes it.
Prints a table of faults, and exits with 1 at the first property that does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from swerl.sandboxes._local import limits

RECIPE = Path(__file__).parents[1] / "tests" / "small.toml"
ROLES = {
    "controller": "swerl train",
    "engine": "swerl.engines._torch_server",
    "rank": "swerl.training.rank.worker",
    "spawner": "_local import spawner",
    "supervisor": "swerl-supervisor",
    "sandbox": "sandbox ",
    "guard": "_process_guard.py",
}
DISK = ("full disk", "read-only folder")
NETWORK = ("loopback down", "connections cut", "loopback slow")
SLOW_LOOPBACK = ("tbf", "rate", "2mbit", "burst", "128kb", "latency", "2s")
"""Packets wait up to 2 s for their turn; those behind them are dropped and sent again."""
MEMORY, MEMORY_OF_ONE, CLOCK = "memory", "one process's memory", "clock"
LARGE_ROLES = ("controller", "engine", "rank")
FREE_MIB = 8
"""Memory left to what is squeezed."""
REPLAYED = ("controller", "rank", CLOCK, *DISK)
"""After these alone a run repeats itself. Others may lose a reply or a sandbox, and the next try
samples with another seed."""
SLOW = ("sandbox stopped", "supervisor stopped")
"""They may make tests exceed their time."""
MOVED_CLOCK = """
import os, time
from pathlib import Path

clock, real_ns = Path(os.environ["CHAOS_CLOCK"]), time.time_ns
time.time_ns = lambda: real_ns() + int(clock.read_text()) * 10**9
time.time = lambda: time.time_ns() / 1e9
"""
"""Python runs it at the start of every process of the run."""
JUMPS_S = (-86_400, -600, -5, 5, 600, 86_400, 30 * 86_400)
GROUP = f"chaos-{os.getpid()}-"
RUN_MIB = 96
MOST_STARTS = 40
"""Starts of one run; a run that needs more does not get ahead."""
END_S = 900.0
"""Seconds for one start to end: every wait inside has a deadline far below."""


@dataclass
class Chaos:
    """One run, the faults that it suffers, and what must hold after each."""

    folder: Path
    random: Random
    steps: int
    kinds: Sequence[str]
    group: Path | None
    """Its memory cgroup."""
    kills: bool = False
    """True: processes are killed, never stopped."""
    keys: Sequence[str] = ()
    """Keys of the recipe to set."""
    faults: Counter[str] = field(default_factory=Counter)
    finished: dict[Path, str] = field(default_factory=dict)
    """Finished Episodes that count, with the digest of their file."""
    pid: int = 0
    """Its latest controller."""

    @property
    def root(self) -> Path:
        return self.folder / "runs" / "small"

    def run(self, most: int) -> None:
        """Start the run again and again until it ends well, with up to `most` faults."""
        runs = ["--runs", str(self.folder / "runs")]
        keys = [word for key in (f"steps={self.steps}", *self.keys) for word in ("--set", key)]
        command = self.swerl("train", str(RECIPE), *keys, *runs)
        own = {f"SWERL_{name}": str(self.folder / name.lower()) for name in ("CACHE", "STATE")}
        env = {**os.environ, **own}
        if CLOCK in self.kinds:
            self.jump(0)
            (self.folder / "sitecustomize.py").write_text(MOVED_CLOCK)
            paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
            env |= {"CHAOS_CLOCK": str(self.clock), "PYTHONPATH": os.pathsep.join(paths)}
        for _ in range(MOST_STARTS):
            with (self.folder / "log").open("ab") as log:
                process = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
            self.pid = process.pid
            try:
                self._torment(process, most)
                code = process.wait(END_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if code != 0:
                reap = self.swerl("sandbox", "reap", "--run", "small")
                subprocess.run(reap, env=env, check=True, stdout=subprocess.DEVNULL)
            self.check_leaks()
            self.check_finished()
            if code == 0:
                return
            require(code in (1, 130, -signal.SIGKILL), f"exit code {code}")
        require(False, f"the run did not end within {MOST_STARTS} starts")

    def swerl(self, *arguments: str) -> list[str]:
        """Return a command of swerl that runs in the run's memory cgroup."""
        command = [sys.executable, "-m", "swerl", *arguments]
        if self.group is None:
            return command
        return ["sh", "-c", 'echo $$ > "$0"/cgroup.procs; exec "$@"', str(self.group), *command]

    @property
    def clock(self) -> Path:
        """File with the difference between the run's clock and this machine's."""
        return self.folder / "clock"

    def jump(self, seconds: int) -> None:
        new = self.clock.with_suffix(".new")
        new.write_text(str(seconds))
        new.rename(self.clock)

    def _torment(self, process: subprocess.Popen[bytes], most: int) -> None:
        """Wait and bring faults about, until the run ends or they are used up."""
        while self.faults.total() < most:
            kind = self.random.choice(self.kinds)
            most_s = 30.0 if self.kills else 8.0  # a start takes seconds
            pause_s, how_long = self.random.uniform(0.5, most_s), self.random.random()
            choice, kills = self.random.random(), self.random.random() < 0.5 or self.kills
            try:
                process.wait(pause_s)
                return
            except subprocess.TimeoutExpired:
                self.check_finished()
            if kind not in ROLES:
                with self._fault(kind, choice):
                    time.sleep(0.2 + 5 * how_long)
                self.faults[kind] += 1
                continue
            victims = [pid for pid, line in tree(process.pid) if role_of(line) == kind]
            if not victims:
                continue
            with suppress(ProcessLookupError):
                victim = victims[int(choice * len(victims))]
                os.kill(victim, signal.SIGKILL if kills else signal.SIGSTOP)
                self.faults[f"{kind} {'killed' if kills else 'stopped'}"] += 1
                if not kills:
                    time.sleep(60**how_long)  # mostly seconds, up to a minute
                    os.kill(victim, signal.SIGCONT)

    @contextmanager
    def _fault(self, kind: str, choice: float) -> Iterator[None]:
        """Keep up a fault that needs no victim for as long as the block lasts."""
        if kind in DISK:
            with disk_fault(kind, self.folder / "runs"):
                yield
        elif kind == CLOCK:
            self.jump(JUMPS_S[int(choice * len(JUMPS_S))])
            yield
        elif kind == MEMORY:
            assert self.group
            with squeezed(self.group):
                yield
        elif kind == MEMORY_OF_ONE:
            assert self.group
            large = [pid for pid, line in tree(self.pid) if role_of(line) in LARGE_ROLES]
            with squeezed_alone(self.group, large[int(choice * len(large))] if large else self.pid):
                yield
        elif kind == NETWORK[2]:
            queue = ["dev", "lo", "root"]
            subprocess.run(["tc", "qdisc", "add", *queue, *SLOW_LOOPBACK], check=True)
            yield
            subprocess.run(["tc", "qdisc", "del", *queue], check=True)
        elif kind == NETWORK[0]:
            subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
            yield
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        else:
            subprocess.run(["ss", "-K", "state", "established"], capture_output=True, check=True)
            yield

    def check_finished(self) -> None:
        """A finished Episode stays as it is, whatever happens later."""
        for path, digest in self.finished.items():
            require(path.exists() and digest_of(path) == digest, f"{path} was lost or changed")
        for path in (self.root / "episodes").glob("*/*/episode.json"):
            with suppress(OSError, ValueError):
                if json.loads(path.read_text())["verdict"] not in ("infra", "invalid"):
                    self.finished.setdefault(path, digest_of(path))

    def check_leaks(self) -> None:
        """Nothing of the run is alive, once its processes had time to see their controller end."""
        until_s = time.monotonic() + 60
        while (left := leftovers(self.folder, self.group)) and time.monotonic() < until_s:
            time.sleep(0.2)
        require(not left, f"still there: {left}")

    def check_tokens(self) -> None:
        """Each token that an Episode sampled was trained once, and no other was."""
        from swerl.training import batch

        for step in range(self.steps):
            sampled: Counter[int] = Counter()
            for path in (self.root / "episodes" / f"{step:05d}").glob("*/trajectory.json"):
                episode = json.loads(path.with_name("episode.json").read_text())
                if episode["verdict"] not in ("infra", "invalid"):
                    for turn in json.loads(path.read_text())["turns"]:
                        sampled.update(turn["output_ids"])
            trained: Counter[int] = Counter()
            for sample in batch.read(self.root / "samples" / f"{step:05d}.parquet").samples:
                trained.update(
                    token for token, on in zip(sample.ids, sample.mask, strict=True) if on
                )
            require(trained == sampled, f"step {step}: {trained.total()} of {sampled.total()}")

    def check_verdicts(self) -> None:
        """No Episode has used up its time because of a fault outside of its sandbox."""
        for path in (self.root / "episodes").glob("*/*/episode.json"):
            verdict = json.loads(path.read_text())["verdict"]
            require(verdict != "timeout" or any(map(self.faults.get, SLOW)), f"{path}: {verdict}")

    def weights(self) -> list[str]:
        """Return what a deterministic run reproduces: the sampled rows of each step."""
        from swerl.training import batch

        rows = []
        for step in range(self.steps):
            samples = batch.read(self.root / "samples" / f"{step:05d}.parquet").samples
            rows.append(hashlib.sha256(repr(sorted(tuple(s.ids) for s in samples)).encode()))
        return [row.hexdigest()[:12] for row in rows]


def differences(one: Chaos, other: Chaos) -> Iterator[str]:
    """Yield each Episode of two runs whose sampled tokens differ, with both verdicts."""
    for path in sorted((one.root / "episodes").glob("*/*/trajectory.json")):
        twin = other.root / path.relative_to(one.root)
        said = [
            [turn["output_ids"] for turn in json.loads(each.read_text())["turns"]]
            for each in (path, twin)
            if each.exists()
        ]
        if said[1:] != said[:1]:
            ends = [json.loads(each.with_name("episode.json").read_text()) for each in (path, twin)]
            verdicts = " and ".join(end["verdict"] for end in ends)
            yield f"{path.parent.relative_to(one.root)}: {verdicts}"


def role_of(line: str) -> str:
    """Return the role of a process by its command line; a guard's ends with its program's."""
    found = [role for role, words in ROLES.items() if words in line]
    return found[-1] if found else ""


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tree(pid: int) -> Iterator[tuple[int, str]]:
    """Yield a process and its descendants with their command lines."""
    with suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        yield pid, line.decode(errors="replace")
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from tree(int(child))


def leftovers(folder: Path, group: Path | None) -> list[str]:
    """Return processes, mounts, cgroups and parts of snapshots of the runs in a folder."""
    mark = f"SWERL_CACHE={folder}".encode()
    left = [str(path) for path in (folder / "cache" / "store" / "work").glob("*")]
    left += [str(path) for path in group.glob("*/") if path.is_dir()] if group else []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            marked = mark in (entry / "environ").read_bytes() or str(folder) in line
            if marked and not is_zombie and int(entry.name) != os.getpid():
                left.append(f"process {entry.name}: {line[:100]}")
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return left + [line for line in mounts if str(folder) in line and "/runs " not in line]


@contextmanager
def disk_fault(kind: str, mount: Path) -> Iterator[None]:
    """Fill a small file system, or make it read-only, for as long as the block lasts."""
    if kind == DISK[0]:
        filler = mount / ".filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
        yield
        filler.unlink(missing_ok=True)
        return
    done = subprocess.run(["mount", "-o", "remount,ro", str(mount)], capture_output=True)
    yield
    if done.returncode == 0:  # files that are open for writing keep it writable
        subprocess.run(["mount", "-o", "remount,rw", str(mount)], check=True)


@contextmanager
def squeezed(group: Path) -> Iterator[None]:
    """Let a memory cgroup grow no more for as long as the block lasts."""
    names = ("memory.max", "memory.current", "max")
    if not (group / names[0]).exists():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "-1")
    limit, usage, free = group / names[0], group / names[1], names[2]
    with suppress(OSError):  # its memory cannot be reclaimed that far
        limit.write_text(str(int(usage.read_text()) + (FREE_MIB << 20)))
    yield
    limit.write_text(free)


@contextmanager
def squeezed_alone(group: Path, pid: int) -> Iterator[None]:
    """Let one process of a memory cgroup grow no more for as long as the block lasts.

    The memory that it has stays charged to its old cgroup.
    """
    own = group.with_name(f"{group.name}-one")
    own.mkdir()
    limit = own / "memory.max"
    limit = limit if limit.exists() else own / "memory.limit_in_bytes"
    limit.write_text(str(FREE_MIB << 20))
    try:
        with suppress(OSError):  # it ended just now
            (own / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for each in (own / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (group / "cgroup.procs").write_text(each)
        own.rmdir()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--each", type=int, default=12, help="faults of one run")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", help="these kinds of fault alone")
    parser.add_argument("--kill", action="store_true", help="stop no process, kill it")
    parser.add_argument("--set", action="append", default=[], help="a key of the recipe")
    given = parser.parse_args(arguments)
    if os.geteuid() == 0 and "CHAOS_MOUNTS" not in os.environ:
        # A network of its own has a loopback that can fail alone.
        script = 'ip link set lo up && ss -K >/dev/null 2>&1 && CHAOS_MOUNTS=1 exec "$@"'
        begin = ["unshare", "-m", "-n", "sh", "-c", script, "sh"]
        if subprocess.run([*begin, "true"], capture_output=True).returncode == 0:
            os.execvp("unshare", [*begin, sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        try:
            torment(Path(folder), given)
        finally:
            for group in memory_groups():
                for sandbox in group.glob("*/"):
                    sandbox.rmdir()
                group.rmdir()
            for mount in Path(folder).glob("*/runs"):
                if mount.is_mount():
                    subprocess.run(["umount", "-l", str(mount)], check=True)


def torment(folder: Path, given: argparse.Namespace) -> None:
    random, total = Random(given.seed), Counter[str]()
    calm = make(folder / "calm", random, given)
    calm.run(0)
    calm.check_tokens()
    number = 0
    while total.total() < given.faults:
        number += 1
        chaos, began_s = make(folder / str(number), random, given), time.monotonic()
        chaos.run(min(given.each, given.faults - total.total()))
        chaos.check_tokens()
        chaos.check_verdicts()
        same = chaos.weights() == calm.weights()
        total += chaos.faults
        seconds = time.monotonic() - began_s
        print(
            f"run {number}: {chaos.faults.total()} faults, {seconds:.0f} s, "
            f"{len(chaos.finished)} episodes kept, "
            f"equal to the undisturbed run: {same}",
            flush=True,
        )
        if not same and all(kind.startswith(REPLAYED) for kind in chaos.faults):
            require(False, f"{dict(chaos.faults)}: differs in {list(differences(calm, chaos))}")
    print_table(total)


def print_table(total: Counter[str]) -> None:
    for name, number in sorted(total.items()):
        print(f"{name:24} {number:5}")
    print(f"{total.total()} faults: nothing lost, nothing left")


def make(folder: Path, random: Random, given: argparse.Namespace) -> Chaos:
    """Return a run in a new folder, on a small file system of its own if that is possible."""
    runs, group = folder / "runs", None
    runs.mkdir(parents=True)
    kinds = [*ROLES, *ROLES, CLOCK]
    if "CHAOS_MOUNTS" in os.environ:
        kinds += [*DISK, *(NETWORK if shutil.which("tc") else NETWORK[:2])]
        if parent := limits.find().get("memory"):
            group = parent / f"{GROUP}{folder.name}"
            group.mkdir()
            kinds += [MEMORY, MEMORY_OF_ONE]
        size = ["-o", f"size={RUN_MIB}m"]
        subprocess.run(["mount", "-t", "tmpfs", *size, "tmpfs", str(runs)], check=True)
    kinds = [kind for kind in kinds if not given.kinds or kind in given.kinds]
    require(kinds or given.faults == 0, f"none of these faults is possible here: {given.kinds}")
    return Chaos(folder, random, given.steps, kinds, group, given.kill, given.set)


def memory_groups() -> list[Path]:
    """Return the memory cgroups of this process's runs."""
    parent = limits.find().get("memory")
    return [*parent.glob(f"{GROUP}*")] if parent else []


def require(holds: object, problem: str) -> None:
    if not holds:
        raise SystemExit(f"chaos: {problem}")


if __name__ == "__main__":
    main()
