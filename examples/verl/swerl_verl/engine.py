"""verl's own servers as swerl's engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swerl.core.chat import Finish
from swerl.core.errors import EngineError, EngineLostError, first_line
from swerl.core.learning import WeightRef
from swerl.core.turn import Completion, Sampling

_FINISH = {
    "aborted": Finish.ABORT,
    "abort": Finish.ABORT,
    "length": Finish.LENGTH,
    "stop": Finish.STOP,
}
"""Stop reason of verl -> the reason here. vLLM's servers say `completed` for two of them."""


class VerlEngine:
    """Implements Engine over verl's LLMServerClient: token ids in, ids and log-probabilities out.

    verl's trainer pauses its servers and publishes weights itself.
    """

    def __init__(self, client: Any) -> None:
        """`client` is the `server_manager` of an agent loop."""
        self._client = client

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Sample one reply on the session's server. Raises EngineError without log-probabilities,
        and EngineLostError if the client raises."""
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "repetition_penalty": 1.0,
            "logprobs": True,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        try:
            output = await self._client.generate(
                request_id=session, prompt_ids=list(ids), sampling_params=params
            )
        except Exception as error:  # the boundary: verl's servers are Ray actors of many kinds
            raise EngineLostError(f"verl's server failed: {first_line(error)}") from error
        sampled, logprobs = tuple(output.token_ids), tuple(output.log_probs or ())
        if len(logprobs) != len(sampled):
            message = f"verl's server returned {len(logprobs)} log-probabilities of {len(sampled)}"
            raise EngineError(message, hint="choose a rollout engine of verl that returns them")
        is_ended = bool(sampled) and sampled[-1] in sampling.stop_token_ids
        ended = Finish.STOP if is_ended else Finish.LENGTH
        extra = output.extra_fields
        step = extra.get("min_global_steps")
        return Completion(
            sampled,
            logprobs,
            _FINISH.get(output.stop_reason, ended),
            weight_version=str(0 if step is None else step),
            prompt_tokens=len(ids),
            cached_tokens=extra.get("num_cached_tokens") or 0,
        )

    async def abort(self, session: str) -> None:
        """Do nothing: verl's client can stop no request, which then runs to its token limit."""

    async def pause(self) -> None:
        """Do nothing: verl's trainer does it."""

    async def load(self, weights: WeightRef) -> str:
        """Return the version: verl's trainer has published the weights."""
        return weights.version

    async def resume(self) -> None:
        """Do nothing: verl's trainer does it."""

    async def close(self) -> None:
        """Do nothing: the client belongs to verl."""
