"""Qwen Code: what it is started with, and how its ends are told apart."""

from __future__ import annotations

import json

import pytest

from swerl.harnesses.qwen_code import Options, QwenCode

from .helpers import ended, started


async def test_a_slow_model_is_waited_for() -> None:
    env = (await started(QwenCode(Options(), ())))["env"]
    found = json.loads(env["SWERL_QWEN_SETTINGS"])["model"]["generationConfig"]
    assert (found["timeout"], found["streamIdleTimeoutMs"]) == (90_000, 0)


@pytest.mark.parametrize(
    ("code", "error", "limit"),
    [
        (1, {"message": "[API Error: 400 prompt is too long: 9 tokens > 8 maximum]"}, True),
        (1, {"message": "Context is too large to send safely after automatic compression."}, True),
        (1, {"message": "[API Error: 500 the engine failed]"}, False),
        (0, None, False),
    ],
)
async def test_limits_are_told_from_breakdowns(
    code: int, error: dict[str, str] | None, limit: bool
) -> None:
    result = {"type": "result"} | ({"error": error} if error else {})
    done = await ended(QwenCode(Options(), ()), result, exit_code=code)
    assert (done.code, done.limit) == (code, limit)
