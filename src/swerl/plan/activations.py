"""Count the bytes that a rank keeps from the forward pass for the backward pass, per tensor.

The method is that of Korthikanti et al. 2022 (arXiv 2205.05198, section 4). Their 34 bytes per
hidden unit (equation 2) do not hold for grouped queries, gated feed-forward blocks, experts or
linear attention, so every kept tensor is counted here, as `training/rank/` computes it. Attention
keeps no scores (FlashAttention, arXiv 2205.14135, section 3.1), and experts are assumed to be
balanced. Tensors are bf16 unless marked fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from swerl.plan.layout import Layout
from swerl.plan.shape import Shape

_BF16 = 2
_FP32 = 4
CHUNK_LOGITS = 1 << 28
"""Logits that a rank computes at a time (`training/rank/model.py`): at most 1 GiB of fp32."""
SHARED_COPIES = 2
"""Largest number of keys that one call of attention gathers for rows that share prefixes, over the
pack's positions (`training/rank/attention.py`)."""
EXPERT_IMBALANCE = 0.3
"""Positions of the busiest rank's experts above an even share. Assumed."""
_CHUNK = 64
"""Positions per chunk of the gated delta rule's kernels."""
_GATED_UNIT = 3
"""Tensors that SwiGLU keeps: both halves of its input, and the product."""


@dataclass(frozen=True, slots=True)
class Splits:
    """The divisors of a tensor's size on one rank."""

    tensor: int
    sequence: int
    """The tensor ranks, if they split the positions between their matrices; else 1."""
    expert_tensor: int
    context: int = 1
    """The ranks whose keys and values each of them gathers."""
    copies: int = 1
    """Copies of all keys and values: with shared prefixes each row has those of its own path."""

    @classmethod
    def of(cls, layout: Layout, *, shared: bool = False) -> Splits:
        sequence = layout.tensor if layout.sequence_parallel else 1
        copies = SHARED_COPIES if shared else 1
        return cls(layout.tensor, sequence, layout.expert_tensor, layout.context, copies)


def recomputed_layers(recompute: bool | int, num_layers: int) -> int:
    """Return how many of a pipeline stage's layers `trainer.recompute` names: the first ones."""
    return num_layers if recompute is True else min(recompute, num_layers)


