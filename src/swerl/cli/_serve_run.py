"""Run `swerl serve`: engine, gateway and sessions, until a signal stops it."""

from __future__ import annotations

import asyncio
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from swerl.cli._output import console, counted, safe
from swerl.cli._serve_sessions import Plan, ServeSessions, Totals, View
from swerl.core.chat import Message
from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineError, SwerlError
from swerl.core.files import disk_errors
from swerl.gateway.conversation import TurnRecord
from swerl.gateway.prompting import HistoryPolicy
from swerl.gateway.server import Gateway
from swerl.rollout import wiring
from swerl.rollout.episode import brief, first_line

if TYPE_CHECKING:
    from rich.console import Console

_LOOK_S = 1.0
"""Seconds between checks for idle sessions."""


async def serve(plan: Plan, view: View) -> Totals:
    """Serve until SIGINT or SIGTERM, then write open sessions. Raises the engine's errors."""
    recipe = plan.recipe
    with disk_errors(plan.folder):
        plan.folder.mkdir(parents=True, exist_ok=True)
    family = wiring.family_of(recipe, recipe.model.path)
    script = plan.script
    setup = EngineSetup(
        family=family,
        log_dir=plan.folder,
        model=recipe.model.path,
        script=None if script is None else lambda _: script,
    )
    async with (
        wiring.engine_of(recipe, setup) as engine,
        Gateway(
            engine=engine,
            family=family,
            model_name=recipe.name,
            host=recipe.gateway.bind,
            port=recipe.gateway.port,
            history=HistoryPolicy(recipe.gateway.history),
            on_refused=view.refused,
        ) as gateway,
    ):
        sessions = ServeSessions(gateway, plan, view, family)
        with _told_to_stop() as stop:
            view.started(gateway.url, sessions.open(plan.keys))
            try:
                while not stop.is_set():
                    await sessions.pass_on_idle()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_S):
                            await stop.wait()
            finally:
                await sessions.close()
        sessions.totals.interrupted = stop.interrupted
    with suppress(OSError):
        plan.folder.rmdir()  # nobody used it
    return sessions.totals


class _Stop(asyncio.Event):
    interrupted = False


@contextmanager
def _told_to_stop() -> Iterator[_Stop]:
    """Yield an event that SIGTERM and the first SIGINT set; a second SIGINT interrupts."""
    loop = asyncio.get_running_loop()
    stop = _Stop()

    def interrupt() -> None:
        stop.interrupted = True
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)


_ASK = "Say hello."
_COLUMNS = f"{'time':<8}  {'branch':<6} {'turn':>5} {'new':>8} {'sampled':>8} {'tok/s':>7}  finish"


class ServeView:
    """Prints what the sessions do."""

    def __init__(
        self, *, engine: str, model: str, key_file: Path | None, trainable: bool, public: bool
    ) -> None:
        self._out = console()
        self._engine = engine
        self._model = model
        self._key_file = key_file
        self._trainable = trainable
        self._public = public
        self._branches: dict[str, _Branches] = {}

    def started(self, url: str, keys: Sequence[str]) -> None:
        """Print the gateway's address, and how to configure each kind of client."""
        self._line(f"[bold]{safe(self._engine)}[/] answers at [bold]{url}[/] until Ctrl-C")
        if not self._trainable:
            self._line("[yellow]for debugging: no token ids, so nothing is trainable[/]")
        if self._public:
            self._line(
                "[yellow]other machines can reach it, and nothing on the way is encrypted[/]"
            )
        self._line("")
        for number, key in enumerate(keys, 1):
            self._line(safe(f"export SWERL_KEY={self._shown(key, number)}"))
        for title, commands in _ways_in(url, self._model).items():
            self._line(f"\n[bold]{title}[/]")
            for command in commands:
                self._line(safe(command))
        self._line(f"\n[dim]{_COLUMNS}[/]")
        self._out.file.flush()  # a script that starts it in the background waits for these lines

    def turn(self, session: str, record: TurnRecord) -> None:
        """Print one answered request."""
        turn, usage = record.turn, record.reply.usage
        branches = self._branches.setdefault(session, _Branches())
        new = len(turn.prompt_ids) if turn.trainable else usage.prompt_tokens
        sampled = len(turn.output_ids) if turn.trainable else usage.completion_tokens
        speed = f"{sampled / turn.duration_s:,.0f}" if turn.duration_s > 0 else ""
        self._line(
            f"{_clock()}  [cyan]{session}.{branches.of(turn.index, turn.parent):<4}[/] "
            f"{turn.index + 1:>5} {new:>8,} {sampled:>8,} {speed:>7}  "
            f"{record.reply.finish.value:<10} {safe(_said(record.reply.message))}",
            cut=True,
        )

    def refused(self, session: str, error: Exception) -> None:
        """Print one failed request."""
        colour = "red" if isinstance(error, EngineError) else "yellow"
        told = str(error) if isinstance(error, SwerlError) else f"internal error: {error!r}"
        self._line(f"{_clock()}  [{colour}]{session or '-':<6} refused  {safe(told)}[/]", cut=True)

    def kept(self, session: str, folder: Path) -> None:
        """Print the folder of an idle session."""
        self._branches.pop(session, None)
        self._line(f"{_clock()}  [dim]{session:<6} was idle: kept in {safe(str(folder))}[/]")

    def _shown(self, key: str, number: int) -> str:
        """Return a key as shell text; a key from a file is read from there."""
        if self._key_file is None:
            return key
        return f'"$(sed -n {number}p {shlex.quote(str(self._key_file))})"'

    def _line(self, text: str, *, cut: bool = False) -> None:
        if cut and self._out.is_terminal:
            self._out.print(text, no_wrap=True, overflow="ellipsis")
        else:
            self._out.print(text, soft_wrap=True)
        self._out.file.flush()


