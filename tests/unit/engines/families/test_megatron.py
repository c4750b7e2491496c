"""Weights survive the way from Hugging Face to Megatron and back, for every trained line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swerl.core.errors import InputError
from swerl.engines.families._megatron_mapping import ModelMapping, layer_entries
from swerl.engines.families._megatron_plan import plan_of

from .lines import LINES, LLAMA3, YARN, build, config_of, per_expert, weights_of

PUBLISHED_STACKED = {"qwen3_5_moe"}


def megatron_names(config: dict[str, Any]) -> list[str]:
    plan = plan_of(config)
    layers = [
        f"decoder.layers.{layer}.{name}"
        for layer in range(plan.num_layers)
        for name in layer_entries(plan, layer)
    ]
    ends = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    return ends + layers + ([] if plan.tied else ["output_layer.weight"])


def through_megatron(
    hf: dict[str, torch.Tensor], config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    mapping = ModelMapping()
    full = {name: mapping.to_megatron(name, hf, config) for name in megatron_names(config)}
    return mapping.to_hf(full, config)


def assert_same(back: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert back.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(back[name], expected[name])] == []


@pytest.mark.parametrize("line", LINES)
def test_every_weight_comes_back_unchanged_under_its_published_name(line: str) -> None:
    model = build(line)
    stacked, config = weights_of(model), config_of(model)
    published = stacked if line in PUBLISHED_STACKED else per_expert(stacked)

    assert_same(through_megatron(stacked, config), published)
    assert_same(through_megatron(per_expert(stacked), config), published)


@pytest.mark.parametrize("line", ["qwen3_moe", "glm4_moe"])
def test_names_are_those_that_transformers_publishes(line: str, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    model = build(line)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    published = load_file(tmp_path / "model.safetensors")

    assert_same(through_megatron(published, config_of(model)), published)


def test_a_nested_language_model_keeps_its_prefix() -> None:
    model = build("qwen3_5_moe")
    text = config_of(model)
    whole = {"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": False}
    nested = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in weights_of(model).items()
    }
    assert "lm_head.weight" in nested

    assert_same(through_megatron(nested, whole), nested)


def test_what_training_leaves_alone_is_named() -> None:
    config = {**LINES["glm4_moe"]}
    names = ["model.layers.2.mlp.gate.weight", "model.layers.3.eh_proj.weight", "lm_head.weight"]
    assert ModelMapping().untrained(names, config) == ("model.layers.3.eh_proj.weight",)

    nested = {"model_type": "qwen3_5_moe", "text_config": LINES["qwen3_5_moe"]}
    names = ["model.visual.blocks.0.norm1.weight", "mtp.fc.weight", "model.language_model.norm.w"]
    assert ModelMapping().untrained(names, nested) == tuple(names[:2])


def test_a_cut_between_key_heads_gives_whole_heads_of_a_delta_net() -> None:
    model = build("qwen3_5")
    hf = weights_of(model)
    name = "decoder.layers.0.self_attention.in_proj.weight"
    half = ModelMapping().to_megatron(name, hf, config_of(model)).chunk(2)[1]

    queries, keys, values, gates, betas, decays = half.split([8, 8, 24, 24, 2, 2])
    mixed = hf["model.layers.0.linear_attn.in_proj_qkv.weight"]
    assert torch.equal(queries, mixed[8:16])
    assert torch.equal(keys, mixed[24:32])
    assert torch.equal(values, mixed[56:80])
    assert torch.equal(gates, hf["model.layers.0.linear_attn.in_proj_z.weight"][24:])
    assert torch.equal(betas, hf["model.layers.0.linear_attn.in_proj_b.weight"][2:])
    assert torch.equal(decays, hf["model.layers.0.linear_attn.in_proj_a.weight"][2:])


def test_a_tied_output_layer_is_the_embedding_and_is_not_written_twice() -> None:
    model = build("qwen3_tied")
    mapping, config, hf = ModelMapping(), config_of(model), weights_of(model)
    output = mapping.to_megatron("output_layer.weight", hf, config)

    assert output is hf["model.embed_tokens.weight"]
    assert mapping.to_hf({"output_layer.weight": output}, config) == {}


@pytest.mark.parametrize("line", LINES)
def test_megatron_takes_the_settings(line: str) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = ModelMapping().config(LINES[line])
    assert isinstance(settings["transformer"], dict)

    assert TransformerConfig(**settings["transformer"]).num_query_groups == 2


@pytest.mark.parametrize(
    ("line", "extra", "message"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type = 'dynamic' is not"),
        ("qwen3", {"rope_scaling": {"type": "yarn"}}, "'factor' in the model's config.json must"),
        ("glm4_moe", {"rope_parameters": YARN}, "partial_rotary_factor = None is not supported"),
        ("mistral", {"sliding_window": 256}, "sliding_window = 256 is not supported"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ("qwen2", {"layer_types": ["sliding_attention"]}, "layer_types = .* is not supported"),
        ("mistral", {"model_type": "mistral3"}, "'mistral3' can be run but not trained"),
        ("qwen3", {"hidden_size": "wide"}, "no whole number 'hidden_size'"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("glm4_moe", {"n_group": 4}, "n_group = 4"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "weights are quantised"),
    ],
)
def test_a_model_outside_the_mapping_is_refused(
    line: str, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ModelMapping().config(LINES[line] | extra)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"type": "linear", "factor": 4.0},
        LLAMA3 | {"original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "factor": 4.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
        YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
        YARN | {"attention_factor": 1.3},
    ],
)
def test_scaled_rope_is_that_of_transformers(rope: dict[str, Any], size: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = LINES["mistral"] | {"rope_theta": 5e5, "max_position_embeddings": 131072}
    settings |= {"rope_parameters": None, "rope_scaling": dict(rope), "head_dim": size}
    plan = plan_of(settings).rope
    theirs = LlamaRotaryEmbedding(LlamaConfig(**settings))

    torch.testing.assert_close(plan.frequencies(), theirs.inv_freq, rtol=2e-7, atol=0)
    assert plan.attention == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.mlp.router.weight", "decoder.layers.9.x", "nonsense"]
)
def test_an_unknown_parameter_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="no counterpart"):
        ModelMapping().to_megatron(name, {}, LINES["qwen3"])
