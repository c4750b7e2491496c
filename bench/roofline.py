"""Count one micro-batch of a recipe's trainer and predict its seconds on a named GPU.

    python bench/roofline.py recipes/qwen35b_8node.toml
    python bench/roofline.py recipes/qwen35b_8node.toml --rows 96000 --gpu b200 --json out.json

One rank's forward, recomputation and backward pass run on a CPU: the real layers, on a fake process
group of the recipe's size (_stand_ins.py). One layer of each kind is counted on two small numbers
of positions, extrapolated to the recipe's, and multiplied by the model's layers. A kernel takes the
longest of its bytes, its operations and a launch. The seconds are a sum of kernels, so they are a
lower bound if nothing overlaps; pipeline bubbles and the optimizer's step are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from swerl.plan.activations import CHUNK_LOGITS, recomputed_layers
from swerl.plan.memory import GPUS
from swerl.plan.parameters import row_cost
from swerl.plan.shape import Shape, shape_from_config
from swerl.recipe.load import load
from swerl.recipe.schema import ModelSection, Recipe


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates that kernels reach on one GPU, a second. All are assumptions but the data sheet's."""

    bf16: float
    """Dense bf16 matrix operations, data sheet (plan/memory.py)."""
    memory: float
    """Bytes, data sheet (plan/memory.py)."""
    nvlink: float
    """Bytes in one direction, data sheet."""
    network: float
    """Bytes in one direction of one network card per GPU: 400 Gb/s with an H100."""
    fp32: float
    """fp32 operations outside of tensor cores, data sheet."""


_LINKS = {
    "a100": (25e9, 19.5e12),
    "h100": (50e9, 67e12),
    "h200": (50e9, 67e12),
    "b200": (50e9, 75e12),
}
"""Network card, fp32. NVIDIA's data sheets of A100, H100, H200 (SXM) and B200 (HGX)."""
MEMORY_SHARE = 0.78
"""Of the bandwidth: what a large elementwise kernel reaches. Assumed."""
PRODUCT_SHARE = 0.75
"""Of the bf16 peak. Measured on an H200: all products of a step of Qwen3-0.6B's shape."""
ATTENTION_SHARE = {128: (0.346, 0.315), 256: (0.30, 0.26)}
"""Of the bf16 peak, forward and backward, of FlashAttention 2 by the width of heads. 128 is
measured on an H200, 256 is assumed."""
FLASH3_SPEEDUP = 1.5
"""Of FlashAttention 3, both ways: the lower end of what arXiv 2407.08608, section 4.1, measured."""
LINK_SHARE = 0.8
"""Of NVLink and of the network. Assumed."""
CHUNK_S = (2.3e-6, 5.3e-6)
"""Seconds of the delta rule for 64 positions of a row, forward and backward. Its chunks wait for
each other, and with few heads a GPU they do not fill it. Assumed."""
LAUNCH_S = 4e-6
"""Least seconds of a kernel."""
EXCHANGE_S = 2e-5
"""Least seconds of an exchange."""
SYNC_S = 3e-4
"""Seconds that the GPU idles when the host waits for it: its queue is empty afterwards. Assumed."""
ISSUE_S = 1e-5
"""Seconds of the host to issue a kernel in eager mode. Assumed."""


def rates(gpu: str) -> Rates:
    """Return the rates of a GPU of `plan.memory.GPUS`."""
    known, (network, fp32) = GPUS[gpu], _LINKS[gpu]
    return Rates(known.bf16_flops, known.bytes_per_s, known.link_bytes_per_s, network, fp32)


@dataclass(slots=True)
class Line:
    """One class of the table."""

    kernels: float = 0.0
    num_bytes: float = 0.0
    flops: float = 0.0
    nvlink_bytes: float = 0.0
    network_bytes: float = 0.0
    seconds: float = 0.0

    def add(self, other: Line, times: float = 1.0) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + times * getattr(other, name))


