"""Models with random weights, random rows, timers and counters for bench/gpu.py."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
DENSE = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
}
SMALL_DENSE = DENSE | {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
HYBRID = {
    "model_type": "qwen3_5_moe",
    "num_hidden_layers": 1,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 4096,
    "num_experts": 256,
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
    "tie_word_embeddings": False,
}
SMALL_HYBRID = HYBRID | {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    # The heads of one rank of recipes/qwen35b_8node.toml: the same kernels, compiled once.
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}


@contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _options(folder: Path, positions: int, dtype: str = "bf16", **changes: Any) -> Any:
    from swerl.training.options import TrainerOptions

    usual = {
        "checkpoint_dir": folder / "checkpoints",
        "publish_dir": folder / "weights",
        "log_dir": folder / "logs",
        "dtype": dtype,
        "recompute": True,
        "warmup_steps": 0,
        "tokens_per_micro_batch": positions,
    }
    return TrainerOptions.model_validate(usual | changes)


def join(options: Any) -> None:
    """Become the only rank, over NCCL on a GPU and gloo on a CPU."""
    import torch.distributed as dist

    from swerl.training.rank import megatron_cpu
    from swerl.training.rank.worker import form_groups

    megatron_cpu.install()
    if dist.is_initialized():
        return
    meeting = Path(tempfile.mkdtemp()) / "rendezvous"
    backend = "nccl" if on_gpu() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=0, world_size=1)
    form_groups(options)


def random_model(
    folder: Path, config: Mapping[str, Any], positions: int, dtype: str = "bf16"
) -> Any:
    """Return the trainer's model with random weights, on the device."""
    import torch

    from swerl.engines.families._megatron_mapping import ModelMapping

    options = _options(folder, positions, dtype)
    join(options)
    from swerl.training.rank.model import build_model

    model = build_model(ModelMapping(), config, options)
    model.to("cuda" if on_gpu() else "cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim > 1:
                param.normal_(0, 0.02)
            elif "norm" in name:
                param.fill_(0.0 if config["model_type"].startswith("qwen3_5") else 1.0)
    model.train()
    return model


def fake_ranks(options: Any) -> None:
    """Become rank 0 of a layout whose other ranks do not exist; exchanges copy this rank's data."""
    import torch
    import torch.distributed as dist

    from bench._stand_ins import form_fake_groups

    def exchange(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        # Not always as many: the others' tokens may choose other experts.
        size = min(len(output), len(input))
        output[:size].copy_(input[:size])
        output[size:].zero_()

    form_fake_groups(options)
    # torch's fake group leaves these outputs as they were allocated.
    dist.all_to_all_single = exchange


def passes(
    config: Mapping[str, Any], options: Any, work: Any, *, backward: bool = True
) -> dict[str, float]:
    """Run forward and backward passes of `work`; return seconds by kernel, and by the clock."""
    import torch
    from roofline import counted_model, counted_rows
    from torch.profiler import ProfilerActivity, profile

    device = "cuda" if on_gpu() else "cpu"
    model = counted_model(config, options).to(device)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, 0.02)
    rows = counted_rows(config, options, work, work.positions, device)

    def once() -> None:
        total = model(rows).sum()
        if backward:
            total.backward()

    times = [seconds_of(once) for _ in range(4)]
    held = allocated_bytes()
    out = model(rows)
    kept = allocated_bytes() - held
    del out
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        seconds_of(once)
    # Operations of the host have the times of their kernels, too.
    events = [each for each in profiler.key_averages() if each.device_type.name == "CUDA"]
    found = {each.key: each.self_device_time_total / 1e6 for each in events}
    return found | {"all": min(times), "kept_bytes": float(kept)}


class _RandomFamily:
    """A family without a tokenizer: the trainer reads its weights' mapping only."""

    def megatron(self) -> Any:
        from swerl.engines.families._megatron_mapping import ModelMapping

        return ModelMapping()


def random_learner(
    folder: Path,
    config: Mapping[str, Any],
    *,
    positions: int,
    dtype: str = "bf16",
    **changes: Any,
) -> Any:
    """Return a rank's trainer; the folder's weights are made if they are missing."""
    from swerl.core import plugins

    options = _options(folder, positions, dtype, **changes)
    join(options)
    if not (folder / "model.safetensors").exists():
        _save(folder, config, positions, dtype)
    from swerl.training.rank.learner import Learner

    module = plugins.load("algorithms", "sft")
    settings = learner_settings(folder, options)
    return Learner(settings, _RandomFamily(), module.build(module.Options()))


def learner_settings(folder: Path, options: Any) -> Any:
    from swerl.training.options import WorkerSettings

    return WorkerSettings(
        model=folder,
        family="qwen3",
        algorithm="sft",
        algorithm_options={},
        options=options,
        rendezvous="",
        rank=0,
    )


def _save(folder: Path, config: Mapping[str, Any], positions: int, dtype: str) -> None:
    from safetensors.torch import save_file

    from swerl.engines.families._megatron_mapping import ModelMapping

    model = random_model(folder, config, positions, dtype)
    from swerl.training.rank import weights

    mapping, tensors = ModelMapping(), {}
    named = {weights.global_name(model, name): each for name, each in model.named_parameters()}
    for name, tensor in weights.tensors(named):
        for key, part in mapping.to_hf({name: tensor}, config).items():
            tensors[key] = part.detach().cpu().clone().contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def random_batch(lengths: Sequence[int], vocab: int) -> Any:
    """Return random rows; every third run of 64 tokens is trained."""
    from swerl.core.learning import Batch
    from swerl.core.sample import Sample

    rng = random.Random(0)
    rows = []
    for number, length in enumerate(lengths):
        # The last token is only a label, so a row has one token more than positions.
        mask = tuple(int(t > 0 and t // 64 % 3 == 0) for t in range(length + 1))
        rows.append(
            Sample(
                episode=f"episode-{number}",
                task="task",
                ids=tuple(rng.randrange(vocab) for _ in range(length + 1)),
                mask=mask,
                logprobs=tuple(-6.0 * trained for trained in mask),
                weight_versions=("0",),
                advantage=1.0,
            )
        )
    return Batch(1, tuple(rows), len(rows))


def seconds_of(call: Callable[[], object]) -> float:
    import torch

    if on_gpu():
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def matrix_rate(size: int) -> float:
    """Return measured bf16 operations a second of a square matrix product."""
    import torch

    device = "cuda" if on_gpu() else "cpu"
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    seconds_of(lambda: left @ right)
    times = 10

    def repeat() -> None:
        for _ in range(times):
            left @ right

    return times * 2 * size**3 / seconds_of(repeat)


def delta_backward() -> bool:
    """Return whether the kernels of delta nets compute gradients here; a CPU does without them."""
    import torch

    from swerl.cluster.checks import FindingState, check_kernels

    if not on_gpu():
        return True
    gpu = "h100" if torch.cuda.get_device_capability()[0] == 9 else ""
    return all(each.state is FindingState.OK for each in check_kernels("", ["fla"], gpu))


def pass_times(forward: Callable[[], Any], *, backward: bool = True) -> Figures:
    """Return the seconds of a forward and a backward pass, and the bytes kept in between."""
    for _ in range(2):
        total = forward().float().sum()
        if backward:
            total.backward()
    held = allocated_bytes()
    out = forward()
    kept = allocated_bytes() - held
    del out
    forward_s = min(seconds_of(forward) for _ in range(3))
    if not backward:
        return {"forward_s": forward_s, "kept_bytes": kept}
    both_s = min(seconds_of(lambda: forward().float().sum().backward()) for _ in range(3))
    return {"forward_s": forward_s, "backward_s": both_s - forward_s, "kept_bytes": kept}


def allocated_bytes() -> int:
    import torch

    return torch.cuda.memory_allocated() if on_gpu() else 0


def free_bytes() -> int:
    import torch

    return torch.cuda.mem_get_info()[0] if on_gpu() else 0


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name() if on_gpu() else "CPU"
