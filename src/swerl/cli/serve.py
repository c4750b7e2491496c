"""`swerl serve`: the gateway in front of an engine, for the user's own agents and SDKs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from swerl.cli._options import (
    EngineChoice,
    JsonOption,
    ModelOption,
    RecipeSettingsOption,
    is_loopback,
    kinds,
    read_engine,
    recipe_of,
)
from swerl.cli._output import print_json, stderr
from swerl.cli._run import INTERRUPTED, run
from swerl.cli._serve_run import Plan, ServeView, show_totals
from swerl.cli._serve_run import serve as serve_until_told
from swerl.core.chat import Message, Role, ToolCall
from swerl.core.errors import InputError, shortened

_SCRIPTS = ("demo",)
_SHORTEST_KEY = 16


def serve(
    engine: Annotated[str, typer.Option(help=f"{kinds(_SCRIPTS, files=True)}.")] = "scripted:demo",
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
    chosen = read_engine(engine, _SCRIPTS, files=True)
    address = [f"gateway.bind={host}", f"gateway.port={port}"]
    if chosen.type == "scripted":
        address.append("engine.in_turn=true")
    recipe = recipe_of(chosen, model, defaults=["name=swerl", *address], settings=settings or ())
    plan = Plan(
        recipe=recipe,
        folder=_folder(output),
        keys=_keys(key_file, recipe.gateway.bind),
        script=_script(chosen),
        idle_s=idle_minutes * 60,
    )
    view = ServeView(
        engine=chosen.text,
        model=recipe.name,
        key_file=key_file,
        trainable=chosen.trainable,
        public=not is_loopback(recipe.gateway.bind),
    )
    if chosen.type not in ("scripted", "openai"):
        stderr().print(f"starting {chosen.text} …", markup=False)
    totals = run(serve_until_told(plan, view), after="finished requests are in transcript.jsonl")
    if as_json:
        print_json(totals)
    folders = totals.folders
    show_totals(totals, f"less {folders[-1] / 'transcript.jsonl'}" if folders else "swerl rollout")
    if totals.num_unwritten:
        raise typer.Exit(1)
    if totals.interrupted:
        raise typer.Exit(INTERRUPTED)


def _script(engine: EngineChoice) -> Sequence[Message] | None:
    if engine.file:
        return read(engine.file)
    return demo() if engine.script else None


def _keys(path: Path | None, host: str) -> list[str]:
    """Return the keys in a file; without a file the gateway creates one."""
    if path is None:
        if not is_loopback(host):
            raise InputError(
                f"{host} is reachable from other machines, so the key must not be printed",
                hint="write keys to a file and pass --key-file FILE",
            )
        return []
    try:
        keys = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read the keys in {path}: {error}",
            hint="--key-file needs a file with one key per line",
        ) from error
    keys = keys[:-1] if keys[-1] == "" else keys
    for number, key in enumerate(keys, 1):
        if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise InputError(
                f"line {number} of {path} is not a key of {_SHORTEST_KEY} printable characters",
                hint="create one with `openssl rand -hex 20`",
            )
    if not keys or len(set(keys)) < len(keys):
        raise InputError(
            f"{path} holds no key" if not keys else f"{path} holds a key twice",
            hint="write one key per line; each has its own session",
        )
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
_MOST_SHOWN = 80
"""Maximum characters of a wrong reply in an error."""


def demo() -> list[Message]:
    """Return the replies of `scripted:demo`."""
    return [Message(Role.ASSISTANT, line) for line in _LINES] * _ROUNDS


def read(path: Path) -> list[Message]:
    """Read replies from a JSON list, or from JSON lines, of replies or of a transcript's turns.

    Raises InputError on a file without replies.
    """
    try:
        text = path.read_text(encoding="utf-8")
        whole = text.lstrip().startswith("[")
        items = json.loads(text) if whole else list(map(json.loads, text.splitlines()))
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read the script {path}: {error}",
            hint="give a transcript, or a JSON list of replies",
        ) from error
    if not items:
        raise InputError(f"{path} has no reply", hint='write [{"text": "Hello."}]')
    return [_reply(item, f"{path}: reply {number}") for number, item in enumerate(items, 1)]


def _reply(item: Any, where: str) -> Message:
    try:
        said: dict[str, Any] = item.get("said", item)
        calls = tuple(
            ToolCall("", str(call["name"]), dict(call.get("arguments") or {}))
            for call in said.get("tool_calls") or ()
        )
        text, thinking = said.get("text") or "", said.get("thinking") or ""
        if not (isinstance(text, str) and isinstance(thinking, str)) or not (text or calls):
            raise TypeError("no text and no tool_calls")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        shown = shortened(json.dumps(item, ensure_ascii=False), _MOST_SHOWN)
        message = f"{where} is no message with a text or tool calls: {shown}"
        hint = '{"text": "…", "tool_calls": [{"name": "Bash", "arguments": {"command": "ls"}}]}'
        raise InputError(message, hint=f"write it as {hint}") from error
    return Message(Role.ASSISTANT, text, thinking, calls)
