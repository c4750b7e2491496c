"""From hidden states to log-probabilities, without ever holding the logits of many positions.

Logits are by far the widest tensor of a forward pass. Many positions go through the output layer a
chunk at a time, and a chunk's logits are made again for its backward pass.

Axes: O positions of this context rank, S those of all context ranks, C positions of a chunk, V
vocabulary of this tensor rank, H hidden.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from torch.utils.checkpoint import checkpoint

from swerl.plan.activations import CHUNK_LOGITS

ToLogits = Callable[[torch.Tensor], torch.Tensor]
"""The output layer: (C, H) to (C, V)."""


def log_probs(
    to_logits: ToLogits, hidden_OH: torch.Tensor, labels_O: torch.Tensor, *, vocab: int
) -> torch.Tensor:
    """Return the log-probability of each label, in fp32. `vocab` is V."""
    size = max(1, CHUNK_LOGITS // vocab)
    if len(labels_O) <= size:
        return _chunk(to_logits, hidden_OH, labels_O)
    chunks = zip(torch.split(hidden_OH, size), torch.split(labels_O, size), strict=True)
    return torch.cat(
        [checkpoint(_chunk, to_logits, *chunk, use_reentrant=False) for chunk in chunks]
    )


def over_context(logp_O: torch.Tensor, place_O: torch.Tensor, num_selected: int) -> torch.Tensor:
    """Return `logp_S`, the same on all context ranks; `place_O` says which of the S `logp_O` are.

    All of them compute the same loss of it. Each takes the gradient of what it put in, so that
    summed over the ranks it counts once.
    """
    logp_S: torch.Tensor = _OverContext.apply(  # type: ignore[no-untyped-call]
        logp_O, place_O, num_selected
    )
    return logp_S


class _OverContext(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logp_O: torch.Tensor, place_O: torch.Tensor, num_selected: int
    ) -> torch.Tensor:
        ctx.save_for_backward(place_O)
        logp_S = logp_O.new_zeros(num_selected).index_copy(0, place_O, logp_O)
        group = parallel_state.get_context_parallel_group()
        torch.distributed.all_reduce(logp_S, group=group)
        return logp_S

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (place_O,) = ctx.saved_tensors
        return grads[0][place_O], None, None


def _chunk(to_logits: ToLogits, hidden_CH: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
    logits_CV = to_logits(hidden_CH)
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return -F.cross_entropy(logits_CV.float(), labels_C, reduction="none")
    loss_C: torch.Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits_CV, labels_C)
    return -loss_C