def activation_bytes(
    shape: Shape, layout: Layout, *, positions: int, recompute: bool | int, shared: bool = False
) -> float:
    """Return the peak on a rank of the first pipeline stage, with `positions` per micro-batch.

    Under the 1F1B schedule the first stage holds as many micro-batches as there are stages
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1). It keeps the input of each recomputed
    layer. These are the first layers and the last ones of the backward pass, so they are whole, one
    at a time, when all others are freed. `shared` is whether rows share prefixes.
    """
    splits = Splits.of(layout, shared=shared)
    stage = range(shape.num_layers // layout.pipeline)
    surplus = EXPERT_IMBALANCE * _routed(shape, splits)
    whole = [
        layer_bytes(shape, splits, layer) + surplus * shape.has_experts(layer) for layer in stage
    ]
    entry = shape.hidden_size / splits.sequence * _BF16
    again = recomputed_layers(recompute, len(stage))
    stored = again * entry + sum(whole[again:])
    peak = again * entry + max(sum(whole[again:]), *whole[:again], 0)
    in_flight = layout.pipeline
    extra = (in_flight - 1) * stored
    return positions * (peak + extra + in_flight * entry + _gradients(shape, splits))


def logit_bytes(shape: Shape, layout: Layout, *, positions: int) -> float:
    """Return the peak of the output layer if every position is trained: that of one chunk.

    One tensor rank keeps the log-softmax and the gradients on both sides of it, in fp32. Several
    keep the logits and an fp32 copy, on which Megatron-Core's cross-entropy works in place.
    """
    per_logit = 3 * _FP32 if layout.tensor == 1 else _BF16 + _FP32
    vocab = shape.vocab_size / layout.tensor
    return min(positions, max(1, CHUNK_LOGITS // vocab)) * vocab * per_logit


def layer_bytes(shape: Shape, splits: Splits, layer: int) -> float:
    """Return the bytes that one layer keeps per position without recomputation.

    Norms, gated units, FlashAttention, the grouped matrix product and the kernels of a delta net
    keep their inputs and little else. A test counts the living bytes of the real layers.
    """
    norms = 2 * 2 * shape.hidden_size / splits.sequence * _BF16
    mixer = _attention(shape, splits) if shape.has_attention(layer) else _linear(shape, splits)
    if shape.has_experts(layer):
        return norms + mixer + _experts(shape, splits)
    return norms + mixer + _GATED_UNIT * shape.ffn_size / splits.tensor * _BF16


def _attention(shape: Shape, splits: Splits) -> float:
    """The projection; copies of queries, which their norm reads, and of their gates; queries and
    keys after rotation; the output with one fp32 log-sum a head; its product with the gate. Context
    ranks keep all gathered keys and values, and the output in both of its orders."""
    queries = shape.num_heads * shape.head_dim / splits.tensor
    keys = max(shape.num_kv_heads / splits.tensor, 1) * shape.head_dim
    gates = queries * shape.gated_attention
    stored = (queries + gates + 2 * keys) * _BF16
    stored += (queries * shape.qk_norm + gates) * _BF16
    stored += (queries + keys) * _BF16
    stored += (queries + gates) * _BF16 + shape.num_heads / splits.tensor * _FP32
    if splits.context * splits.copies > 1:
        stored += (queries + 2 * keys * splits.context * splits.copies) * _BF16
    return stored


def _linear(shape: Shape, splits: Splits) -> float:
    """The convolution's input; queries, keys and values, each value head's matrix within a chunk;
    the norm's input, gate and output; six fp32 numbers of each head."""
    heads = shape.linear_num_value_heads / splits.tensor
    keys, values = shape.linear_key_size / splits.tensor, shape.linear_value_size / splits.tensor
    convolution = (2 * keys + values) * _BF16
    rule = (2 * keys + values + _CHUNK * heads) * _BF16 + 6 * heads * _FP32
    return convolution + rule + 3 * values * _BF16


def _experts(shape: Shape, splits: Splits) -> float:
    """The copies of a position that its experts read and their gated units; the shared expert's,
    and its output before its gate; the router's scores, weights and choices in fp32."""
    gate = shape.hidden_size / splits.sequence if shape.gated_attention else 0.0
    shared = (_GATED_UNIT * shape.shared_ffn_size / splits.tensor + gate) * _BF16
    router = 3.5 * shape.num_experts / splits.sequence * _FP32
    return _routed(shape, splits) + shared + router


def _routed(shape: Shape, splits: Splits) -> float:
    """The copies of a position that its experts read, and their gated units, in even balance."""
    inner = _GATED_UNIT * shape.expert_ffn_size / splits.expert_tensor
    copies = shape.experts_per_token * splits.expert_tensor / splits.sequence
    return copies * (shape.hidden_size + inner) * _BF16


def _gradients(shape: Shape, splits: Splits) -> float:
    """The gradients that exist at once: of a layer's output and of its widest inner tensor, and of
    the convolution's input and output. An estimate."""
    copies = shape.experts_per_token * splits.expert_tensor / splits.sequence
    channels = (2 * shape.linear_key_size + shape.linear_value_size) / splits.tensor
    widest = max(
        2 * shape.ffn_size / splits.tensor * _BF16,
        copies * max(shape.hidden_size, 2 * shape.expert_ffn_size / splits.expert_tensor) * _BF16,
        2 * channels * _BF16 if shape.num_linear_layers else 0.0,
        shape.num_heads * shape.head_dim / splits.tensor * _BF16,
    )
    return shape.hidden_size / splits.sequence * _BF16 + widest
