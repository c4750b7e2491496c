"""Measure swerl's GPU code on one GPU against the plan and the roofline, in eight minutes at most.

    python bench/gpu.py                         all pieces
    python bench/gpu.py --only step layers      some pieces
    python bench/gpu.py --small                 small shapes; runs on a CPU too

step      an optimizer step of a Qwen3-0.6B-shaped model on 32k packed tokens: MFU against the
          measured rate of bf16 matrix products, and peak memory against the plan
layers    one delta net, one attention and one expert layer of Qwen3.6-35B-A3B's shape: seconds and
          kept bytes against the roofline and the plan
sleep     sleep and wake of a rank: memory given back, seconds, weights bit-equal
numerics  log-probabilities and gradient norm in bf16 on the GPU against fp32 on the CPU
ipc       weights by CUDA IPC to a second process; on a CPU by shared memory

Each piece runs in a process of its own, so that one that fails does not stop the others. Weights
are random. Prints a table and writes gpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

Figures = dict[str, Any]
_DENSE = {
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
_SMALL_DENSE = _DENSE | {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
_HYBRID = {
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
_SMALL_HYBRID = _HYBRID | {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LIMITS_S = {"step": 150, "layers": 150, "sleep": 60, "numerics": 90, "ipc": 30}
"""Most seconds of each piece: together eight minutes."""


def step(small: bool) -> Figures:
    """Take optimizer steps, and compare speed and memory with the machine and the plan."""
    import torch

    from swerl.plan.parameters import row_cost
    from swerl.plan.shape import shape_from_config

    config = _SMALL_DENSE if small else _DENSE
    lengths = (96, 64, 32) if small else (16384, 8192, 8192)
    peak = _matrix_rate(256 if small else 8192)
    with _folder() as folder:
        learner = _learner(folder, config, positions=sum(lengths))
        batch = _batch(lengths, config["vocab_size"])
        learner.step(batch)  # kernels are compiled and Adam's state is made
        _reset_peak()
        seconds = [_timed(lambda: learner.step(batch)) for _ in range(3)]
        used_gib = torch.cuda.max_memory_allocated() / 2**30 if _on_gpu() else None
    work = sum(map(row_cost(shape_from_config("bench", config)).of, lengths))
    best = min(seconds)
    return {
        "step_s": best,
        "tokens_per_s": sum(lengths) / best,
        "matrix_tflops": peak / 1e12,
        "mfu_of_measured_rate": work / best / peak,
        "peak_gib": used_gib,
        "planned_gib": None if small else _planned_gib(config, sum(lengths)),
    }


def layers(small: bool) -> Figures:
    """Time one layer of each kind, forward and backward, and count the bytes that it keeps."""
    import torch

    from swerl.plan.activations import Splits, layer_bytes
    from swerl.plan.shape import shape_from_config
    from swerl.training.rank.layers import RowParams

    positions = 128 if small else 32768
    found: Figures = {"positions": positions}
    for name in ("linear_attention", "full_attention"):
        config = (_SMALL_HYBRID if small else _HYBRID) | {"layer_types": [name]}
        with _folder() as folder:
            model = _model(folder, config, positions)
        layer = model.decoder.layers[0]
        device = next(model.parameters()).device
        hidden = torch.randn(positions, 1, config["hidden_size"], device=device)
        hidden = hidden.to(torch.bfloat16).requires_grad_()
        bounds = torch.tensor([0, positions], dtype=torch.int32)
        rows = RowParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=positions,
            max_seqlen_kv=positions,
        )
        rope = model.rotary_pos_emb(positions).to(device)
        whole = _passes(
            lambda layer=layer, hidden=hidden, rope=rope, rows=rows: layer(
                hidden, attention_mask=None, rotary_pos_emb=rope, packed_seq_params=rows
            )[0]
        )
        planned = layer_bytes(shape_from_config("layer", config), Splits(1, 1, 1), 0)
        found[name] = whole | {"planned_bytes_of_a_position": planned}
        if whole["kept_bytes"] is not None:
            found[name]["kept_bytes_of_a_position"] = whole["kept_bytes"] / positions
        if name == "full_attention":
            found["experts"] = _passes(lambda layer=layer, hidden=hidden: layer.mlp(hidden)[0])
    if not small:
        found["roofline_s"] = _roofline(positions)
    return found


def sleep(small: bool) -> Figures:
    """Let a rank sleep and wake twice; the second time its host memory exists already."""
    import torch

    config = _SMALL_DENSE if small else _DENSE
    with _folder() as folder:
        learner = _learner(folder, config, positions=1024)
        learner.step(_batch((512, 256), config["vocab_size"]))
        before = [each.detach().cpu().clone() for each in learner.model.parameters()]
        rounds = []
        for _ in range(2):
            free = _free_bytes()
            slept_s = _timed(learner.sleep)
            given = _free_bytes() - free
            wake_s = _timed(learner.wake)
            rounds.append({"sleep_s": slept_s, "wake_s": wake_s, "given_gib": given / 2**30})
        after = [each.detach().cpu() for each in learner.model.parameters()]
        equal = all(map(torch.equal, before, after))
        # A step after a sleep must work.
        learner.step(_batch((512, 256), config["vocab_size"]))
    return {"first": rounds[0], "second": rounds[1], "weights_bit_equal": equal}


def numerics(small: bool) -> Figures:
    """Compare bf16 here with fp32 on the CPU: the same weights, the same rows."""
    with tempfile.TemporaryDirectory() as name:
        found = {}
        for dtype, hidden in (("fp32", True), ("bf16", False)):
            environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if hidden else {})
            command = [sys.executable, __file__, "--child", dtype, name]
            subprocess.run(command, env=environment, check=True, timeout=LIMITS_S["numerics"])
            found[dtype] = json.loads((Path(name) / f"{dtype}.json").read_text())
    pairs = zip(found["fp32"]["logprobs"], found["bf16"]["logprobs"], strict=True)
    differences = [abs(a - b) for a, b in pairs]
    norm = found["fp32"]["grad_norm"]
    return {
        "device": found["bf16"]["device"],
        "logprob_difference_mean": statistics.mean(differences),
        "logprob_difference_max": max(differences),
        "loss_difference": abs(found["bf16"]["loss"] - found["fp32"]["loss"]),
        "grad_norm_relative": abs(found["bf16"]["grad_norm"] - norm) / norm,
    }


def _numerics_child(dtype: str, folder: Path) -> None:
    """Write the log-probabilities and the gradient norm of a hybrid model with experts."""
    import torch

    layers = ["linear_attention", "full_attention"]
    config = _SMALL_HYBRID | {"layer_types": layers, "num_hidden_layers": 2}
    lengths = (90, 50, 20)
    learner = _learner(folder, config, positions=sum(lengths), dtype=dtype)
    batch = _batch(lengths, config["vocab_size"])
    logprobs = [value for row in learner.logprobs(batch) for value in row]
    stats = learner.step(batch)
    found = {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "logprobs": logprobs,
        "grad_norm": stats.grad_norm,
        "loss": stats.loss,
    }
    (folder / f"{dtype}.json").write_text(json.dumps(found))


def ipc(small: bool) -> Figures:
    """Pass weights to a second process without a copy; it reads them and reports their sum."""
    import torch
    import torch.multiprocessing as processes

    device = "cuda" if _on_gpu() else "cpu"
    size = 2**16 if small else 2**29
    bucket = torch.arange(size, device=device).to(torch.bfloat16)
    context = processes.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_read_bucket, args=(theirs,))
    child.start()
    try:
        started = time.perf_counter()
        ours.send(bucket)
        if not ours.poll(LIMITS_S["ipc"]):
            raise TimeoutError("the second process did not answer")
        answer = ours.recv()
        seconds = time.perf_counter() - started
        # The child wrote into the first element: the memory is the same.
        shared = bucket[0].item() == _WRITTEN
        bucket[0] = 0
        ours.send("done")
        child.join(LIMITS_S["ipc"])
    finally:
        child.kill()
    return {
        "device": device,
        "gib": bucket.nbytes / 2**30,
        "seconds_with_start": seconds,
        "sum_equal": answer == float(bucket.float().sum()),
        "memory_is_shared": shared,
    }


_WRITTEN = 7.0


def _read_bucket(link: Any) -> None:
    import torch

    bucket = link.recv()
    total = float(bucket.float().sum())
    bucket[0] = _WRITTEN
    if bucket.is_cuda:
        torch.cuda.synchronize()
    link.send(total)
    link.recv()


PIECES: Mapping[str, Callable[[bool], Figures]] = {
    "step": step,
    "layers": layers,
    "sleep": sleep,
    "numerics": numerics,
    "ipc": ipc,
}


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _options(folder: Path, positions: int, dtype: str = "bf16") -> Any:
    from swerl.training.options import TrainerOptions

    return TrainerOptions(
        checkpoint_dir=folder / "checkpoints",
        publish_dir=folder / "weights",
        log_dir=folder / "logs",
        dtype=dtype,
        recompute=True,
        warmup_steps=0,
        tokens_per_micro_batch=positions,
    )


def _join(options: Any) -> None:
    """Become the only rank, over NCCL on a GPU and gloo on a CPU."""
    import torch.distributed as dist

    from swerl.training.rank import megatron_cpu
    from swerl.training.rank.worker import form_groups

    megatron_cpu.install()
    if dist.is_initialized():
        return
    meeting = Path(tempfile.mkdtemp()) / "rendezvous"
    backend = "nccl" if _on_gpu() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=0, world_size=1)
    form_groups(options)


def _model(folder: Path, config: Mapping[str, Any], positions: int, dtype: str = "bf16") -> Any:
    """Return the trainer's model with random weights, on the device."""
    import torch

    from swerl.engines.families._megatron_mapping import ModelMapping

    options = _options(folder, positions, dtype)
    _join(options)
    from swerl.training.rank.model import build_model

    model = build_model(ModelMapping(), config, options)
    model.to("cuda" if _on_gpu() else "cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim > 1:
                param.normal_(0, 0.02)
            elif "norm" in name:
                param.fill_(0.0 if config["model_type"].startswith("qwen3_5") else 1.0)
    model.train()
    return model


class _RandomFamily:
    """A family without a tokenizer: the trainer reads its weights' mapping only."""

    def megatron(self) -> Any:
        from swerl.engines.families._megatron_mapping import ModelMapping

        return ModelMapping()


def _learner(
    folder: Path, config: Mapping[str, Any], *, positions: int, dtype: str = "bf16"
) -> Any:
    """Return a rank's trainer; the folder's weights are made if they are missing."""
    from swerl.core import plugins
    from swerl.training.options import WorkerSettings

    options = _options(folder, positions, dtype)
    _join(options)
    if not (folder / "model.safetensors").exists():
        _save(folder, config, positions, dtype)
    from swerl.training.rank.learner import Learner

    settings = WorkerSettings(
        model=folder,
        family="qwen3",
        algorithm="sft",
        algorithm_options={},
        options=options,
        rendezvous="",
        rank=0,
    )
    module = plugins.load("algorithms", "sft")
    return Learner(settings, _RandomFamily(), module.build(module.Options()))


def _save(folder: Path, config: Mapping[str, Any], positions: int, dtype: str) -> None:
    from safetensors.torch import save_file

    from swerl.engines.families._megatron_mapping import ModelMapping

    model = _model(folder, config, positions, dtype)
    from swerl.training.rank import weights

    mapping, tensors = ModelMapping(), {}
    named = {weights.global_name(model, name): each for name, each in model.named_parameters()}
    for name, tensor in weights.tensors(named):
        for key, part in mapping.to_hf({name: tensor}, config).items():
            tensors[key] = part.detach().cpu().clone().contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def _batch(lengths: Sequence[int], vocab: int) -> Any:
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


def _timed(call: Callable[[], object]) -> float:
    import torch

    if _on_gpu():
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if _on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _matrix_rate(size: int) -> float:
    """Return measured bf16 operations a second of a square matrix product."""
    import torch

    device = "cuda" if _on_gpu() else "cpu"
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    _timed(lambda: left @ right)
    times = 10

    def repeat() -> None:
        for _ in range(times):
            left @ right

    return times * 2 * size**3 / _timed(repeat)


def _passes(forward: Callable[[], Any]) -> Figures:
    """Return the seconds of a forward and a backward pass, and the bytes kept in between."""
    import torch

    for _ in range(2):
        forward().float().sum().backward()
    held = torch.cuda.memory_allocated() if _on_gpu() else 0
    out = forward()
    kept = torch.cuda.memory_allocated() - held if _on_gpu() else None
    del out
    forward_s = min(_timed(forward) for _ in range(3))
    both_s = min(_timed(lambda: forward().float().sum().backward()) for _ in range(3))
    return {"forward_s": forward_s, "backward_s": both_s - forward_s, "kept_bytes": kept}


def _reset_peak() -> None:
    import torch

    if _on_gpu():
        torch.cuda.reset_peak_memory_stats()


def _free_bytes() -> int:
    import torch

    return torch.cuda.mem_get_info()[0] if _on_gpu() else 0


def _planned_gib(config: Mapping[str, Any], positions: int) -> float:
    """Return the planned memory of the trainer's tensors in a step, as a run's metrics do."""
    from swerl.plan.activations import activation_bytes, logit_bytes
    from swerl.plan.layout import layout
    from swerl.plan.memory import training_state
    from swerl.plan.parameters import rank_params
    from swerl.plan.shape import shape_from_config
    from swerl.recipe.load import load

    shape = shape_from_config("bench", config)
    sets = [f"trainer.tokens_per_micro_batch={positions}"]
    found = layout(load([ROOT / "recipes" / "qwen06b_1gpu.toml"], sets), shape)
    state = training_state(rank_params(shape, found), found)
    activations = activation_bytes(shape, found, positions=positions, recompute=True)
    logits = logit_bytes(shape, found, positions=positions // 3)
    whole = state.weights + state.gradients + state.optimizer + activations + logits
    return float(whole) / 2**30


def _roofline(positions: int) -> Figures:
    """Return the predicted seconds of each layer on one rank, without recomputation."""
    with _folder() as folder:
        layout = {
            "ranks": 1,
            "tensor_parallel": 1,
            "context_parallel": 1,
            "expert_parallel": 1,
            "recompute": "false",
        }
        out = folder / "roofline.json"
        command = [sys.executable, str(ROOT / "bench" / "roofline.py")]
        command += [str(ROOT / "recipes" / "qwen35b_8node.toml"), f"--json={out}"]
        command += [f"--set=trainer.{key}={value}" for key, value in layout.items()]
        command += ["--gpu", "h200" if "H200" in _gpu_name() else "h100"]
        command += ["--rows", str(positions)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        parts = json.loads(out.read_text())["parts"]
    return {name: part["seconds"] for name, part in parts.items() if name != "ends"}


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name() if _on_gpu() else "CPU"


def run(piece: str, *, small: bool) -> Figures:
    """Run one piece in a process of its own; an error becomes a figure."""
    command = [sys.executable, __file__, "--piece", piece, *(["--small"] if small else [])]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMITS_S[piece], check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {LIMITS_S[piece]} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": done.stderr.strip()[-2000:]}
    found: Figures = json.loads(lines[-1])
    return found | {"wall_s": time.perf_counter() - started}


def table(found: Mapping[str, Figures]) -> Iterator[str]:
    """Yield `piece  figure  value`, nested figures by their path."""
    for piece, figures in found.items():
        for name, value in _flat(figures):
            shown = f"{value:.5g}" if isinstance(value, float) else str(value)
            yield f"{piece:9} {name:44} {shown}"


def _flat(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def main() -> None:
    """Run the pieces, print a table and write gpu.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=sorted(PIECES), default=list(PIECES))
    parser.add_argument("--small", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="file for the numbers")
    parser.add_argument("--piece", choices=sorted(PIECES), help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.child:
        _numerics_child(args.child[0], Path(args.child[1]))
        return
    if args.piece:
        print(json.dumps(PIECES[args.piece](args.small)))
        return
    if not args.small and not _on_gpu():
        parser.error("torch finds no GPU; --small runs on a CPU")
    found: dict[str, Figures] = {"machine": {"gpu": _gpu_name()}}
    for piece in args.only:
        found[piece] = run(piece, small=args.small)
    print("\n".join(table(found)))
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(any("error" in figures for figures in found.values()))


if __name__ == "__main__":
    main()
