"""Check that a recipe can be launched, before anything loads: `swerl doctor RECIPE`.

Each check is one function that yields findings: those of `CHECKS` look at the recipe's own files,
those of `NODE_CHECKS` at its machines. Checks of sandboxes run where the recipe places sandboxes:
beside the controller, or on every machine.
"""

from __future__ import annotations

import asyncio
import platform
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from swerl.checks import smoke
from swerl.cluster.checks import (
    FindingState,
    MachineFinding,
    check_nodes,
    check_result,
    last_output,
)
from swerl.cluster.open import Nodes, open_nodes
from swerl.cluster.sandbox_servers import serve_sandboxes
from swerl.core.contracts import SandboxBackend
from swerl.core.errors import ClusterError, ImageError, SandboxUnavailableError, SwerlError
from swerl.core.events import ignore
from swerl.core.files import disk_errors
from swerl.core.sandbox import Limits
from swerl.core.task import Task, read_tasks
from swerl.engines.sglang import SGLANG, server_command
from swerl.images.store import default_store
from swerl.plan.cost import estimate, from_recipe
from swerl.plan.parameters import model_params
from swerl.plan.plan import RecipePlan, kernel_modules
from swerl.recipe.check import TWIN
from swerl.recipe.hub import model_faults, model_name
from swerl.recipe.schema import Recipe
from swerl.rollout import wiring

REST_BYTES = 2 << 30
"""Disk for Episodes, Turns, Samples and logs of a run of a hundred steps."""
DAY_S = 86_400.0
_RESOLVE = (
    "import sys; from sglang.srt.server_args import prepare_server_args; "
    "prepare_server_args(sys.argv[1:]).resolve_once()"
)
"""Resolves flags as SGLang does at its start, and ends with its error."""
_ORGANISATIONS = {"qwen": "Qwen", "glm": "zai-org"}
"""Start of a model's name -> its owner on the hub."""
_SGLANG = (
    "import importlib.metadata as m, sglang, torch; "
    "print('SGLang', m.version('sglang') + ', torch', torch.__version__ + ', NCCL', "
    "'.'.join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else 'none')"
)


async def examine_recipe(planned: RecipePlan, root: Path) -> AsyncIterator[MachineFinding]:
    """Yield every finding when it is ready. Starts no part of the run and leaves only logs.

    `root` is the run's folder.
    """
    recipe, logs = planned.recipe, root / "doctor"
    with disk_errors(logs):
        logs.mkdir(parents=True, exist_ok=True)
    for check in CHECKS:
        # Reading many tasks takes a while, and the event loop must stay free.
        for finding in await asyncio.to_thread(list, check(planned)):
            yield finding
    try:
        async with open_nodes(recipe) as nodes:
            async for finding in _check_machines(planned, nodes, root, logs):
                yield finding
    except (ClusterError, ImportError) as error:
        fix = getattr(error, "hint", "")
        yield check_result("all", "machines", str(error), good=False, fix=fix)
    if not recipe.cluster.sandbox_cpus:
        async for finding in _check_here(recipe, logs):
            yield finding


async def _check_machines(
    planned: RecipePlan, nodes: Nodes, root: Path, logs: Path
) -> AsyncIterator[MachineFinding]:
    disk_bytes = planned.disk.most + REST_BYTES
    modules = kernel_modules(planned.recipe, planned.shape)
    findings = check_nodes(planned.recipe, nodes, root, disk_bytes=disk_bytes, modules=modules)
    async for finding in findings:
        yield finding
    for node_check in NODE_CHECKS:
        async for finding in node_check(planned, nodes):
            yield finding
    if planned.recipe.cluster.sandbox_cpus:
        async for finding in _check_on_nodes(planned.recipe, nodes, logs):
            yield finding


def check_faults(planned: RecipePlan) -> Iterator[MachineFinding]:
    """Check names, packages, cores and certificates, and the files that the recipe names."""
    here, errors = platform.node(), (*planned.obstacles, *planned.absent)
    # Folder and interpreter of the model have checks of their own.
    errors = tuple(error for error in errors if not str(error).startswith(("model:", "engine.")))
    for error in errors:
        yield check_result(here, "recipe", str(error), good=False, fix=error.hint)
    if not errors:
        detail = "keys, names, packages, budgets, layout and memory fit"
        yield MachineFinding(here, "recipe", FindingState.OK, detail)


