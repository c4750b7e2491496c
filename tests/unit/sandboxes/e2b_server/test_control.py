"""Sandboxes are made, found, prolonged and removed as the SDK asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from e2b import (
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxLifecycle,
    SandboxQuery,
    SandboxState,
)

from swerl.core.sandbox import Mount, SandboxOrder
from swerl.images.store import default_store
from swerl.sandboxes import local

from .helpers import KEY, LIMITS, Service, eventually, serving


def test_info_returns_the_create_arguments(service: Service) -> None:
    sandbox = Sandbox.create(timeout=77, metadata={"image": "host", "ü": "ä=&"}, **service.sdk)
    info = sandbox.get_info()
    assert info.metadata == {"image": "host", "ü": "ä=&"}
    assert (info.template_id, info.state, info.memory_mb) == ("base", "running", LIMITS.memory_mib)
    assert (info.end_at - info.started_at).total_seconds() == pytest.approx(77, abs=1)
    assert info.allow_internet_access is False
    assert sandbox.kill()


def test_kill_removes_once_and_the_sandbox_is_gone(service: Service) -> None:
    sandbox = Sandbox.create(**service.sdk)
    assert sandbox.is_running()
    assert sandbox.kill()
    assert not sandbox.is_running()
    assert not sandbox.kill()
    with pytest.raises(NotFoundException):
        Sandbox.get_info(sandbox.sandbox_id, **service.sdk)
    with pytest.raises(Exception, match="was not found"):
        sandbox.commands.run("true")


def test_time_runs_out_unless_it_is_prolonged(service: Service) -> None:
    prolonged, short = (Sandbox.create(timeout=1, **service.sdk) for _ in range(2))
    prolonged.set_timeout(60)
    eventually(lambda: not short.is_running())
    path = f"/sandboxes/{prolonged.sandbox_id}/timeout"
    with service.client(**{"X-API-Key": KEY}) as client:
        assert client.post(path, json={}).status_code == 400
    assert prolonged.is_running()
    prolonged.set_timeout(0)
    eventually(lambda: not prolonged.is_running())


def test_no_prolonging_leads_past_the_longest_life() -> None:
    with serving(local.build(local.Options()), max_lifetime_s=100.0) as service:
        sandbox = Sandbox.create(timeout=100, **service.sdk)
        box = service.server._served.all()[0]
        box._last_s -= 60.0  # a minute later
        sandbox.set_timeout(100)
        assert box.left_s < 41
        sandbox.connect(timeout=100)
        assert box.left_s < 41
        assert sandbox.kill()


def test_connect_opens_the_same_sandbox_and_never_cuts_its_time(service: Service) -> None:
    sandbox = Sandbox.create(timeout=500, **service.sdk)
    sandbox.files.write("kept", "here")
    again = Sandbox.connect(sandbox.sandbox_id, timeout=5, **service.sdk)
    assert again.files.read("kept") == "here"
    left_s = (again.get_info().end_at - datetime.now(UTC)).total_seconds()
    assert left_s > 400
    Sandbox.connect(sandbox.sandbox_id, timeout=2000, **service.sdk)
    assert (again.get_info().end_at - datetime.now(UTC)).total_seconds() > 1900
    sandbox.kill()
    with pytest.raises(NotFoundException):
        Sandbox.connect(sandbox.sandbox_id, **service.sdk)


def test_unsupported_calls_are_refused(service: Service, sandbox: Sandbox) -> None:
    with pytest.raises(SandboxException, match="501"):
        sandbox.pause()
    with pytest.raises(SandboxException, match="501"):
        sandbox.create_snapshot()
    with service.client(**{"X-API-Key": KEY}) as client:
        for wish in (
            {"autoPauseMemory": True},
            {"mcp": {"x": {}}},
            {"volumeMounts": [{"name": "v"}]},
        ):
            answer = client.post("/v2/sandboxes", json={"templateID": "base", **wish})
            assert answer.status_code == 400, wish
            assert "cannot" in answer.json()["message"]
        assert client.delete("/v2/sandboxes").status_code == 405
        assert client.get(f"/sandboxes/{sandbox.sandbox_id}/logs").json()["logs"] == []
    assert sandbox.get_metrics() == []
    assert sandbox.is_running()


@pytest.mark.parametrize(
    ("template", "status"),
    [("no-such-image", 404), ("dir:/etc", 403), ("snapshot:sha256:" + "a" * 64, 403),
     ("swerl-snapshot:x", 403), ("/etc", 403), ("../x", 403), ("dir%3A%2Fetc", 403),
     ("file:/etc", 403), ("", 400), ("x\0y", 400)],
)  # fmt: skip
def test_an_unknown_template_is_refused(service: Service, template: str, status: int) -> None:
    with service.client(**{"X-API-Key": KEY}) as client:
        answer = client.post("/sandboxes", json={"templateID": template})
    assert answer.status_code == status
    assert answer.json()["code"] == status


@pytest.mark.parametrize(
    "body",
    [b"no json", b"[]", b'{"templateID": 1}', b'{"templateID": "base", "timeout": -1}',
     b'{"templateID": "base", "timeout": 90000}', b'{"templateID": "base", "timeout": "soon"}',
     b'{"templateID": "base", "metadata": {"a": 1}}', b'{"templateID": "base", "envVars": []}'],
)  # fmt: skip
def test_a_wrong_wish_makes_nothing(service: Service, body: bytes) -> None:
    with service.client(**{"X-API-Key": KEY}) as client:
        before = len(client.get("/sandboxes").json())
        answer = client.post("/v2/sandboxes", content=body)
        assert answer.status_code == 400, answer.text
        assert len(client.get("/sandboxes").json()) == before


async def test_the_same_wish_sent_many_times_at_once_makes_one_sandbox(service: Service) -> None:
    headers = {"X-API-Key": KEY, "Idempotency-Key": "at once"}
    async with httpx.AsyncClient(base_url=service.url, headers=headers) as client:
        asked = [client.post("/v2/sandboxes", json={"templateID": "base"}) for _ in range(5)]
        made = {answer.json()["sandboxID"] for answer in await asyncio.gather(*asked)}
        assert len(made) == 1
        assert (await client.delete(f"/sandboxes/{made.pop()}")).status_code == 204


def test_the_same_wish_sent_twice_makes_one_sandbox(service: Service) -> None:
    headers = {"X-API-Key": KEY, "Idempotency-Key": "once"}
    with service.client(**headers) as client:
        wish = {"templateID": "base"}
        one, two = (client.post("/v2/sandboxes", json=wish).json() for _ in range(2))
        assert one["sandboxID"] == two["sandboxID"]
        other = client.post("/v2/sandboxes", json={**wish, "metadata": {"a": "b"}})
        assert other.status_code == 409
        client.delete(f"/sandboxes/{one['sandboxID']}")
        three = client.post("/v2/sandboxes", json=wish).json()
        assert three["sandboxID"] != one["sandboxID"]
        client.delete(f"/sandboxes/{three['sandboxID']}")


@pytest.fixture(scope="module")
def five(service: Service) -> Iterator[list[str]]:
    """Ids of five sandboxes, the oldest first."""
    made = []
    for number in range(5):
        metadata = {"list": "five", "odd": str(number % 2), "text": "a b&c=d"}
        made.append(Sandbox.create(metadata=metadata, timeout=120, **service.sdk))
        time.sleep(0.002)
    yield [sandbox.sandbox_id for sandbox in made]
    for sandbox in made:
        sandbox.kill()


def test_lists_come_in_pages(service: Service, five: list[str]) -> None:
    query = SandboxQuery(metadata={"list": "five", "text": "a b&c=d"})
    for order, expected in (("asc", five), ("desc", five[::-1])):
        pages = Sandbox.list(query=query, limit=2, order=order, **service.sdk)
        seen = []
        while pages.has_next:
            seen.append([info.sandbox_id for info in pages.next_items()])
        assert seen == [expected[:2], expected[2:4], expected[4:]]


def test_lists_are_filtered(service: Service, five: list[str]) -> None:
    def ids(**query: object) -> list[str]:
        asked = SandboxQuery(metadata={"list": "five"}, **query)
        items = Sandbox.list(query=asked, order="asc", **service.sdk).next_items()
        return [info.sandbox_id for info in items]

    assert ids() == five
    assert ids(state=[SandboxState.RUNNING]) == five
    assert ids(state=[SandboxState.PAUSED]) == []
    assert ids(template="base") == five
    assert ids(template="other") == []
    odd = SandboxQuery(metadata={"list": "five", "odd": "1"})
    assert len(Sandbox.list(query=odd, **service.sdk).next_items()) == 2
    with service.client(**{"X-API-Key": KEY}) as client:
        first = client.get("/sandboxes", params={"metadata": "list=five&odd=0"}).json()
        assert {entry["sandboxID"] for entry in first} == set(five[::2])
        for wrong in ("limit=0", "limit=x", "state=gone", "startedAfter=x", "nextToken=x"):
            assert client.get(f"/v2/sandboxes?{wrong}").status_code == 400, wrong


def test_no_more_sandboxes_than_allowed() -> None:
    with serving(local.build(local.Options()), max_sandboxes=1) as small:
        Sandbox.create(**small.sdk)
        with pytest.raises(SandboxException, match="the limit of 1 sandboxes is reached"):
            Sandbox.create(retries=0, **small.sdk)


def test_templates_are_those_of_the_operator() -> None:
    templates = {"base": "host", "mine": "dir:/"}
    with (
        serving(local.build(local.Options()), templates=templates) as named,
        named.client(**{"X-API-Key": KEY}) as client,
    ):
        assert [entry["templateID"] for entry in client.get("/templates").json()] == [
            "base",
            "mine",
        ]
        assert client.get("/templates/aliases/mine").json()["templateID"] == "mine"
        assert client.get("/templates/other").status_code == 404


def test_an_order_of_folders_of_the_machine_is_for_servers_that_take_orders(
    service: Service, tmp_path: Path
) -> None:
    (tmp_path / "word").write_text("here")
    text = SandboxOrder(f"dir:{tmp_path}", LIMITS, "/w", (Mount(tmp_path, "/m"),)).to_text()
    body = {"templateID": "base", "timeout": 60, "metadata": {SandboxOrder.KEY: text}}
    with service.client(**{"X-API-Key": KEY}) as client:
        made = client.post("/sandboxes", json=body).json()
    sandbox = Sandbox.connect(made["sandboxID"], **service.sdk)
    assert sandbox.commands.run("test ! -e /m && test ! -e /word").exit_code == 0
    assert sandbox.kill()


@pytest.mark.parametrize("text", ["", "{}", '{"image": "host", "limits": {"x": 1}}', "[]"])
def test_an_order_that_cannot_be_read_is_refused(text: str) -> None:
    body = {"templateID": "base", "metadata": {SandboxOrder.KEY: text}}
    with (
        serving(local.build(local.Options()), takes_orders=True) as taking,
        taking.client(**{"X-API-Key": KEY}) as client,
    ):
        answer = client.post("/sandboxes", json=body)
    assert answer.status_code == 400
    assert "the sandbox order cannot be read" in answer.text


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A server whose template is a folder, so that its sandboxes can be kept."""
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "image").mkdir()
    (tmp_path / "image/given").write_text("of the image")
    templates = {"base": f"dir:{tmp_path}/image"}
    with serving(local.build(local.Options()), templates=templates, max_sandboxes=4) as running:
        yield running
    assert not default_store().snapshots()


