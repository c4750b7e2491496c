"""What nobody owns goes, whoever died when; what somebody uses stays."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.liveness import ProcessIdentity
from swerl.core.sandbox import Limits
from swerl.images.store import default_store
from swerl.sandboxes.ledger import (
    Entry,
    Ledger,
    Outcome,
    SandboxState,
    list_sandboxes,
    reap,
    reap_leftovers,
)

from .conftest import Machines

LIMITS = Limits(lifetime_s=60)
Write = Callable[..., Entry]


async def outcomes(ledger: Ledger, **scope: bool) -> dict[str, Outcome]:
    results = await reap(ledger, run="r", **scope)  # type: ignore[arg-type]
    return {result.entry.name: result.outcome for result in results}


async def states(ledger: Ledger) -> dict[str, SandboxState]:
    return {row.entry.name: row.state for row in await list_sandboxes(ledger, run="r")}


async def test_a_dead_owners_sandboxes_go_at_every_stage(
    ledger: Ledger, machines: Machines, dead: ProcessIdentity, write: Write
) -> None:
    intended, made, opened, gone = (write(dead).name, write(dead).name, *[
        write(dead, opened_s=1e9, id="x").name for _ in range(2)
    ])  # fmt: skip
    for name in (made, opened):
        machines.add(name)
    assert await states(ledger) == {
        intended: SandboxState.ORPHAN,
        made: SandboxState.ORPHAN,
        opened: SandboxState.ORPHAN,
        gone: SandboxState.ORPHAN,
    }
    assert await outcomes(ledger) == {
        intended: Outcome.REMOVED,
        made: Outcome.REMOVED,
        opened: Outcome.REMOVED,
        gone: Outcome.REMOVED,
    }
    assert machines.names() == []
    assert set((await states(ledger)).values()) == {SandboxState.ENDED}
    assert await outcomes(ledger) == {}


async def test_a_living_owners_sandbox_stays_unless_all_go(
    ledger: Ledger, machines: Machines
) -> None:
    async with machines.backend().open("img", LIMITS, workdir="/w"):
        (name,) = machines.names()
        assert await states(ledger) == {name: SandboxState.OPEN}
        assert await outcomes(ledger) == {}
        assert machines.names() == [name]
        assert await outcomes(ledger, living=True) == {name: Outcome.REMOVED}
        assert machines.names() == []


async def test_another_hosts_sandbox_goes_by_its_deadline_only(
    ledger: Ledger, machines: Machines, dead: ProcessIdentity, write: Write
) -> None:
    far = replace(dead, host="far/away", boot="other")
    fresh = write(far, intended_s=time.time()).name
    old = write(far, intended_s=time.time() - 1000).name
    for name in (fresh, old):
        machines.add(name)
    assert await outcomes(ledger) == {old: Outcome.REMOVED}
    assert machines.names() == [fresh]


async def test_a_sandbox_without_confirmed_close_is_removed_while_its_owner_lives(
    ledger: Ledger, machines: Machines
) -> None:
    machines.flag("lose-answer")
    machines.flag("stuck")
    backend = machines.backend(price=1.0)
    try:
        async with backend.open("img", LIMITS, workdir="/w"):
            pass
    except Exception:  # noqa: BLE001  how it fails is another test's matter
        pass
    (name,) = machines.names()
    assert await states(ledger) == {name: SandboxState.ORPHAN}
    machines.flag("stuck", on=False)
    assert await outcomes(ledger) == {name: Outcome.REMOVED}


async def test_a_sandbox_that_its_provider_lost_is_shown_and_kept(
    ledger: Ledger, machines: Machines
) -> None:
    async with machines.backend().open("img", LIMITS, workdir="/w"):
        (name,) = machines.names()
        (machines.folder / f"{name}.json").unlink()
        assert await states(ledger) == {name: SandboxState.LOST}
        assert await outcomes(ledger) == {}


async def test_a_paid_sandbox_that_appears_after_a_reap_goes_too(
    ledger: Ledger, machines: Machines, dead: ProcessIdentity, write: Write
) -> None:
    """Its creation was under way when its owner died, and took longer than the first `reap`."""
    name = write(dead, intended_s=time.time(), price=1.0).name
    assert await outcomes(ledger) == {name: Outcome.REMOVED}
    machines.add(name)
    assert [result.entry.name for result in await reap_leftovers(ledger, "r")] == [name]
    assert machines.names() == []
    assert set((await states(ledger)).values()) == {SandboxState.ENDED}


async def test_an_unreachable_provider_fails_its_sandboxes_and_no_others(
    ledger: Ledger, machines: Machines, dead: ProcessIdentity, write: Write
) -> None:
    reachable = machines.add(write(dead).name)
    unreachable = write(dead, settings={"folder": machines.folder / "nowhere"}).name
    results = {result.entry.name: result for result in await reap(ledger, run="r")}
    assert results[reachable].outcome is Outcome.REMOVED
    assert results[unreachable].outcome is Outcome.FAILED
    assert results[unreachable].reason == "the folder of machines is not there (make it)"
    assert (await states(ledger))[unreachable] is SandboxState.ORPHAN


async def test_a_dry_run_changes_nothing(
    ledger: Ledger, machines: Machines, dead: ProcessIdentity, write: Write
) -> None:
    name = machines.add(write(dead).name)
    assert await outcomes(ledger, dry_run=True) == {name: Outcome.WOULD}
    assert machines.names() == [name]
    assert await states(ledger) == {name: SandboxState.ORPHAN}


async def test_one_runs_leftovers_leave_other_runs_alone(
    ledger: Ledger, machines: Machines, dead: ProcessIdentity, write: Write
) -> None:
    ours, theirs = (machines.add(write(dead, run=run).name) for run in ("ours", "theirs"))
    assert [result.entry.name for result in await reap_leftovers(ledger, "ours")] == [ours]
    assert machines.names() == [theirs]
    assert await reap_leftovers(ledger, "ours") == []


HALF_A_SNAPSHOT = """
import os, signal
from swerl.images.store import default_store
with default_store().scratch() as folder:
    (folder / "tree").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_the_files_of_a_snapshot_that_was_killed_go(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    done = subprocess.run([sys.executable, "-c", HALF_A_SNAPSHOT])  # noqa: ASYNC221
    work = tmp_path / "cache" / "store" / "work"
    assert done.returncode < 0 and len([*work.iterdir()]) == 1
    with default_store().scratch() as scratch:
        await reap(ledger, run="r", dry_run=True)
        assert len([*work.iterdir()]) == 2
        await reap(ledger, run="r")
        assert [*work.iterdir()] == [scratch]