def check_tasks(planned: RecipePlan) -> Iterator[MachineFinding]:
    """Check the task file, its certificates, and the images that `local` sandboxes need."""
    recipe, here = planned.recipe, platform.node()
    source = Path(recipe.tasks.source)
    if recipe.tasks.source == TWIN or not source.is_file():
        return
    tasks = list(read_tasks(source))
    certified = sum(bool(task.certificate) for task in tasks)
    detail = f"{len(tasks):,} tasks, {certified:,} with a certificate"
    good = bool(tasks) and (certified == len(tasks) or recipe.tasks.uncertified)
    yield check_result(here, "tasks", detail, good=good, fix=f"swerl tasks vet {source}")
    images = {task.image for task in tasks if not task.image.startswith("dir:")}
    if recipe.sandbox.type != "local" or not images:
        return
    lacking = [image for image in sorted(images) if not _is_stored(image)]
    detail = f"{len(images) - len(lacking):,} of {len(images):,} in the store"
    yield check_result(here, "images", detail, good=not lacking, fix=f"swerl images pull {source}")


def _is_stored(image: str) -> bool:
    try:
        default_store().find(image)
    except ImageError:
        return False
    return True


async def check_model(planned: RecipePlan, nodes: Nodes) -> AsyncIterator[MachineFinding]:
    """Check on every machine that the model's folder is complete."""
    path = planned.recipe.model.path
    if path is None:
        detail = "the twin's, which the run makes"
        yield MachineFinding(platform.node(), "model", FindingState.OK, detail)
        return
    owner = next((o for n, o in _ORGANISATIONS.items() if path.name.lower().startswith(n)), "OWNER")
    size_gb = model_params(planned.shape).total * 2 / 1e9
    command = f"hf download {owner}/{path.name} --local-dir {path}"
    name, _, commit = model_name(path).partition("@")
    if "/" in name:  # in the hub's cache, which has the same path on a machine with the same home
        command = f"hf download {name} --revision {commit}"
    fix = f"{command}    # {size_gb:,.0f} GB in bf16"
    for node in nodes.all:
        faults, size = await node.call(model_faults, path)
        detail = "; ".join(faults) or f"{path} is complete, {size / 1e9:,.1f} GB"
        yield check_result(node.name, "model", detail, good=not faults, fix=fix)


async def check_engine(planned: RecipePlan, nodes: Nodes) -> AsyncIterator[MachineFinding]:
    """Check on every machine with engines that SGLang is installed and accepts the plan's flags."""
    recipe = planned.recipe
    if recipe.engine.type != "sglang" or recipe.engine.options.get("url"):
        return
    python = str(wiring.sglang_launch(recipe)[0].python)
    fix = "set engine.python to the interpreter of an environment with SGLang: docs/guides/engines"
    for node in nodes.engines:
        works, line = await node.call(last_output, [python, "-c", _SGLANG])
        number = line.removeprefix("SGLang ").partition(",")[0] if works else ""
        good = works and not SGLANG.is_too_old(number)
        is_new = works and not SGLANG.is_tested(number)
        detail = f"{python}: {line}" + f"; tested: {SGLANG.tested}" * is_new
        yield check_result(node.name, "engine", detail, good=good, fix=f"{fix}.md")
        if works and (path := recipe.model.path) and await node.call(path.is_dir):
            flags = _engine_flags(planned, path)
            works, line = await node.call(last_output, [python, "-c", _RESOLVE, *flags])
            detail = "SGLang accepts the plan's flags" if works else line
            flag_fix = "change engine.flags, or install another SGLang"
            yield check_result(node.name, "engine flags", detail, good=works, fix=flag_fix)


def _engine_flags(planned: RecipePlan, model: Path) -> list[str]:
    """Return the arguments with which the run would start a server."""
    options, flags = wiring.sglang_launch(planned.recipe)
    options = options.model_copy(update={"flags": (*flags, *options.flags)})
    layout = planned.layout
    size, saver = layout.gpus_per_engine, layout.colocated
    # After the interpreter, `-m` and the module.
    return server_command(options, model, host="127.0.0.1", port=1, num_gpus=size, saver=saver)[3:]


CHECKS = (check_faults, check_tasks)
NODE_CHECKS = (check_model, check_engine)


