"""The torch-cpu server as a process: how it starts, fails, refuses and ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer

from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineError, EngineLostError
from swerl.core.turn import Sampling
from swerl.engines import _torch_server, torch_cpu
from swerl.engines._sglang_client import HttpEngine
from swerl.engines._torch_batch import FinishedReply

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = Sampling(900, temperature=0.0, stop_token_ids=())


def setup(log_dir: Path, model: Path | None) -> EngineSetup:
    return EngineSetup(family=None, log_dir=log_dir, model=model)  # type: ignore[arg-type]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    tmp_path_factory: pytest.TempPathFactory, endless_model: Path
) -> AsyncIterator[HttpEngine]:
    opened = torch_cpu.open(
        torch_cpu.Options(), setup(tmp_path_factory.mktemp("log"), endless_model)
    )
    async with opened as engine:
        yield engine


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A tiny model that has no end token, so that a reply lasts as long as a test needs."""
    folder = tmp_path_factory.mktemp("endless")
    config = json.loads((tiny_model / "config.json").read_text()) | {"eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(tiny_model / "model.safetensors")
    return folder


async def call(engine: HttpEngine, path: str, body: Any = None) -> tuple[int, Any]:
    """Send raw HTTP; without a body it is a GET."""
    method = "GET" if body is None else "POST"
    async with (
        aiohttp.ClientSession() as client,
        client.request(method, engine.url + path, json=body) as response,
    ):
        text = await response.text()
        is_json = response.content_type == "application/json"
        return response.status, json.loads(text) if is_json else text


async def until(engine: HttpEngine, key: str, value: int) -> None:
    async with asyncio.timeout(5):
        # Another process cannot be awaited, only asked again.
        while (await call(engine, "/server_info"))[1][key] != value:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate", {}, "input_ids"),
        ("/generate", {"input_ids": [1, "x"]}, "input_ids.1"),
        ("/generate", {"input_ids": [-1]}, "vocabulary"),
        ("/generate", {"input_ids": [1], "sampling_params": {"min_p": 0.1}}, "min_p"),
        ("/generate", {"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
        (
            "/generate",
            {"input_ids": [1], "sampling_params": {"stop_token_ids": list(range(17))}},
            "stop ids",
        ),
        ("/pause_generation", {"mode": "nap"}, "mode"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "/nowhere"),
    ],
)
async def test_bad_bodies_are_answered_400_with_the_reason(
    engine: HttpEngine, path: str, body: Any, message: str
) -> None:
    status, answer = await call(engine, path, body)
    assert status == 400
    assert message in answer["error"]["message"]


async def test_running_requests_block_what_would_corrupt_them(
    engine: HttpEngine, endless_model: Path
) -> None:
    task = asyncio.create_task(engine.generate([5], LONG, "busy"))
    await until(engine, "num_running", 1)
    update = {"model_path": str(endless_model)}
    assert (await call(engine, "/update_weights_from_disk", update))[0] == 400
    await engine.abort("busy")
    await task
    assert (await call(engine, "/update_weights_from_disk", update))[0] == 200


def test_a_cache_that_cannot_be_had_is_one_clear_error(tiny_model: Path) -> None:
    with pytest.raises(EngineError, match="memory") as caught:
        _torch_server.App(tiny_model, num_rows=10**9, max_running=4, context=64)
    assert "context_length" in caught.value.hint


async def test_an_engine_that_dies_mid_reply_is_lost(tmp_path: Path, endless_model: Path) -> None:
    async with torch_cpu.open(torch_cpu.Options(), setup(tmp_path, endless_model)) as engine:
        task = asyncio.create_task(engine.generate([5], LONG, "s"))
        await until(engine, "num_running", 1)
        os.kill(server_pid(tmp_path), signal.SIGKILL)
        with pytest.raises(EngineLostError):
            await task
        for _ in range(1200):
            if not await asks_again(engine):
                return
            await asyncio.sleep(0.05)
        pytest.fail("the engine's end is not noticed")


async def asks_again(engine: HttpEngine) -> bool:
    """Say whether a lost engine is worth another request: it is not, once its end is noticed."""
    with pytest.raises(EngineLostError) as caught:
        await engine.generate([5], Sampling(1), "s")
    return caught.value.retryable


async def test_a_large_model_answers_http_during_a_step(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch_server, "LARGE", 0)
    app = _torch_server.App(tiny_model, num_rows=4, max_running=4, context=64)
    begun, go_on, step = threading.Event(), threading.Event(), app.batch.step
    paused_steps = []

    def slow() -> list[FinishedReply]:
        begun.set()
        assert go_on.wait(10)
        paused_steps.append(app.batch.paused)
        return step()

    monkeypatch.setattr(app.batch, "step", slow)
    stepping = asyncio.create_task(app.step_forever())
    async with TestClient(TestServer(app.routes())) as client:
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 9, "temperature": 0.0}}
        reply = asyncio.create_task(client.post("/generate", json=body))
        await asyncio.to_thread(begun.wait, 10)
        assert (await client.get("/model_info")).status == 200
        other = asyncio.create_task(client.post("/generate", json=body))
        await asyncio.sleep(0.05)
        paused = asyncio.create_task(client.post("/pause_generation", json={"mode": "in_place"}))
        await asyncio.sleep(0.05)
        assert not paused.done()  # it waits for the end of the step
        go_on.set()
        await paused
        await asyncio.sleep(0.05)
        await client.post("/continue_generation")
        for task in (reply, other):
            assert len((await (await task).json())["output_ids"]) == 9
    assert len(paused_steps) >= 9 and not any(paused_steps)
    stepping.cancel()


def server_pid(log_dir: Path) -> int:
    return int(json.loads((log_dir / "engine.ready.json").read_text())["pid"])
