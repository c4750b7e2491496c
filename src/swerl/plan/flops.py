"""How much arithmetic a row costs: a part that grows with its length, and one with its square.

Counted are the multiply-adds of matrix products, as Narayanan et al. 2021 (arXiv 2104.04473,
section 5.1) and the PaLM paper (arXiv 2204.02311, appendix B) do: 2 operations each, and twice as
many in the backward pass as in the forward pass. Norms, softmax and rotary embeddings are not.
"""

from __future__ import annotations

from dataclasses import dataclass

from swerl.plan.parameters import active_params
from swerl.plan.shape import Shape

_TRAINING = 6
"""Operations per multiply-add of a forward and a backward pass."""
_CHUNK = 64
"""Positions that the gated delta rule's kernels work on at a time."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """Operations of one training pass over a row, as a polynomial in its length."""

    per_token: float
    per_token_pair: float

    def of(self, length: int) -> float:
        """Return the operations of a row of `length` positions."""
        return self.per_token * length + self.per_token_pair * length**2


def row_cost(shape: Shape) -> RowCost:
    """Return a model's cost of a row, the output layer on every position included.

    Causal attention multiplies each query with half of the keys on average, and its probabilities
    with as many values: T^2 / 2 times 2 times the queries' width. Linear attention's chunked form
    (arXiv 2412.06464, section 3.3) does the same within chunks, and reads and writes a state of
    key width times value width for each head.
    """
    attention = shape.num_attention_layers * shape.num_heads * shape.head_dim
    return RowCost(
        per_token=_TRAINING * (_matrix_params(shape) + _linear_attention(shape)),
        per_token_pair=_TRAINING * attention,
    )


def _matrix_params(shape: Shape) -> float:
    """Return the parameters that multiply one token: looking up an embedding costs nothing."""
    lookup = 0 if shape.tied else shape.vocab_size * shape.hidden_size
    return active_params(shape) - lookup


def _linear_attention(shape: Shape) -> float:
    if not shape.num_linear_layers:
        return 0.0
    keys, values = shape.linear_key_size, shape.linear_value_size
    state = 2 * values * keys / shape.linear_num_key_heads
    return shape.num_linear_layers * (state + _CHUNK * (keys + values))
