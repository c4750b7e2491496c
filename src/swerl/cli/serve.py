"""`swerl serve`: the gateway in front of an engine, for the user's own agents and SDKs.

Engine, gateway and one open session per key run until a signal stops them.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from swerl.cli._options import (
    JsonOption,
    ModelOption,
    RecipeSettingsOption,
    is_loopback,
    keys_in,
    kinds,
    read_engine,
    recipe_of,
)
from swerl.cli._output import console, counted, print_json, safe, stderr
from swerl.cli._run import INTERRUPTED, run
from swerl.core.chat import Message, Role
from swerl.core.contracts import EngineSetup, Family
from swerl.core.errors import EngineError, InputError, RunError, SwerlError
from swerl.core.files import disk_errors
from swerl.core.learning import Batch
from swerl.core.sample import Sample, to_samples
from swerl.core.turn import Sampling, Trajectory, seed_of
from swerl.gateway.conversation import TurnRecord
from swerl.gateway.limits import SessionLimits
from swerl.gateway.prompting import HistoryPolicy
from swerl.gateway.server import Gateway
from swerl.gateway.sessions import Session
from swerl.recipe.schema import Recipe
from swerl.rollout import record, wiring
from swerl.rollout.episode import brief, first_line
from swerl.training import batch

_LOOK_S = 1.0
"""Seconds between checks for idle sessions."""
_NO_CAP = 10**12
"""Limits for a person at a keyboard, who is no runaway agent; the loop breaker stays."""
_SCRIPTS = ("demo",)


def serve(
    engine: Annotated[str, typer.Option(help=f"{kinds(_SCRIPTS)}.")] = "scripted:demo",
    model: ModelOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8780,
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with API keys, one per line and session. By default a new key."),
    ] = None,
    idle_minutes: Annotated[
        float,
        typer.Option(min=0.001, help="Write and close a session after this idle time."),
    ] = 30.0,
    settings: RecipeSettingsOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the records.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve your own agents from an engine, print each request, and record the exact tokens."""
    chosen = read_engine(engine, _SCRIPTS)
    recipe = recipe_of(chosen, model, defaults=["name=swerl"], settings=settings or ())
    plan = Plan(
        recipe=recipe,
        folder=_folder(output),
        host=host,
        port=port,
        keys=_keys(key_file, host),
        script=demo() if chosen.script else None,
        idle_s=idle_minutes * 60,
    )
    view = ServeView(
        engine=chosen.text,
        model=recipe.name,
        key_file=key_file,
        trainable=chosen.trainable,
        public=not is_loopback(host),
    )
    if chosen.type not in ("scripted", "openai"):
        stderr().print(f"starting {chosen.text} …", markup=False)
    totals = run(_serve(plan, view), after="finished requests are in transcript.jsonl")
    if as_json:
        print_json(totals)
    folders = totals.folders
    show_totals(totals, f"less {folders[-1] / 'transcript.jsonl'}" if folders else "swerl rollout")
    if totals.num_unwritten:
        raise typer.Exit(1)
    if totals.interrupted:
        raise typer.Exit(INTERRUPTED)


def _keys(path: Path | None, host: str) -> list[str]:
    """Return the keys in a file; without a file the gateway creates one."""
    keys = keys_in(path, host, "--key-file")
    if len(set(keys)) < len(keys):
        raise InputError(f"{path} holds a key twice", hint="each key has its own session")
    return keys


def _folder(output: Path | None) -> Path:
    """Return an empty folder."""
    if output is None:
        base = Path("runs", "serve")
        names = {path.name for path in base.iterdir()} if base.is_dir() else set()
        return base / next(str(n) for n in range(len(names) + 1) if str(n) not in names)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(
            f"-o {output} is not empty",
            hint="choose another folder, or remove -o to get a new one",
        )
    return output


