"""Count the bytes that real layers keep for the backward pass: `python -m ….activation_rank KIND`.

One layer of a real model's widths runs on a CPU in bf16, on few positions. FlashAttention, the
delta rule's kernels and the grouped matrix product are replaced by one operation each that keeps
what the kernel keeps. Every storage that an operation makes is counted until it is freed, but for
parameters. Prints JSON: the bytes that are kept of a position.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Rule(torch.autograd.Function):
    """Keeps what fla's kernel keeps: inputs, decays and the matrices within chunks of 64."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        query, _, value, decay, _ = inputs
        within = query.new_empty(*query.shape[:2], 64)
        ctx.save_for_backward(*inputs, within, torch.empty_like(decay))
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:5])


class Attend(torch.autograd.Function):
    """Keeps what FlashAttention keeps: inputs, the output, and one fp32 sum a head."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(query)
        sums = torch.empty(query.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


class Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(x.shape[0], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None


class Counted(TorchDispatchMode):
    """An allocator's count: bytes of living storages that operations made."""

    def __init__(self, without: set[int]) -> None:
        super().__init__()
        self.live = 0
        self._sizes: dict[int, int] = {}
        self._without = without

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self._track(each)
        return out

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes or key in self._without:
            return
        self._sizes[key] = size
        self.live += size

        def freed() -> None:
            if self._sizes.pop(key, None) is not None:
                self.live -= size

        weakref.finalize(storage, freed)


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
    from swerl.engines.families._megatron_mapping import ModelMapping
    from swerl.training.rank import attention, gated_delta, moe
    from swerl.training.rank.microbatch import PackedRows
    from swerl.training.rank.model import build_model
    from swerl.training.rank.worker import form_groups

    gated_delta.gated_delta_rule = lambda q, k, v, *, log_decay_MH, beta_MH, bounds: Rule.apply(
        *(each.contiguous() for each in (q, k, v, log_decay_MH, beta_MH))
    )
    attention.attend = lambda q, k, v, *rest: Attend.apply(q, k, v)
    moe._multiply_in_turn = lambda x, weight, counts: Grouped.apply(x, weight)
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
