"""SGLang's wire format as the CPU server reads and writes it."""

from __future__ import annotations

from typing import TypeVar
from uuid import uuid4

from aiohttp import web
from pydantic import BaseModel, Field, ValidationError

from swerl.core.chat import Json
from swerl.core.errors import EngineError
from swerl.engines._torch_jobs import Ended, PauseMode, Request
from swerl.engines._torch_model import Shape
from swerl.engines._torch_rows import MAX_STOP_IDS


class BadRequestError(EngineError):
    """The client asks for something that this server cannot do."""


class SamplingBody(BaseModel):
    """`sampling_params`; what is not named here is refused, never silently ignored."""

    model_config = {"extra": "forbid"}

    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)


class GenerateBody(BaseModel):
    """POST /generate."""

    input_ids: list[int] = Field(min_length=1)
    rid: str = Field(default_factory=lambda: uuid4().hex)
    sampling_params: SamplingBody = SamplingBody()
    return_logprob: bool = False


class AbortBody(BaseModel):
    """POST /abort_request."""

    rid: str = ""
    abort_all: bool = False


class PauseBody(BaseModel):
    """POST /pause_generation."""

    mode: PauseMode = PauseMode.ABORT


class UpdateBody(BaseModel):
    """POST /update_weights_from_disk."""

    model_path: str
    flush_cache: bool = True
    weight_version: str | None = None


class CheckBody(BaseModel):
    """POST /weights_checker."""

    action: str = Field(default="checksum", pattern="^checksum$")


Body = TypeVar("Body", bound=BaseModel)


async def read_body(http: web.Request, kind: type[Body]) -> Body:
    """Parse a request's JSON. Raises BadRequestError naming the first wrong field."""
    try:
        return kind.model_validate_json(await http.read() or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequestError(f"{where}: {first['msg']}") from error


def to_request(body: GenerateBody, *, shape: Shape, context: int, free_seed: int) -> Request:
    """Check a body against the model. `free_seed` serves where the client sets none."""
    sampling = body.sampling_params
    if unknown := [i for i in body.input_ids if not 0 <= i < shape.vocab]:
        raise BadRequestError(f"input id {unknown[0]} is outside the vocabulary of {shape.vocab}")
    total = len(body.input_ids) + sampling.max_new_tokens
    if total > context:
        raise BadRequestError(
            f"{len(body.input_ids)} input ids plus {sampling.max_new_tokens} new tokens exceed "
            f"the context length of {context}"
        )
    stop_ids = set(sampling.stop_token_ids or ()) | set(shape.eos_ids)
    if len(stop_ids) > MAX_STOP_IDS:
        raise BadRequestError(f"{len(stop_ids)} stop ids; at most {MAX_STOP_IDS} are supported")
    seed = free_seed if sampling.sampling_seed is None else sampling.sampling_seed
    return Request(
        rid=body.rid,
        ids=tuple(body.input_ids),
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_ids=() if sampling.ignore_eos else tuple(sorted(stop_ids)),
        seed=seed % 2**64,
    )


def reply(ended: Ended, version: str, return_logprob: bool) -> Json:
    """Build the body of a finished /generate. `version` serves a request that never ran."""
    num_output = len(ended.output_ids)
    spans = ended.versions or ((version, 0),)
    ends = [start for _, start in spans[1:]] + [num_output]
    meta: dict[str, Json] = {
        "id": ended.request.rid,
        "finish_reason": _finish(ended),
        "prompt_tokens": len(ended.request.ids),
        "completion_tokens": num_output,
        "cached_tokens": ended.cached_tokens,
        "weight_version": spans[-1][0],
        "weight_versions": [
            {"version": name, "start": start, "end": end}
            for (name, start), end in zip(spans, ends, strict=True)
        ],
    }
    if return_logprob:
        pairs = zip(ended.logprobs, ended.output_ids, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    return {"text": "", "output_ids": list(ended.output_ids), "meta_info": meta}


def _finish(ended: Ended) -> Json:
    if ended.reason == "stop":
        return {"type": "stop", "matched": ended.output_ids[-1]}
    if ended.reason == "length":
        return {"type": "length", "length": ended.request.max_new_tokens}
    return {"type": "abort", "message": "Aborted"}