@dataclass(slots=True)
class Part:
    """What a layer of one kind does, or the model's two ends."""

    lines: dict[str, Line] = field(default_factory=dict)
    syncs: Counter[str] = field(default_factory=Counter)

    def add(self, other: Part, times: float = 1.0) -> None:
        for kind, line in other.lines.items():
            self.lines.setdefault(kind, Line()).add(line, times)
        for place, number in other.syncs.items():
            self.syncs[place] += round(number * times)

    @property
    def seconds(self) -> float:
        return sum(line.seconds for line in self.lines.values())


@dataclass(frozen=True, slots=True)
class Work:
    """One rank's micro-batch."""

    positions: int
    """On one context rank."""
    rows: tuple[int, ...]
    """Lengths of the whole rows."""
    trained: float
    """Share of the positions whose log-probabilities the loss reads."""
    gpus_per_node: int
    rates: Rates
    flash3: bool = False
    """Whether attention runs FlashAttention 3."""
    attention_share: tuple[float, float] = ATTENTION_SHARE[256]


def model_config(section: ModelSection) -> dict[str, Any]:
    """Return the config of a recipe's model, completed if it comes from the table of shapes."""
    assert section.path is not None
    file = section.path / "config.json"
    if file.is_file():
        whole = json.loads(file.read_text(encoding="utf-8"))
        return dict(whole.get("text_config", whole))
    table = tomllib.loads((files("swerl.plan") / "shapes.toml").read_text(encoding="utf-8"))
    known = table[section.path.name.lower()]
    kind = "qwen3_5" if "linear_num_key_heads" in known else "qwen3"
    if any(key in known for key in ("num_experts", "n_routed_experts")):
        kind += "_moe"
    usual = {
        "model_type": kind,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "linear_conv_kernel_dim": 4,
        "norm_topk_prob": True,
    }
    return {**usual, **known}


def layer_kinds(shape: Shape) -> Counter[str]:
    """Return how many layers of each kind a model has."""
    found: Counter[str] = Counter()
    for layer in range(shape.num_layers):
        mixer = "attention" if shape.has_attention(layer) else "delta net"
        found[mixer + " + experts" * shape.has_experts(layer)] += 1
    return found


def only(config: Mapping[str, Any], kind: str, num_layers: int) -> dict[str, Any]:
    """Return a config whose layers are all of one kind."""
    mixer = "linear_attention" if kind.startswith("delta") else "full_attention"
    changed = {
        **config,
        "num_hidden_layers": num_layers,
        "layer_types": [mixer] * num_layers,
        "first_k_dense_replace": 0 if "experts" in kind else num_layers,
    }
    changed.pop("full_attention_interval", None)
    return changed


def count_recipe(recipe: Recipe, work: Work) -> dict[str, Part]:
    """Return the parts of one micro-batch: one layer of each kind by name, and `ends`.

    If some layers are recomputed, a layer is the mean of all of its kind: each kind is taken to
    have its share of them.
    """
    from bench._stand_ins import join_fake_ranks

    config = model_config(recipe.model)
    stage = config["num_hidden_layers"] // recipe.trainer.pipeline_parallel
    share = recomputed_layers(recipe.trainer.recompute, stage) / stage
    parts: dict[str, Part] = {}
    with tempfile.TemporaryDirectory() as folder:
        options = rank_options(recipe, Path(folder))
        join_fake_ranks(options)
        for again, times in ((False, 1 - share), (True, share)):
            if times:
                chosen = options.model_copy(update={"recompute": again})
                for name, part in _count_parts(config, chosen, work).items():
                    parts.setdefault(name, Part()).add(part, times)
    return parts


def _count_parts(config: Mapping[str, Any], options: Any, work: Work) -> dict[str, Part]:
    parts = {}
    for kind in layer_kinds(shape_from_config("counted", config)):
        one, two = (_part(only(config, kind, number), options, work) for number in (1, 2))
        layer = Part()
        layer.add(two)
        layer.add(one, -1)
        ends = Part()
        ends.add(one)
        ends.add(layer, -1)
        parts[kind], parts["ends"] = layer, ends
    return parts


def rank_options(recipe: Recipe, folder: Path) -> Any:
    """Return the options of one pipeline stage's ranks: stages are the slowest dimension."""
    from swerl.training.options import TrainerOptions

    trainer = recipe.trainer
    settings = trainer.model_dump() | {
        "ranks": trainer.ranks // trainer.pipeline_parallel,
        "pipeline_parallel": 1,
    }
    return TrainerOptions(**settings, checkpoint_dir=folder, publish_dir=folder, log_dir=folder)


