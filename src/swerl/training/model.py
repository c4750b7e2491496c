"""The model in training: Megatron-Core's GPTModel on packed rows.

Rows are packed end to end without padding (Megatron's `thd` format); attention never crosses from
one row to the next. The model answers with log-probabilities, and its output layer runs only on the
positions that are asked for.

Axes: N tokens of all rows of a micro-batch, S selected positions, H hidden, V vocabulary (of this
tensor-parallel rank).
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from swerl.chat import Json
from swerl.interfaces import MegatronMapping
from swerl.training.layer_spec import block_spec, check_divides
from swerl.training.microbatch import PackedRows


class TokenModel(GPTModel):  # type: ignore[misc]  # megatron-core ships no types
    """GPTModel that answers with the log-probability of given next tokens."""

    temperature = 1.0
    """What logits are divided by."""

    def forward(self, rows: PackedRows) -> torch.Tensor:
        """Return `logp_S`, the log-probability of `labels_S`, in fp32."""
        hidden_SH = self._hidden(rows)
        weight = self.shared_embedding_or_output_weight() if self._tied else None
        logits_S1V, _ = self.output_layer(hidden_SH.unsqueeze(1), weight=weight)
        if self.temperature != 1.0:
            logits_S1V = logits_S1V / self.temperature
        return _log_prob(logits_S1V.squeeze(1), rows.labels_S)

    @property
    def _tied(self) -> bool:
        return bool(self.share_embeddings_and_output_weights)

    def _hidden(self, rows: PackedRows) -> torch.Tensor:
        bounds = torch.tensor([0, *rows.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        longest = max(rows.lengths)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        embedded, rope, *_ = self._preprocess(
            input_ids=rows.ids_N.unsqueeze(0), position_ids=None, packed_seq_params=packed
        )
        hidden_N1H = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=rope,
            packed_seq_params=packed,
        )
        hidden_SH: torch.Tensor = hidden_N1H.squeeze(1).index_select(0, rows.selected_S)
        return hidden_SH


def build_model(
    mapping: MegatronMapping, hf_config: Mapping[str, Json], temperature: float
) -> TokenModel:
    """Build this rank's part of the model, with weights that still have to be loaded.

    Raises TrainerError where the model does not divide over the tensor-parallel ranks.
    """
    shapes = mapping.config(hf_config)
    transformer, model = shapes["transformer"], shapes["model"]
    assert isinstance(transformer, Mapping)
    assert isinstance(model, Mapping)
    tensor_ranks = parallel_state.get_tensor_model_parallel_world_size()
    check_divides(transformer, model, tensor_ranks)
    config = TransformerConfig(
        **transformer,
        activation_func=F.silu,
        tensor_model_parallel_size=tensor_ranks,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        # Gradients of micro-batches and ranks are summed: the rows' weights hold the divisor.
        calculate_per_token_loss=True,
    )
    built = TokenModel(
        config=config,
        transformer_layer_spec=block_spec(config),
        max_sequence_length=hf_config.get("max_position_embeddings", 4096),
        **model,
    )
    built.temperature = temperature
    return built


def _log_prob(logits_SV: torch.Tensor, labels_S: torch.Tensor) -> torch.Tensor:
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return -F.cross_entropy(logits_SV.float(), labels_S, reduction="none")
    loss_S: torch.Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits_SV, labels_S)
    return -loss_S
