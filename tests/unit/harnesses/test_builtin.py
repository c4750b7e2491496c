"""The built-in agent, against a real HTTP server and real files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swerl.core.errors import SandboxLostError
from swerl.harnesses import builtin as _messages_client

from .plain import LostSandbox, Model, edit, run, use


async def test_the_request_is_an_anthropic_message_with_the_session_key(tmp_path: Path) -> None:
    model = Model([[{"type": "text", "text": "Hello."}]])
    await run(model, tmp_path)
    body = model.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "Fix it."}]
    assert body["model"] == "policy"
    assert body["system"].startswith("You repair software.")
    assert [tool["name"] for tool in body["tools"]] == ["bash", "str_replace_editor", "submit"]
    assert model.headers[0]["x-api-key"] == "key-1"


async def test_a_reply_without_a_call_ends_the_run_and_a_cut_one_says_so(tmp_path: Path) -> None:
    for stop_reason, limit in (("end_turn", False), ("max_tokens", True)):
        model = Model([[{"type": "text", "text": "I"}]], stop_reason=stop_reason)
        done = await run(model, tmp_path)
        assert (done.code, done.limit) == (0, limit)


async def test_the_turn_limit_stops_a_model_that_never_submits(tmp_path: Path) -> None:
    model = Model([[use("bash", command="true")]] * 5)
    done = await run(model, tmp_path, max_turns=2)
    assert done.limit
    assert len(model.bodies) == 2


async def test_several_calls_of_one_reply_are_answered_together(tmp_path: Path) -> None:
    first, second = use("bash", command="echo 1"), use("bash", command="echo 2")
    model = Model([[first, second], [use("submit")]])
    await run(model, tmp_path)
    results = model.bodies[1]["messages"][2]["content"]
    assert [(r["tool_use_id"], r["content"]) for r in results] == [
        (first["id"], "1"),
        (second["id"], "2"),
    ]


async def test_the_budget_stops_a_slow_model_and_keeps_the_log(tmp_path: Path) -> None:
    model = Model([[use("bash", command="true")]], delay_s=5)
    done = await run(model, tmp_path, budget_s=0.05)
    assert done.timed_out
    assert json.loads(done.log.splitlines()[0])["content"] == "Fix it."


async def test_an_answer_with_an_error_ends_the_run_as_failed(tmp_path: Path) -> None:
    done = await run(Model([], status=529), tmp_path)
    assert done.code == 1
    assert "529" in done.log


async def test_a_gateway_that_asks_for_patience_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_messages_client, "_PAUSES_S", (0.01, 0.01))
    for busy, code in ((2, 0), (3, 1)):
        model = Model([[{"type": "text", "text": "Hello."}]], busy=busy)
        done = await run(model, tmp_path)
        assert done.code == code
        assert len(model.bodies) == 1 - code


async def test_a_lost_sandbox_is_not_the_models_mistake(tmp_path: Path) -> None:
    model = Model([[edit("view", path="a.py")]])
    with pytest.raises(SandboxLostError):
        await run(model, tmp_path, sandbox=LostSandbox())
