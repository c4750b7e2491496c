"""A dense decoder's forward in plain torch over a cache of rows, in float32.

Axes: B rows of the batch, T new positions, L cached positions, V vocabulary, H hidden, Q query
heads, K key-value heads, G = Q / K, D head dimension, P positions of a row.

A row of the cache belongs to one token sequence. `forward` writes keys and values of the new tokens
at their positions. Each token attends to the positions up to its own, so later ones in the row are
never read. Position P - 1 is scratch space for padding.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as load_safetensors
from torch import Tensor
from torch.nn import functional

from swerl.core.errors import EngineError, InputError
from swerl.engines._weights import ADAPTER_CONFIG, digest, shards
from swerl.engines.families._megatron_plan import ModelPlan, plan_of


@dataclass(frozen=True, slots=True)
class DenseShape:
    """The parts of a config.json that the server uses."""

    plan: ModelPlan
    max_positions: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one block; projections that read the same input are stored as one matrix."""

    input_norm_H: Tensor
    qkv: Tensor
    """[(Q + 2K)·D, H]"""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[Q + K, D]"""
    out: Tensor
    post_norm_H: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """All weights, checked and ready: replacing them is one assignment."""

    embed_VH: Tensor
    layers: tuple[LayerWeights, ...]
    norm_H: Tensor
    head_VH: Tensor
    checksum: str
    num_params: int


class DenseModel:
    """Weights and rotary tables."""

    def __init__(self, shape: DenseShape, weights: DenseWeights, num_positions: int) -> None:
        self.shape = shape
        self.weights = weights
        self._plan, self._attention = shape.plan, shape.plan.attention
        rope = shape.plan.rope
        self._scale = rope.attention**2 * self._attention.head_dim**-0.5
        # Cosines and signed sines [P, D]; with them a roll by half rotates by 90°.
        angles = torch.arange(num_positions).float()[:, None] * rope.frequencies()
        sin = angles.sin()
        self._cos_PD, self._sin_PD = angles.cos().repeat(1, 2), torch.cat((-sin, sin), -1)

    def new_cache(self, num_rows: int) -> Tensor:
        """Return zeroed memory [layers, 2, rows, K, P, D]; pages are taken when first written.

        Raises EngineError if the system does not reserve that much.
        """
        heads, positions = self._attention, self._cos_PD.shape[0]
        size = (self._plan.num_layers, 2, num_rows, heads.num_groups, positions, heads.head_dim)
        try:
            memory = mmap.mmap(-1, 4 * math.prod(size))
        except (OSError, ValueError, OverflowError) as error:
            raise EngineError(
                f"no memory for a cache of {4 * math.prod(size) / 2**30:.0f} GiB: {error}",
                hint="lower num_rows or context_length",
            ) from error
        # Most rows are short: a whole huge page would be zeroed for a few tokens.
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.float32).view(size)

    def forward(self, ids_BT: Tensor, positions_BT: Tensor, cache: Tensor, length: int) -> Tensor:
        """Return hidden states [B, T, H] and fill the cache, whose rows are the batch's rows.

        `cache` is `[layers, 2, B, K, P, D]`; `length` is one more than the largest position.
        """
        visible_L = torch.arange(length)
        mask_BTL = visible_L <= positions_BT[:, :, None]
        mask = mask_BTL.repeat(1, self._attention.num_heads // self._attention.num_groups, 1)[
            :, None
        ]
        rotary = self._cos_PD[positions_BT][:, :, None], self._sin_PD[positions_BT][:, :, None]
        x = functional.embedding(ids_BT, self.weights.embed_VH)
        for layer, kv in zip(self.weights.layers, cache, strict=True):
            normed = self._norm(x, layer.input_norm_H)
            heads = self._heads(normed, layer, rotary)
            x = x + self._attend(heads, positions_BT, kv, mask) @ layer.out.T
            gate, up = (self._norm(x, layer.post_norm_H) @ layer.gate_up.T).chunk(2, -1)
            x = x + (functional.silu(gate) * up) @ layer.down.T
        return self._norm(x, self.weights.norm_H)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden states [..., H]."""
        return hidden @ self.weights.head_VH.T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._plan.epsilon)

    def _heads(self, x: Tensor, layer: LayerWeights, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return queries, keys and values of all heads [B, T, Q + 2K, D], the first two rotated."""
        attention = self._attention
        mixed = functional.linear(x, layer.qkv, layer.qkv_bias)
        heads = mixed.view(*x.shape[:2], -1, attention.head_dim)
        qk, v = heads.tensor_split([attention.num_heads + attention.num_groups], 2)
        if layer.qk_norm is not None:
            qk = functional.rms_norm(qk, qk.shape[-1:], None, self._plan.epsilon) * layer.qk_norm
        cos, sin = rotary
        qk = torch.addcmul(qk * cos, qk.roll(attention.head_dim // 2, -1), sin)
        return torch.cat((qk, v), 2)

    def _attend(self, heads: Tensor, positions_BT: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        num_rows, num_new = positions_BT.shape
        num_kv, dim = self._attention.num_groups, self._attention.head_dim
        q, k, v = torch.split(heads, [self._attention.num_heads, num_kv, num_kv], 2)
        row_B1 = torch.arange(num_rows)[:, None]
        kv[0][row_B1, :, positions_BT] = k
        kv[1][row_B1, :, positions_BT] = v
        # Query heads that share a key head are merged into one: [B, K, G·T, D].
        split = q.view(num_rows, num_new, num_kv, -1, dim).permute(0, 2, 3, 1, 4)
        grouped = split.reshape(num_rows, num_kv, -1, dim)
        length = mask.shape[-1]
        mixed = functional.scaled_dot_product_attention(
            grouped, kv[0, :, :, :length], kv[1, :, :, :length], attn_mask=mask, scale=self._scale
        )
        per_token = mixed.view(num_rows, num_kv, -1, num_new, dim).permute(0, 3, 1, 2, 4)
        return per_token.reshape(num_rows, num_new, -1)


def read_shape(folder: Path) -> DenseShape:
    """Read config.json. Raises EngineError if the model is not a dense one of a trained line."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        plan = plan_of(config)
        if plan.delta or plan.experts:
            raise InputError(f"{config['model_type']} is not a dense model with full attention")
        eos = config.get("eos_token_id")
        return DenseShape(
            plan,
            config.get("max_position_embeddings", 32768),
            () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        )
    except FileNotFoundError as error:
        raise EngineError(
            f"no config.json in {str(folder)!r}", hint="name a model folder in Hugging Face format"
        ) from error
    except (InputError, ValueError, AttributeError) as error:
        raise EngineError(
            f"{str(path)!r} cannot be served: {error}",
            hint="torch-cpu serves dense models; use engine.type = 'sglang' for others",
        ) from error


def read_weights(folder: Path, shape: DenseShape, *, base: Path | None = None) -> DenseWeights:
    """Read and check a folder of weights, or of adapters (PEFT) of the model in `base`.

    Raises EngineError that names the first wrong tensor.
    """
    blobs = [path.read_bytes() for path in shards(folder)]
    checksum = digest(folder, blobs)
    tensors = {name: t for blob in blobs for name, t in load_safetensors(blob).items()}
    if base and (folder / ADAPTER_CONFIG).is_file():
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        tensors = _merged(base, tensors, scale=config["lora_alpha"] / config["r"])
    plan = shape.plan
    expected = _expected(plan)
    if plan.tied:
        tensors.pop("lm_head.weight", None)
    for name, size in expected.items():
        shape_there = tuple(tensors[name].shape) if name in tensors else "nothing"
        if shape_there != size:
            raise EngineError(
                f"tensor {name!r} must be {size}, the folder has {shape_there}",
                hint="use weights of the served model",
            )
    if extra := sorted(set(tensors) - set(expected)):
        raise EngineError(f"tensor {extra[0]!r} is not part of the served model")
    tensors = {name: tensors[name].float() for name in expected}
    embed_VH = tensors["model.embed_tokens.weight"]
    return DenseWeights(
        embed_VH=embed_VH,
        layers=tuple(_layer(plan, tensors, index) for index in range(plan.num_layers)),
        norm_H=tensors["model.norm.weight"],
        head_VH=embed_VH if plan.tied else tensors["lm_head.weight"],
        checksum=checksum,
        num_params=sum(tensor.numel() for tensor in tensors.values()),
    )


def _merged(
    base: Path, adapters: Mapping[str, torch.Tensor], *, scale: float
) -> dict[str, torch.Tensor]:
    """Return a model's tensors in fp32, with the changes of its adapters added."""
    files = (load_safetensors(path.read_bytes()) for path in shards(base))
    tensors = {name: t.float() for file in files for name, t in file.items()}
    for name, A in adapters.items():
        path, found, _ = name.removeprefix("base_model.model.").partition(".lora_A.weight")
        if not found:
            continue
        weight, B = f"{path}.weight", adapters.get(name.replace(".lora_A.", ".lora_B."))
        if weight not in tensors or B is None or (len(B), A.shape[1]) != tensors[weight].shape:
            raise EngineError(
                f"the adapter {name!r} does not fit the served model",
                hint="use adapters that were trained on the model that the engine started with",
            )
        tensors[weight] += scale * (B.float() @ A.float())
    return tensors


def _expected(plan: ModelPlan) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by its Hugging Face name."""
    hidden, inner, attention = plan.hidden_size, plan.ffn_size, plan.attention
    query, key = (n * attention.head_dim for n in (attention.num_heads, attention.num_groups))
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (plan.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not plan.tied:
        sizes["lm_head.weight"] = (plan.vocab_size, hidden)
    parts: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if attention.bias:
        parts |= {f"self_attn.{name}_proj.bias": (key,) for name in "kv"}
        parts["self_attn.q_proj.bias"] = (query,)
    if attention.normed:
        parts |= {f"self_attn.{name}_norm.weight": (attention.head_dim,) for name in "qk"}
    for index in range(plan.num_layers):
        sizes |= {f"model.layers.{index}.{part}": size for part, size in parts.items()}
    return sizes


def _layer(plan: ModelPlan, tensors: Mapping[str, Tensor], index: int) -> LayerWeights:
    def part(name: str, kind: str = "weight") -> Tensor:
        return tensors[f"model.layers.{index}.{name}.{kind}"]

    def qkv(kind: str) -> Tensor:
        return torch.cat([part(f"self_attn.{name}_proj", kind) for name in "qkv"])

    attention, qk_norm = plan.attention, None
    if attention.normed:
        norms = [part("self_attn.q_norm")] * attention.num_heads
        qk_norm = torch.stack(norms + [part("self_attn.k_norm")] * attention.num_groups)
    return LayerWeights(
        input_norm_H=part("input_layernorm"),
        qkv=qkv("weight"),
        qkv_bias=qkv("bias") if attention.bias else None,
        qk_norm=qk_norm,
        out=part("self_attn.o_proj"),
        post_norm_H=part("post_attention_layernorm"),
        gate_up=torch.cat([part("mlp.gate_proj"), part("mlp.up_proj")]),
        down=part("mlp.down_proj"),
    )


@dataclass(frozen=True, slots=True)
class Draws:
    """One sampled token for each row."""

    ids_B: NDArray[np.int64]
    logprobs_B: NDArray[np.float32]
    """Under the temperature-scaled distribution, before top-k and top-p cut it, as SGLang does;
    for greedy rows (temperature 0) at temperature 1."""


def draw(logits_BV: Tensor, table: NDArray[np.void]) -> Draws:
    """Sample each row by its settings in `table` (RECORDs of the rows of the batch)."""
    greedy_B = table["temperature"] == 0.0
    temperature_B = torch.from_numpy(np.where(greedy_B, np.float32(1.0), table["temperature"]))
    logprobs_BV = torch.log_softmax(logits_BV / temperature_B[:, None], -1)
    probs_BV = logprobs_BV.exp().double()
    if (table["top_k"] > 0).any() or (table["top_p"] < 1.0).any():
        probs_BV = _cut(probs_BV, table)
    cdf_BV = probs_BV.cumsum(-1)
    uniform_B = uniforms(table["seed"], table["num_tokens"] - table["num_prompt"])
    target_B1 = torch.from_numpy(uniform_B)[:, None] * cdf_BV[:, -1:]
    ids_B1 = torch.searchsorted(cdf_BV, target_B1, right=True)
    if greedy_B.any():
        best_B1 = logits_BV.argmax(-1, keepdim=True)
        ids_B1 = torch.where(torch.from_numpy(greedy_B)[:, None], best_B1, ids_B1)
    logprobs_B = logprobs_BV.gather(-1, ids_B1)[:, 0]
    return Draws(ids_B1[:, 0].numpy(), logprobs_B.numpy())


def uniforms(seed_B: NDArray[np.uint64], count_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the count-th number in [0, 1) of each seed's stream (SplitMix64's mixer)."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seed_B + golden) + (count_B.astype(np.uint64) + np.uint64(1)) * golden)
    # 40 bits: u times the total stays below the total, so every draw is a valid id.
    return (mixed >> np.uint64(24)).astype(np.float64) * 2.0**-40


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _cut(probs_BV: Tensor, table: NDArray[np.void]) -> Tensor:
    """Set probabilities outside each row's top-k or top-p nucleus to zero."""
    top_p_B1 = torch.from_numpy(table["top_p"].astype(np.float64))[:, None]
    num_vocab = probs_BV.shape[-1]
    top_k = np.where(table["top_k"] > 0, table["top_k"], num_vocab)
    top_k_B1 = torch.from_numpy(top_k)[:, None]
    sorted_BV, order_BV = probs_BV.sort(stable=True, dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    kept_BV = (before_BV <= top_p_B1) & (torch.arange(num_vocab) < top_k_B1)
    # The most likely token is kept under every setting.
    kept_BV[:, 0] = True
    return torch.zeros_like(probs_BV).scatter_(-1, order_BV, sorted_BV * kept_BV)
