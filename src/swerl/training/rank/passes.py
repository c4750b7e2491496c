"""Megatron-Core's schedules over the micro-batches of this rank, with or without pipeline stages.

Stages pass activations of each micro-batch's own length. Only the last stage has log-probabilities
and the loss; figures are counted on one of the ranks that hold the same rows, and told to all.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from swerl.training.rank.context import Share
from swerl.training.rank.microbatch import MicroBatch

Figures = Mapping[str, float]
MicroLoss = Callable[[MicroBatch, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, Figures]]
"""The loss of a micro-batch, from its log-probabilities and the reference's, and its figures."""


def own_share() -> Share:
    """Return which part of every row this rank holds."""
    return Share(
        context_ranks=parallel_state.get_context_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        tensor_ranks=parallel_state.get_tensor_model_parallel_world_size(),
    )


def counts() -> bool:
    """Return whether this rank's figures count: on the last stage, first among equals."""
    shares = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )
    return shares == (0, 0) and bool(parallel_state.is_pipeline_last_stage())


def log_probs(
    model: torch.nn.Module, micro_batches: Sequence[MicroBatch]
) -> list[torch.Tensor | None]:
    """Return `logp_S` of each micro-batch without a gradient; none off the last stage."""
    with torch.no_grad():
        found: list[torch.Tensor] = _run(model, micro_batches, _without_loss, forward_only=True)
    return list(found) or [None] * len(micro_batches)


def gradients(
    model: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    reference: Sequence[torch.Tensor | None],
    loss: MicroLoss,
) -> list[Figures]:
    """Add up gradients over micro-batches and ranks; return the figures that count here."""
    inputs = list(zip(micro_batches, reference, strict=True))
    found: list[Figures] = _run(model, inputs, partial(_with_loss, loss), forward_only=False)
    return found if counts() else []


def _run(
    model: torch.nn.Module,
    inputs: Sequence[Any],
    forward_step: Callable[..., Any],
    *,
    forward_only: bool,
) -> list[Any]:
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(inputs),
        model=[model],
        num_microbatches=len(inputs),
        seq_length=0,  # each stage tells the next the shape of what it sends
        micro_batch_size=0,
        forward_only=forward_only,
    )
    return results


def _without_loss(
    inputs: Iterator[MicroBatch], model: torch.nn.Module
) -> tuple[torch.Tensor, None]:
    return model(next(inputs).rows), None


def _with_loss(
    loss: MicroLoss,
    inputs: Iterator[tuple[MicroBatch, torch.Tensor | None]],
    model: torch.nn.Module,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Figures]]]:
    micro, ref_logp_S = next(inputs)

    def of_output(logp_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Figures]:
        value, figures = loss(micro, logp_S, ref_logp_S)
        return value, _NO_TOKENS, figures

    return model(micro.rows), of_output


_NO_TOKENS = torch.tensor(0, dtype=torch.int)
"""What Megatron would divide gradients by; ours need no divisor."""
