"""Every sandbox is in the ledger before it exists, and what went wrong with it is, too."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from swerl.core.errors import SandboxError
from swerl.core.sandbox import Limits
from swerl.sandboxes.ledger import Entry, Ledger

from .conftest import Machines

LIMITS = Limits(lifetime_s=60)


def entries(ledger: Ledger) -> list[Entry]:
    return ledger.read()


async def test_the_intent_is_written_before_the_machine_exists(
    ledger: Ledger, machines: Machines
) -> None:
    backend = machines.backend(boot_s=0.05)
    context = backend.open("img", LIMITS, workdir="/w")
    opening = asyncio.ensure_future(context.__aenter__())
    await machines.appear()
    (entry,) = entries(ledger)
    assert [entry.name] == machines.names()
    assert not entry.opened_s
    sandbox = await opening
    (entry,) = entries(ledger)
    assert (entry.id, bool(entry.opened_s)) == (sandbox.id, True)
    await context.__aexit__(None, None, None)
    (entry,) = entries(ledger)
    assert (entry.why, machines.names()) == ("closed", [])


async def test_the_ledger_keeps_how_to_reach_the_provider_and_no_secret(
    ledger: Ledger, machines: Machines
) -> None:
    backend = machines.backend(
        run="nightly",
        price=1.5,
        api_key="hunter2",
        url="https://me:hunter2@gateway.example/v1",
        headers={"Authorization": "hunter2", "X-Route": "gpu"},
    )
    async with backend.open("img", LIMITS, workdir="/w", name="swerl-mine"):
        (entry,) = entries(ledger)
    assert (entry.name, entry.run, entry.price) == ("swerl-mine", "nightly", 1.5)
    assert json.loads(entry.settings) == {
        "folder": str(machines.folder),
        "price": 1.5,
        "url": "https://gateway.example/v1",
        "headers": {"X-Route": "gpu"},
    }
    assert b"hunter2" not in ledger.path.read_bytes()
    assert ledger.folder.stat().st_mode & 0o77 == 0


async def test_an_error_in_use_passes_through_and_is_noted(
    ledger: Ledger, machines: Machines
) -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        async with machines.backend().open("img", LIMITS, workdir="/w"):
            raise error
    assert caught.value is error
    (entry,) = entries(ledger)
    assert (entry.why, machines.names()) == ("closed after ValueError", [])


async def test_a_machine_whose_answer_got_lost_is_removed_at_once(
    ledger: Ledger, machines: Machines
) -> None:
    machines.flag("lose-answer")
    with pytest.raises(SandboxError, match="connection reset"):
        async with machines.backend().open("img", LIMITS, workdir="/w"):
            pass
    (entry,) = entries(ledger)
    assert machines.names() == []
    assert entry.ended_s and "connection reset" in entry.why


async def test_without_a_ledger_nothing_paid_is_created(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SWERL_STATE", str(tmp_path / "file"))
    with pytest.raises(SandboxError, match="no paid sandbox without a record") as caught:
        async with machines.backend(price=0.1).open("img", LIMITS, workdir="/w"):
            pass
    assert "SWERL_STATE" in caught.value.hint
    assert machines.names() == []


async def test_without_a_ledger_free_sandboxes_warn_once_and_work(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SWERL_STATE", str(tmp_path / "file"))
    heard: list[str] = []
    backend = machines.backend(warn=heard.append)
    for _ in range(2):
        async with backend.open("img", LIMITS, workdir="/w"):
            assert len(machines.names()) == 1
    assert len(heard) == 1
    assert "cannot write the ledger" in heard[0]