def test_a_snapshot_is_a_template_until_it_is_deleted(kept: Service) -> None:
    sandbox = Sandbox.create(timeout=120, **kept.sdk)
    sandbox.files.write("new", "kept")
    made = sandbox.create_snapshot(mode="filesystem")
    named = sandbox.create_snapshot(name="mine")
    assert named.snapshot_id == "mine" and named.names == ["mine"]
    with pytest.raises(SandboxException, match="already"):
        sandbox.create_snapshot(name="mine")
    with pytest.raises(SandboxException, match="memory is not kept"):
        sandbox.create_snapshot(mode="full")
    sandbox.files.write("new", "changed later")
    listed = [each.snapshot_id for each in Sandbox.list_snapshots(**kept.sdk).next_items()]
    assert listed == [made.snapshot_id, "mine"]
    for template in (made.snapshot_id, "mine"):
        other = Sandbox.create(template, timeout=120, **kept.sdk)
        assert other.files.read("new") == "kept"
        assert other.files.read("given") == "of the image"
        other.kill()
    # The limit of sandboxes is one of snapshots, too.
    for number in range(2):
        sandbox.create_snapshot(name=str(number))
    with pytest.raises(SandboxException, match="limit of 4 snapshots"):
        sandbox.create_snapshot()
    for name in (made.snapshot_id, "mine"):
        assert Sandbox.delete_snapshot(name, **kept.sdk)
        assert not Sandbox.delete_snapshot(name, **kept.sdk)
    with pytest.raises((SandboxException, NotFoundException)):
        Sandbox.create("mine", timeout=120, **kept.sdk)
    sandbox.kill()


