"""Logins are found where `docker login` leaves them, and never shown."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from swerl.core.errors import ImageError
from swerl.images.http import Auth, Login, find_login, http_session, logged_in, read_challenges
from swerl.images.registry import Registry


def config(folder: Path, **settings: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(settings))
    return file


def helper(folder: Path, script: str) -> None:
    program = folder / "docker-credential-fake"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


async def test_login_of_docker_hub_is_found_by_its_old_name(tmp_path: Path) -> None:
    pair = base64.b64encode(b"ann:s:3cret").decode()
    plain = {"username": "bob", "password": "pw"}
    file = config(tmp_path, auths={"https://index.docker.io/v1/": {"auth": pair}, "quay.io": plain})
    assert await find_login("docker.io", file) == Login("ann", "s:3cret")
    assert await find_login("quay.io", file) == Login("bob", "pw")
    assert await find_login("ghcr.io", file) is None
    assert logged_in(file) == ["docker.io", "quay.io"]


async def test_helper_program_is_asked_for_its_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper(tmp_path, 'read key; printf \'{"Username": "bob", "Secret": "%s!"}\' "$key"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    hub = "https://index.docker.io/v1/"
    file = config(tmp_path, credHelpers={"ghcr.io": "fake", hub: "fake"})
    assert await find_login("ghcr.io", file) == Login("bob", "ghcr.io!")
    assert await find_login("docker.io", file) == Login("bob", f"{hub}!")
    helper(tmp_path, 'echo \'{"Username": "", "Secret": ""}\'')
    assert await find_login("ghcr.io", file) is None


async def test_damaged_config_or_login_is_one_clear_error(tmp_path: Path) -> None:
    file = config(tmp_path, auths={"ghcr.io": {"auth": "%%%"}})
    with pytest.raises(ImageError, match="is damaged"):
        await find_login("ghcr.io", file)
    file.write_text("{")
    with pytest.raises(ImageError, match="cannot read Docker's config"):
        await find_login("ghcr.io", file)
    assert logged_in(file) == []


@pytest.mark.parametrize(
    ("headers", "scheme", "parameters"),
    [
        (["Bearer realm=https://a/t, p=1"], "bearer", {"realm": "https://a/t", "p": "1"}),
        (['Basic realm="x", Bearer realm="https://a/t"'], "bearer", {"realm": "https://a/t"}),
        (['Basic realm="x"', 'BEARER Realm="https://a/t"'], "bearer", {"realm": "https://a/t"}),
        (['Negotiate, Basic realm="a, b=\\"c\\""'], "basic", {"realm": 'a, b="c"'}),
    ],
)
def test_challenges_are_read_in_every_form(
    headers: list[str], scheme: str, parameters: dict[str, str]
) -> None:
    assert read_challenges(headers)[scheme] == parameters


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"token": "a\\nb"}', b"[]", b"\xff"])
async def test_a_hostile_token_is_one_clear_error(tmp_path: Path, body: bytes) -> None:
    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(body=body)

    async with RawTestServer(answer) as server, http_session() as http:
        challenge = {"bearer": {"realm": str(server.make_url("/token"))}}
        auth = Auth("127.0.0.1:5000", http, tmp_path / "none.json")
        with pytest.raises(ImageError, match="answered without a token"):
            await auth.answer("swe/task", challenge)


async def test_a_push_requests_its_scope_at_once(tmp_path: Path) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        if request.path == "/token":
            return web.json_response({"token": request.query["scope"]})
        if request.headers.get("Authorization") == "Bearer repository:a/b:pull,push":
            return web.Response(status=404)
        # Quay hides a new repository from tokens for `pull`, the only scope that it names.
        realm = f'Bearer realm="http://{request.host}/token",scope="repository:a/b:pull"'
        return web.Response(status=401, headers={"WWW-Authenticate": realm})

    async with RawTestServer(answer) as server, http_session() as http:
        registry = Registry(f"127.0.0.1:{server.port}", http, tmp_path / "none.json")
        assert not await registry.has_blob("a/b", f"sha256:{0:064}")


async def test_a_login_is_not_sent_without_encryption(tmp_path: Path) -> None:
    pair = base64.b64encode(b"ann:s3cret").decode()
    file = config(tmp_path, auths={"ghcr.io": {"auth": pair}})
    async with http_session() as http:
        with pytest.raises(ImageError, match="requests the login without encryption"):
            await Auth("ghcr.io", http, file).answer(
                "s", {"bearer": {"realm": "http://127.0.0.1:9"}}
            )


@pytest.mark.parametrize("place", ["auths", "helper"])
async def test_an_identity_token_is_exchanged_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    forms = []

    async def answer(request: web.BaseRequest) -> web.Response:
        forms.append(
            (request.method, dict(await request.post()), "Authorization" in request.headers)
        )
        return web.json_response({"access_token": "t0"})

    helper(tmp_path, 'echo \'{"Username": "<token>", "Secret": "id-token"}\'')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    pair = base64.b64encode(b"00000000-0000:").decode()
    entry = {"127.0.0.1:5000": {"auth": pair, "identitytoken": "id-token"}}
    file = config(tmp_path, **({"auths": entry} if place == "auths" else {"credsStore": "fake"}))
    async with RawTestServer(answer) as server, http_session() as http:
        realm = str(server.make_url("/token"))
        challenge = {"bearer": {"realm": realm, "service": "s", "scope": "a:pull b:pull"}}
        auth = Auth("127.0.0.1:5000", http, file)
        assert await auth.answer("swe/task", challenge)
    assert auth.headers("swe/task") == {"Authorization": "Bearer t0"}
    form = {"grant_type": "refresh_token", "client_id": "swerl", "refresh_token": "id-token"}
    assert forms == [("POST", {**form, "service": "s", "scope": "a:pull b:pull"}, False)]
