"""Bodies that the client sends, and its checks of the answers."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import pytest

from swerl.core.chat import Finish
from swerl.core.errors import EngineError
from swerl.core.turn import Completion, Sampling
from swerl.engines._sglang_wire import ServedShape, generate_body, read_completion

SHAPE = ServedShape(num_vocab=512)
GOOD: dict[str, Any] = {
    "output_ids": [7, 8],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 2},
        "weight_version": "v0",
        "output_token_logprobs": [[-1.0, 7, None], [-0.5, 8, None]],
    },
}


def test_a_consistent_reply_is_read() -> None:
    assert read_completion(GOOD, SHAPE) == Completion((7, 8), (-1.0, -0.5), Finish.LENGTH, "v0")


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


@pytest.mark.parametrize("kind", [list, tuple, functools.partial(array, "i")])
def test_ids_of_any_kind_are_sent_as_a_list(kind: Callable[[list[int]], Sequence[int]]) -> None:
    ids = [0, 5, 150_000]

    body = generate_body(kind(ids), Sampling(1), "r", routed=False)

    sent = orjson.loads(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))
    assert sent["input_ids"] == ids
