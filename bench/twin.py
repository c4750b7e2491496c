"""Measure a short run of the twin by its parts, with the floor of the same minute.

    python bench/twin.py [--steps 10] [--set KEY=VALUE ...] [--json FILE]

Prints the CPU of the start, and CPU and page faults of an Episode by process, counted from the end
of the second step to that of the last. The floor of the sandboxes is two starts of Python: code
under test needs one, and what an agent does costs about another. A model that is not cached is made
first, and counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

HZ = os.sysconf("SC_CLK_TCK")
ROLES = {"sandboxes": "spawner", "trainer": "swerl.training.rank.worker", "engine": "_torch_server"}
"""Process -> a word of its command."""
STARTS = 20
FIRST_STEP = 2


def role_of(pid: int, controller: int) -> str:
    """Return the part of swerl that a process is."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    named = (role for role, word in ROLES.items() if word in command)
    return "controller" if pid == controller else next(named, "others")


def usage(controller: int) -> Counter[tuple[str, str]]:
    """Return (role, measure) -> CPU seconds or faults so far."""
    used: Counter[tuple[str, str]] = Counter()
    for pid in _tree(controller):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            own = role_of(pid, controller)
        except OSError:  # it has just ended
            continue
        for role, is_ended in ((own, 0), ("ended" if own == "controller" else own, 1)):
            user, system = map(int, fields[11 + 2 * is_ended :][:2])
            used[role, "CPU s"] += (user + system) / HZ
            used[role, "faults"] += int(fields[7 + is_ended])
    return used


def _tree(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):  # it has just ended
        for thread in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in thread.read_text().split():
                yield from _tree(int(child))


def _until(events: Path, event: str, count: int, run: subprocess.Popen[bytes]) -> tuple[float, int]:
    """Wait for so many events of a kind; return the time and the number of Episodes that ended."""
    while run.poll() is None:
        text = events.read_text() if events.exists() else ""
        if text.count(f'{{"event": "{event}"') >= count:
            return time.monotonic(), text.count('{"event": "EpisodeEnded"')
        time.sleep(0.05)
    raise SystemExit("the run ended too early")


def floor_ms() -> float:
    """Return the CPU milliseconds of two starts of Python without its site packages."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(STARTS):
        subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return 2 * 1000 * spent_s / STARTS


def main() -> None:
    """Train, measure between two steps, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = [
        word for each in (f"steps={options.steps}", *options.set) for word in ("--set", each)
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "swerl", "train", "twin_cpu", "--runs", folder]
        with subprocess.Popen([*command, *settings], stdout=subprocess.DEVNULL) as run:
            events = Path(folder, "twin/events.jsonl")
            _until(events, "PhaseStarted", 1, run)
            start = usage(run.pid)
            began, num_before = _until(events, "StepEnded", FIRST_STEP, run)
            before = usage(run.pid)
            ended, num_after = _until(events, "StepEnded", options.steps, run)
            used = usage(run.pid)
            used.subtract(before)
            run.terminate()
    spent = {role: seconds for (role, measure), seconds in start.items() if measure == "CPU s"}
    parts = ", ".join(f"{role} {seconds:.1f}" for role, seconds in spent.items())
    print(f"from the command to the first Episode: {sum(spent.values()):.1f} s of CPU ({parts})")
    show(used, num_after - num_before, ended - began, options.json)


def show(
    used: Mapping[tuple[str, str], float], episodes: int, wall_s: float, to: Path | None
) -> None:
    """Print the figures of an Episode, and keep them."""
    rows = {
        role: (1000 * used[role, "CPU s"] / episodes, used[role, "faults"] / episodes)
        for role in ("sandboxes", "controller", "trainer", "engine")
    }
    print(f"an Episode of {episodes}: {1000 * wall_s / episodes:.0f} ms of wall time")
    print("process        CPU ms   faults")
    for role, (cpu_ms, faults) in rows.items():
        print(f"{role:12}{cpu_ms:9.1f}{faults:9.0f}")
    print(f"floor of the sandboxes: {floor_ms():.1f} ms")
    if to:
        to.write_text(json.dumps({"wall_s": wall_s, "episodes": episodes, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
