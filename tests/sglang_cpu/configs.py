"""The config.json of the recipes' models, with the parts that only an engine reads."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

_COMMON = {"max_position_embeddings": 262_144, "hidden_act": "silu", "rms_norm_eps": 1e-6}
_ROPE = {"rope_theta": 1e7, "rope_type": "default"}
_VISION = {
    "model_type": "qwen3_5_moe",
    "depth": 27,
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "out_hidden_size": 2048,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "deepstack_visual_indexes": [],
}


def config_of(name: str) -> dict[str, Any]:
    """Return the config of a known model: its shape, architecture, vision tower and MTP head."""
    shapes = tomllib.loads((files("swerl.plan") / "shapes.toml").read_text(encoding="utf-8"))
    shape = {**shapes[name.lower()], **_COMMON}
    if "vision_config" in shape:
        del shape["vision_config"]
        every = shape["full_attention_interval"]
        kinds = ("linear_attention",) * (every - 1) + ("full_attention",)
        text = shape | {
            "model_type": "qwen3_5_moe_text",
            "layer_types": kinds * (shape["num_hidden_layers"] // every),
            "mtp_num_hidden_layers": 1,
            "rope_parameters": _ROPE
            | {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
        }
        architecture = "Qwen3_5MoeForConditionalGeneration"
        whole = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": _VISION}
        return whole | {"architectures": [architecture]}
    if shape.get("model_type") == "glm4_moe":
        more = {"architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1}
        return shape | more | {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}
    more = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return shape | more | {"rope_parameters": _ROPE}
