"""A rough estimate of one GPU's memory in training and in rollout.

Counted: bf16 weights, fp32 gradients, fp32 master weights and Adam's two moments spread over the
copies, the inputs of recomputed layers, one layer at work, and the logits with their gradient.
Not counted: the allocator's gaps, communication buffers, CUDA's own memory. Expect 10 to 20 % more.
"""

from __future__ import annotations

from dataclasses import dataclass

from swerl.recipe.schema import Recipe
from swerl.training.layout import Layout
from swerl.training.shape import Shape

GPU_GIB = {"a100": 80.0, "h100": 80.0, "h200": 141.0, "b200": 180.0}
"""Memory of one GPU, by the name that the price book uses too."""

_WEIGHT_BYTES = 2
_GRAD_BYTES = 4
_OPTIMIZER_BYTES = 12
_GIB = 2**30
_LAYER_FACTOR = 34
"""Bytes that one layer keeps per position and hidden unit when nothing is recomputed, attention
scores excepted (Korthikanti et al. 2022, equation 2)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Estimated GiB of one GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    engine_weights: float
    """The engine's copy of the weights, which a colocated trainer makes room for in turn."""

    @property
    def training(self) -> float:
        """Sum while the trainer works."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def memory(recipe: Recipe, shape: Shape, found: Layout) -> Memory:
    """Estimate the memory of one GPU, the fullest pipeline stage."""
    dense = (shape.dense_params / found.pipeline + shape.embedding_params) / found.tensor
    experts = shape.expert_params / (found.pipeline * found.expert * found.expert_tensor)
    optimizer = dense / (found.data * found.context) + experts / found.expert_data
    if recipe.trainer.offload_optimizer:
        optimizer = 0.0
    positions = recipe.trainer.tokens_per_micro_batch
    logits = positions * shape.vocab_size / found.tensor * 4 * 2
    return Memory(
        weights=(dense + experts) * _WEIGHT_BYTES / _GIB,
        gradients=(dense + experts) * _GRAD_BYTES / _GIB,
        optimizer=optimizer * _OPTIMIZER_BYTES / _GIB,
        activations=_activations(recipe, shape, found) / _GIB,
        logits=logits / _GIB,
        engine_weights=shape.params * _WEIGHT_BYTES / found.gpus_per_engine / _GIB,
    )


def _activations(recipe: Recipe, shape: Shape, found: Layout) -> float:
    split = found.tensor if found.sequence_parallel else 1
    units = recipe.trainer.tokens_per_micro_batch / split * shape.hidden_size
    layers = shape.num_layers / found.pipeline
    expert_units = recipe.trainer.tokens_per_micro_batch / split * shape.expert_ffn_size
    one_layer = units * _LAYER_FACTOR + expert_units * shape.experts_per_token * 6
    if recipe.trainer.recompute:
        return layers * units * _WEIGHT_BYTES + one_layer
    return layers * one_layer
