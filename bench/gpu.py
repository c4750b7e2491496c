"""Measure swerl's GPU code on one GPU against the plan and the roofline, in some eight minutes.

    python bench/gpu.py                         all pieces
    python bench/gpu.py --only step layers      some pieces
    python bench/gpu.py --small                 small shapes; runs on a CPU too

step      an optimizer step of a Qwen3-0.6B-shaped model on 32k packed tokens: MFU against the
          measured rate of bf16 matrix products, and peak memory against the plan
layers    one delta net, one attention and one expert layer of Qwen3.6-35B-A3B's shape: seconds and
          kept bytes against the roofline and the plan
rank      one micro-batch of rank 0 of recipes/qwen35b_8node.toml without its exchanges (a fake
          process group): seconds of each class of kernels against the roofline
sleep     sleep and wake of a rank: memory given back, seconds, weights bit-equal
numerics  log-probabilities and gradient norm in bf16 on the GPU against fp32 on the CPU
ipc       weights by CUDA IPC to a second process; on a CPU by shared memory

The first run on a machine takes some minutes more: it compiles the kernels of delta nets. Their
backward pass is left out if fla-core refuses it: on an H100, with Triton 3.4 to 3.7.0.
Each piece runs in a process of its own, so that one that fails does not stop the others; what it
measured before it failed is kept. Weights are random. Prints a table and writes gpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from _gpu_model import (
    DENSE,
    HYBRID,
    SMALL_DENSE,
    SMALL_HYBRID,
    Figures,
    delta_backward,
    free_bytes,
    gpu_name,
    matrix_rate,
    on_gpu,
    pass_times,
    random_batch,
    random_learner,
    random_model,
    scratch_folder,
    seconds_of,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
LIMITS_S = {"step": 120, "layers": 400, "rank": 400, "sleep": 90, "numerics": 400, "ipc": 60}
"""Most seconds of each piece; on a machine's first run the kernels of delta nets compile."""


def step(small: bool) -> Figures:
    """Take optimizer steps, and compare speed and memory with the machine and the plan."""
    from swerl.plan.parameters import row_cost
    from swerl.plan.shape import shape_from_config

    config = SMALL_DENSE if small else DENSE
    lengths = (96, 64, 32) if small else (16384, 8192, 8192)
    peak = matrix_rate(256 if small else 8192)
    with scratch_folder() as folder:
        learner = random_learner(folder, config, positions=sum(lengths))
        batch = random_batch(lengths, config["vocab_size"])
        learner.step(batch)  # kernels are compiled and Adam's state is made
        seconds = [seconds_of(lambda: learner.step(batch)) for _ in range(3)]
        used_gib = learner.step(batch).extra.get("peak_memory_gib")
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
    # Kernels of delta nets compile for minutes, so they come last.
    for name in ("full_attention", "linear_attention"):
        config = (SMALL_HYBRID if small else HYBRID) | {"layer_types": [name]}
        with scratch_folder() as folder:
            model = random_model(folder, config, positions)
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
        whole = pass_times(
            lambda layer=layer, hidden=hidden, rope=rope, rows=rows: layer(
                hidden, attention_mask=None, rotary_pos_emb=rope, packed_seq_params=rows
            )[0],
            backward=name == "full_attention" or delta_backward(),
        )
        planned = layer_bytes(shape_from_config("layer", config), Splits(1, 1, 1), 0)
        found[name] = whole | {"planned_bytes_of_a_position": planned}
        if on_gpu():
            found[name]["kept_bytes_of_a_position"] = whole["kept_bytes"] / positions
        if name == "full_attention":
            found["experts"] = pass_times(lambda layer=layer, hidden=hidden: layer.mlp(hidden)[0])
            if not small:
                found["roofline_s"] = _roofline(positions)
        keep(found)
    return found


def keep(found: Figures) -> None:
    """Print what a piece has measured so far: it is kept if the piece fails later."""
    print(json.dumps(found), flush=True)


_CLASSES = {
    "attention": r"flash|fmha",
    "delta rule": r"chunk_(?!logits)|delta|recompute_w_u|merge_\d+x|solve_tril|l2norm",
    "expert products": r"group",
    "matrix products": r"gemm|nvjet|cutlass|cublas|splitK",
    "fused elementwise": r"triton_|conv1d|layer_norm|rms_norm",
    "copies": r"index|gather|scatter|Cat|copy|Memcpy|nonzero|embedding",
}
"""Classes of the roofline's table by the names of their kernels; the first that matches."""
_WHOLE = ("elementwise", "all", "kept_bytes")


def rank(small: bool) -> Figures:
    """Time a recipe's rank on one GPU, exchanges left out, and sum its kernels by class.

    A layer is the difference of two models, one with a layer more. The other ranks do not exist:
    what they would send is this rank's own.
    """
    import roofline
    from _gpu_model import fake_ranks, passes

    sets = ["trainer.recompute=false"]
    if small:
        splits = {"ranks": 4, "tensor_parallel": 1, "context_parallel": 2, "expert_parallel": 2}
        sets += [f"trainer.{name}={number}" for name, number in splits.items()]
    recipe = roofline.load([ROOT / "recipes" / "qwen35b_8node.toml"], sets)
    work = roofline.micro_batch(recipe, (768, 768, 768) if small else (), 0.125, "h100")
    config = roofline.model_config(recipe.model)
    if small:
        config |= SMALL_HYBRID | {"num_hidden_layers": 4}
    kinds = roofline.layer_kinds(roofline.shape_from_config("rank", config))
    found: Figures = {"positions": work.positions, "layers": dict(kinds)}
    with scratch_folder() as folder:
        options = roofline.rank_options(recipe, folder)
        fake_ranks(options)
        for kind in sorted(kinds):
            backward = kind.startswith("attention") or delta_backward()
            one, two = (
                passes(roofline.only(config, kind, n), options, work, backward=backward)
                for n in (1, 2)
            )
            found[kind] = _by_class(two, one)
            if kind.startswith("attention"):
                found["ends"] = _by_class(one, found[kind])
            keep(found)
    return found