def _part(config: Mapping[str, Any], options: Any, work: Work) -> Part:
    """Count a model on two small numbers of positions, and extrapolate each operation."""
    unit = _unit(config, options, work)
    sizes = (unit, 2 * unit)
    small, large = (_count(config, options, work, size) for size in sizes)
    if [op.name for op in small.ops] != [op.name for op in large.ops]:
        raise AssertionError("the operations depend on the number of positions")
    scale = (work.positions - sizes[0]) / (sizes[1] - sizes[0])
    part = Part(syncs=Counter(small.syncs))
    hidden = 0.0
    for first, second in zip(small.ops, large.ops, strict=True):
        op = replace(
            first,
            num_bytes=first.num_bytes + scale * (second.num_bytes - first.num_bytes),
            flops=first.flops + scale * (second.flops - first.flops),
        )
        line = _line(op, work)
        # Beside an exchange that does not wait, the next kernel takes only what is left of it.
        taken = line.seconds
        line.seconds = max(0.0, taken - hidden)
        hidden = taken if op.is_async else 0.0
        part.lines.setdefault(op.kind, Line()).add(line)
    waits = sum(part.syncs.values())
    part.lines["host syncs"] = Line(kernels=waits, seconds=waits * SYNC_S)
    return part


def _unit(config: Mapping[str, Any], options: Any, work: Work) -> int:
    """Return a small number of positions that stands for all: a part of the large counts."""
    shape = shape_from_config("counted", config)
    # With so many positions on each tensor rank every expert gets the same number.
    unit = max(16, shape.num_experts // max(1, shape.experts_per_token))
    unit *= len(work.rows) * options.tensor_parallel
    chunks = num_chunks(config, options, work)
    # Each chunk of logits gets as many trained positions, but for half a percent.
    sizes = ((size, size * work.trained / chunks) for size in range(unit, 100 * unit, unit))
    return next(size for size, exact in sizes if abs(round(exact) - exact) <= exact / 200)


def num_chunks(config: Mapping[str, Any], options: Any, work: Work) -> int:
    """Return the chunks of logits of all trained positions."""
    chunk = max(1, CHUNK_LOGITS // (config["vocab_size"] // options.tensor_parallel))
    return math.ceil(work.positions * work.trained / chunk)


def _count(config: Mapping[str, Any], options: Any, work: Work, positions: int) -> Any:
    from bench._op_counts import count

    model = counted_model(config, options)
    return count(model, counted_rows(config, options, work, positions))


def counted_model(config: Mapping[str, Any], options: Any) -> Any:
    """Return the trainer's model of this rank; its weights have no values yet."""
    from swerl.engines.families._megatron_mapping import ModelMapping
    from swerl.training.rank import model as models

    class Uninitialised(ModelMapping):
        def config(self, hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
            shapes = super().config(hf_config)
            settings = {**shapes["transformer"], "perform_initialization": False}
            return {**shapes, "transformer": settings}

    return models.build_model(Uninitialised(), config, options).train()


def counted_rows(
    config: Mapping[str, Any], options: Any, work: Work, positions: int, device: str = "cpu"
) -> Any:
    """Return this rank's part of `work`'s rows, shortened to `positions` of this rank."""
    import torch

    from swerl.training.rank import model as models
    from swerl.training.rank.microbatch import PackedRows

    # As many chunks of logits as with all positions.
    chunks = num_chunks(config, options, work)
    per_chunk = max(1, round(positions * work.trained / chunks))
    models.CHUNK_LOGITS = per_chunk * (config["vocab_size"] // options.tensor_parallel)
    num_trained = chunks * per_chunk
    context = options.context_parallel
    length = positions * context // len(work.rows)
    routed = _balanced(config, positions)
    return PackedRows(
        ids_N=torch.zeros(positions, dtype=torch.long, device=device),
        lengths=(length,) * len(work.rows),
        selected_O=torch.linspace(0, positions - 1, num_trained).long().to(device),
        labels_O=torch.zeros(num_trained, dtype=torch.long, device=device),
        index_O=torch.arange(num_trained, device=device),
        num_selected=num_trained * context,
        routed_NLK=None if routed is None else routed.to(device),
    )


def _balanced(config: Mapping[str, Any], positions: int) -> Any:
    """Return a record of routing that gives every expert as many positions."""
    import torch

    shape = shape_from_config("counted", config)
    if not any(shape.has_experts(layer) for layer in range(shape.num_layers)):
        return None
    chosen = torch.arange(positions * shape.experts_per_token) % shape.num_experts
    by_position = chosen.reshape(positions, 1, -1).expand(-1, shape.num_layers, -1)
    return by_position.to(torch.int16).contiguous()


def _line(op: Any, work: Work) -> Line:
    moved = op.num_bytes / (work.rates.memory * MEMORY_SHARE)
    is_backward = op.name == "backward"
    found = Line(kernels=1, num_bytes=op.num_bytes, flops=op.flops)
    if op.kind == "exchanges":
        found = _exchange(op, work)
    elif op.kind == "attention":
        # Causal: a query sees half of its row on average.
        found.flops *= sum(row**2 / 2 for row in work.rows) / sum(work.rows)
        found.seconds = found.flops / (work.rates.bf16 * work.attention_share[is_backward])
        found.seconds /= FLASH3_SPEEDUP if work.flash3 else 1
    elif op.kind == "delta rule":
        found.seconds = max(moved, max(work.rows) / 64 * CHUNK_S[is_backward])
    elif op.kind == "fp32 products":
        found.seconds = max(moved, op.flops / work.rates.fp32)
    else:
        found.seconds = max(moved, op.flops / (work.rates.bf16 * PRODUCT_SHARE), LAUNCH_S)
    return found


def _exchange(op: Any, work: Work) -> Line:
    """Return the bytes that one rank sends: over NVLink, and over its network card.

    A ring carries (n - 1) / n of the whole tensor, an all-reduce twice that; a node's cards share
    what crosses nodes. An all-to-all sends each rank its part.
    """
    num = len(op.ranks)
    if num == 1:
        return Line()
    nodes = [rank // (work.gpus_per_node or num) for rank in op.ranks]
    local = nodes.count(nodes[0])
    if op.name.startswith("alltoall"):
        inside, outside = op.num_bytes * (local - 1) / num, op.num_bytes * (num - local) / num
    else:
        passes = 2 if op.name.startswith("allreduce") else 1
        inside = passes * op.num_bytes * (num - 1) / num if local > 1 else 0.0
        outside = passes * op.num_bytes * (num - local) / num / local
    speed = work.rates
    seconds = max(inside / speed.nvlink, outside / speed.network) / LINK_SHARE
    return Line(
        kernels=1,
        nvlink_bytes=inside,
        network_bytes=outside,
        seconds=max(seconds, EXCHANGE_S),
    )


def whole(parts: Mapping[str, Part], kinds: Mapping[str, int], stages: int) -> Part:
    """Return one rank's micro-batch: all layers of its pipeline stage, and both ends."""
    found = Part()
    found.add(parts["ends"])
    for kind, number in kinds.items():
        found.add(parts[kind], number / stages)
    return found


def mfu(recipe: Recipe, work: Work, seconds: float) -> float:
    """Return the planner's operations of the rows over those that the GPUs could do."""
    trainer = recipe.trainer
    shape = shape_from_config(recipe.name, model_config(recipe.model))
    gpus = trainer.tensor_parallel * trainer.context_parallel * trainer.pipeline_parallel
    cost = row_cost(shape)
    return sum(map(cost.of, work.rows)) / (seconds * gpus * work.rates.bf16)


def report(recipe: Recipe, work: Work, parts: Mapping[str, Part], gpu: str) -> dict[str, Any]:
    """Return the table as JSON."""
    kinds = layer_kinds(shape_from_config(recipe.name, model_config(recipe.model)))
    total = whole(parts, kinds, recipe.trainer.pipeline_parallel)
    kernels = sum(_kernels(total))
    lines = sorted(total.lines.items(), key=lambda item: -item[1].seconds)
    return {
        "recipe": recipe.name,
        "gpu": gpu,
        "rows": list(work.rows),
        "positions": work.positions,
        "layers": dict(kinds),
        "classes": {kind: asdict(line) for kind, line in lines},
        "parts": {
            name: {
                "kernels": sum(_kernels(part)),
                "bytes": sum(line.num_bytes for line in part.lines.values()),
                "link_bytes": sum(
                    line.nvlink_bytes + line.network_bytes for line in part.lines.values()
                ),
                "syncs": part.lines["host syncs"].kernels,
                "seconds": part.seconds,
            }
            for name, part in parts.items()
        },
        "syncs": dict(total.syncs),
        "kernels": kernels,
        "seconds": total.seconds,
        "issue_seconds": kernels * ISSUE_S,
        "mfu": mfu(recipe, work, total.seconds),
    }


def _kernels(part: Part) -> Iterable[float]:
    """Yield the kernels of each class; a host sync is none."""
    return (line.kernels for kind, line in part.lines.items() if kind != "host syncs")


def table(found: Mapping[str, Any]) -> Iterable[str]:
    """Yield the lines of the printed table."""
    rows = ", ".join(f"{row:,}" for row in found["rows"])
    yield f"{found['recipe']} on {found['gpu']}: a micro-batch with rows of {rows} tokens"
    yield f"{'class':18}{'kernels':>9}{'GB':>9}{'TFLOP':>9}{'NVLink GB':>11}{'IB GB':>8}{'s':>8}"
    for kind, line in found["classes"].items():
        yield (
            f"{kind:18}{line['kernels']:9,.0f}{line['num_bytes'] / 1e9:9.1f}"
            f"{line['flops'] / 1e12:9.2f}{line['nvlink_bytes'] / 1e9:11.2f}"
            f"{line['network_bytes'] / 1e9:8.2f}{line['seconds']:8.3f}"
        )
    yield f"{'together':18}{found['kernels']:9,.0f}{'':37}{found['seconds']:8.3f}"
    yield f"MFU {found['mfu']:.1%}; the host issues these kernels in {found['issue_seconds']:.2f} s"
    for name, part in found["parts"].items():
        yield (
            f"  {found['layers'].get(name, 1):3} x {name:20} {part['kernels']:6,.0f} kernels "
            f"{part['bytes'] / 1e9:7.1f} GB {part['syncs']:4.0f} syncs "
            f"{1e3 * part['seconds']:8.2f} ms"
        )
    for place, number in sorted(found["syncs"].items()):
        yield f"  {number:5} host syncs in {place}"


def micro_batch(recipe: Recipe, rows: Sequence[int], trained: float, gpu: str) -> Work:
    """Return the micro-batch of these rows; without rows it is full of rows of 32,000 tokens."""
    trainer = recipe.trainer
    if not rows:
        room = trainer.tokens_per_micro_batch * trainer.context_parallel
        number = -(-room // 32_768)
        rows = (room // number,) * number
    positions = sum(rows) // trainer.context_parallel
    share = ATTENTION_SHARE[128 if model_config(recipe.model)["head_dim"] <= 128 else 256]
    per_node = recipe.cluster.gpus_per_node
    return Work(positions, tuple(rows), trained, per_node, rates(gpu), attention_share=share)


def main() -> None:
    """Print the table; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    shipped = Path("recipes/qwen35b_8node.toml")
    parser.add_argument("recipe", type=Path, nargs="?", default=shipped)
    parser.add_argument("--set", action="append", default=[], help="a recipe key, as KEY=VALUE")
    parser.add_argument("--gpu", choices=sorted(_LINKS), help="default: the recipe's")
    parser.add_argument("--rows", type=int, nargs="+", default=[], help="tokens of each row")
    parser.add_argument("--trained", type=float, default=0.125, help="share of trained tokens")
    parser.add_argument("--flash3", action="store_true", help="assume FlashAttention 3")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    recipe = load([args.recipe], args.set)
    gpu = args.gpu or recipe.cluster.gpu
    work = micro_batch(recipe, args.rows, args.trained, gpu)
    work = replace(work, flash3=args.flash3)
    found = report(recipe, work, count_recipe(recipe, work), gpu)
    print("\n".join(table(found)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
