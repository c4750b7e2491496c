"""How the client judges what an engine answers."""

from __future__ import annotations

from typing import Any

import pytest

from swerl.chat import Finish
from swerl.engines._sglang_wire import ModelShape, read_completion
from swerl.errors import EngineError
from swerl.turn import Completion

SHAPE = ModelShape(num_vocab=512)
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
    with pytest.raises(EngineError, match="makes no sense"):
        read_completion({"output_ids": ids, "meta_info": meta}, SHAPE)
