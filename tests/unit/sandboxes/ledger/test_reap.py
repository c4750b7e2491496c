"""What nobody owns goes, whoever died when; what somebody uses stays."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.liveness import ProcessIdentity
from swerl.core.sandbox import Limits, new_name
from swerl.images.store import default_store
from swerl.sandboxes import local
from swerl.sandboxes.ledger.bill import bill
from swerl.sandboxes.ledger.reap import (
    Outcome,
    Provider,
    SandboxState,
    collect_snapshots,
    list_sandboxes,
    reap,
    reap_leftovers,
)
from swerl.sandboxes.ledger.store import Entry, Ledger

from .conftest import Machines

LIMITS = Limits(lifetime_s=60)
Write = Callable[..., Entry]


async def outcomes(ledger: Ledger, **scope: object) -> dict[str, Outcome]:
    report = await reap(ledger, **(scope or {"run": "r"}))  # type: ignore[arg-type]
    return {each.sandbox.entry.name: each.outcome for each in report.reaped}


async def states(ledger: Ledger) -> dict[str, SandboxState]:
    return {
        each.entry.name: each.state for each in (await list_sandboxes(ledger, run="r")).sandboxes
    }


async def test_a_dead_owners_sandboxes_go_at_every_stage(
    ledger: Ledger, machines: Machines, dead: ProcessIdentity, write: Write
) -> None:
    intended, made, opened, gone = (write(dead).name, write(dead).name, *[
        write(dead, opened_s=1e9, id="x").name for _ in range(2)
    ])  # fmt: skip
    for name in (made, opened):
        machines.add(name)
    assert await states(ledger) == {
        intended: SandboxState.LOST,
        made: SandboxState.ORPHAN,
        opened: SandboxState.ORPHAN,
        gone: SandboxState.LOST,
    }
    assert await outcomes(ledger) == {
        intended: Outcome.GONE,
        made: Outcome.REMOVED,
        opened: Outcome.REMOVED,
        gone: Outcome.GONE,
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
        assert await outcomes(ledger, run="r", living=True) == {name: Outcome.REMOVED}
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


async def test_a_sandbox_that_no_ledger_holds_goes_by_the_owner_in_its_name(
    ledger: Ledger, machines: Machines, dead: ProcessIdentity
) -> None:
    mine = machines.add(new_name(), time.time())
    orphan = machines.add(new_name().replace(mine.split("-")[1], str(dead.pid), 1))
    elsewhere = machines.add(f"swerl-{dead.pid}-000000{mine[-10:]}")
    foreign = machines.add("swerl-of-somebody")
    only = Provider("folder", f'{{"folder": "{machines.folder}"}}')
    assert await outcomes(ledger, only=only) == {orphan: Outcome.REMOVED}
    assert machines.names() == sorted([mine, elsewhere, foreign])


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


async def test_a_paid_sandbox_that_appears_after_it_was_reaped_goes_too(
    ledger: Ledger, machines: Machines, dead: ProcessIdentity, write: Write
) -> None:
    """Its creation was under way when its owner died, and took longer than the first `reap`."""
    began_s = time.time() - 30
    name = write(dead, intended_s=began_s, price=1.0, settings={"url": "u"}).name
    assert await outcomes(ledger) == {name: Outcome.GONE}
    with closing(ledger.open()) as db:
        db.execute("UPDATE sandboxes SET ended_s = ?", (began_s + 1,))
    ledger.tidy(keep=0)
    machines.add(name)
    assert await states(ledger) == {name: SandboxState.ORPHAN}
    assert [each.sandbox.entry.name for each in await reap_leftovers(ledger, "r")] == [name]
    assert machines.names() == []


async def test_an_unreachable_provider_fails_its_sandboxes_and_no_others(
    ledger: Ledger, machines: Machines, dead: ProcessIdentity, write: Write
) -> None:
    reachable = machines.add(write(dead).name)
    cut_off = write(dead, settings={"folder": machines.folder / "nowhere"}).name
    report = await reap(ledger, run="r")
    assert {each.sandbox.entry.name: each.outcome for each in report.reaped} == {
        reachable: Outcome.REMOVED,
        cut_off: Outcome.FAILED,
    }
    assert [answer.problem for answer in report.unreachable] == [
        "the folder of machines is not there (make it)"
    ]
    assert (await states(ledger))[cut_off] is SandboxState.UNKNOWN


async def test_a_backend_that_is_absent_or_rejects_its_settings_is_a_warning(
    ledger: Ledger, dead: ProcessIdentity, write: Write
) -> None:
    for change in ("backend = 'no-such'", """settings = replace(settings, 'folder"', 'fodler"')"""):
        with closing(ledger.open()) as db:
            db.execute(f"UPDATE sandboxes SET {change} WHERE name = ?", (write(dead).name,))
    listing = await list_sandboxes(ledger, run="r")
    problems = [answer.problem for answer in listing.unreachable]
    assert len(problems) == 2
    assert any("unknown sandbox 'no-such'" in each for each in problems)
    assert any("fodler" in each and "folder" in each for each in problems)


async def test_a_removal_that_fails_is_reported_and_tried_again(
    ledger: Ledger, machines: Machines, dead: ProcessIdentity, write: Write
) -> None:
    name = machines.add(write(dead).name)
    machines.flag("stuck")
    (failed,) = (await reap(ledger, run="r")).reaped
    assert failed.outcome is Outcome.FAILED
    assert failed.problem == "the provider answers 500 (ask again later)"
    machines.flag("stuck", on=False)
    assert await outcomes(ledger) == {name: Outcome.REMOVED}


async def test_a_dry_run_changes_nothing(
    ledger: Ledger, machines: Machines, dead: ProcessIdentity, write: Write
) -> None:
    name = machines.add(write(dead).name)
    (would,) = (await reap(ledger, run="r", dry_run=True)).reaped
    assert would.outcome is Outcome.WOULD
    assert machines.names() == [name]
    assert await states(ledger) == {name: SandboxState.ORPHAN}


async def test_one_runs_leftovers_leave_other_runs_alone(
    ledger: Ledger, machines: Machines, dead: ProcessIdentity, write: Write
) -> None:
    ours, theirs = (machines.add(write(dead, run=run).name) for run in ("ours", "theirs"))
    done = await reap_leftovers(ledger, "ours")
    assert [each.sandbox.entry.name for each in done] == [ours]
    assert machines.names() == [theirs]
    assert await reap_leftovers(ledger, "ours") == []


async def test_a_sandbox_found_after_a_lost_answer_is_billed_and_a_gone_one_to_its_deadline(
    ledger: Ledger, machines: Machines, dead: ProcessIdentity, write: Write
) -> None:
    began_s = time.time() - 3600
    machines.add(write(dead, intended_s=began_s, price=2.0).name)
    write(dead, intended_s=began_s, price=2.0)
    write(dead, intended_s=began_s, opened_s=began_s, lifetime_s=1800.0, price=2.0)
    assert bill(ledger).num_unsettled == 3
    await reap(ledger, run="r")
    (line,) = bill(ledger).lines
    assert (line.num_sandboxes, round(line.cost, 2)) == (2, 3.0), "one hour, and half an hour"
    assert bill(ledger).num_unsettled == 0


HALF_A_SNAPSHOT = """
import os, signal
from swerl.images.store import default_store
with default_store().owner().scratch() as folder:
    (folder / "tree").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""


