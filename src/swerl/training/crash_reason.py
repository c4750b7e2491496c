"""Find why a rank ended or hangs from its log: the exception and its place in the project.

The exit status decides what to search for, so warnings after an exception are not mistaken for it.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swerl.cluster.node import ProcessEnd
from swerl.core.errors import install_command

TAIL_BYTES = 1 << 18
"""Bytes read from a log's end; the stacks of all threads fit in."""
_TRACEBACK = "Traceback (most recent call last):"
_STACK = re.compile(r"(Current thread|Thread) .*\(most recent call first\):")
_FATAL = "Fatal Python error: "
_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+),? in (?P<name>[^\s(]+)')
_LIBRARIES = re.compile(r".*(/site-packages/|/dist-packages/|/lib/python[\d.]*/|(?=<))")
"""Beginning of a path into a library, also one of a virtual environment."""
_TORCH_HOOKS = ("__torch_function__", "__torch_dispatch__")
"""Functions that torch calls on the way to every other function."""
_WARNING = re.compile(r"warning|^\[\w+\]:\[W|^W\d{4}", re.IGNORECASE)
_PEERS = ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError")
_MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "can't allocate memory")
_LESS_MEMORY = (
    "lower trainer.tokens_per_micro_batch, or set trainer.recompute or trainer.offload_optimizer; "
    "`swerl train RECIPE --dry-run` prints what a rank needs"
)
_LONGEST = 400
"""Characters of an exception's first line that are quoted."""


@dataclass(frozen=True, slots=True)
class CrashReason:
    text: str
    """The exception and its place, or the signal."""
    advice: str = ""
    """Remedy, if one is known."""
    follows: bool = False
    """True if the death of another rank caused this one."""


def crash_reason(log: Path, ended: ProcessEnd, *, num_oom_kills: int = 0) -> CrashReason:
    """Return why the process that wrote a log ended.

    `num_oom_kills` counts the out-of-memory kills in its control group, or on its machine, while
    it ran.
    """
    if ended.lost:
        return CrashReason(ended.lost)
    if ended.by_signal == signal.SIGKILL and num_oom_kills:
        killed = "process" if num_oom_kills == 1 else "processes"
        text = f"out of memory: the kernel killed {num_oom_kills} {killed} while it ran"
        return CrashReason(text, f"give the machine more memory, or {_LESS_MEMORY}")
    if ended.by_signal == signal.SIGKILL:
        advice = "a user, a scheduler or a container's memory limit killed it; `dmesg` may show it"
        return CrashReason("it was killed before it could write a reason", advice)
    lines = _tail(log).splitlines()
    text = _fatal(lines) if ended.by_signal else _exception(lines)
    if not text:
        return CrashReason(_last_line(lines))
    return CrashReason(text, _advice(text), any(sign in text for sign in _PEERS))


def hang_places(logs: Mapping[int, tuple[Path, int]]) -> str:
    """Describe where ranks hang, by the stacks at the end of their logs; rare places come first.

    `logs` maps a rank to its log, and to the number of bytes in it that are older than the stacks.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for rank, (log, begin) in logs.items():
        stack = next(_stacks(_tail(log, begin=begin).splitlines()), [])
        place = _place(stack)
        places[f"in {place}" if place else "wrote no stack"].append(rank)
    few_first = sorted(places.items(), key=lambda entry: len(entry[1]))
    return "; ".join(f"{_names(ranks)} {place}" for place, ranks in few_first[:4])


def _advice(text: str) -> str:
    if any(sign in text for sign in _MEMORY):
        return _LESS_MEMORY
    if text.startswith(("ModuleNotFoundError", "ImportError")):
        return f"install the missing package on that machine: {install_command('twin')}"
    return ""


def _exception(lines: Sequence[str]) -> str:
    """Return the exception that ended a Python process, and its place."""
    starts = [number for number, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    if not starts:
        return ""
    # torch puts the rank before each line.
    prefix = lines[starts[-1]].removesuffix(_TRACEBACK)
    # Frames are indented below the prefix; the first line that is not names the exception.
    block = [line.removeprefix(prefix) for line in lines[starts[-1] + 1 :]]
    frames: list[str] = []
    for line in block:
        if line and not line[0].isspace():
            kind, *text = line.split(":", 1)
            raised = ":".join([kind.rpartition(".")[2], *text])[:_LONGEST]
            place = _place(frames[::-1])
            return f"{raised} (in {place})" if place else raised
        frames.append(line)
    return ""


def _fatal(lines: Sequence[str]) -> str:
    """Return the message of a process that aborted, and its place."""
    starts = [number for number, line in enumerate(lines) if line.startswith(_FATAL)]
    if not starts:
        return ""
    message = lines[starts[-1]].removeprefix(_FATAL)
    # C++ prints the exception a few lines before.
    for line in lines[max(0, starts[-1] - 20) : starts[-1]]:
        if line.strip().startswith("what():"):
            message = line.strip().removeprefix("what():").strip()[:_LONGEST]
    place = _place(next(_stacks(lines[starts[-1] :]), []))
    return f"{message} (in {place})" if place else message


def _stacks(lines: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the main thread's stacks that a signal had written, innermost frame first."""
    for number, line in enumerate(lines):
        if _STACK.match(line) and line.startswith("Current"):
            yield lines[number + 1 :]


def _place(frames: Sequence[str]) -> str:
    """Return the innermost frame in the project or the user's code, else the innermost one."""
    matches = []
    for line in frames:
        if match := _FRAME.search(line):
            matches.append(match)
        elif matches and line and not line[0].isspace():
            break
    if not matches:
        return ""
    ours = (m for m in matches if _is_project(m["path"]) and m["name"] not in _TORCH_HOOKS)
    inner = next(ours, matches[0])
    return f"{_short(inner['path'])}:{inner['line']}, {inner['name']}"


def _is_project(path: str) -> bool:
    """Return whether a file belongs to swerl or its user, not to a library."""
    inside, is_library = _LIBRARIES.subn("", path)
    return not is_library or inside.startswith("swerl/")


def _short(path: str) -> str:
    """Return a path from its package on, if the package is known."""
    inside = _LIBRARIES.sub("", path)
    _, swerl, within = inside.rpartition("/swerl/")
    return f"swerl/{within}" if swerl else inside


def _last_line(lines: Sequence[str]) -> str:
    """Return the last line that is neither a warning nor the source line below one."""
    for line in reversed(lines):
        if line.strip() and not line[0].isspace() and not _WARNING.search(line):
            return line.strip()[:_LONGEST]
    return "its log shows no reason"


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _tail(log: Path, *, begin: int = 0) -> str:
    """Return the end of a log, without its first `begin` bytes."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")