@dataclass(frozen=True, slots=True)
class FirstDay:
    """The first 24 hours of a run, by its plan."""

    steps: float
    step_minutes: float
    disk_gb: float
    dollars: float


def first_day(planned: RecipePlan) -> FirstDay | None:
    """Return the first day's steps, disk and dollars; None if the plan has no speed or price."""
    simulated, recipe = planned.simulate(), planned.recipe
    if simulated is None or planned.cost is None:
        return None
    steps = min(recipe.steps, DAY_S / simulated.step_s)
    settings = (f"step_minutes={simulated.step_s / 60}", f"sandbox_seconds={simulated.sandbox_s}")
    whole = estimate(from_recipe(recipe), settings).cases[1].total_dollars
    written = planned.disk.most - (recipe.steps - steps) * planned.disk.episodes
    return FirstDay(steps, simulated.step_s / 60, written / 1e9, whole * steps / recipe.steps)


async def _check_here(recipe: Recipe, logs: Path) -> AsyncIterator[MachineFinding]:
    here = platform.node()
    try:
        backend = wiring.sandbox_backend(recipe, lambda _: None)
    except SwerlError as error:
        yield check_result(here, "sandbox", str(error), good=False, fix=error.hint)
        return
    async for finding in _check_sandboxes(recipe, {here: backend}, logs):
        yield finding


async def _check_on_nodes(
    recipe: Recipe, nodes: Nodes, logs: Path
) -> AsyncIterator[MachineFinding]:
    """Check the sandboxes of every machine, through a sandbox server on it."""
    try:
        async with serve_sandboxes(nodes.all, recipe, logs=logs, emit=ignore) as spread:
            async for finding in _check_sandboxes(recipe, spread.backends(), logs):
                yield finding
    except SwerlError as error:
        yield check_result("all", "sandbox", str(error), good=False, fix=error.hint)


async def _check_sandboxes(
    recipe: Recipe, places: Mapping[str, SandboxBackend], logs: Path
) -> AsyncIterator[MachineFinding]:
    """Boot the first Task's image on each machine, and fetch a page of this machine from it."""
    with tempfile.TemporaryDirectory(prefix="tasks-", dir=logs) as scratch:
        few = {"num_train": 1, "num_heldout": 0, "num_unseen": 0}
        smallest = recipe.model_copy(update={"tasks": recipe.tasks.model_copy(update=few)})
        try:
            tasks, _ = await asyncio.to_thread(wiring.tasks_of, smallest, Path(scratch).resolve())
        except SwerlError:
            detail = "none opened: there is no task to take its image from"
            yield MachineFinding(platform.node(), "sandbox", FindingState.WARN, detail)
            return
        checks = [_check(recipe, tasks[0], name, backend) for name, backend in places.items()]
        for findings in await asyncio.gather(*checks):
            for finding in findings:
                yield finding


async def _check(
    recipe: Recipe, task: Task, where: str, backend: SandboxBackend
) -> list[MachineFinding]:
    try:
        (result,) = await smoke.check(backend, [task])
    except ExceptionGroup as group:
        error = group.exceptions[0]
        if not isinstance(error, SandboxUnavailableError):
            raise
        return [check_result(where, "sandbox", str(error), good=False, fix=error.hint)]
    detail = f"{recipe.sandbox.type}: {result.image} booted in {result.boot_s:.1f} s"
    fix = f"run `swerl sandbox smoke` on all images of the tasks: {result.failure}"
    rows = [check_result(where, "sandbox", detail, good=result.ok, fix=fix)]
    return [*rows, await _check_gateway(recipe, task, where, backend)] if result.ok else rows


async def _check_gateway(
    recipe: Recipe, task: Task, here: str, backend: SandboxBackend
) -> MachineFinding:
    limits = Limits(**recipe.limits.model_dump(), lifetime_s=recipe.budgets.sandbox_s)
    try:
        async with backend.open(task.image, limits, workdir=task.workdir) as sandbox:
            url = await smoke.reach_from(sandbox)
    except (SwerlError, OSError, TimeoutError) as error:
        fix = getattr(error, "hint", "") or "check it: `swerl sandbox smoke --isolation`"
        return check_result(here, "gateway", str(error), good=False, fix=fix)
    return MachineFinding(here, "gateway", FindingState.OK, f"reached from inside at {url}")
