"""SGLang's wire format: requests and answers of /generate, and names of weight versions.

An inconsistent answer is an error.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from swerl.core.chat import Finish, Json
from swerl.core.errors import EngineError
from swerl.core.turn import Completion, RoutedExperts, Sampling, WeightChange

FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
ROUNDING = 1e-4
"""Largest log-probability above 0 that floating-point sums may produce."""
PARTIAL = "partial:"
"""Prefix of the version of partly updated weights."""
RESTARTED = f"{PARTIAL}restarted"
"""Version of a restarted server: it holds the run's first weights."""


class PauseMode(StrEnum):
    """The effect of a pause on running requests."""

    RETRACT = "retract"
    """They keep their tokens and are prefilled again under the new weights: no stale cache."""
    ABORT = "abort"
    """They end with the tokens sampled so far; their sessions send them again."""
    IN_PLACE = "in_place"
    """They keep tokens and cache: fastest, but the cached keys belong to the old weights."""


@dataclass(frozen=True, slots=True)
class ServedShape:
    """Sizes of a model, to check an answer against."""

    num_vocab: int | None = None
    """Upper bound of the ids that the engine may sample; None if it is not known."""
    num_layers: int = 0
    top_k_experts: int = 0
    num_experts: int = 0


MOST_WRITTEN = 640 * 2**20
"""Bytes of kept prompts: those of 1,024 agents at 60,000 tokens, ten bytes each."""
_MOST_BRANCHES = 4
"""Prompts kept of one session: its agent's, and those of sub-agents at work."""


@dataclass(frozen=True, slots=True)
class _PromptText:
    ids: bytes
    text: bytes


class WrittenPrompts:
    """The latest prompts of each session as JSON: the next one repeats one, so its end is new."""

    def __init__(self, num_vocab: int | None, *, most_bytes: int = MOST_WRITTEN) -> None:
        """`num_vocab`: upper bound of the ids; None if it is not known."""
        self.num_bytes = 0
        self._num_vocab = num_vocab
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, list[_PromptText]] = OrderedDict()
        """By session, the latest last; of each, the latest first."""

    def write(self, ids: Sequence[int], session: str) -> bytes:
        """Return a prompt as JSON. Raises EngineError on an id outside the vocabulary."""
        array_ids = ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)
        whole = array_ids.tobytes()
        prompts = self._kept.get(session, [])
        old = next(
            (prompt for prompt in prompts if whole.startswith(prompt.ids)), _PromptText(b"", b"")
        )
        new = array("i", whole[len(old.ids) :])
        self._check(new)
        parts = (old.text, orjson.dumps(new.tolist())[1:-1])
        written = _PromptText(whole, b",".join(filter(None, parts)))
        # No other prompt will continue `old`.
        branches = [written, *(prompt for prompt in prompts if prompt is not old)]
        self._kept[session] = branches[:_MOST_BRANCHES]
        self._kept.move_to_end(session)
        self.num_bytes += _size([written]) - _size([old, *branches[_MOST_BRANCHES:]])
        while self.num_bytes > self._most_bytes:
            self.num_bytes -= _size(self._kept.popitem(last=False)[1])
        return b"[%b]" % written.text

    def _check(self, ids: array[int]) -> None:
        """Refuse an id outside the embedding: it would crash SGLang's server."""
        top = math.inf if self._num_vocab is None else self._num_vocab
        if ids and not (min(ids) >= 0 and max(ids) < top):
            wrong = next(token for token in ids if not 0 <= token < top)
            raise EngineError(
                f"prompt id {wrong} is outside the vocabulary of {self._num_vocab}",
                hint="tokenizer and model belong to different families",
            )


def _size(prompts: Sequence[_PromptText]) -> int:
    return sum(len(prompt.ids) + len(prompt.text) for prompt in prompts)


def generate_body(prompt: bytes, sampling: Sampling, rid: str, *, routed: bool) -> dict[str, Any]:
    """Build the body of /generate; `prompt` is a JSON list of ids."""
    params: dict[str, Json] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": orjson.Fragment(prompt),
        "sampling_params": params,
        "return_logprob": True,
    }
    if routed:
        body |= {"return_routed_experts": True, "routed_experts_start_len": sampling.num_routed}
    return body


def read_completion(
    answer: Mapping[str, Any],
    shape: ServedShape,
    *,
    num_prompt: int = 0,
    routed_from: int | None = None,
) -> Completion:
    """Check and convert an answer of /generate. Raises EngineError on any inconsistency.

    `routed_from` is the first position whose routed experts were requested; None requests none.
    """
    try:
        meta = answer["meta_info"]
        ids = tuple(answer["output_ids"])
        pairs = meta.get("output_token_logprobs") or ()
        finish = FINISH[meta["finish_reason"]["type"]]
        routed = None
        if routed_from is not None and finish is not Finish.ABORT:
            routed = _routed(meta, shape, routed_from, num_prompt + len(ids) - 1 - routed_from)
        # The version of the first token counts: staleness is measured from it.
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
        completion = Completion(
            ids=ids,
            logprobs=tuple(float(pair[0]) for pair in pairs),
            finish=finish,
            weight_version=str(spans[0]["version"]),
            prompt_tokens=meta.get("prompt_tokens", 0),
            cached_tokens=meta.get("cached_tokens", 0),
            weight_changes=tuple(
                WeightChange(int(span["start"]), str(span["version"])) for span in spans[1:]
            ),
            routed=routed,
        )
        _check_tokens(completion, [pair[1] for pair in pairs], shape.num_vocab)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"the engine's reply is inconsistent: {error!r}",
            hint="does the server implement SGLang's contract?",
        ) from error
    return completion


def _check_tokens(completion: Completion, scored: list[int], num_vocab: int | None) -> None:
    if list(completion.ids) != scored:
        raise ValueError("log-probabilities belong to other ids than the sampled ones")
    if not completion.ids and completion.finish is not Finish.ABORT:
        raise ValueError("nothing was sampled, and the reply was not aborted")
    top = num_vocab if num_vocab is not None else math.inf
    for token, logprob in zip(completion.ids, completion.logprobs, strict=True):
        if not (type(token) is int and 0 <= token < top):
            raise ValueError(f"sampled id {token!r} is outside the vocabulary of {num_vocab}")
        if not -math.inf < logprob <= ROUNDING:
            raise ValueError(f"log-probability {logprob} of id {token}")


def _routed(
    meta: Mapping[str, Any], shape: ServedShape, start: int, num_positions: int
) -> RoutedExperts:
    """Read expert ids [positions, layers, top k], sent as base64 of int32, in fewer bytes."""
    import numpy as np

    sent = meta.get("routed_experts")
    if not sent:
        message = "the engine returned no routed experts"
        hint = "start it with --enable-return-routed-experts, on a mixture-of-experts model"
        raise EngineError(message, hint=hint)
    ids = np.frombuffer(base64.b64decode(sent, validate=True), "<i4")
    expected = num_positions * shape.num_layers * shape.top_k_experts
    if len(ids) != expected:
        raise ValueError(f"{len(ids)} routed experts for {num_positions} positions, not {expected}")
    if len(ids) and not (ids.min() >= 0 and ids.max() < shape.num_experts):
        raise ValueError(f"routed experts from {ids.min()} to {ids.max()} of {shape.num_experts}")
    compact = ids.astype("u1" if shape.num_experts <= 256 else "<u2")
    return RoutedExperts(
        start=start,
        num_layers=shape.num_layers,
        top_k=shape.top_k_experts,
        bytes_per_id=compact.itemsize,
        data=compact.tobytes(),
    )