def show_totals(totals: Totals, next_command: str) -> None:
    """Print the sums over all sessions, their folder and the next command."""
    out: Console = console()
    dropped = sum(totals.dropped.values())
    share = totals.trained / max(totals.sampled + dropped, 1)
    out.print(
        f"\n{counted(totals.turns, 'turn')} in {counted(totals.branches, 'branch', 'branches')}, "
        f"{counted(totals.samples, 'sample')}; {totals.trained:,} of "
        f"{totals.sampled + dropped:,} sampled tokens trainable ({share:.1%})",
        soft_wrap=True,
    )
    for reason, tokens in totals.dropped.items():
        out.print(f"{tokens:,} sampled tokens {safe(reason)}, counted and left out", soft_wrap=True)
    if len(totals.folders) == 1:
        out.print(f"{'kept':<8}{safe(str(totals.folders[0]))}", soft_wrap=True)
    elif totals.folders:
        kept = f"{totals.folders[0].parent}, {len(totals.folders):,} sessions with a folder each"
        out.print(f"{'kept':<8}{safe(kept)}", soft_wrap=True)
    out.print(f"{'next':<8}{safe(next_command)}", soft_wrap=True)


class _Branches:
    """Numbers the branches of one session in the order of its Turns."""

    def __init__(self) -> None:
        self._of_leaf: dict[int, int] = {}
        """Last Turn of a branch -> its number."""
        self._num = 0

    def of(self, turn: int, parent: int | None) -> int:
        """Return the number of a Turn's branch, new or continued."""
        number = None if parent is None else self._of_leaf.pop(parent, None)
        if number is None:
            self._num += 1
            number = self._num
        self._of_leaf[turn] = number
        return number


def _ways_in(url: str, model: str) -> Mapping[str, Sequence[str]]:
    """Return shell commands by client."""
    provider = f'{{name="swerl",base_url="{url}/v1",env_key="SWERL_KEY",wire_api="responses"}}'
    body = (
        f'{{"model":"{model}","max_tokens":500,"messages":[{{"role":"user","content":"{_ASK}"}}]}}'
    )
    asked = f'messages=[{{"role": "user", "content": "{_ASK}"}}]'
    return {
        "Claude Code": [
            f"ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN=$SWERL_KEY ANTHROPIC_MODEL={model} "
            f"ANTHROPIC_SMALL_FAST_MODEL={model} CLAUDE_CODE_ATTRIBUTION_HEADER=0 claude"
        ],
        "Codex": [
            f"codex -c model={model} -c model_provider=swerl "
            f"-c {shlex.quote(f'model_providers.swerl={provider}')}"
        ],
        "curl": [
            f'curl {url}/v1/messages -H "x-api-key: $SWERL_KEY" '
            f"-H 'content-type: application/json' -d {shlex.quote(body)}"
        ],
        "Python": [
            f'anthropic.Anthropic(base_url="{url}", api_key=os.environ["SWERL_KEY"])'
            f'.messages.create(model="{model}", max_tokens=500, {asked})',
            f'openai.OpenAI(base_url="{url}/v1", api_key=os.environ["SWERL_KEY"])'
            f'.chat.completions.create(model="{model}", {asked})',
        ],
    }


def _said(message: Message) -> str:
    """Return a reply's calls in short, or its first words."""
    return "  ".join(map(brief, message.tool_calls)) or first_line(message.text)


def _clock() -> str:
    return time.strftime("%H:%M:%S")
