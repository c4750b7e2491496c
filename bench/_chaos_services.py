"""Services that fail, for bench/chaos.py: dockerd, a registry, a sandbox server, a Ray cluster.

The first three fail under known solutions; an image is pulled at its first use. A round is `swerl
eval` with the known solution of a few Tasks, so every Episode must be solved, or lost as `infra`
and started again: another verdict is a fault that became a result. The daemons are this program's
own, on a Unix socket and on loopback.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

from swerl.cluster.node import free_port
from swerl.core.task import GradingSpec, Task, write_tasks
from swerl.sandboxes import e2b
from swerl.sandboxes.e2b_server.access import new_key

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.services import dockerd, image, registry
from tests.services.daemon import Daemon, launch

GOLD = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
DOCKERD = ("dockerd killed", "dockerd ended", "dockerd stopped", "containerd killed")
REGISTRY = ("registry killed", "registry refuses", "registry answers 503", "registry cuts")
SERVER = ("server killed", "server ended", "server stopped")
WEATHER = {"registry refuses": "refuse", "registry answers 503": "503", "registry cuts": "cut"}
RAY_ROLES = {"ray head": "gcs_server", "raylet": "raylet/raylet", "ray worker": "ray::RayHost"}
"""Process of a Ray cluster -> words of its command line."""
NUM_TASKS, ATTEMPTS = 2, 3
PATIENCE = 20
"""Starts of one round; an image whose registry is away ends a start, not an Episode."""
END_S = 600.0
SETUP = """
printf 'def add(a, b):\\n    return a - b\\n' >calc.py
git init -q . && git add . && git -c user.name=t -c user.email=t@localhost commit -qm base
"""
TEST = "python3 -c 'import time, calc; time.sleep(1); assert calc.add(2, 3) == 5'"


class Service(Protocol):
    """A service that fails, and the image of its Tasks."""

    kinds: Sequence[str]
    image: str

    def settings(self) -> list[str]: ...
    def fault(self, kind: str, random: Random) -> None: ...
    def mend(self) -> None: ...
    def leftovers(self) -> Iterator[str]: ...


@dataclass
class Round:
    """One evaluation, the faults that it suffers, and what must hold after each."""

    folder: Path
    settings: list[str]
    faults: Counter[str] = field(default_factory=Counter)
    finished: dict[Path, bytes] = field(default_factory=dict)

    def run(self, service: Service, random: Random, most: int) -> None:
        """Run the command until every Episode is solved, with up to `most` faults."""
        names = ["--attempts", str(ATTEMPTS), "--runs", str(self.folder / "runs")]
        settings = [word for each in self.settings for word in ("--set", each)]
        engine = ["--engine", "scripted:gold", "--set", "engine.delay_s=0.7"]
        command = ["eval", str(self.folder / "tasks.jsonl"), *engine, *names, *settings]
        for _ in range(PATIENCE):
            with (self.folder / "log").open("ab") as log:
                process = subprocess.Popen(
                    self.swerl(*command), env=self.env, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=log, start_new_session=True,
                )  # fmt: skip
            try:
                while self.faults.total() < most and process.poll() is None:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(random.uniform(0.5, 9))
                        break
                    kind = random.choice(service.kinds)
                    service.fault(kind, random)
                    self.faults[kind] += 1
                    self.check_finished()
                process.wait(END_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            service.mend()
            reap = self.swerl("sandbox", "reap")
            subprocess.run(reap, env=self.env, check=True, stdout=subprocess.DEVNULL)
            self.check_finished()
            self.check_leaks(service)
            if len(self.finished) == NUM_TASKS * ATTEMPTS:
                return
        require(False, f"{self.folder}: not solved within {PATIENCE} starts")

    @property
    def env(self) -> dict[str, str]:
        own = {"SWERL_CACHE": str(self.folder / "cache"), "SWERL_STATE": str(self.folder / "state")}
        return {**os.environ, **own}

    def swerl(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "swerl.cli", *arguments]

    def check_finished(self) -> None:
        """An Episode is solved or `infra`, and a solved one stays as it is."""
        for path, before in self.finished.items():
            require(path.exists() and path.read_bytes() == before, f"{path} was lost or changed")
        for path in (self.folder / "runs").glob("*/episodes/*/*/episode.json"):
            data = path.read_bytes()
            episode = json.loads(data)
            verdict = episode["verdict"]
            grade = path.with_name("grade.json")
            why = grade.read_text() if grade.exists() else ""
            require(verdict in ("solved", "infra"), f"{path}: {verdict}: {why}")
            if verdict == "solved":
                self.finished.setdefault(path, data)

    def check_leaks(self, service: Service) -> None:
        until_s = time.monotonic() + 60
        while (left := [*self.leftovers(), *service.leftovers()]) and time.monotonic() < until_s:
            time.sleep(0.2)
        require(not left, f"still there: {left}")

    def leftovers(self) -> Iterator[str]:
        """Yield processes of the round, its mounts, and parts of layers."""
        yield from map(str, (self.folder / "cache" / "store" / "work").glob("*"))
        mark = f"SWERL_CACHE={self.folder}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes():
                    yield f"process {entry.name}: {(entry / 'cmdline').read_bytes()!r}"
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        yield from (line for line in mounts if str(self.folder) in line)


class Docker:
    """A dockerd that fails; its sandboxes are of the kind `docker`."""

    kinds = DOCKERD

    def __init__(self, stack: ExitStack, base: image.BaseImage) -> None:
        import docker

        self.daemon = dockerd.start()
        stack.callback(lambda: self.daemon.stop())
        self.client = docker.APIClient(base_url=self.daemon.address, timeout=60)
        self.client.load_image(base.archive.read_bytes())
        self.image = base.name

    def settings(self) -> list[str]:
        return [
            "sandbox.type=docker",
            f"sandbox.base_url={self.daemon.address}",
            "sandbox.user=root",
        ]

    def fault(self, kind: str, random: Random) -> None:
        process, pause_s = self.daemon.process, random.choice([0, 0, 1, 5, 15])
        if kind == "dockerd stopped":
            process.send_signal(signal.SIGSTOP)
            time.sleep(1 + pause_s)
            process.send_signal(signal.SIGCONT)
            return
        if kind == "containerd killed":  # dockerd starts it again by itself
            for pid in helpers(self.daemon.folder, "containerd\0"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(pause_s)
            return
        process.send_signal(signal.SIGKILL if kind == "dockerd killed" else signal.SIGTERM)
        process.wait(60)
        time.sleep(pause_s)
        self.mend()

    def mend(self) -> None:
        if self.daemon.process.poll() is not None:
            self.daemon = dockerd.start_again(self.daemon)

    def __str__(self) -> str:
        return "no container left"

    def leftovers(self) -> Iterator[str]:
        for entry in self.client.containers(all=True):
            yield f"container {entry['Names']}: {entry['Status']}"


class Pulls:
    """A registry behind a proxy that fails; its sandboxes are of the kind `local`."""

    kinds = REGISTRY

    def __init__(self, stack: ExitStack, base: image.BaseImage) -> None:
        self.daemon = registry.start()
        stack.callback(lambda: self.daemon.stop())
        self.proxy = Proxy(self.daemon.address)
        stack.callback(self.proxy.close)
        self.image = f"{self.proxy.address}/{base.name}"
        copy = ["skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"oci:{base.layout}:1"]
        to = f"docker://{self.daemon.address}/{base.name}"
        subprocess.run([*copy, to], check=True, stdout=subprocess.DEVNULL)

    def settings(self) -> list[str]:
        return ["sandbox.type=local", "sandbox.pull=missing"]

    def fault(self, kind: str, random: Random) -> None:
        how_long = random.choice([0.2, 1, 4, 12])
        if kind in WEATHER:
            self.proxy.weather = WEATHER[kind]
            self.proxy.cut()
            time.sleep(how_long)
            self.proxy.weather = ""
            return
        self.proxy.num_cut += bool(self.proxy.open)
        self.daemon.process.kill()
        self.daemon.process.wait()
        time.sleep(how_long)
        self.mend()

    def mend(self) -> None:
        if self.daemon.process.poll() is None:
            return
        folder, (host, _, port) = self.daemon.folder, self.daemon.address.partition(":")
        command = ["docker-registry", "serve", str(folder / "settings.yml")]
        process = launch(command, folder, lambda: answers(host, int(port)))
        self.daemon = Daemon(self.daemon.address, process, folder)

    def leftovers(self) -> Iterator[str]:
        return iter(())

    def __str__(self) -> str:
        return f"{self.proxy.num_cut} faults met open connections so far"


class Proxy:
    """Passes bytes on to the registry; in bad weather it refuses, answers 503 or cuts.

    It is slow, so that faults meet downloads.
    """

    CUT_BYTES = 200_000
    PAUSE_S = 0.05
    """Pause after 64 KiB."""

    def __init__(self, target: str) -> None:
        host, _, port = target.partition(":")
        self.target = host, int(port)
        self.weather = ""
        self.num_cut = 0
        self.open: set[socket.socket] = set()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.server.accept()
                threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            if self.weather == "refuse":
                reset = (1).to_bytes(4, "little") + bytes(4)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                return
            if self.weather == "503":
                client.recv(1 << 16)
                client.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
                return
            with socket.create_connection(self.target) as server:
                self.open |= {client, server}
                back = threading.Thread(target=self.copy, args=(client, server), daemon=True)
                back.start()
                self.copy(server, client, self.CUT_BYTES if self.weather == "cut" else None)
                self.open -= {client, server}

    def copy(self, source: socket.socket, target: socket.socket, most: int | None = None) -> None:
        with suppress(OSError):
            while (most is None or most > 0) and (data := source.recv(min(most or 65536, 65536))):
                target.sendall(data)
                time.sleep(self.PAUSE_S * len(data) / 65536)
                most = None if most is None else most - len(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End the connections that are open."""
        self.num_cut += bool(self.open)
        for each in tuple(self.open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.server.close()
        self.cut()


class Server:
    """A `swerl sandbox serve` over `local`; its client is the kind `e2b`."""

    kinds = SERVER
    image = "base"

    def __init__(self, stack: ExitStack, _: image.BaseImage) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serve-")))
        (self.folder / "image").mkdir()
        (self.folder / "key").write_text(new_key())
        os.environ[e2b.KEY] = (self.folder / "key").read_text()
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.mend()
        stack.callback(self.end)

    def settings(self) -> list[str]:
        url = f"http://127.0.0.1:{self.port}"
        return ["sandbox.type=e2b", f"sandbox.api_url={url}", f"sandbox.sandbox_url={url}"]

    def fault(self, kind: str, random: Random) -> None:
        assert self.process
        pause_s = 60 ** random.random()  # mostly seconds, up to a minute
        if kind == "server stopped":
            self.process.send_signal(signal.SIGSTOP)
            time.sleep(pause_s)
            self.process.send_signal(signal.SIGCONT)
            return
        if kind == "server ended":
            self.end()
        self.process.kill()
        self.process.wait()
        time.sleep(pause_s / 4)
        self.mend()

    def mend(self) -> None:
        if self.process and self.process.poll() is None:
            return
        command = [sys.executable, "-m", "swerl.cli", "sandbox", "serve"]
        command += ["--listen", f"127.0.0.1:{self.port}", "--api-key-file", f"{self.folder}/key"]
        command += ["--template", f"base=dir:{self.folder}/image", "--set", "limits.memory_mib=512"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        for _ in range(2400):
            with suppress(OSError):
                answers("127.0.0.1", self.port)
                return
            time.sleep(0.1)
        require(False, "the server does not start")

    def end(self) -> None:
        assert self.process
        self.process.terminate()
        self.process.wait(60)

    def leftovers(self) -> Iterator[str]:
        for pid in helpers(self.folder / "image", "swerl-supervisor"):
            yield f"sandbox of process {pid}"

    def __str__(self) -> str:
        return "no sandbox left"


class RayCluster:
    """A cluster of one node on loopback, which starts again after its head or raylet was killed."""

    def __init__(self, stack: ExitStack) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-")))
        self.address = f"127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[bytes] | None = None
        stack.callback(self.end)

    def mend(self) -> None:
        """Start it unless all of it runs: `ray start` ends some time after its daemons."""
        if all(helpers(self.folder, RAY_ROLES[name]) for name in ("ray head", "raylet")):
            return
        self.end()
        log = self.folder / "log"
        host, _, port = self.address.partition(":")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += [f"--node-ip-address={host}", f"--port={port}", "--num-cpus=8", "--num-gpus=0"]
        command += [f"--temp-dir={self.folder}", "--include-dashboard=false"]
        for _ in range(4):  # Ray gives its daemons 30 s, which a busy machine may exceed
            with log.open("wb") as out:
                self.process = subprocess.Popen(
                    command, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                    env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}, start_new_session=True,
                )  # fmt: skip
            while self.process.poll() is None:
                if "Ray runtime started" in log.read_text(errors="replace"):
                    return
                time.sleep(0.2)
            self.end()
        require(False, f"Ray does not start: {log.read_text(errors='replace')[-500:]}")

    def leftovers(self) -> list[str]:
        """Return the actors of runs."""
        return [f"actor {pid}" for pid in helpers(self.folder, RAY_ROLES["ray worker"])]

    def end(self) -> None:
        """Kill its processes; those of killed daemons do not end by themselves at once."""
        if self.process:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.process.kill()
            self.process.wait()
        for pid in helpers(self.folder, ""):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


SERVICES: dict[str, Callable[[ExitStack, image.BaseImage], Service]] = {
    "docker": Docker,
    "registry": Pulls,
    "server": Server,
}


def torment(name: str, faults: int, *, each: int, seed: int) -> Counter[str]:
    """Run rounds until so many faults have been brought about; return them by kind."""
    random, total = Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, ExitStack() as stack:
        built = Path(folder) / "image"
        built.mkdir()
        service, number = SERVICES[name](stack, image.build(built)), 0
        with kept_on_failure(calm := make(Path(folder) / "calm", service)):
            calm.run(service, random, 0)
        while total.total() < faults:
            number += 1
            began_s, one = time.monotonic(), make(Path(folder) / str(number), service)
            with kept_on_failure(one):
                one.run(service, random, min(each, faults - total.total()))
            total += one.faults
            print(
                f"round {number}: {one.faults.total()} faults, {time.monotonic() - began_s:.0f} s, "
                f"{len(one.finished)} episodes solved: {dict(one.faults)}; {service}",
                flush=True,
            )
    return total


def make(folder: Path, service: Service) -> Round:
    folder.mkdir()
    spec = GradingSpec("command", test_command=TEST)
    tasks = [
        Task(
            f"t-{number}", "r", service.image, "/repo", "Mend add.", spec,
            gold_patch=GOLD, setup=SETUP,
        )
        for number in range(NUM_TASKS)
    ]  # fmt: skip
    write_tasks(folder / "tasks.jsonl", tasks)
    small = ["limits.memory_mib=512", "limits.disk_mib=512", "rollout.concurrency=2"]
    return Round(folder, [*service.settings(), *small])


@contextmanager
def kept_on_failure(one: Round) -> Iterator[None]:
    """Print the end of the log of a round that failed."""
    try:
        yield
    except BaseException:
        print((one.folder / "log").read_text(errors="replace")[-3000:], file=sys.stderr)
        raise


def answers(host: str, port: int) -> bool:
    with socket.create_connection((host, port), timeout=5):
        return True


def helpers(folder: Path, words: str) -> list[int]:
    """Return the processes with these words in their command line and a folder there or as Ray's.

    Ray's workers have its folder in their environment only.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (entry / "cmdline").read_bytes()
            where = line + (entry / "environ").read_bytes()
            if words.encode() in line and os.fsencode(folder) in where:
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def require(holds: object, problem: str) -> None:
    if not holds:
        raise SystemExit(f"chaos: {problem}")