KILLED_SERVER = """
import asyncio, os, signal, sys
from swerl.core.sandbox import Limits, new_name
from swerl.sandboxes import local
async def main():
    backend = local.build(local.Options())
    async with backend.open(f"dir:{sys.argv[1]}", Limits(), workdir="/w") as sandbox:
        for name in (new_name(), "prepared"):
            await sandbox.snapshot(name)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


async def test_the_snapshots_of_a_killed_server_go_and_prepared_ones_stay(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "image").mkdir()
    argv = [sys.executable, "-c", KILLED_SERVER, str(tmp_path / "image")]
    assert subprocess.run(argv).returncode < 0  # noqa: ASYNC221
    backend = local.build(local.Options())
    async with backend.open(f"dir:{tmp_path}/image", LIMITS, workdir="/w") as sandbox:
        await sandbox.snapshot(mine := new_name())
    assert await collect_snapshots(ledger, dry_run=True) == 1
    assert len(default_store().snapshots()) == 3
    await reap(ledger)
    left = {each.name for each in default_store().snapshots().values()}
    assert left == {"prepared", mine}


async def test_the_files_of_a_snapshot_that_was_killed_go(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    done = subprocess.run([sys.executable, "-c", HALF_A_SNAPSHOT])  # noqa: ASYNC221
    work = tmp_path / "cache" / "store" / "work"
    assert done.returncode < 0 and len([*work.iterdir()]) == 1
    with default_store().owner().scratch() as used:
        await reap(ledger, run="r", dry_run=True)
        assert len([*work.iterdir()]) == 2
        await reap(ledger, run="r")
        assert [*work.iterdir()] == [used]
