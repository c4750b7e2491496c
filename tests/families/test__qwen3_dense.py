"""Weights survive the way from Hugging Face to Megatron and back."""

from __future__ import annotations

import pytest
import torch

from swerl.chat import Json
from swerl.errors import InputError
from swerl.families._qwen3_dense import Qwen3DenseMapping

HEADS, GROUPS, HEAD_DIM, HIDDEN, FFN, VOCAB, LAYERS = 4, 2, 8, 16, 24, 40, 2


def hf_config(*, tied: bool) -> dict[str, Json]:
    return {
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": tied,
    }


def hf_weights(*, tied: bool) -> dict[str, torch.Tensor]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**hf_config(tied=tied)))
    names = {name for name, _ in model.named_parameters()}
    return {k: torch.randn_like(v) for k, v in model.state_dict().items() if k in names}


def megatron_names(*, tied: bool) -> list[str]:
    per_layer = [
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]
    layers = [f"decoder.layers.{i}.{name}" for i in range(LAYERS) for name in per_layer]
    ends = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    return ends + layers + ([] if tied else ["output_layer.weight"])


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_comes_back_unchanged(tied: bool) -> None:
    mapping, config, hf = Qwen3DenseMapping(), hf_config(tied=tied), hf_weights(tied=tied)
    full = {name: mapping.to_megatron(name, hf, config) for name in megatron_names(tied=tied)}

    back = mapping.to_hf(full, config)

    assert back.keys() == hf.keys()
    assert all(torch.equal(back[name], hf[name]) for name in hf)


def test_qkv_rows_are_grouped_as_megatron_reads_them() -> None:
    hf = hf_weights(tied=True)
    qkv = Qwen3DenseMapping().to_megatron(
        "decoder.layers.1.self_attention.linear_qkv.weight", hf, hf_config(tied=True)
    )

    heads = qkv.view(GROUPS, HEADS // GROUPS + 2, HEAD_DIM, HIDDEN)
    q = hf["model.layers.1.self_attn.q_proj.weight"].view(HEADS, HEAD_DIM, HIDDEN)
    v = hf["model.layers.1.self_attn.v_proj.weight"].view(GROUPS, HEAD_DIM, HIDDEN)
    assert torch.equal(heads[1, 0], q[2])
    assert torch.equal(heads[1, -1], v[1])


def test_a_tied_output_layer_is_the_embedding_and_is_not_written_twice() -> None:
    mapping, config, hf = Qwen3DenseMapping(), hf_config(tied=True), hf_weights(tied=True)
    output = mapping.to_megatron("output_layer.weight", hf, config)

    assert output is hf["model.embed_tokens.weight"]
    assert mapping.to_hf({"output_layer.weight": output}, config) == {}


def test_config_names_what_megatron_needs() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = Qwen3DenseMapping().config(hf_config(tied=True))
    transformer, model = config["transformer"], config["model"]
    assert isinstance(transformer, dict)

    assert TransformerConfig(**transformer).num_query_groups == GROUPS
    assert model == {
        "vocab_size": VOCAB,
        "position_embedding_type": "rope",
        "rotary_base": 1000000,
        "share_embeddings_and_output_weights": True,
    }


@pytest.mark.parametrize(
    "extra", [{"attention_bias": True}, {"rope_parameters": {"rope_type": "yarn"}}]
)
def test_a_model_outside_the_mapping_is_refused(extra: dict[str, Json]) -> None:
    with pytest.raises(InputError, match="cannot be trained"):
        Qwen3DenseMapping().config(hf_config(tied=True) | extra)


@pytest.mark.parametrize("name", ["decoder.layers.0.mlp.router.weight", "nonsense"])
def test_an_unknown_parameter_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="no counterpart"):
        Qwen3DenseMapping().to_megatron(name, {}, hf_config(tied=True))
