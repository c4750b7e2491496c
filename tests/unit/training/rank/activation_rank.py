"""Count the bytes that real layers keep for the backward pass: `python -m ….activation_rank KIND`.

One layer of a real model's widths runs on a CPU in bf16, on few positions, with one operation in
place of each kernel (bench/_stand_ins.py). Every storage that an operation makes is counted until
it is freed, but for parameters. Prints JSON: the bytes that are kept of a position.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swerl.training.options import TrainerOptions
from swerl.training.rank import megatron_cpu

POSITIONS = 128
MOE = {
    "model_type": "qwen3_5_moe",
    "num_hidden_layers": 1,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 4096,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "attn_output_gate": True,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "rope_type": "default",
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "delta": {**MOE, "layer_types": ["linear_attention"]},
    "attention": {**MOE, "layer_types": ["full_attention"]},
    "dense": {
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_theta": 1000000,
    },
}
"""Widths of Qwen3.6-35B-A3B and of Qwen3-4B, with a small vocabulary."""


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    megatron_cpu.install()
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        print(json.dumps(measure(CONFIGS[sys.argv[1]], Path(folder))))  # noqa: T201
        dist.destroy_process_group()


def measure(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    # Found from the repository's root, where tests run this module.
    from bench._op_counts import Counted
    from bench._stand_ins import replace_kernels
    from swerl.engines.families._megatron_mapping import ModelMapping
    from swerl.training.rank.microbatch import PackedRows
    from swerl.training.rank.model import build_model
    from swerl.training.rank.worker import form_groups

    replace_kernels()
    options = TrainerOptions(
        checkpoint_dir=folder,
        publish_dir=folder,
        log_dir=folder,
        dtype="bf16",
        tokens_per_micro_batch=POSITIONS,
    )
    form_groups(options)
    model = build_model(ModelMapping(), config, options)
    model.train()
    for param in model.parameters():
        param.data.normal_(0, 0.02)
    without = {param.untyped_storage()._cdata for param in model.parameters()}
    # One trained position: the output layer keeps next to nothing.
    selected = torch.tensor([POSITIONS - 1])
    rows = PackedRows(
        ids_N=torch.randint(0, 4096, (POSITIONS,)),
        lengths=(POSITIONS,),
        selected_O=selected,
        labels_O=torch.tensor([5]),
        index_O=torch.tensor([0]),
        num_selected=1,
    )
    # The final norm is not the layer's.
    model.decoder.final_layernorm = None
    counted = Counted(without)
    with counted:
        out = model(rows)
    held = counted.live
    del out
    return {"held": held / POSITIONS}


if __name__ == "__main__":
    main()
