"""A dense decoder's forward over a cache of rows, in float32, and in NumPy: it starts the hundred
small operations of a step several times faster than torch does.

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

from swerl.core.errors import EngineError, InputError
from swerl.engines._weights import digest, shards
from swerl.engines.families._megatron_plan import ModelPlan, plan_of

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DenseShape:
    """The parts of a config.json that the server uses."""

    plan: ModelPlan
    max_positions: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one block; projections that read the same input are stored as one matrix."""

    input_norm_H: Floats
    qkv: Floats
    """[(Q + 2K)·D, H]"""
    qkv_bias: Floats | None
    qk_norm: Floats | None
    """[Q + K, D]"""
    out: Floats
    post_norm_H: Floats
    gate_up: Floats
    down: Floats


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """All weights, checked and ready: replacing them is one assignment."""

    embed_VH: Floats
    layers: tuple[LayerWeights, ...]
    norm_H: Floats
    head_VH: Floats
    checksum: str
    num_params: int


class DenseModel:
    """Weights and rotary tables."""

    def __init__(self, shape: DenseShape, weights: DenseWeights, num_positions: int) -> None:
        self.shape = shape
        self.weights = weights
        self._plan, self._attention = shape.plan, shape.plan.attention
        rope = shape.plan.rope
        self._scale = np.float32(rope.attention**2 * self._attention.head_dim**-0.5)
        # Cosines and signed sines [P, D]; with them a roll by half rotates by 90°.
        angles = torch.arange(num_positions).float()[:, None] * rope.frequencies()
        sin = angles.sin()
        self._cos_PD: Floats = angles.cos().repeat(1, 2).numpy()
        self._sin_PD: Floats = torch.cat((-sin, sin), -1).numpy()

    def new_cache(self, num_rows: int) -> Floats:
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
                hint="lower engine.context_length",
            ) from error
        # Most rows are short: a whole huge page would be zeroed for a few tokens.
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        return np.frombuffer(memory, dtype=np.float32).reshape(size)

    def forward(self, ids_BT: Ids, positions_BT: Ids, cache: Floats, length: int) -> Floats:
        """Return hidden states [B, T, H] and fill the cache, whose rows are the batch's rows.

        `cache` is `[layers, 2, B, K, P, D]`; `length` is one more than the largest position.
        """
        later_BTL = np.arange(length) > positions_BT[:, :, None]
        mask_BTL = np.where(later_BTL, np.float32(-np.inf), np.float32(0))
        rotary = self._cos_PD[positions_BT][:, :, None], self._sin_PD[positions_BT][:, :, None]
        # One matrix of all positions: NumPy multiplies stacked matrices one by one.
        x = self.weights.embed_VH[ids_BT.ravel()]
        for layer, kv in zip(self.weights.layers, cache, strict=True):
            heads = self._heads(self._norm(x, layer.input_norm_H), layer, rotary)
            x += self._attend(heads, positions_BT, kv, mask_BTL) @ layer.out.T
            both = self._norm(x, layer.post_norm_H) @ layer.gate_up.T
            gate, up = both[:, : len(layer.gate_up) // 2], both[:, len(layer.gate_up) // 2 :]
            # SiLU: exp overflows to infinity where the quotient is zero.
            x += (gate / (1 + np.exp(-gate)) * up) @ layer.down.T
        return self._norm(x, self.weights.norm_H).reshape(*ids_BT.shape, -1)

    def logits(self, hidden: Floats) -> Floats:
        """Return logits [..., V] of hidden states [..., H]."""
        return hidden @ self.weights.head_VH.T

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        """Divide by the root mean square of the last axis, then multiply by the weight."""
        squares = np.einsum("...h,...h->...", x, x) / np.float32(x.shape[-1])
        normed: Floats = x / np.sqrt(squares + np.float32(self._plan.epsilon))[..., None]
        return normed * weight

    def _heads(self, x: Floats, layer: LayerWeights, rotary: tuple[Floats, Floats]) -> Floats:
        """Return queries, keys and values of all heads [B, T, Q + 2K, D], the first two rotated."""
        attention, (cos, sin) = self._attention, rotary
        mixed = x @ layer.qkv.T
        if layer.qkv_bias is not None:
            mixed += layer.qkv_bias
        heads = mixed.reshape(*cos.shape[:2], -1, attention.head_dim)
        qk = heads[:, :, : attention.num_heads + attention.num_groups]
        if layer.qk_norm is not None:
            qk[:] = self._norm(qk, layer.qk_norm)
        half = attention.head_dim // 2
        rolled = np.concatenate((qk[..., half:], qk[..., :half]), -1)
        qk *= cos
        qk += rolled * sin
        return heads

    def _attend(self, heads: Floats, positions_BT: Ids, kv: Floats, mask_BTL: Floats) -> Floats:
        num_rows, num_new, length = mask_BTL.shape
        num_heads, num_kv = self._attention.num_heads, self._attention.num_groups
        q = heads[:, :, :num_heads]
        new_kv = heads[:, :, num_heads:].reshape(num_rows, num_new, 2, num_kv, -1)
        kv[:, np.arange(num_rows)[:, None], :, positions_BT] = new_kv
        # Query heads that share a key head are merged into one: [B, K, G·T, D].
        split = q.reshape(num_rows, num_new, num_kv, -1, q.shape[-1]).transpose(0, 2, 3, 1, 4)
        grouped = (split * self._scale).reshape(num_rows, num_kv, -1, q.shape[-1])
        scores = grouped @ kv[0, :, :, :length].swapaxes(-1, -2)
        by_token = scores.reshape(*split.shape[:-1], length)
        by_token += mask_BTL[:, None, None]
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed: Floats = scores @ kv[1, :, :, :length] / scores.sum(-1, keepdims=True)
        by_head = mixed.reshape(split.shape).transpose(0, 3, 1, 2, 4)
        return by_head.reshape(num_rows * num_new, -1)


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


def read_weights(folder: Path, shape: DenseShape) -> DenseWeights:
    """Read and check a folder of weights. Raises EngineError that names the first wrong tensor."""
    blobs = [path.read_bytes() for path in shards(folder)]
    checksum = digest(blobs)
    tensors = {name: t for blob in blobs for name, t in load_safetensors(blob).items()}
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
    arrays = {name: tensors[name].float().numpy() for name in expected}
    embed_VH = arrays["model.embed_tokens.weight"]
    return DenseWeights(
        embed_VH=embed_VH,
        layers=tuple(_layer(plan, arrays, index) for index in range(plan.num_layers)),
        norm_H=arrays["model.norm.weight"],
        head_VH=embed_VH if plan.tied else arrays["lm_head.weight"],
        checksum=checksum,
        num_params=sum(array.size for array in arrays.values()),
    )


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


def _layer(plan: ModelPlan, arrays: Mapping[str, Floats], index: int) -> LayerWeights:
    def part(name: str, kind: str = "weight") -> Floats:
        return arrays[f"model.layers.{index}.{name}.{kind}"]

    def qkv(kind: str) -> Floats:
        return np.concatenate([part(f"self_attn.{name}_proj", kind) for name in "qkv"])

    attention, qk_norm = plan.attention, None
    if attention.normed:
        norms = [part("self_attn.q_norm")] * attention.num_heads
        qk_norm = np.stack(norms + [part("self_attn.k_norm")] * attention.num_groups)
    return LayerWeights(
        input_norm_H=part("input_layernorm"),
        qkv=qkv("weight"),
        qkv_bias=qkv("bias") if attention.bias else None,
        qk_norm=qk_norm,
        out=part("self_attn.o_proj"),
        post_norm_H=part("post_attention_layernorm"),
        gate_up=np.concatenate([part("mlp.gate_proj"), part("mlp.up_proj")]),
        down=part("mlp.down_proj"),
    )


@dataclass(frozen=True, slots=True)
class Draws:
    """One sampled token for each row."""

    ids_B: NDArray[np.int64]
    logprobs_B: NDArray[np.float32]
    """Under the temperature-scaled distribution, before top-k and top-p cut it, as SGLang does;
    for greedy rows (temperature 0) at temperature 1."""


def draw(logits_BV: Floats, table: NDArray[np.void]) -> Draws:
    """Sample each row by its settings in `table` (RECORDs of the rows of the batch)."""
    greedy_B = table["temperature"] == 0.0
    temperature_B = np.where(greedy_B, np.float32(1.0), table["temperature"])
    scaled_BV = (logits_BV - logits_BV.max(-1, keepdims=True)) / temperature_B[:, None]
    shares_BV = np.exp(scaled_BV).astype(np.float64)
    log_total_B = np.log(shares_BV.sum(-1))
    if (table["top_k"] > 0).any() or (table["top_p"] < 1.0).any():
        shares_BV = _cut(shares_BV, table)
    cdf_BV = shares_BV.cumsum(-1)
    uniform_B = uniforms(table["seed"], table["num_tokens"] - table["num_prompt"])
    ids_B = (cdf_BV <= (uniform_B * cdf_BV[:, -1])[:, None]).sum(-1)
    ids_B = np.where(greedy_B, logits_BV.argmax(-1), ids_B)
    logprobs_B = scaled_BV[np.arange(len(ids_B)), ids_B] - log_total_B
    return Draws(ids_B, logprobs_B.astype(np.float32))


def uniforms(seed_B: NDArray[np.uint64], count_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the count-th number in [0, 1) of each seed's stream (SplitMix64's mixer)."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    mixed = _mix(_mix(seed_B + golden) + (count_B.astype(np.uint64) + np.uint64(1)) * golden)
    # 40 bits: u times the total stays below the total, so every draw is a valid id.
    return (mixed >> np.uint64(24)).astype(np.float64) * 2.0**-40


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _cut(shares_BV: NDArray[np.float64], table: NDArray[np.void]) -> NDArray[np.float64]:
    """Set shares outside each row's top-k or top-p nucleus to zero."""
    order_BV = np.argsort(-shares_BV, axis=-1, kind="stable")
    sorted_BV = np.take_along_axis(shares_BV, order_BV, -1)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    num_vocab = shares_BV.shape[-1]
    top_k_B = np.where(table["top_k"] > 0, table["top_k"], num_vocab)
    top_p_B = table["top_p"] * shares_BV.sum(-1)
    kept_BV = (before_BV <= top_p_B[:, None]) & (np.arange(num_vocab) < top_k_B[:, None])
    # The most likely token is kept under every setting.
    kept_BV[:, 0] = True
    cut_BV = np.empty_like(shares_BV)
    np.put_along_axis(cut_BV, order_BV, sorted_BV * kept_BV, -1)
    return cut_BV
