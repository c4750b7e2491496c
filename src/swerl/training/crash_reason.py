"""Find why a rank ended or hangs from its log: the exception and its place in the project."""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swerl.cluster.node import ProcessEnd

TAIL_BYTES = 1 << 18
"""How much of a log's end is read; stacks of every thread fit in."""
_TRACEBACK = "Traceback (most recent call last):"
_STACK = re.compile(r"(Current thread|Thread) .*\(most recent call first\):")
_FATAL = "Fatal Python error: "
_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+),? in (?P<name>[^\s(]+)')
_LIBRARIES = re.compile(r".*(/site-packages/|/dist-packages/|/lib/python[\d.]*/|(?=<))")
"""What a path begins with that leads to a library, a virtual environment's too."""
_PASSED = ("__torch_function__", "__torch_dispatch__")
"""Functions that torch calls on the way to every other one."""
_BESIDE = ("Exception in thread", "Exception ignored in")
_WARNING = re.compile(r"warning|^\[\w+\]:\[W|^W\d{4}", re.IGNORECASE)
_PEERS = ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError")
_MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "can't allocate memory")
_LESS_MEMORY = (
    "lower trainer.tokens_per_micro_batch, or set trainer.recompute or trainer.offload_optimizer; "
    "`swerl train RECIPE --dry-run` says what a rank needs"
)
_LONGEST = 400
"""Characters of an exception's first line that are quoted."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a process ended."""

    text: str
    """The exception and its place, or how the process was ended."""
    advice: str = ""
    """What to do about it, where that is known."""
    follows: bool = False
    """Whether the death of another rank brought it about."""


def cause_of(log: Path, ended: ProcessEnd, *, num_oom_kills: int = 0) -> Cause:
    """Return why the process that wrote a log ended.

    `num_oom_kills` counts the processes of its control group, or of its machine, that the kernel
    killed for want of memory while it ran.
    """
    if ended.lost:
        return Cause(ended.lost)
    if ended.by_signal == signal.SIGKILL:
        return _killed(num_oom_kills)
    lines = _tail(log).splitlines()
    told = _fatal(lines) if ended.by_signal else _exception(lines)
    if not told:
        return Cause(_last_line(lines))
    return Cause(told, _advice(told), any(sign in told for sign in _PEERS))


def places(logs: Mapping[int, tuple[Path, int]]) -> str:
    """Say where ranks stand by the stacks at the end of their logs, those that differ first.

    `logs` has a rank's log and the number of bytes in it that are older than the stacks.
    """
    found: dict[str, list[int]] = defaultdict(list)
    for rank, (log, begin) in logs.items():
        stack = next(_stacks(_tail(log, begin=begin).splitlines()), [])
        place = _place(stack)
        found[f"in {place}" if place else "wrote no stack"].append(rank)
    few_first = sorted(found.items(), key=lambda each: len(each[1]))
    return "; ".join(f"{_names(ranks)} {place}" for place, ranks in few_first[:4])


def _killed(num_oom_kills: int) -> Cause:
    if num_oom_kills:
        killed = "process" if num_oom_kills == 1 else "processes"
        text = f"the kernel killed {num_oom_kills} {killed} for want of memory while it ran"
        return Cause(text, f"give the machine more memory, or {_LESS_MEMORY}")
    advice = "somebody, a scheduler or a container's memory limit killed it: `dmesg` may say which"
    return Cause("it had no time to say why", advice)


def _advice(told: str) -> str:
    if any(sign in told for sign in _MEMORY):
        return _LESS_MEMORY
    if told.startswith(("ModuleNotFoundError", "ImportError")):
        return "install what is missing on that machine: pip install 'swerl[twin]'"
    return ""


def _exception(lines: Sequence[str]) -> str:
    """Return the exception that ended a Python process, and its place."""
    starts = [place for place, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    fatal = [start for start in starts if not _is_beside(lines, start)] or starts
    if not fatal:
        return ""
    prefix = lines[fatal[-1]].removesuffix(_TRACEBACK).replace("+ Exception Group ", "| ")
    # Its frames are indented below the prefix; what is not any more says what was raised.
    block = [line.removeprefix(prefix) for line in lines[fatal[-1] + 1 :]]
    frames: list[str] = []
    for line in block:
        if line and not line[0].isspace():
            kind, *text = line.split(":", 1)
            told = ":".join([kind.rpartition(".")[2], *text])[:_LONGEST]
            place = _place(frames[::-1])
            return f"{told} (in {place})" if place else told
        frames.append(line)
    return ""


def _is_beside(lines: Sequence[str], start: int) -> bool:
    """Say whether a traceback is of something that ends no process."""
    return start > 0 and any(sign in lines[start - 1] for sign in _BESIDE)


def _fatal(lines: Sequence[str]) -> str:
    """Return what a process said that was ended by a signal of its own."""
    starts = [place for place, line in enumerate(lines) if line.startswith(_FATAL)]
    if not starts:
        return ""
    told = lines[starts[-1]].removeprefix(_FATAL)
    # C++ says what it threw a few lines before.
    for line in lines[max(0, starts[-1] - 20) : starts[-1]]:
        if line.strip().startswith("what():"):
            told = line.strip().removeprefix("what():").strip()[:_LONGEST]
    place = _place(next(_stacks(lines[starts[-1] :]), []))
    return f"{told} (in {place})" if place else told


def _stacks(lines: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the stacks that were written by a signal, innermost frame first; the main thread's."""
    marks = [place for place, line in enumerate(lines) if _STACK.match(line)]
    for start in marks:
        if lines[start].startswith("Current"):
            yield lines[start + 1 :]


def _place(frames: Sequence[str]) -> str:
    """Return the innermost frame that is the project's or the user's, else the innermost one."""
    found = []
    for line in frames:
        if match := _FRAME.search(line):
            found.append(match)
        elif found and line and not line[0].isspace():
            break
    if not found:
        return ""
    ours = (each for each in found if _is_project(each["path"]) and each["name"] not in _PASSED)
    inner = next(ours, found[0])
    return f"{_short(inner['path'])}:{inner['line']}, {inner['name']}"


def _is_project(path: str) -> bool:
    """Say whether a file is swerl's or its user's, and of no library."""
    inside, is_library = _LIBRARIES.subn("", path)
    return not is_library or inside.startswith("swerl/")


def _short(path: str) -> str:
    """Return a path from its package on, where that is known."""
    inside = _LIBRARIES.sub("", path)
    _, swerl, within = inside.rpartition("/swerl/")
    return f"swerl/{within}" if swerl else inside


def _last_line(lines: Sequence[str]) -> str:
    """Return the last line that is neither a warning nor the source line below one."""
    for line in reversed(lines):
        if line.strip() and not line[0].isspace() and not _WARNING.search(line):
            return line.strip()[:_LONGEST]
    return "its log does not say why"


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _tail(log: Path, *, begin: int = 0) -> str:
    """Return the end of a log, from a number of bytes on at the earliest."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")
