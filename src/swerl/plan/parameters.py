"""Count parameters, of a model and of one rank of a layout, and the arithmetic of a training row.

Tensor ranks split matrices by heads or width, and hold norms, routers and gates whole. Layers are
split over pipeline stages, experts over expert ranks and expert-tensor ranks. Arithmetic counts the
multiply-adds of matrix products, as Narayanan et al. 2021 (arXiv 2104.04473, section 5.1) and the
PaLM paper (arXiv 2204.02311, appendix B) do: 2 operations each, and twice as many in the backward
pass as in the forward pass. Norms, softmax and rotary embeddings are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from swerl.plan.layout import Layout
from swerl.plan.shape import Shape
from swerl.recipe.schema import LoraSection


@dataclass(frozen=True, slots=True)
class ParamCounts:
    """Numbers of parameters by the way in which ranks share them."""

    split: int = 0
    """Split over tensor ranks."""
    key_value: int = 0
    """Split over tensor ranks too, but never below one head."""
    whole: int = 0
    """On every tensor rank."""
    expert: int = 0
    """Of routed experts."""

    def __add__(self, other: ParamCounts) -> ParamCounts:
        return ParamCounts(
            self.split + other.split,
            self.key_value + other.key_value,
            self.whole + other.whole,
            self.expert + other.expert,
        )

    @property
    def total(self) -> int:
        return self.split + self.key_value + self.whole + self.expert


@dataclass(frozen=True, slots=True)
class RankParams:
    """Parameters on one rank."""

    dense: int
    """All but routed experts: copies are the data and context ranks."""
    expert: int
    """Of routed experts: copies are the expert data ranks."""

    @property
    def total(self) -> int:
        return self.dense + self.expert


def model_params(shape: Shape) -> ParamCounts:
    return _sum(shape, range(shape.num_layers)) + _ends(shape, first=True, last=True)


def active_params(shape: Shape) -> int:
    """Return the parameters that one token uses."""
    return _active(shape, model_params(shape))


def _active(shape: Shape, params: ParamCounts) -> int:
    idle = 1 - shape.experts_per_token / shape.num_experts if shape.num_experts else 0
    return params.total - round(idle * params.expert)


def trained_params(shape: Shape, lora: LoraSection) -> int:
    """Return the parameters that the optimizer changes: the adapters, or all."""
    if lora.rank:
        return _adapters(shape, lora, range(shape.num_layers)).total
    return model_params(shape).total


def rank_params(shape: Shape, layout: Layout, lora: LoraSection | None = None) -> RankParams:
    """Return the parameters, or with `lora` the adapters, of a rank of the fullest stage."""
    stages = (_stage(shape, layout, stage, lora) for stage in range(layout.pipeline))
    return max(stages, key=lambda params: params.total)


def _stage(shape: Shape, layout: Layout, stage: int, lora: LoraSection | None) -> RankParams:
    size = shape.num_layers // layout.pipeline
    layers = range(stage * size, (stage + 1) * size)
    if lora:
        params = _adapters(shape, lora, layers)
    else:
        params = _sum(shape, layers)
        params += _ends(shape, first=stage == 0, last=stage == layout.pipeline - 1)
    key_value = params.key_value // min(layout.tensor, shape.num_kv_heads)
    return RankParams(
        dense=params.split // layout.tensor + key_value + params.whole,
        expert=params.expert // (layout.expert * layout.expert_tensor),
    )


@cache
def _sum(shape: Shape, layers: range) -> ParamCounts:
    params = ParamCounts()
    for layer in layers:
        params += _attention(shape) if shape.has_attention(layer) else _linear_attention(shape)
        params += _experts(shape) if shape.has_experts(layer) else _feed_forward(shape)
    return params


def _adapters(shape: Shape, lora: LoraSection, layers: range) -> ParamCounts:
    """Count A and B of each matrix; tensor ranks split B with outputs and A with inputs."""
    hidden, rank, params = shape.hidden_size, lora.rank, ParamCounts()
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    values = shape.linear_value_size
    mixed = 2 * shape.linear_key_size + 2 * values + 2 * shape.linear_num_value_heads
    for layer in layers:
        if not shape.has_attention(layer):
            if "delta_net" in lora.targets:
                params += ParamCounts(split=rank * (mixed + values), whole=5 * rank * hidden)
        elif "attention" in lora.targets:
            split = (2 + shape.gated_attention) * queries
            params += ParamCounts(rank * split, 2 * rank * keys, 4 * rank * hidden)
        routed = shape.has_experts(layer)
        width = shape.shared_ffn_size if routed else shape.ffn_size
        if "mlp" in lora.targets and width:
            params += ParamCounts(split=3 * rank * width, whole=3 * rank * hidden)
        if "experts" in lora.targets and routed:
            per_expert = rank * (2 * hidden + 3 * shape.expert_ffn_size)
            params += ParamCounts(expert=shape.num_experts * per_expert)
    return params


def _ends(shape: Shape, *, first: bool, last: bool) -> ParamCounts:
    """Return embeddings and the last norm; tied embeddings on one rank are one matrix."""
    matrix = shape.vocab_size * shape.hidden_size
    matrices = 1 if first and last and shape.tied else first + last
    return ParamCounts(split=matrices * matrix, whole=shape.hidden_size * last)


def _attention(shape: Shape) -> ParamCounts:
    queries = shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    bias = shape.qkv_bias
    outer = 3 if shape.gated_attention else 2
    return ParamCounts(
        split=outer * shape.hidden_size * queries + bias * queries,
        key_value=2 * keys * (shape.hidden_size + bias),
        whole=shape.hidden_size + 2 * shape.head_dim * shape.qk_norm,
    )


def _linear_attention(shape: Shape) -> ParamCounts:
    """Count a gated delta net: projections, convolution, decay and its gates, norms."""
    keys, values, heads = (
        shape.linear_key_size,
        shape.linear_value_size,
        shape.linear_num_value_heads,
    )
    projections = shape.hidden_size * (2 * keys + 3 * values + 2 * heads)
    convolution = shape.linear_conv_size * (2 * keys + values)
    return ParamCounts(
        split=projections + convolution + 2 * heads, whole=shape.hidden_size + values // heads
    )


def _feed_forward(shape: Shape) -> ParamCounts:
    return ParamCounts(split=3 * shape.hidden_size * shape.ffn_size, whole=shape.hidden_size)


def _experts(shape: Shape) -> ParamCounts:
    hidden = shape.hidden_size
    return ParamCounts(
        split=3 * hidden * shape.shared_ffn_size,
        whole=hidden * (1 + shape.num_experts + shape.shared_gate),
        expert=3 * hidden * shape.expert_ffn_size * shape.num_experts,
    )


_TRAINING = 6
"""Operations per multiply-add of a forward and a backward pass."""
_FROZEN = 4
"""The same of a frozen matrix, which needs no gradient of its own."""
_CHUNK = 64
"""Positions that the gated delta rule's kernels work on at a time."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """Operations of one training pass over a row, as a polynomial in its length."""

    per_token: float
    per_token_pair: float

    def of(self, length: int) -> float:
        return self.per_token * length + self.per_token_pair * length**2


