"""Looks whether the machines of a run are fit for it, before anything of the run starts."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

from swerl.cluster import checks
from swerl.cluster.checks import Finding, Questions, State, Wanted, judged
from swerl.cluster.node import PYTHON, Node, Order, Running, free_port
from swerl.cluster.open import Nodes
from swerl.core.errors import ClusterError
from swerl.recipe.schema import Recipe

CLOCKS_S = 1.0
"""Difference of clocks that files' times and logs still make sense with."""
CLOCKS_BAD_S = 30.0
"""Difference from which a heartbeat cannot be trusted."""


async def check_nodes(
    recipe: Recipe, nodes: Nodes, folder: Path, *, disk_bytes: int
) -> AsyncIterator[Finding]:
    """Yield a line a check, machine by machine, then what concerns them together.

    `folder` is the run's, which exists and which all machines share.
    """
    examined = await asyncio.gather(
        *(_examine(node, recipe, folder, disk_bytes) for node in nodes.all)
    )
    for findings in examined:
        for finding in findings:
            yield finding
    for finding in await _versions(nodes.all):
        yield finding
    for finding in await _shared(nodes.all, folder):
        yield finding
    for node in nodes.all:
        yield await _clock(node)
    for finding in await check_collective(
        nodes.trainer, recipe.trainer.ranks, folder, threads=recipe.trainer.threads
    ):
        yield finding


async def require_fit(recipe: Recipe, nodes: Nodes, folder: Path, *, disk_bytes: int) -> None:
    """Raise ClusterError on machines of which a check failed, naming the first ones."""
    failed = [
        finding
        async for finding in check_nodes(recipe, nodes, folder, disk_bytes=disk_bytes)
        if finding.state is State.FAIL
    ]
    if failed:
        shown = "; ".join(f"{each.node}: {each.check}: {each.found}" for each in failed[:3])
        message = f"{len(failed)} checks of the machines failed: {shown}"
        hint = f"{failed[0].mend}; `swerl train preflight RECIPE` shows all checks"
        raise ClusterError(message, hint=hint)


async def _examine(node: Node, recipe: Recipe, folder: Path, disk_bytes: int) -> Sequence[Finding]:
    wanted = Wanted(recipe.cluster.gpus_per_node, recipe.cluster.gpu, node.gpus)
    asked = Questions(node.name, node.address, wanted, folder.resolve(), disk_bytes)
    try:
        return await node.call(checks.examine, asked)
    except (ClusterError, OSError) as error:
        mend = getattr(error, "hint", "") or f"{folder} must exist there: share it"
        return [judged(node.name, "machine", str(error), good=False, mend=mend)]


async def _versions(nodes: Sequence[Node]) -> list[Finding]:
    """Compare what is installed with the first machine's."""
    found = await asyncio.gather(*(node.call(checks.versions) for node in nodes))
    rows = []
    for node, own in zip(nodes, found, strict=True):
        differing = {
            name for name in own.keys() | found[0].keys() if own.get(name) != found[0].get(name)
        }
        text = ", ".join(f"{name} {number}" for name, number in own.items())
        mend = f"install the versions of {nodes[0].name}: {', '.join(sorted(differing))} differ"
        rows.append(judged(node.name, "versions", text, good=not differing, mend=mend))
    return rows


async def _shared(nodes: Sequence[Node], folder: Path) -> list[Finding]:
    """Have every machine write a word into the run folder, and every other one read it."""
    token = secrets.token_hex(4)
    words = {f".preflight-{token}-{number}": secrets.token_hex(8) for number in range(len(nodes))}
    where = folder.resolve()
    rows = []
    try:
        for node, (name, word) in zip(nodes, words.items(), strict=True):
            await node.call(checks.leave_word, where, name, word)
        for node in nodes:
            read = await node.call(checks.read_words, where, list(words))
            missing = [
                other.name
                for other, said, word in zip(nodes, read, words.values(), strict=True)
                if said != word
            ]
            found = f"reads the files of all {len(nodes)}"
            if missing:
                found = f"does not see the files of {', '.join(missing)}"
            mend = f"{where} must be one folder on all machines: give --runs a shared one"
            rows.append(judged(node.name, "shared folder", found, good=not missing, mend=mend))
    except (ClusterError, OSError) as error:
        mend = f"{where} must be writable on all machines: give --runs a shared one"
        rows.append(judged("all", "shared folder", str(error), good=False, mend=mend))
    finally:
        for name in words:
            (where / name).unlink(missing_ok=True)
    return rows


async def _clock(node: Node) -> Finding:
    """Compare a machine's clock with this one's, less half of the way there and back."""
    before = time.time()
    there = await node.call(time.time)
    after = time.time()
    apart = abs(there - (before + after) / 2)
    doubt = (after - before) / 2
    found = f"{apart * 1e3:,.1f} ms apart, ± {doubt * 1e3:,.1f}"
    mend = "start a time service (chrony, ntpd) there"
    if apart - doubt <= CLOCKS_S:
        return Finding(node.name, "clock", State.OK, found)
    state = State.FAIL if apart - doubt > CLOCKS_BAD_S else State.WARN
    return Finding(node.name, "clock", state, found, mend)


ALL_REDUCE_S = 300.0
"""Seconds until it must be over; NCCL alone takes up to a minute to set up on many machines."""


async def check_collective(
    nodes: Sequence[Node], num_ranks: int, folder: Path, *, threads: int
) -> list[Finding]:
    """Run one rank a GPU (or CPU process) on the nodes, and judge sum and speed."""
    where, name = "all" if len(nodes) > 1 else nodes[0].name, "all-reduce"
    each = num_ranks // len(nodes)
    log = (folder / "preflight" / "all-reduce.log").resolve()
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    first = nodes[0]
    running: list[Running] = []
    try:
        port = await first.call(free_port, first.address)
        for rank in range(num_ranks):
            node = nodes[rank // each]
            told = {
                "rank": rank,
                "ranks": num_ranks,
                "store": f"tcp://{first.address}:{port}",
                "address": node.address,
                "threads": threads,
            }
            place = rank % each
            gpu = {"CUDA_VISIBLE_DEVICES": node.gpus[place]} if place < len(node.gpus) else {}
            argv = (PYTHON, "-m", "swerl.cluster._allreduce_rank", json.dumps(told))
            running.append(await node.start(Order(argv, log, env=gpu)))
        deaths = [process.ended for process in running]
        await asyncio.wait(deaths, timeout=ALL_REDUCE_S, return_when=asyncio.ALL_COMPLETED)
    except (ClusterError, OSError) as error:
        mend = getattr(error, "hint", "") or f"{first.address} is no address of {first.name}"
        return [judged(where, name, str(error), good=False, mend=mend)]
    finally:
        for process in running:
            if not process.ended.done():
                await process.signal(signal.SIGKILL)
    ends = [str(each.result()) if each.done() else "hangs" for each in deaths]
    bad = [f"rank {rank}: {end}" for rank, end in enumerate(ends) if end != "exit code 0"]
    said = _last_line(log)
    if bad or said is None:
        mend = f"do the machines reach each other on every port? Its log is {log}"
        return [judged(where, name, "; ".join(bad[:4]) or "no answer", good=False, mend=mend)]
    log.unlink(missing_ok=True)
    return [Finding(where, name, State.OK, said)]


def _last_line(log: Path) -> str | None:
    with suppress(OSError):
        for line in reversed(log.read_text(errors="replace").splitlines()):
            if line.startswith("all-reduce: "):
                return line.removeprefix("all-reduce: ")
    return None
