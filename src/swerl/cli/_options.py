"""Options that several commands share: sandbox backend, task file, engine and model."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swerl.cli._output import keep_stdout_for_json, stderr
from swerl.core.errors import InputError, RecipeError, TaskError, unknown
from swerl.core.sandbox import Limits
from swerl.core.secrets import without_logins
from swerl.core.task import Task, read_tasks

if TYPE_CHECKING:
    from pydantic import BaseModel

    from swerl.core.contracts import SandboxBackend
    from swerl.recipe.schema import Recipe


BackendOption = Annotated[
    str, typer.Option("--backend", help="Kind of sandbox, as in a recipe's sandbox.type.")
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="One setting of the backend, as in a recipe: sandbox.KEY=VALUE.",
    ),
]
SettingsAndLimitsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="As in a recipe: sandbox.KEY=VALUE of the backend, or limits.memory_mib=8192.",
    ),
]


RecipeSettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one recipe key."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(help="Folder of a model or run, or a hub id; for openai=URL the name there."),
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        callback=keep_stdout_for_json,
        help="Print JSON on stdout, and text only on stderr.",
    ),
]
RunsOption = Annotated[Path, typer.Option(help="Folder of all run folders.")]
AgentOption = Annotated[str, typer.Option(help="An agent: builtin, claude-code, codex, …")]
AttemptsOption = Annotated[
    int, typer.Option("-k", "--attempts", min=1, help="Attempts at each task.")
]
PushOption = Annotated[
    str | None,
    typer.Option(metavar="OWNER/NAME", help="Also upload it to this repository of the hub."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]


def require_new(out: Path, *, force: bool) -> None:
    """Raise InputError if the output exists, unless it may be replaced."""
    if out.exists() and not force:
        raise InputError(
            f"{out} exists already", hint="name another one with -o, or replace it with --force"
        )


def require_made_from(out: Path, ids: Collection[str]) -> None:
    """Raise InputError if the output exists and holds other Tasks than these.

    A command that resumes may replace its own earlier output.
    """
    if not out.exists():
        return
    try:
        if {task.id for task in read_tasks(out)} <= set(ids):
            return
    except InputError:
        pass
    raise InputError(
        f"{out} exists already, and this command did not write it",
        hint="name another file with -o, or remove this one",
    )


def open_backend(
    backend: str, settings: Sequence[str] | None = None, *, run: str = ""
) -> SandboxBackend:
    """Build a backend from a command line; `run` is its use in the ledger.

    Raises UnknownNameError on an unknown backend, RecipeError on a setting that it refuses.
    """
    from swerl.rollout import wiring

    def warn(text: str) -> None:
        stderr().print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)

    return wiring.open_backend(backend, backend_options(backend, settings), run=run, warn=warn)


def backend_options(backend: str, settings: Sequence[str] | None = None) -> BaseModel | None:
    """Return a backend's validated settings, or None if it has none. Raises as `open_backend`."""
    from swerl.recipe.check import plugin_options
    from swerl.recipe.sections import PluginSection

    chosen = PluginSection.model_validate({**sandbox_settings(settings), "type": backend})
    return plugin_options("sandboxes", chosen, section="sandbox")


def sandbox_settings(settings: Sequence[str] | None) -> dict[str, Any]:
    """Return the keys of a recipe's sandbox section. Raises RecipeError on any other key."""
    from swerl.recipe.load import read_settings

    sections = read_settings(settings or ())
    for key, value in sections.items():
        if key != "sandbox" or not isinstance(value, dict):
            hint = f"as in a recipe: --set sandbox.{key}=…"
            raise RecipeError(f"--set {key} is not a setting of the backend", hint=hint)
    return dict(sections.get("sandbox", {}))


def split_limits(settings: Sequence[str], **defaults: float) -> tuple[Limits, list[str]]:
    """Return the limits in `limits.KEY=VALUE` settings, and the settings of the backend.

    `defaults` replace those of `Limits`. Raises RecipeError.
    """

    from swerl.recipe.load import load, read_settings

    bounds = [setting for setting in settings if setting.startswith("limits.")]
    rest = [setting for setting in settings if setting not in bounds]
    base = {**asdict(Limits()), **defaults}
    # A recipe has the lifetime among its budgets, so only the other limits are checked as recipe.
    lifetime_s = read_settings(bounds).get("limits", {}).get("lifetime_s", base.pop("lifetime_s"))
    if not isinstance(lifetime_s, int | float) or not lifetime_s > 0:
        raise RecipeError(f"limits.lifetime_s = {lifetime_s!r}", hint="give seconds above 0")
    bounds = [setting for setting in bounds if not setting.startswith("limits.lifetime_s=")]
    recipe = load([], ["name=limits", *(f"limits.{name}={base[name]}" for name in base), *bounds])
    return Limits(**recipe.limits.model_dump(), lifetime_s=lifetime_s), rest


def is_loopback(host: str) -> bool:
    """True if only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def keys_in(path: Path | None, host: str, option: str) -> list[str]:
    """Return the API keys in a file, one per line; none without a file, so that one is made.

    `option` names the file on the command line. Raises InputError on a file without keys, and
    without a file if other machines reach `host`: a new key is printed.
    """
    if path is None:
        if is_loopback(host):
            return []
        raise InputError(
            f"{host} is reachable from other machines, so the key must not be printed",
            hint=f"write a key to a file and pass {option} FILE",
        )
    try:
        keys = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read the keys in {path}: {error}",
            hint=f"{option} needs a file with one key per line",
        ) from error
    if keys == [""]:
        raise InputError(f"{path} holds no key", hint="write one key per line")
    for number, key in enumerate(keys, 1):
        if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise InputError(
                f"line {number} of {path} is not a key of {_SHORTEST_KEY} printable characters",
                hint="create one with `openssl rand -hex 20`",
            )
    return keys


def tasks_in(path: Path) -> list[Task]:
    """Return a file's Tasks. Raises TaskError if it is unreadable or empty."""
    if tasks := list(read_tasks(path)):
        return tasks
    raise TaskError(f"{path} has no task", hint="`swerl convert` lists why rows were rejected")


