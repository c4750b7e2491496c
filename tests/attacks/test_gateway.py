"""Probes of the gateway fail where the gateway is a bad one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from swerl.gateway.router import Router
from tests.attacks import life, resources, runner
from tests.attacks.attack import AttackOutcome
from tests.attacks.runner import Subject

from .weak import WeakBackend, WeakSandbox

HANDLE = Router.handle


async def result(name: str, folder: Path, backend: Any = None) -> AttackOutcome:
    subject = Subject(backend or WeakBackend(), "weak", workdir=str(folder))
    found = await runner.attack(subject, runner.choose([name]))
    return found.rows[0].finding.result


@pytest.mark.parametrize("name", ["session-keys", "engine-admin", "gateway-as-proxy"])
async def test_the_gateway_as_it_is_holds(tmp_path: Path, name: str) -> None:
    assert await result(name, tmp_path) is AttackOutcome.PASS


async def test_a_gateway_that_goes_by_the_key_alone_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def by_key(self: Router, alone: Any, request: web.BaseRequest) -> web.StreamResponse:
        return await HANDLE(
            self, self.sessions.get(request.headers.get("x-api-key", ""), alone), request
        )

    monkeypatch.setattr(Router, "handle", by_key)
    assert await result("session-keys", tmp_path) is AttackOutcome.FAIL


async def test_a_gateway_that_answers_the_engines_paths_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_door(self: Router, alone: Any, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/flush_cache":
            return web.json_response({"flushed": True})
        return await HANDLE(self, alone, request)

    monkeypatch.setattr(Router, "handle", open_door)
    assert await result("engine-admin", tmp_path) is AttackOutcome.FAIL


async def test_a_gateway_that_fetches_for_others_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(self: Router, alone: Any, request: web.BaseRequest) -> web.StreamResponse:
        host, _, port = request.host.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port or 80))
        writer.close()
        return web.Response(body=await reader.read(100))

    monkeypatch.setattr(Router, "handle", fetch)
    assert await result("gateway-as-proxy", tmp_path) is AttackOutcome.FAIL


async def test_a_sandbox_without_a_bound_on_open_files_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "_MOST_DESCRIPTORS", 100)
    assert await result("descriptor-exhaustion", tmp_path) is AttackOutcome.FAIL


async def test_a_command_that_is_held_by_its_child_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WeakSandbox.run

    async def patient(self: WeakSandbox, argv: Any, **options: Any) -> Any:
        if "sleep 30 & echo done" in argv:
            argv = ["sh", "-c", "echo done; sleep 0.3"]
        return await run(self, argv, **options)

    monkeypatch.setattr(life, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(WeakSandbox, "run", patient)
    assert await result("held-output", tmp_path) is AttackOutcome.FAIL