async def _serve(plan: Plan, view: ServeView) -> Totals:
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
        in_turn=True,
    )
    async with (
        wiring.engine_of(recipe, setup) as engine,
        Gateway(
            engine=engine,
            family=family,
            model_name=recipe.name,
            host=plan.host,
            port=plan.port,
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


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of the served gateway."""

    recipe: Recipe
    folder: Path
    host: str
    port: int
    keys: Sequence[str]
    """One session per key; empty: one new key."""
    script: Sequence[Message] | None
    """Replies of a scripted engine."""
    idle_s: float
    """Idle seconds after which a session is written; its key then starts a new one."""


@dataclass(slots=True)
class Totals:
    """Sums over all sessions."""

    turns: int = 0
    branches: int = 0
    samples: int = 0
    sampled: int = 0
    """Tokens of all Turns."""
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)
    num_unwritten: int = 0
    """Sessions that could not be written."""
    interrupted: bool = False
    """True if Ctrl-C ended it."""

    def add(self, trajectory: Trajectory, num_samples: int, num_trained: int) -> None:
        self.turns += len(trajectory.turns)
        self.branches += len(list(trajectory.leaves()))
        self.samples += num_samples
        self.sampled += trajectory.num_sampled_tokens
        self.trained += num_trained
        for reason, tokens in trajectory.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + tokens


@dataclass(slots=True)
class _Served:
    """An open session and its growing log."""

    session: Session
    folder: Path
    last_s: float
    """Time of its last Turn, or of its opening."""
    has_turns: bool = False


class ServeSessions:
    """Keeps one session open per key; an idle one is written and replaced."""

    def __init__(self, gateway: Gateway, plan: Plan, view: ServeView, family: Family) -> None:
        self.totals = Totals()
        self._gateway = gateway
        self._family = family
        self._plan = plan
        self._view = view
        self._served: dict[str, _Served] = {}
        self._num_opened = 0

    def open(self, keys: Sequence[str]) -> list[str]:
        """Open a session per key, or one with a new key, and return the keys."""
        fresh: list[str | None] = [None]
        for key in keys or fresh:
            self._open(key)
        return list(self._served)

    async def pass_on_idle(self) -> None:
        """Write each idle session and open a new one for its key."""
        now = time.monotonic()
        for key, served in list(self._served.items()):
            is_idle = now - served.last_s >= self._plan.idle_s
            if is_idle and served.has_turns and not served.session.conversation.answers:
                self._open(key)
                if await self._keep(served):
                    self._view.kept(served.session.id, served.folder)

    async def close(self) -> None:
        """End and write every session."""
        while self._served:
            _, served = self._served.popitem()
            await self._keep(served)
        self.totals.folders.sort(key=lambda folder: int(folder.name))

    def _open(self, key: str | None) -> None:
        recipe = self._plan.recipe
        self._num_opened += 1
        session_id = str(self._num_opened)
        session = self._gateway.open(
            session_id,
            sampling=Sampling(
                max_new_tokens=recipe.rollout.max_new_tokens,
                temperature=recipe.rollout.temperature,
                seed=seed_of(recipe.seed, session_id),
            ),
            limits=SessionLimits(
                max_turns=_NO_CAP,
                max_sampled_tokens=_NO_CAP,
                max_context_tokens=recipe.rollout.max_context_tokens,
                model_call_s=recipe.budgets.model_call_s,
            ),
            on_turn=lambda turn: self._note(served, turn),
            key=key,
        )
        folder = self._plan.folder / session_id
        served = _Served(session, folder, time.monotonic())
        self._served[session.key] = served

    def _note(self, served: _Served, turn: TurnRecord) -> None:
        """Write a Turn's text at once, so it survives a crash; then print it."""
        served.last_s = time.monotonic()
        served.has_turns = True
        try:
            with disk_errors(served.folder):
                served.folder.mkdir(parents=True, exist_ok=True)
                with (served.folder / "transcript.jsonl").open("ab") as file:
                    file.write(orjson.dumps(record.transcript_turn(turn, self._family)) + b"\n")
        except RunError as error:  # the client has its reply, and the tree its Turn
            self._view.refused(served.session.id, error)
        self._view.turn(served.session.id, turn)

    async def _keep(self, served: _Served) -> bool:
        """End a session and return whether it was written; an unused one needs no folder."""
        trajectory = await served.session.close()
        name = served.session.id
        samples = _samples(trajectory)
        trained = sum(sample.num_trained_tokens for sample in samples)
        self.totals.add(trajectory, len(samples), trained)
        if not trajectory.turns:
            return False
        try:
            await asyncio.to_thread(_write, served.folder, trajectory)
        except RunError as error:
            self.totals.num_unwritten += 1
            self._view.refused(name, error)
            return False
        self.totals.folders.append(served.folder)
        return True


def _write(folder: Path, trajectory: Trajectory) -> None:
    """Write a session's tokens and rows. Raises RunError."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    stored = record.write_trajectory(folder, trajectory)
    if samples := _samples(stored):
        whole = Batch(step=0, samples=tuple(samples), num_episodes=1)
        batch.write(folder / "samples.parquet", whole)


def _samples(trajectory: Trajectory) -> list[Sample]:
    return to_samples(trajectory, episode=trajectory.session, task="serve")


_ASK = "Say hello."
_COLUMNS = f"{'time':<8}  {'branch':<6} {'turn':>5} {'new':>8} {'sampled':>8} {'tok/s':>7}  finish"


class ServeView:
    """Prints each request of the sessions."""

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
        text = str(error) if isinstance(error, SwerlError) else f"internal error: {error!r}"
        self._line(f"{_clock()}  [{colour}]{session or '-':<6} refused  {safe(text)}[/]", cut=True)

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
        text = f"{totals.folders[0].parent}, {len(totals.folders):,} sessions with a folder each"
        out.print(f"{'kept':<8}{safe(text)}", soft_wrap=True)
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


_LINES = (
    "Hello! I am a script behind swerl's gateway, not a model. I say three lines in turn, whatever "
    "you ask. Every token of mine is kept as it would be for training.",
    "You came back: this reply continues the branch of the last one, and only your new message was "
    "put into tokens.",
    "A real model answers with `--engine torch-cpu --model DIR` or `--engine sglang=URL --model "
    "DIR`. Ctrl-C in swerl's window shows what was recorded.",
)
_ROUNDS = 10_000
"""Repetitions of the demo's replies: practically endless."""


def demo() -> list[Message]:
    """Return the replies of `scripted:demo`."""
    return [Message(Role.ASSISTANT, line) for line in _LINES] * _ROUNDS