SETTINGS = (
    *("rollout.max_new_tokens=16384", "rollout.max_context_tokens=1000000"),
    *("budgets.model_call_s=600", "budgets.tool_s=900", "budgets.agent_s=1800"),
    *("budgets.grading_s=1900", "budgets.episode_s=3700", "budgets.sandbox_s=7200"),
)
"""Settings for a real agent on a real repository; a recipe's defaults fit a small model."""
LIMITS = (
    "rollout.max_turns=200",
    *("limits.memory_mib=4096", "limits.disk_mib=4096"),
    *("limits.num_processes=512", "limits.num_cpus=1"),
)
"""Limits of an Episode on a real repository."""
_SHORTEST_KEY = 16
"""Characters that an API key has at least."""
_SERVERS = "torch-cpu, sglang=URL, vllm=URL, or openai=URL to debug"
_REPLY_SHARE = 4
"""Context size divided by the maximum reply."""
_DEFAULT_CONTEXT = 32768
"""Context size in tokens if a model folder gives none."""
_SERVER_S = 10.0
"""Seconds for a server to report its limits."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    text: str
    type: str
    script: str | None = None
    """Name of a built-in script."""
    url: str | None = None

    @property
    def trainable(self) -> bool:
        """True if it returns token ids."""
        return self.type != "openai"


def kinds(scripts: Sequence[str]) -> str:
    """Return the valid values of `--engine` as text for help and hints."""
    return ", ".join([*(f"scripted:{name}" for name in scripts), _SERVERS])


def read_engine(text: str, scripts: Sequence[str]) -> EngineChoice:
    """Read `--engine`. Raises InputError, and UnknownNameError with the nearest engines."""
    from swerl.core import plugins

    if text.removeprefix("scripted:") in scripts and ":" in text:
        return EngineChoice(text, "scripted", script=text.partition(":")[2])
    if match := re.fullmatch(r"(sglang|vllm|openai)=(https?://\S+)", text):
        return EngineChoice(without_logins(text), match[1], url=match[2])
    built_in = list(plugins.names("engines"))
    if text in set(built_in) - {"scripted", "openai"}:
        return EngineChoice(text, text)
    name = re.split("[:=]", text)[0]
    if name not in built_in:
        raise unknown("engine", name, [*built_in, *(f"scripted:{script}" for script in scripts)])
    raise InputError(f"--engine {text!r} is not an engine", hint=f"use {kinds(scripts)}")


def recipe_of(
    engine: EngineChoice, model: str | None, *, defaults: Sequence[str], settings: Sequence[str]
) -> Recipe:
    """Return a recipe with this engine and model; `defaults` come before the user's.

    Raises RecipeError, InputError and UnknownNameError.
    """
    from swerl.recipe.check import check
    from swerl.recipe.load import load

    written = [*SETTINGS, *defaults, f"engine.type={engine.type}"]
    if engine.type == "openai":
        written += [f"engine.base_url={engine.url}", f"engine.model={model or 'default'}"]
    else:
        written += [f"engine.url={engine.url}"] if engine.url else []
        written += _model_settings(engine, model)
    recipe = load([], [*written, *settings])
    check(recipe)
    return recipe


def _model_settings(engine: EngineChoice, model: str | None) -> list[str]:
    """Return the settings of a model: its folder and its context size."""
    if model is None:
        if engine.type == "scripted":
            return []
        raise InputError(
            f"--engine {engine.text} needs --model with a model folder",
            hint="a run folder works, too: its newest weights are used",
        )
    from swerl.engines.families._megatron_plan import text_config
    from swerl.recipe.hub import model_folder

    folder = model_folder(Path(model), fetch=True)
    # A run stands for its newest published weights.
    folder = max((path for path in folder.glob("weights/*") if path.name.isdigit()), default=folder)
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"--model {model} is not a model folder: {error}",
            hint="give a folder in Hugging Face format, a run, or an id of the Hugging Face hub",
        ) from error
    shape: Any = text_config(config)
    context = int(shape.get("max_position_embeddings") or _DEFAULT_CONTEXT)
    context = min([context, *(_served_limits(engine) if engine.url else ())])
    return [
        f"model.path={folder}",
        f"rollout.max_context_tokens={context}",
        f"rollout.max_new_tokens={max(context // _REPLY_SHARE, 1)}",
    ]


def _served_limits(engine: EngineChoice) -> list[int]:
    """Return the most tokens of a request by a running server's context and by its memory."""
    import urllib.request
    from http.client import HTTPException

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    limits = []
    for path, name in (("/v1/models", "max_model_len"), ("/server_info", "max_total_num_tokens")):
        # If no server answers, the engine says so.
        with suppress(OSError, HTTPException, ValueError, LookupError, TypeError):
            with opener.open(f"{engine.url}".rstrip("/") + path, timeout=_SERVER_S) as answer:
                info = json.load(answer)
            limits.append(int(info["data"][0][name] if "data" in info else info[name]))
    # The memory differs a little between two starts of a server, and a resumed command must not.
    return [limit - limit % 512 for limit in limits]
