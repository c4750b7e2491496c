"""Run a command's coroutine with clean Ctrl-C and SIGTERM; show its progress."""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from swerl.cli._output import stderr
from swerl.core.jobs import PatientLoop

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

T = TypeVar("T")
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
TERMINATED = 143
"""Exit code after SIGTERM: 128 + SIGTERM."""


class _SignalError(Exception):
    """Ctrl-C, or SIGTERM from a scheduler, container runtime or service manager."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


@dataclass(slots=True)
class Grace:
    """Time for work to end by itself after SIGTERM; a second SIGTERM ends it at once."""

    seconds: float
    ask: Callable[[], None]
    """Asks the work to end."""
    is_asked: bool = False


def run(work: Coroutine[Any, Any, T], *, after: str, grace: Grace | None = None) -> T:
    """Run to the end. On Ctrl-C or SIGTERM close everything, print `after`, exit with 130 or 143.

    A second Ctrl-C does not wait for the cleanup.
    """
    try:
        with asyncio.Runner(loop_factory=PatientLoop) as runner:
            return runner.run(_until_signal(work, grace))
    except KeyboardInterrupt:
        code = INTERRUPTED
    except _SignalError as error:
        code = error.code
    stderr().print(f"[yellow]interrupted[/]: {after}", soft_wrap=True)
    raise typer.Exit(code) from None


async def _until_signal(work: Coroutine[Any, Any, T], grace: Grace | None) -> T:
    """Await work; a signal cancels it. Raises _SignalError after its cleanup."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    codes: list[int] = []

    def end(code: int) -> None:
        if codes:
            return
        codes.append(code)
        stderr().print("[yellow]stopping[/]; Ctrl-C again stops at once", soft_wrap=True)
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, end_at_once)
        task.cancel()

    def end_at_once(*_: object) -> None:
        codes.append(INTERRUPTED)
        raise KeyboardInterrupt

    def ask_to_end(grace: Grace) -> None:
        stderr().print(f"[yellow]stopping[/] within {grace.seconds:g} s", soft_wrap=True)
        grace.is_asked = True
        grace.ask()
        loop.add_signal_handler(signal.SIGTERM, end, TERMINATED)
        loop.call_later(grace.seconds, end, TERMINATED)

    loop.add_signal_handler(signal.SIGINT, end, INTERRUPTED)
    if grace:
        loop.add_signal_handler(signal.SIGTERM, ask_to_end, grace)
    else:
        loop.add_signal_handler(signal.SIGTERM, end, TERMINATED)
    try:
        return await work
    except asyncio.CancelledError:
        if len(codes) == 1:
            raise _SignalError(codes[0]) from None
        raise
    except KeyboardInterrupt:
        raise _SignalError(INTERRUPTED) from None
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def progress_bar(title: str, total: int | None, *, note: str = "") -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr; yield the function that advances it with `note`'s fields.

    Where no terminal reads it, a line comes now and then.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    out = stderr()
    if not out.is_terminal:
        yield _lines(title, total)
        return
    columns = [BarColumn(min(40, out.width // 5)), MofNCompleteColumn(), TimeElapsedColumn()]
    with _progress(out, *columns, *([TextColumn(note)] if note else ())) as progress:
        bar = progress.add_task(title, total=total, good=0)
        yield functools.partial(progress.update, bar, advance=1)


_LINE_S = 20.0
"""Seconds between two lines of progress in a file or a pipe."""


def _lines(title: str, total: int | None) -> Callable[..., None]:
    """Return a function that counts as a progress bar does, and prints the number now and then."""
    number, printed_at = 0, time.monotonic()

    def step(*, advance: int = 1, completed: int | None = None, **_: object) -> None:
        nonlocal number, printed_at
        number = number + advance if completed is None else completed
        if time.monotonic() - printed_at > _LINE_S:
            printed_at = time.monotonic()
            of_all = "" if total is None else f" of {total:,}"
            stderr().print(f"  {title} {number:,}{of_all}", markup=False, soft_wrap=True)

    return step


_PATIENCE_S = 2.0
"""Seconds without a word that a user takes for a hang."""


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show a spinner with the seconds on a terminal; elsewhere one line if it takes a while."""
    if not stderr().is_terminal:
        timer = threading.Timer(_PATIENCE_S, lambda: stderr().print(f"{text} …", markup=False))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        return
    with spinner(stderr()) as progress:
        progress.add_task(text)
        yield


def spinner(out: Console) -> Progress:
    """Return a line with a spinner and the seconds."""
    from rich.progress import SpinnerColumn, TimeElapsedColumn

    return _progress(out, SpinnerColumn(), TimeElapsedColumn())


def _progress(out: Console, *columns: ProgressColumn) -> Progress:
    """Return a progress display with the task's words first; a narrow terminal cuts only these."""
    from rich.progress import Progress, TextColumn
    from rich.table import Column

    words = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
    return Progress(words, *columns, console=out, transient=True)