def row_cost(shape: Shape, lora: LoraSection | None = None) -> RowCost:
    """Return the cost of a row, with the output layer on every position.

    With adapters (`lora` with a rank) the model's matrices are frozen.

    Causal attention multiplies each query with half of the keys on average, and its probabilities
    with as many values: T^2 / 2 times 2 times the queries' width. Linear attention's chunked form
    (arXiv 2412.06464, section 3.3) does the same within chunks, and reads and writes a state of
    key width times value width for each head.
    """
    attention = shape.num_attention_layers * shape.num_heads * shape.head_dim
    trained, frozen = _matrix_params(shape), 0.0
    if lora and lora.rank:
        frozen = trained
        trained = _active(shape, _adapters(shape, lora, range(shape.num_layers)))
    return RowCost(
        per_token=_TRAINING * (trained + _linear_attention_flops(shape)) + _FROZEN * frozen,
        per_token_pair=_TRAINING * attention,
    )


def _matrix_params(shape: Shape) -> float:
    """Return the parameters that multiply a token; embedding lookups cost nothing."""
    lookup = 0 if shape.tied else shape.vocab_size * shape.hidden_size
    return active_params(shape) - lookup


def _linear_attention_flops(shape: Shape) -> float:
    if not shape.num_linear_layers:
        return 0.0
    keys, values = shape.linear_key_size, shape.linear_value_size
    state = 2 * values * keys / shape.linear_num_key_heads
    return shape.num_linear_layers * (state + _CHUNK * (keys + values))
