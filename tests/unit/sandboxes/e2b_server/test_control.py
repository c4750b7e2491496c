"""Sandboxes are made, found, prolonged and removed as the SDK asks."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import pytest
from e2b import NotFoundException, Sandbox, SandboxException, SandboxQuery

from swerl.core.sandbox import Mount, SandboxOrder
from swerl.sandboxes.e2b_server.control import choose
from swerl.sandboxes.e2b_server.failure import Code, WireError
from swerl.sandboxes.e2b_server.served import ServerOptions

from .helpers import KEY, LIMITS, Service, eventually


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


def test_calls_that_are_not_served_answer_501_with_a_reason(
    service: Service, sandbox: Sandbox
) -> None:
    calls = (
        sandbox.pause,
        sandbox.create_snapshot,
        sandbox.get_metrics,
        lambda: sandbox.fork(count=1),
        lambda: sandbox.files.watch_dir("/tmp"),
    )
    for call in calls:
        with pytest.raises(SandboxException, match="does not serve"):
            call()
    with service.client(**{"X-API-Key": KEY}) as client:
        for wish in ({"autoPause": True}, {"mcp": {"x": {}}}, {"volumeMounts": [{"name": "v"}]}):
            answer = client.post("/v2/sandboxes", json={"templateID": "base", **wish})
            assert answer.status_code == 501, wish
        for method, path in (
            ("DELETE", "/v2/sandboxes"),
            ("GET", "/templates"),
            ("GET", "/snapshots"),
            ("GET", "/no/such/path"),
        ):
            answer = client.request(method, path)
            assert (answer.status_code, answer.json()["code"]) == (501, 501)
            assert "does not serve" in answer.json()["message"]
    assert sandbox.is_running()


@pytest.mark.parametrize(
    ("template", "status"),
    [("no-such-image", 404), ("dir:/etc", 403), ("snapshot:sha256:" + "a" * 64, 403),
     ("/etc", 403), ("../x", 403), ("dir%3A%2Fetc", 403),
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
        before = len(client.get("/v2/sandboxes").json())
        answer = client.post("/v2/sandboxes", content=body)
        assert answer.status_code == 400, answer.text
        assert len(client.get("/v2/sandboxes").json()) == before


def test_a_list_has_all_of_this_metadata_the_newest_first(service: Service) -> None:
    metadata = {"list": "two", "text": "a b&c=d"}
    sandboxes = [Sandbox.create(metadata=metadata, **service.sdk) for _ in range(2)]
    pages = Sandbox.list(query=SandboxQuery(metadata=metadata), limit=1, **service.sdk)
    listed = [info.sandbox_id for info in pages.next_items()]
    assert listed == [sandbox.sandbox_id for sandbox in reversed(sandboxes)]
    assert not pages.has_next
    for sandbox in sandboxes:
        sandbox.kill()


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


OPTIONS = ServerOptions(templates={"base": "host", "folder": "dir:/srv"}, image_key="img")


@pytest.mark.parametrize(
    "reference",
    ["dir:/etc", "dir:etc", "/etc", "./x", "../x", "~/x", "oci:/x", "oci-archive:/x", "file:///x",
     "built:/etc", "snapshot:sha256:0", quote("dir:/etc", safe="")],
)  # fmt: skip
def test_no_client_names_a_folder_of_the_servers_machine(reference: str) -> None:
    for template, metadata in ((reference, {}), ("base", {"img": reference})):
        with pytest.raises(WireError) as refused:
            choose(template, metadata, OPTIONS)
        assert refused.value.code is Code.PERMISSION_DENIED
