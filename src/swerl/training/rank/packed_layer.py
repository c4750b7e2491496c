"""A transformer layer that hands recorded experts to its router, and what carries them there.

Megatron passes `packed_seq_params` to every layer, also when a layer is recomputed: so the record
that a layer sees is always that of the micro-batch at hand, whatever the pipeline's order is.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from swerl.core.errors import TrainerError
from swerl.training.rank.moe import ReplayRouter


@dataclass
class RowParams(PackedSeqParams):  # type: ignore[misc]  # megatron-core ships no types
    """Bounds of packed rows, and the experts that the engine chose for them."""

    routed_NLK: torch.Tensor | None = None
    """By position of this context rank, layer of the whole model, and choice.

    Layers are all of the model's, as SGLang records them, or those with experts.
    """


class PackedLayer(TransformerLayer):  # type: ignore[misc]  # megatron-core ships no types
    """A transformer layer on packed rows."""

    def __init__(
        self,
        config: TransformerConfig,
        *arguments: Any,
        experts_place: int | None = None,
        num_expert_layers: int = 0,
        **named: Any,
    ) -> None:
        """`experts_place` counts the layers with experts of the whole model before this one."""
        super().__init__(config, *arguments, **named)
        self._place = experts_place
        self._num_expert_layers = num_expert_layers

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the layer; the router, where there is one, first gets its part of the record."""
        if self._place is not None:
            router = self.mlp.router
            assert isinstance(router, ReplayRouter)
            router.replay_NK = self._record(named.get("packed_seq_params"))
        return super().forward(*arguments, **named)

    def _record(self, rows: PackedSeqParams | None) -> torch.Tensor | None:
        routed_NLK = getattr(rows, "routed_NLK", None)
        if routed_NLK is None:
            return None
        _, num_layers, num_chosen = routed_NLK.shape
        places = {self.config.num_layers: self.layer_number - 1}
        places[self._num_expert_layers] = self._place
        if num_layers not in places or num_chosen != self.config.moe_router_topk:
            raise TrainerError(
                f"the engine recorded {num_chosen} experts in {num_layers} layers, the model has "
                f"{self.config.moe_router_topk} in {self._num_expert_layers}",
                hint="engine and trainer must serve the same model",
            )
        routed_NK: torch.Tensor = routed_NLK[:, places[num_layers]]
        if not self.config.sequence_parallel:
            return routed_NK
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        own_NK: torch.Tensor = torch.chunk(routed_NK, ranks)[
            parallel_state.get_tensor_model_parallel_rank()
        ]
        return own_NK