def test_forks_begin_with_the_same_files_and_differ_afterwards(kept: Service) -> None:
    sandbox = Sandbox.create(timeout=120, metadata={"a": "b"}, **kept.sdk)
    sandbox.files.write("new", "kept")
    forks = sandbox.fork(timeout=120, count=4)
    # Four sandboxes are the server's limit, and the first is open.
    good = [fork for fork in forks if isinstance(fork, Sandbox)]
    assert len(good) == 3 and len(forks) == 4
    for number, fork in enumerate(good):
        assert fork.files.read("new") == "kept"
        fork.files.write("new", str(number))
    assert [fork.files.read("new") for fork in good] == ["0", "1", "2"]
    assert sandbox.files.read("new") == "kept"
    assert good[0].get_info().metadata == {"a": "b"}
    for each in (*good, sandbox):
        each.kill()


def test_a_paused_sandbox_resumes_with_its_files_and_its_tokens(kept: Service) -> None:
    sandbox = Sandbox.create(timeout=120, metadata={"a": "b"}, **kept.sdk)
    other = Sandbox.create(timeout=120, **kept.sdk)
    for turn in range(3):
        sandbox.files.write("new", str(turn))
        background = sandbox.commands.run("sleep 1000", background=True)
        with pytest.raises(SandboxException, match="memory is not kept"):
            sandbox.pause(mode="full")
        assert sandbox.pause(mode="filesystem")
        assert not sandbox.pause()
        assert not sandbox.is_running()
        with pytest.raises(SandboxException, match="is paused"):
            sandbox.set_timeout(100)
        assert sandbox.get_info().state == SandboxState.PAUSED
        paused = SandboxQuery(state=[SandboxState.PAUSED])
        listed = Sandbox.list(query=paused, **kept.sdk).next_items()
        assert [each.sandbox_id for each in listed] == [sandbox.sandbox_id]
        assert not Sandbox.list_snapshots(**kept.sdk).next_items()
        assert sandbox.connect(timeout=100).files.read("new") == str(turn)
        assert background.pid not in [each.pid for each in sandbox.commands.list()]
        assert sandbox.files.read("given") == "of the image"
    assert sandbox.get_info().state == SandboxState.RUNNING
    assert sandbox.get_info().metadata == {"a": "b"}
    assert other.is_running()
    assert sandbox.pause() and sandbox.kill() and not sandbox.kill()
    with pytest.raises(NotFoundException):
        sandbox.connect()
    assert other.pause()  # the end of the server removes its files


def test_clients_that_resume_at_once_get_one_sandbox(kept: Service) -> None:
    sandbox = Sandbox.create(timeout=120, **kept.sdk)
    sandbox.pause()

    def connect(_: int) -> str:
        return Sandbox.connect(sandbox.sandbox_id, **kept.sdk).files.read("given")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(connect, range(4))) == ["of the image"] * 4
    assert len(Sandbox.list(**kept.sdk).next_items()) == 1
    sandbox.kill()


def test_the_end_of_its_time_pauses_a_sandbox_that_asked_for_it(kept: Service) -> None:
    at_end: SandboxLifecycle = {"on_timeout": "pause"}
    sandbox = Sandbox.create(timeout=120, lifecycle=at_end, **kept.sdk)
    sandbox.files.write("new", "kept")
    sandbox.set_timeout(0)
    eventually(lambda: sandbox.get_info().state == SandboxState.PAUSED)
    assert sandbox.connect(timeout=100).files.read("new") == "kept"
    sandbox.kill()
