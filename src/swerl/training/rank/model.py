"""Build the model in training: Megatron-Core's GPTModel on packed rows.

Rows are packed end to end (Megatron's `thd` format); attention never crosses rows. A pipeline stage
returns hidden states, the last one log-probabilities. Its output layer runs on the selected
positions only. Logits are by far the widest tensor of a forward pass. So many positions pass the
output layer in chunks, and a chunk's logits are recomputed in its backward pass.

Axes: N positions of this context rank, O selected of them, S selected of all context ranks, C
positions of a chunk, H hidden, V vocabulary of this tensor rank. With several tensor ranks each
holds N / ranks positions between the matrices (sequence parallelism).
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from swerl.core.chat import Json
from swerl.core.contracts import MegatronMapping
from swerl.core.errors import TrainerError
from swerl.engines.families._megatron_plan import RopePlan
from swerl.plan.activations import CHUNK_LOGITS
from swerl.training.options import TrainerOptions
from swerl.training.rank.layers import RowParams, block_spec, check_divides
from swerl.training.rank.microbatch import PackedRows

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


ToLogits = Callable[[torch.Tensor], torch.Tensor]
"""The output layer: (C, H) to (C, V)."""


class TokenModel(GPTModel):  # type: ignore[misc]  # megatron-core ships no types
    temperature = 1.0
    """Divisor of the logits."""

    def forward(self, rows: PackedRows) -> torch.Tensor:
        """Return `logp_S` in fp32, the same on all context ranks; hidden states on other stages."""
        hidden_N1H = self._hidden(rows)
        if not self.post_process:
            return hidden_N1H
        if self.config.sequence_parallel:
            # The output layer all-reduces its input's gradient, so backward only splits it.
            hidden_N1H = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_N1H, tensor_parallel_output_grad=False
            )
        hidden_OH = hidden_N1H.squeeze(1).index_select(0, rows.selected_O)
        vocab = self.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
        logp_O = chunked_log_probs(self._logits, hidden_OH, rows.labels_O, vocab=vocab)
        if parallel_state.get_context_parallel_world_size() == 1:
            return logp_O
        return over_context(logp_O, rows.index_O, rows.num_selected)

    def _logits(self, hidden_OH: torch.Tensor) -> torch.Tensor:
        # The last stage has a copy of tied embeddings and no output matrix of its own.
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        logits_O1V, _ = self.output_layer(hidden_OH.unsqueeze(1), weight=weight)
        logits_OV: torch.Tensor = logits_O1V.squeeze(1)
        return logits_OV if self.temperature == 1.0 else logits_OV / self.temperature

    def _hidden(self, rows: PackedRows) -> torch.Tensor:
        bounds = torch.tensor([0, *rows.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        depth_M = None if rows.forest is None else rows.forest.depths()
        longest = max(rows.lengths) if depth_M is None else int(depth_M.max()) + 1
        packed = RowParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            routed_NLK=rows.routed_NLK,
            forest=rows.forest,
        )
        embedded, rope, *_ = self._preprocess(
            input_ids=rows.ids_N.unsqueeze(0), position_ids=None, packed_seq_params=packed
        )
        if depth_M is not None:
            # Megatron takes angles of M positions for those of the pack, not of one row.
            rope = rope[depth_M.to(rope.device)]
        if self.config.recompute_granularity and torch.is_grad_enabled() and self.pre_process:
            # Megatron's recomputation has a gradient only if its input has one; frozen
            # embeddings have none.
            embedded.requires_grad_()
        hidden_N1H: torch.Tensor = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=rope,
            packed_seq_params=packed,
        )
        return hidden_N1H


def build_model(
    mapping: MegatronMapping, hf_config: Mapping[str, Json], options: TrainerOptions
) -> TokenModel:
    """Build this rank's part of the model; its weights are loaded later.

    Raises TrainerError if the model does not divide over the ranks.
    """
    shapes = mapping.config(hf_config)
    transformer, model, rope = shapes["transformer"], shapes["model"], shapes["rope"]
    assert isinstance(transformer, Mapping)
    assert isinstance(model, Mapping)
    assert isinstance(rope, Mapping)
    check_divides(transformer, model, options.tensor_parallel)
    _check_layout(transformer, options)
    config = TransformerConfig(**{**_settings(options), **transformer})
    built = TokenModel(
        config=config,
        transformer_layer_spec=block_spec(config, shapes),
        max_sequence_length=hf_config.get("max_position_embeddings", 4096),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **model,
    )
    built.temperature = options.temperature
    # Megatron's own scaling has constants of one model in it.
    built.rotary_pos_emb.inv_freq = RopePlan(**rope).frequencies()  # type: ignore[arg-type]
    if built.post_process:
        # Its input is already gathered: the selected positions.
        built.output_layer.sequence_parallel = False
        built.output_layer.allreduce_dgrad = options.tensor_parallel > 1
    return built


def _settings(options: TrainerOptions) -> dict[str, object]:
    """Return the part of TransformerConfig that does not depend on the model."""
    dtype = _DTYPES[options.dtype]
    settings: dict[str, object] = {
        "activation_func": F.silu,
        "tensor_model_parallel_size": options.tensor_parallel,
        "sequence_parallel": options.tensor_parallel > 1,
        "pipeline_model_parallel_size": options.pipeline_parallel,
        "context_parallel_size": options.context_parallel,
        "expert_model_parallel_size": options.expert_parallel,
        "expert_tensor_parallel_size": options.expert_tensor_parallel,
        # Micro-batches are packed rows and differ in length.
        "variable_seq_lengths": options.pipeline_parallel > 1,
        # The backward pass does not read what was sent to the next stage.
        "deallocate_pipeline_outputs": True,
        "moe_token_dispatcher_type": "alltoall",
        # Megatron refuses one expert per token without it; its own routing is not used (moe.py).
        "moe_router_pre_softmax": True,
        "bf16": options.dtype == "bf16",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "bias_dropout_fusion": False,
        # SwiGLU keeps its input alone, and is one kernel.
        "bias_activation_fusion": True,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        # Gradients of micro-batches and ranks are summed: the rows' weights hold the divisor.
        "calculate_per_token_loss": True,
    }
    if options.recompute:
        settings |= {
            "recompute_granularity": "full",
            # Each layer of the stage, or so many of its first ones.
            "recompute_method": "uniform" if options.recompute is True else "block",
            "recompute_num_layers": int(options.recompute),
        }
    return settings


def _check_layout(transformer: Mapping[str, Json], options: TrainerOptions) -> None:
    """Refuse layouts that Megatron-Core trains wrong or fails on without a reason."""
    layers, stages = transformer["num_layers"], options.pipeline_parallel
    assert isinstance(layers, int)
    if layers % stages:
        raise TrainerError(
            f"the model's layers ({layers}) do not divide by pipeline_parallel={stages}",
            hint="choose a pipeline_parallel that divides them",
        )


def chunked_log_probs(
    to_logits: ToLogits, hidden_OH: torch.Tensor, labels_O: torch.Tensor, *, vocab: int
) -> torch.Tensor:
    """Return the log-probability of each label, in fp32, chunk by chunk. `vocab` is V."""
    # A chunk has at least one position, even with a huge vocabulary.
    size = max(1, CHUNK_LOGITS // vocab)
    if len(labels_O) <= size:
        return _chunk(to_logits, hidden_OH, labels_O)
    chunks = zip(torch.split(hidden_OH, size), torch.split(labels_O, size), strict=True)
    return torch.cat(
        [checkpoint(_chunk, to_logits, *chunk, use_reentrant=False) for chunk in chunks]
    )


def over_context(logp_O: torch.Tensor, index_O: torch.Tensor, num_selected: int) -> torch.Tensor:
    """Return `logp_S`, the same on all context ranks; `index_O` are the indices of `logp_O` in it.

    All ranks compute the same loss from it. Each takes the gradient of its own part, so the sum
    over the ranks counts each part once.
    """
    logp_S: torch.Tensor = _OverContext.apply(  # type: ignore[no-untyped-call]
        logp_O, index_O, num_selected
    )
    return logp_S


class _OverContext(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logp_O: torch.Tensor, index_O: torch.Tensor, num_selected: int
    ) -> torch.Tensor:
        ctx.save_for_backward(index_O)
        # Each selected position is set on one rank, so the sum collects all parts.
        logp_S = logp_O.new_zeros(num_selected).index_copy(0, index_O, logp_O)
        group = parallel_state.get_context_parallel_group()
        torch.distributed.all_reduce(logp_S, group=group)
        return logp_S

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (index_O,) = ctx.saved_tensors
        return grads[0][index_O], None, None


def _chunk(to_logits: ToLogits, hidden_CH: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
    logits_CV = to_logits(hidden_CH)
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return -F.cross_entropy(logits_CV.float(), labels_C, reduction="none")
    # Each tensor rank has the logits of a part of the vocabulary.
    loss_C: torch.Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits_CV, labels_C)
    return -loss_C
