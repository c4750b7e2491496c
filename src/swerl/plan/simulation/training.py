"""The seconds of a simulated optimizer step: arithmetic, starts, exchanges, the pipeline's bubble.

Exchanges are those that `bench/roofline.py` counts: per layer of a micro-batch between tensor,
context and expert ranks, and once a step between data ranks. Nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace

from swerl.plan.activations import recomputed_layers
from swerl.plan.layout import Layout
from swerl.plan.memory import PRECISIONS, GpuModel
from swerl.plan.parameters import RowCost, rank_params, row_cost, trained_params
from swerl.plan.shape import Shape
from swerl.recipe.schema import Recipe

_BF16 = 2
_FP32 = 4


@dataclass(frozen=True, slots=True)
class TrainerSpeed:
    """Speed of a trainer whose ranks wait for each other once a micro-batch."""

    row: RowCost
    """Seconds of a row on the ranks that share a copy of the model, exchanges included."""
    start_s: float
    """Seconds of a micro-batch on one pipeline stage that do not depend on its size."""
    copies: int
    """Data ranks."""
    stages: int
    budget: int
    """Tokens of a micro-batch on all context ranks."""
    step_s: float
    """Gradients between data ranks, and an optimizer on the host."""
    shared: int = 0
    """Tokens that all rows begin with and a micro-batch computes once; 0 if rows are separate."""

    def __call__(self, rows: Sequence[int]) -> float:
        """Return the seconds of a step on rows of these lengths, dealt to the copies."""
        work, start = [0.0] * self.copies, min([*rows, self.shared])
        once = self.row.of(start)
        for row in sorted(rows, reverse=True):
            heapreplace(work, work[0] + self.row.of(row) - once)
        room = max(self.budget - start, 1) * self.copies
        slots = max(-(-(sum(rows) - start * len(rows)) // room), 1)
        # Each stage waits for the first micro-batch to arrive and for the last one to leave.
        bubble = (slots + self.stages - 1) / slots
        return bubble * (max(work) + slots * (self.start_s + once)) + self.step_s


def trainer_speed(
    recipe: Recipe, shape: Shape, layout: Layout, gpu: GpuModel, value: Mapping[str, float]
) -> TrainerSpeed:
    """Return the speed of a recipe's trainer.

    Recomputation repeats the forward pass, which MFU does not count.
    """
    trainer, lora = recipe.trainer, recipe.trainer.lora
    cost, links = row_cost(shape, lora), _Links(layout, gpu, value)
    # With frozen weights the forward pass is about half of the arithmetic.
    stage = shape.num_layers // layout.pipeline
    again = recomputed_layers(trainer.recompute, stage) / stage
    repeated = 1 + (1 / 2 if lora.rank else 1 / 3) * again
    shared = layout.tensor * layout.pipeline * layout.context
    rate = shared * gpu.bf16_flops * value["train_mfu"] * (1 - value["imbalance"]) / repeated
    exchanged = sum(_exchanges(shape, layout, links, passes=2 + again))
    params = rank_params(shape, layout, lora if lora.rank else None)
    each = _FP32 + PRECISIONS[trainer.dtype].weight  # Gradients are added, weights gathered.
    copies, whole = layout.data * layout.context, layout.expert * layout.expert_tensor
    step_s = links.ring_s(params.dense * each, copies, layout.tensor)
    step_s += links.ring_s(params.expert * each, layout.expert_data, whole)
    if trainer.offload_optimizer:
        step_s += trained_params(shape, lora) / layout.num_nodes / value["host_adam_per_s"]
    per_token = cost.per_token / rate + exchanged / layout.context / layout.pipeline
    return TrainerSpeed(
        row=RowCost(per_token, cost.per_token_pair / rate),
        start_s=shape.num_layers / layout.pipeline * value["train_layer_s"],
        copies=layout.data,
        stages=layout.pipeline,
        budget=trainer.tokens_per_micro_batch * layout.context,
        step_s=step_s,
        # All rows of an agent begin with its system prompt and tools, which are most of this.
        shared=int(value["first_prompt"]) if trainer.shared_prefixes else 0,
    )


def _exchanges(shape: Shape, layout: Layout, links: _Links, *, passes: float) -> Iterator[float]:
    """Yield seconds of each exchange per position on a rank, over all layers.

    Tensor ranks gather and scatter a layer's positions twice a pass, and gather them once more for
    each matrix's gradient. Context ranks gather keys and values; delta nets swap positions for
    heads. Experts receive and return copies, and all ranks of one expert have all of its copies.
    `passes` are forward, backward and the repeated one.
    """
    tensor, context, split = layout.tensor, layout.context, layout.expert_tensor
    hidden, routed = shape.hidden_size * _BF16, shape.num_layers - shape.num_dense_layers
    yield links.ring_s(hidden, tensor, 1) * (4 * passes + 2) * shape.num_layers
    keys = 2 * max(shape.num_kv_heads // tensor, 1) * shape.head_dim * _BF16 * context
    yield links.ring_s(keys, context, tensor) * (passes + 1) * shape.num_attention_layers
    swapped = 2 * (shape.linear_key_size + shape.linear_value_size) / tensor * _BF16
    yield links.swap_s(swapped, context, tensor) * passes * shape.num_linear_layers
    if shape.num_experts:
        sent = shape.experts_per_token * hidden / (tensor if layout.sequence_parallel else 1)
        yield links.swap_s(sent, layout.expert, split) * 2 * passes * routed
        yield links.ring_s(sent * split, split, 1) * 2 * passes * routed


@dataclass(frozen=True, slots=True)
class _Links:
    """NVLink in a node and one network card a GPU between nodes.

    A group has `size` ranks, each `stride` after the one before.
    """

    layout: Layout
    gpu: GpuModel
    value: Mapping[str, float]

    def ring_s(self, num_bytes: float, size: int, stride: int) -> float:
        """Return the seconds to gather a whole of `num_bytes`; a node's cards share the work."""
        local = self._local(size, stride)
        inside = num_bytes * (size - 1) / size if local > 1 else 0.0
        return self._seconds(inside, num_bytes * (size - local) / size / local)

    def swap_s(self, num_bytes: float, size: int, stride: int) -> float:
        """Return the seconds to send each rank its part of `num_bytes`."""
        local = self._local(size, stride)
        return self._seconds(num_bytes * (local - 1) / size, num_bytes * (size - local) / size)

    def _local(self, size: int, stride: int) -> int:
        """Return the ranks of a group in one node."""
        return max(1, min(size, self.layout.gpus_per_node // stride))

    def _seconds(self, inside: float, outside: float) -> float:
        links = self.gpu.link_bytes_per_s, self.value["network_bytes_per_s"]
        return max(inside / links[0], outside / links[1]) / self.value["link_share"]
