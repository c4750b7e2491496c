"""`swerl sandbox ps | reap | bill`, as users type them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from swerl.cli.main import typer_app
from swerl.core.errors import InputError, RecipeError, UnknownNameError
from swerl.core.liveness import this_process
from swerl.core.sandbox import new_name
from swerl.sandboxes.ledger.store import Entry, Use, default_ledger

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


def rows(*words: str) -> list[dict[str, object]]:
    found = json.loads(swerl(*words, "--json").stdout)
    assert isinstance(found, list)
    return [row for row in found if row["run"]]


def write(**known: object) -> Entry:
    """Write a sandbox of this process's into the ledger."""
    use = Use("e2b", "{}", "paid", this_process())
    entry = Entry(use, **{"name": new_name(), "image": "img", "lifetime_s": 60.0, **known})  # type: ignore[arg-type]
    ledger = default_ledger()
    with closing(ledger.open()) as db:
        return ledger.add(db, entry)


def test_a_sandbox_is_shown_reaped_and_billed(held: subprocess.Popen[str]) -> None:
    (row,) = rows("ps", "--backend", "local")
    assert row["owner"] == {
        "pid": held.pid,
        "host": os.uname().nodename,
        "state": "alive",
    }
    assert (row["run"], row["image"], row["state"]) == ("held", "host", "open")
    assert str(row["name"]) in swerl("ps").stdout
    assert rows("reap", "--run", "held") == []

    held.send_signal(signal.SIGKILL)
    held.wait()
    (row,) = rows("ps", "--backend", "local")
    assert row["state"] in {"orphan", "lost"}, "its first process may die a moment later"
    (done,) = rows("reap", "--run", "held")
    assert done["name"] == row["name"]
    assert rows("ps", "--backend", "local") == []
    (row,) = rows("ps", "--backend", "local", "--all")
    assert (row["state"], row["why"]) == ("ended", "reaped: its owner is dead")
    assert [each["num_sandboxes"] for each in json.loads(swerl("bill", "--json").stdout)["lines"]]


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


def test_a_bill_adds_up_by_run_backend_and_day() -> None:
    began_s = time.time() - 3 * 86_400
    for ended_s in (began_s + 3600, began_s + 7200):
        write(intended_s=began_s, opened_s=began_s, id="x", ended_s=ended_s, price=0.5)

    def lines(*words: str) -> list[tuple[str, int, float]]:
        found = json.loads(swerl("bill", "--json", *words).stdout)["lines"]
        return [(row["label"], row["num_sandboxes"], round(row["cost"], 2)) for row in found]

    assert lines() == [("paid", 2, 1.5)]
    assert lines("--by", "backend") == [("e2b", 2, 1.5)]
    day = time.strftime("%Y-%m-%d", time.gmtime(began_s))
    assert lines("--by", "day") == [(day, 2, 1.5)]
    assert lines("--since", "4d") == [("paid", 2, 1.5)]
    assert lines("--since", "2d") == lines("--run", "other") == []
    assert "$1.5000" in swerl("bill").stdout


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (("bill", "--since", "soon"), InputError, "not a time span"),
        (("ps", "--set", "a=b"), InputError, "--set needs --backend"),
        (("ps", "--backend", "dokcer"), UnknownNameError, "unknown sandbox 'dokcer'"),
        (("reap", "--backend", "local", "--set", "sandbox.isolatr=x"), RecipeError, "isolatr"),
    ],
)
def test_bad_input_is_named(words: tuple[str, ...], kind: type[Exception], said: str) -> None:
    done = swerl(*words)
    assert isinstance(done.exception, kind)
    assert said in str(done.exception)


async def test_a_run_removes_what_its_killed_start_left(held: subprocess.Popen[str]) -> None:
    from swerl.core.events import Event, Notice
    from swerl.recipe.load import load
    from swerl.rollout import wiring

    heard: list[Event] = []
    recipe = load([], ["name=held"])
    await wiring.reap_leftovers(recipe, heard.append)
    assert [entry.ended_s for entry in default_ledger().read().entries] == [0]
    held.kill()
    await asyncio.to_thread(held.wait)
    await wiring.reap_leftovers(recipe, heard.append)
    assert all(entry.ended_s for entry in default_ledger().read().entries)
    assert all(isinstance(event, Notice) for event in heard)
