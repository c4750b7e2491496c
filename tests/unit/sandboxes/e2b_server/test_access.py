"""Nothing answers without the API key, or without the token of the very sandbox."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from e2b import Sandbox

from .helpers import KEY, Service

CONTROL = [
    ("GET", "/health"), ("POST", "/sandboxes"), ("POST", "/v2/sandboxes"), ("GET", "/v2/sandboxes"),
    ("GET", "/sandboxes/ID"), ("DELETE", "/sandboxes/ID"), ("POST", "/sandboxes/ID/connect"),
    ("POST", "/v2/sandboxes/ID/connect"), ("POST", "/sandboxes/ID/timeout"), ("GET", "/templates"),
    ("OPTIONS", "/sandboxes"), ("GET", "/"), ("GET", "/no/such/path"),
]  # fmt: skip
ENVD = [
    ("GET", "/health"), ("GET", "/files?path=/etc/passwd"), ("POST", "/files?path=/tmp/x"),
    ("GET", "/files?path=/etc/passwd&signature=v1_x"), ("POST", "/process.Process/Start"),
    ("POST", "/process.Process/List"), ("POST", "/process.Process/NoSuchCall"),
    ("POST", "/filesystem.Filesystem/Stat"),
]  # fmt: skip


@pytest.fixture
def two(service: Service) -> Iterator[tuple[Sandbox, Sandbox]]:
    made = Sandbox.create(**service.sdk), Sandbox.create(**service.sdk)
    yield made
    for sandbox in made:
        sandbox.kill()


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"X-API-Key": ""}, {"X-API-Key": KEY[:-1]}, {"X-API-Key": KEY + "0"},
        {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}, {"Authorization": "Bearer x"},
        {"X-Access-Token": KEY},
    ],
)  # fmt: skip
def test_no_control_route_answers_without_the_key(
    service: Service, sandbox: Sandbox, headers: dict[str, str]
) -> None:
    with service.client(**headers) as client:
        for method, path in CONTROL:
            answer = client.request(method, path.replace("ID", sandbox.sandbox_id))
            assert answer.status_code == 401, (method, path)
            assert sandbox.sandbox_id not in answer.text
            assert "Access-Control-Allow-Origin" not in answer.headers
    assert sandbox.is_running()


def test_a_sandbox_opens_to_its_own_token_alone(
    service: Service, two: tuple[Sandbox, Sandbox]
) -> None:
    mine, other = two
    for token in ("", "x", KEY, other._envd_access_token or ""):
        headers = {"E2b-Sandbox-Id": mine.sandbox_id, "X-Access-Token": token, "X-API-Key": KEY}
        with service.client(**headers) as client:
            for method, path in ENVD:
                assert client.request(method, path).status_code == 401, (method, path)
            assert client.get("/", headers={"E2b-Sandbox-Port": "8000"}).status_code == 401
    host = {"Host": f"49983-{mine.sandbox_id}.localhost", "X-Access-Token": "wrong"}
    assert httpx.get(f"{service.url}/health", headers=host).status_code == 401
    assert mine.commands.run("echo mine").stdout == "mine\n"


def test_a_token_for_servers_inside_opens_nothing_else(service: Service, sandbox: Sandbox) -> None:
    token = sandbox.traffic_access_token or ""
    for name in ("E2b-Traffic-Access-Token", "X-Access-Token"):
        with service.client(**{"E2b-Sandbox-Id": sandbox.sandbox_id, name: token}) as client:
            for method, path in ENVD:
                assert client.request(method, path).status_code == 401, (method, path)
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "9"}
    for extra in (
        {"E2b-Traffic-Access-Token": token},
        {"X-Access-Token": sandbox._envd_access_token or ""},
    ):
        with service.client(**headers, **extra) as client:
            assert client.get("/").status_code == 502  # let in, and nothing listens there


def test_a_host_name_reaches_the_sandbox(service: Service, sandbox: Sandbox) -> None:
    headers = {
        "Host": f"49983-{sandbox.sandbox_id}.sandboxes.example",
        "X-Access-Token": sandbox._envd_access_token or "",
    }
    assert httpx.get(f"{service.url}/health", headers=headers).status_code == 204


def test_a_sandbox_that_is_gone_is_reported_as_the_sdk_expects(service: Service) -> None:
    with service.client(**{"E2b-Sandbox-Id": "gone", "X-Access-Token": "x"}) as client:
        answer = client.get("/health")
    assert answer.status_code == 502
    assert answer.json() == {
        "sandboxId": "gone", "message": "The sandbox was not found", "code": 502
    }  # fmt: skip


def test_the_log_has_a_line_for_each_request_and_no_secret(
    service: Service, sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "swerl.sandboxes.e2b_server")
    sandbox.commands.run("echo hello-from-the-command")
    with service.client(**{"X-API-Key": KEY}) as client:
        client.get("/no%0a/such", params={"secret": "in-the-query"})
    lines = [record.getMessage() for record in caplog.records]
    assert "127.0.0.1 'POST' '/process.Process/Start' 200" in lines
    assert r"127.0.0.1 'GET' '/no\n/such' 501" in lines
    secrets = KEY, sandbox._envd_access_token, "hello-from", "in-the-query", "\n"
    assert not any(secret in line for secret in secrets for line in lines if secret)
