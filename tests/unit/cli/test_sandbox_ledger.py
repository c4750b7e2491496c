"""`swerl sandbox ps | reap`, as users type them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from swerl.cli.main import typer_app
from swerl.core.errors import InputError
from swerl.core.liveness import this_process
from swerl.core.sandbox import new_name
from swerl.sandboxes.ledger import Entry, default_ledger

HOLD = """
import asyncio
from swerl.core.sandbox import Limits
from swerl.rollout import wiring
from swerl.sandboxes import local

async def hold():
    backend = wiring.open_backend("local", local.Options(), run="held")
    async with backend.open("host", Limits(lifetime_s=60), workdir="/tmp/w"):
        print("up", flush=True)
        await asyncio.sleep(60)

asyncio.run(hold())
"""


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWERL_STATE", str(tmp_path))


@pytest.fixture
def held() -> Iterator[subprocess.Popen[str]]:
    """A process that holds a sandbox."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def swerl(*words: str) -> Result:
    return CliRunner().invoke(typer_app, ["sandbox", *words])


def rows(*words: str) -> list[dict[str, Any]]:
    found = json.loads(swerl(*words, "--json").stdout)
    assert isinstance(found, list)
    return found


def write(**fields: float) -> Entry:
    """Write a sandbox of this process's into the ledger."""
    entry = Entry(
        *(new_name(), "e2b", "{}", "paid", this_process(), "img"),
        **{"lifetime_s": 60.0, **fields},
    )
    default_ledger().add(entry)
    return entry


def test_a_sandbox_is_shown_and_reaped(held: subprocess.Popen[str]) -> None:
    (row,) = rows("ps")
    assert (row["owner"]["pid"], row["owner_state"]) == (held.pid, "alive")
    assert (row["run"], row["image"], row["state"]) == ("held", "host", "open")
    assert str(row["name"]) in swerl("ps").stdout
    assert rows("reap", "--run", "held") == []

    held.send_signal(signal.SIGKILL)
    held.wait()
    (row,) = rows("ps")
    assert row["state"] == "orphan"
    (done,) = rows("reap", "--run", "held")
    assert (done["entry"]["name"], done["outcome"]) == (row["name"], "removed")
    assert rows("ps") == []
    (row,) = rows("ps", "--all")
    assert (row["state"], row["why"]) == ("ended", "reaped: its owner is dead")


def test_all_needs_a_second_word() -> None:
    done = swerl("reap", "--all")
    assert isinstance(done.exception, InputError)
    assert "add --yes" in done.exception.hint
    assert swerl("reap", "--all", "--dry-run", "--run", "nobody's").exit_code == 0


def test_an_unreachable_provider_is_a_warning_and_what_it_keeps_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    entry = write(intended_s=time.time() - 1000, price=1.0)
    done = swerl("ps")
    assert done.exit_code == 0
    assert "e2b cannot be reached" in done.output
    assert entry.name in done.output
    done = swerl("reap", "--run", "paid")
    assert done.exit_code == 1
    assert "failed e2b" in done.output
    assert "E2B_API_KEY" in done.output


def test_costs_are_a_column_and_a_sum() -> None:
    began_s = time.time() - 3 * 86_400
    for hours in (1, 2):
        write(intended_s=began_s, opened_s=began_s, ended_s=began_s + hours * 3600, price=0.5)
    costs = sorted(row["cost_usd"] for row in rows("ps", "--all", "--run", "paid"))
    assert costs == [0.5, 1.0]
    assert rows("ps", "--all", "--run", "other") == rows("ps") == []
    assert "2 sandboxes, $1.5000" in swerl("ps", "--all").stdout


async def test_a_run_removes_what_its_killed_start_left(held: subprocess.Popen[str]) -> None:
    from swerl.core.events import Event, Notice
    from swerl.recipe.load import load
    from swerl.rollout import wiring

    heard: list[Event] = []
    recipe = load([], ["name=held"])
    await wiring.reap_leftovers(recipe, heard.append)
    assert [entry.ended_s for entry in default_ledger().read()] == [0]
    held.kill()
    await asyncio.to_thread(held.wait)
    await wiring.reap_leftovers(recipe, heard.append)
    assert all(entry.ended_s for entry in default_ledger().read())
    assert all(isinstance(event, Notice) for event in heard)