def _by_class(kernels: Mapping[str, float], without: Mapping[str, float]) -> Figures:
    """Return seconds by class; `all` is the pass by the clock, with nothing overlapped."""
    found: Figures = {}
    for names, sign in ((kernels, 1), (without, -1)):
        for name, seconds in names.items():
            known = (kind for kind, pattern in _CLASSES.items() if re.search(pattern, name))
            kind = name if name in (*_CLASSES, *_WHOLE) else next(known, "elementwise")
            found[kind] = found.get(kind, 0.0) + sign * seconds
    return found


def sleep(small: bool) -> Figures:
    """Let a rank sleep and wake twice; the second time its host memory exists already."""
    import torch

    config = SMALL_DENSE if small else DENSE
    with scratch_folder() as folder:
        learner = random_learner(folder, config, positions=1024)
        learner.step(random_batch((512, 256), config["vocab_size"]))
        before = [each.detach().cpu().clone() for each in learner.model.parameters()]
        rounds = []
        for _ in range(2):
            free = free_bytes()
            slept_s = seconds_of(learner.sleep)
            given = free_bytes() - free
            wake_s = seconds_of(learner.wake)
            rounds.append({"sleep_s": slept_s, "wake_s": wake_s, "given_gib": given / 2**30})
        after = [each.detach().cpu() for each in learner.model.parameters()]
        equal = all(map(torch.equal, before, after))
        # A step after a sleep must work.
        learner.step(random_batch((512, 256), config["vocab_size"]))
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
        "gradients_by_kernels": found["bf16"]["kernels"],
        "logprob_difference_mean": statistics.mean(differences),
        "logprob_difference_max": max(differences),
        "loss_difference": abs(found["bf16"]["loss"] - found["fp32"]["loss"]),
        "grad_norm_relative": abs(found["bf16"]["grad_norm"] - norm) / norm,
    }


def _numerics_child(dtype: str, folder: Path) -> None:
    """Write the log-probabilities and the gradient norm of a hybrid model with experts."""
    import torch

    layers = ["linear_attention", "full_attention"]
    config = SMALL_HYBRID | {"layer_types": layers, "num_hidden_layers": 2}
    lengths = (90, 50, 20)
    learner = random_learner(folder, config, positions=sum(lengths), dtype=dtype)
    from swerl.training.rank import gated_delta

    batch = random_batch(lengths, config["vocab_size"])
    logprobs = [value for row in learner.logprobs(batch) for value in row]
    kernels = delta_backward()
    if not kernels:
        # The step's gradients come from torch's own loop.
        gated_delta.has_kernels = lambda: False  # type: ignore[assignment]
    stats = learner.step(batch)
    found = {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "kernels": kernels,
        "logprobs": logprobs,
        "grad_norm": stats.grad_norm,
        "loss": stats.loss,
    }
    (folder / f"{dtype}.json").write_text(json.dumps(found))


def ipc(small: bool) -> Figures:
    """Pass weights to a second process without a copy; it reads them and reports their sum."""
    import torch
    import torch.multiprocessing as processes

    device = "cuda" if on_gpu() else "cpu"
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
    "sleep": sleep,
    "ipc": ipc,
    "layers": layers,
    "numerics": numerics,
    "rank": rank,
}


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
    with scratch_folder() as folder:
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
        command += ["--gpu", "h200" if "H200" in gpu_name() else "h100"]
        command += ["--rows", str(positions)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        parts = json.loads(out.read_text())["parts"]
    return {name: part["seconds"] for name, part in parts.items() if name != "ends"}


def run(piece: str, *, small: bool) -> Figures:
    """Run one piece in a process of its own; an error becomes a figure."""
    command = [sys.executable, __file__, "--piece", piece, *(["--small"] if small else [])]
    started, pipe = time.perf_counter(), subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    late = False
    try:
        out, err = process.communicate(timeout=LIMITS_S[piece])
    except subprocess.TimeoutExpired:
        late = True
        # A child that lives on would slow the next piece down.
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    # Libraries may print lines of their own.
    lines = [line for line in out.splitlines() if line.startswith("{")]
    found: Figures = json.loads(lines[-1]) if lines else {}
    if late:
        found["error"] = f"took longer than {LIMITS_S[piece]} s"
    elif process.returncode or not lines:
        found["error"] = err.strip()[-2000:]
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
    if not args.small and not on_gpu():
        parser.error("torch finds no GPU; --small runs on a CPU")
    found: dict[str, Figures] = {"machine": {"gpu": gpu_name()}}
    for piece in args.only:
        found[piece] = run(piece, small=args.small)
        print("\n".join(table({piece: found[piece]})), flush=True)
        # The whole command may be cut short.
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(any("error" in figures for figures in found.values()))


if __name__ == "__main__":
    main()
