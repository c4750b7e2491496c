"""`swerl train preflight`: check a recipe's machines, sandboxes and gateway connection.

Checks of machines run on every machine. Checks of sandboxes and of their connection to the gateway
run where the recipe places sandboxes: beside the controller, or on every machine.
"""

from __future__ import annotations

import asyncio
import platform
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from swerl.checks import smoke
from swerl.cluster.checks import FindingState, MachineFinding, check_ports, check_result
from swerl.cluster.open import Nodes, open_nodes
from swerl.cluster.preflight import check_nodes
from swerl.cluster.sandbox_servers import serve_sandboxes
from swerl.core.contracts import SandboxBackend
from swerl.core.errors import SandboxUnavailableError, SwerlError
from swerl.core.events import ignore
from swerl.core.files import disk_errors
from swerl.core.sandbox import Limits
from swerl.core.task import Task
from swerl.plan.plan import kernel_modules, plan_disk
from swerl.plan.shape import shape_of
from swerl.recipe.schema import Recipe
from swerl.rollout import wiring

REACH_S = 60.0
REST_BYTES = 2 << 30
"""Disk for Episodes, Turns, Samples and logs of a run of a hundred steps."""
_FETCH = (
    'curl -fsS -m 20 "$0" 2>/dev/null || wget -qO- -T 20 "$0" 2>/dev/null || python3 -c '
    "'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())' "
    '"$0"'
)


async def preflight(recipe: Recipe, root: Path) -> AsyncIterator[MachineFinding]:
    """Yield every finding when it is ready. Starts no part of the run and leaves only logs.

    Raises ClusterError if Ray cannot provide the machines.
    """
    logs = root / "preflight"
    with disk_errors(logs):
        logs.mkdir(parents=True, exist_ok=True)
    spread = bool(recipe.cluster.sandbox_cpus)
    async with open_nodes(recipe) as nodes:
        shape = shape_of(recipe.model)
        disk_bytes = plan_disk(recipe, shape).most + REST_BYTES
        modules = kernel_modules(recipe, shape)
        async for finding in check_nodes(
            recipe, nodes, root, disk_bytes=disk_bytes, modules=modules
        ):
            yield finding
        if spread:
            async for finding in _check_on_nodes(recipe, nodes, logs):
                yield finding
    if recipe.gateway.port:
        for finding in check_ports(platform.node(), recipe.gateway.bind, [recipe.gateway.port]):
            yield finding
    if not spread:
        async for finding in _check_here(recipe, logs):
            yield finding


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
        one = recipe.model_copy(update={"tasks": recipe.tasks.model_copy(update=few)})
        try:
            tasks, _ = await asyncio.to_thread(wiring.tasks_of, one, Path(scratch).resolve())
        except SwerlError as error:
            yield check_result(platform.node(), "tasks", str(error), good=False, fix=error.hint)
            return
        checks = [_check(recipe, tasks[0], name, backend) for name, backend in places.items()]
        for findings in await asyncio.gather(*checks):
            for finding in findings:
                yield finding


async def _check(
    recipe: Recipe, task: Task, where: str, backend: SandboxBackend
) -> list[MachineFinding]:
    try:
        (seen,) = await smoke.check(backend, [task])
    except ExceptionGroup as group:
        error = group.exceptions[0]
        if not isinstance(error, SandboxUnavailableError):
            raise
        return [check_result(where, "sandbox", str(error), good=False, fix=error.hint)]
    found = f"{recipe.sandbox.type}: {seen.image} booted in {seen.boot_s:.1f} s"
    fix = f"run `swerl sandbox smoke` on all images of the tasks: {seen.failure}"
    rows = [check_result(where, "sandbox", found, good=seen.ok, fix=fix)]
    return [*rows, await _check_gateway(recipe, task, where, backend)] if seen.ok else rows


async def _check_gateway(
    recipe: Recipe, task: Task, here: str, backend: SandboxBackend
) -> MachineFinding:
    word = secrets.token_hex(8)
    page = f"HTTP/1.1 200 OK\r\nContent-Length: {len(word)}\r\nConnection: close\r\n\r\n{word}"
    listener = smoke.WordServer(page)
    limits = Limits(**recipe.limits.model_dump(), lifetime_s=recipe.budgets.sandbox_s)
    try:
        async with backend.open(task.image, limits, workdir=task.workdir) as sandbox:
            url = await sandbox.expose(listener)
            done = await sandbox.run(["sh", "-c", _FETCH, f"{url}/"], cwd="/", timeout_s=REACH_S)
    except (SwerlError, OSError, TimeoutError) as error:
        fix = getattr(error, "hint", "") or "check it: `swerl sandbox smoke --isolation`"
        return check_result(here, "gateway", str(error), good=False, fix=fix)
    finally:
        listener.close()
    if word in done.text:
        return MachineFinding(here, "gateway", FindingState.OK, f"reached from inside at {url}")
    found = f"not reached from inside at {url}: {done.text.strip()[-80:]}"
    fix = "set gateway.bind and the gateway address of the backend"
    return check_result(here, "gateway", found, good=False, fix=fix)
