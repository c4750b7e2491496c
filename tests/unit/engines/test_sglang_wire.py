"""Bodies that the client sends, and its checks of the answers."""

from __future__ import annotations

import subprocess
import sys
from array import array
from random import Random
from typing import Any

import orjson
import pytest

from swerl.core.errors import EngineError
from swerl.engines._sglang_wire import (
    ServedShape,
    WrittenPrompts,
    read_completion,
)

SHAPE = ServedShape(num_vocab=512)
GOOD: dict[str, Any] = {
    "output_ids": [7, 8],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 2},
        "weight_version": "v0",
        "output_token_logprobs": [[-1.0, 7, None], [-0.5, 8, None]],
    },
}


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        ([7], [[-1.0, 7, None], [-0.5, 8, None]]),
        ([7, 9], [[-1.0, 7, None], [-0.5, 8, None]]),
        ([7, 512], [[-1.0, 7, None], [-0.5, 512, None]]),
        ([7, 8], []),
        ([7, 8], [[-1.0, 7, None], [float("nan"), 8, None]]),
        ([7, 8], [[-1.0, 7, None], [None, 8, None]]),
    ],
    ids=["fewer ids", "other ids", "unknown id", "no logprobs", "nan", "null"],
)
def test_an_inconsistent_reply_is_an_error(ids: list[int], logprobs: list[Any]) -> None:
    meta = {**GOOD["meta_info"], "output_token_logprobs": logprobs}
    with pytest.raises(EngineError, match="is inconsistent"):
        read_completion({"output_ids": ids, "meta_info": meta}, SHAPE)


def test_a_prompt_is_written_whole_whichever_known_one_it_continues() -> None:
    prompts, random = WrittenPrompts(None), Random(0)
    known: dict[str, list[list[int]]] = {"a": [[]], "b": [[]]}
    for _ in range(500):
        session = random.choice(["a", "b"])
        start = random.choice(known[session])
        ids = start[: random.randrange(len(start) + 1)]
        ids = ids + [random.randrange(200_000) for _ in range(random.randrange(4))]
        known[session].append(ids)

        assert orjson.loads(prompts.write(array("i", ids), session)) == ids


def test_only_the_end_of_a_continued_prompt_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    dumps = orjson.dumps
    monkeypatch.setattr(orjson, "dumps", lambda ids: written.append(len(ids)) or dumps(ids))
    prompts = WrittenPrompts(None)

    for length in (100, 110, 111, 111):
        prompts.write(range(length), "s")
    prompts.write([*range(110), 7], "s")  # a fork

    assert written == [100, 10, 1, 0, 111]


def test_prompts_are_kept_within_bounds() -> None:
    prompts = WrittenPrompts(None, most_bytes=10_000)
    for number in range(300):
        assert prompts.write([number % 7] * 100, f"s{number % 50}")
        assert prompts.num_bytes <= 10_000
    assert prompts.num_bytes == sum(
        len(each.ids) + len(each.text) for kept in prompts._kept.values() for each in kept
    )


@pytest.mark.parametrize("wrong", [-1, 512])
def test_an_id_outside_the_vocabulary_is_refused(wrong: int) -> None:
    prompts = WrittenPrompts(512)
    prompts.write([1, 2], "s")
    with pytest.raises(EngineError, match=f"prompt id {wrong} is outside"):
        prompts.write([1, 2, wrong], "s")


def test_prompts_and_replies_need_no_numpy() -> None:
    """The core's packages are enough for an engine at a URL."""
    code = (
        "import sys\n"
        "sys.modules['numpy'] = None\n"
        "from swerl.core.turn import Sampling\n"
        "from swerl.engines._sglang_client import HttpEngine, connect\n"
        "from swerl.engines import _sglang_wire as wire\n"
        "prompt = wire.WrittenPrompts(9).write([1, 2], 's')\n"
        "wire.generate_body(prompt, Sampling(1), 'r', routed=False)\n"
        f"wire.read_completion({GOOD!r}, wire.ServedShape(512))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
