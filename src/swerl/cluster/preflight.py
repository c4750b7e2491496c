"""Preflight: check the machines of a run, and the network between them, before it starts."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from swerl.cluster import checks
from swerl.cluster.checks import FindingState, GpuNeed, MachineFinding, MachineNeed, check_result
from swerl.cluster.node import Node
from swerl.cluster.open import Nodes
from swerl.core.errors import ClusterError
from swerl.recipe.schema import Recipe

CLOCKS_S = 1.0
"""Clock difference up to which file times and logs make sense."""
CLOCKS_BAD_S = 30.0
"""Clock difference from which a heartbeat cannot be trusted."""


async def check_nodes(
    recipe: Recipe, nodes: Nodes, folder: Path, *, disk_bytes: int, modules: tuple[str, ...] = ()
) -> AsyncIterator[MachineFinding]:
    """Yield the findings machine by machine, then those about all of them together.

    `folder` is the run's; it exists, and all machines share it. `modules` are kernels that each
    machine must have.
    """
    examined = await asyncio.gather(
        *(_examine(node, recipe, folder, disk_bytes, modules) for node in nodes.all)
    )
    for findings in examined:
        for each in findings:
            yield each
    for each in await _check_versions(nodes.all):
        yield each
    for each in await _check_shared(nodes.all, folder):
        yield each
    for node in nodes.all:
        yield await _check_clock(node)


async def require_fit(
    recipe: Recipe, nodes: Nodes, folder: Path, *, disk_bytes: int, modules: tuple[str, ...] = ()
) -> None:
    """Raise ClusterError if a check failed, naming the first ones; see `check_nodes`."""
    failed = [
        each
        async for each in check_nodes(recipe, nodes, folder, disk_bytes=disk_bytes, modules=modules)
        if each.state is FindingState.FAIL
    ]
    if failed:
        shown = "; ".join(f"{each.node}: {each.check}: {each.found}" for each in failed[:3])
        message = f"{len(failed)} checks of the machines failed: {shown}"
        hint = f"{failed[0].fix}; `swerl train preflight RECIPE` shows all checks"
        raise ClusterError(message, hint=hint)


async def _examine(
    node: Node, recipe: Recipe, folder: Path, disk_bytes: int, modules: tuple[str, ...]
) -> Sequence[MachineFinding]:
    gpus = GpuNeed(recipe.cluster.gpus_per_node, recipe.cluster.gpu, node.gpus)
    need = MachineNeed(node.name, node.address, gpus, folder.resolve(), disk_bytes, modules)
    try:
        return await node.call(checks.examine, need)
    except (ClusterError, OSError) as error:
        fix = getattr(error, "hint", "") or f"{folder} must exist there: share it"
        return [check_result(node.name, "machine", str(error), good=False, fix=fix)]


async def _check_versions(nodes: Sequence[Node]) -> list[MachineFinding]:
    """Compare installed versions with those of the first machine."""
    found = await asyncio.gather(*(node.call(checks.versions) for node in nodes))
    rows = []
    for node, own in zip(nodes, found, strict=True):
        differing = {
            name for name in own.keys() | found[0].keys() if own.get(name) != found[0].get(name)
        }
        text = ", ".join(f"{name} {number}" for name, number in own.items())
        fix = f"install the versions of {nodes[0].name}: {', '.join(sorted(differing))} differ"
        rows.append(check_result(node.name, "versions", text, good=not differing, fix=fix))
    return rows


async def _check_shared(nodes: Sequence[Node], folder: Path) -> list[MachineFinding]:
    """Every machine writes a token into the run folder, and every machine reads all of them."""
    token = secrets.token_hex(4)
    tokens = {f".preflight-{token}-{number}": secrets.token_hex(8) for number in range(len(nodes))}
    shared = folder.resolve()
    rows = []
    try:
        # All machines write before the first one reads.
        for node, (name, own) in zip(nodes, tokens.items(), strict=True):
            await node.call(checks.write_token, shared, name, own)
        for node in nodes:
            read = await node.call(checks.read_tokens, shared, list(tokens))
            missing = [
                other.name
                for other, text, own in zip(nodes, read, tokens.values(), strict=True)
                if text != own
            ]
            found = f"reads the files of all {len(nodes)}"
            if missing:
                found = f"does not see the files of {', '.join(missing)}"
            fix = f"{shared} must be one folder on all machines: give --runs a shared one"
            rows.append(check_result(node.name, "shared folder", found, good=not missing, fix=fix))
    except (ClusterError, OSError) as error:
        fix = f"{shared} must be writable on all machines: give --runs a shared one"
        rows.append(check_result("all", "shared folder", str(error), good=False, fix=fix))
    finally:
        for name in tokens:
            (shared / name).unlink(missing_ok=True)
    return rows


async def _check_clock(node: Node) -> MachineFinding:
    """Compare a machine's clock with this one's; half of the round trip is the uncertainty."""
    before = time.time()
    there = await node.call(time.time)
    after = time.time()
    apart = abs(there - (before + after) / 2)
    doubt = (after - before) / 2
    found = f"{apart * 1e3:,.1f} ms apart, ± {doubt * 1e3:,.1f}"
    # Only a difference beyond the uncertainty is certain.
    if apart - doubt <= CLOCKS_S:
        return MachineFinding(node.name, "clock", FindingState.OK, found)
    state = FindingState.FAIL if apart - doubt > CLOCKS_BAD_S else FindingState.WARN
    fix = "start a time service (chrony, ntpd) there"
    return MachineFinding(node.name, "clock", state, found, fix)
