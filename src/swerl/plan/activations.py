"""Count the bytes that a rank keeps from the forward pass for the backward pass, per tensor.

The method is that of Korthikanti et al. 2022 (arXiv 2205.05198, section 4). Their 34 bytes per
hidden unit (equation 2) do not hold for grouped queries, gated feed-forward blocks, experts or
linear attention, so every kept tensor is counted here. Attention keeps no scores (FlashAttention,
arXiv 2205.14135, section 3.1), fused SwiGLU keeps its two inputs, and experts are assumed to be
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
_CHUNK = 64
"""Positions per chunk of the gated delta rule's kernels."""


@dataclass(frozen=True, slots=True)
class Splits:
    """The divisors of a tensor's size on one rank."""

    tensor: int
    sequence: int
    """The tensor ranks, if they split the positions between their matrices; else 1."""
    expert_tensor: int

    @classmethod
    def of(cls, layout: Layout) -> Splits:
        sequence = layout.tensor if layout.sequence_parallel else 1
        return cls(layout.tensor, sequence, layout.expert_tensor)


def activation_bytes(shape: Shape, layout: Layout, *, positions: int, recompute: bool) -> float:
    """Return the peak on a rank of the first pipeline stage, with `positions` per micro-batch.

    Under the 1F1B schedule the first stage holds as many micro-batches as there are stages
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1). With `recompute` it keeps the input
    of each layer, and one whole layer at a time.
    """
    splits = Splits.of(layout)
    stage = range(shape.num_layers // layout.pipeline)
    whole = [layer_bytes(shape, splits, layer) for layer in stage]
    entry = shape.hidden_size / splits.sequence * _BF16
    kept = len(stage) * entry + max(whole) if recompute else sum(whole)
    in_flight = layout.pipeline
    extra = (in_flight - 1) * (len(stage) * entry if recompute else sum(whole))
    return positions * (kept + extra + in_flight * entry + _gradients(shape, splits))


def logit_bytes(shape: Shape, layout: Layout, *, positions: int) -> float:
    """Return the peak of the output layer if every position is trained: that of one chunk.

    One tensor rank keeps the log-softmax and the gradients on both sides of it, in fp32. Several
    keep the logits and an fp32 copy, on which Megatron-Core's cross-entropy works in place.
    """
    per_logit = 3 * _FP32 if layout.tensor == 1 else _BF16 + _FP32
    vocab = shape.vocab_size / layout.tensor
    return min(positions, max(1, CHUNK_LOGITS // vocab)) * vocab * per_logit


def layer_bytes(shape: Shape, splits: Splits, layer: int) -> float:
    """Return the bytes that one layer keeps per position without recomputation."""
    norms = 4 * shape.hidden_size / splits.sequence * _BF16
    mixer = _attention(shape, splits) if shape.has_attention(layer) else _linear(shape, splits)
    if shape.has_experts(layer):
        return norms + mixer + _experts(shape, splits)
    return norms + mixer + 3 * shape.ffn_size / splits.tensor * _BF16


def _attention(shape: Shape, splits: Splits) -> float:
    """Queries, keys, values and outputs; queries and keys before their norms; gate and its product;
    one fp32 log-sum per head."""
    queries = shape.num_heads * shape.head_dim / splits.tensor
    keys = max(shape.num_kv_heads / splits.tensor, 1) * shape.head_dim
    kept = 2 * queries + 2 * keys
    kept += (queries + keys) * shape.qk_norm
    kept += 2 * queries * shape.gated_attention
    return kept * _BF16 + shape.num_heads / splits.tensor * _FP32


def _linear(shape: Shape, splits: Splits) -> float:
    """Before and after the convolution; queries and keys normalised for each value head; output
    gate, output and normalised output; each head's matrix within a chunk; fp32 decay and beta."""
    heads = shape.linear_num_value_heads / splits.tensor
    keys, values = shape.linear_key_size / splits.tensor, shape.linear_value_size / splits.tensor
    key_dim = shape.linear_key_size / shape.linear_num_key_heads
    kept = 2 * (2 * keys + values) + 2 * heads * key_dim + 3 * values + _CHUNK * heads
    return kept * _BF16 + 2 * heads * _FP32


def _experts(shape: Shape, splits: Splits) -> float:
    """The copies of a position that its experts read, their two inputs of SwiGLU and its output;
    the shared expert's; fp32 logits and scores of the router."""
    inner = 3 * shape.expert_ffn_size / splits.expert_tensor
    copies = shape.experts_per_token * splits.expert_tensor / splits.sequence
    routed = copies * (shape.hidden_size + inner) * _BF16
    shared = 3 * shape.shared_ffn_size / splits.tensor * _BF16
    return routed + shared + 2 * shape.num_experts / splits.sequence * _FP32


def _gradients(shape: Shape, splits: Splits) -> float:
    """The gradients that exist at once: of a layer's output and of its widest inner tensor."""
    copies = shape.experts_per_token * splits.expert_tensor / splits.sequence
    widest = max(
        2 * shape.ffn_size / splits.tensor,
        copies * max(shape.hidden_size, 2 * shape.expert_ffn_size / splits.expert_tensor),
        (2 * shape.linear_key_size + shape.linear_value_size) / splits.tensor,
        shape.num_heads * shape.head_dim / splits.tensor,
    )
    return (shape.hidden_size / splits.sequence + widest) * _BF16
