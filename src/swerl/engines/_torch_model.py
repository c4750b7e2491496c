"""A dense Qwen3 forward in plain torch over a cache of rows, in float32.

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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as load_safetensors
from torch import Tensor
from torch.nn import functional

from swerl.core.errors import EngineError
from swerl.engines._weights import ADAPTER_CONFIG, digest, shards


@dataclass(frozen=True, slots=True)
class Qwen3Shape:
    """The numbers of a config.json that the forward pass uses."""

    vocab: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    tied: bool
    max_positions: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one block; projections that read the same input are stored as one matrix."""

    input_norm_H: Tensor
    qkv: Tensor
    """[(Q + 2K)·D, H]"""
    qk_norm: Tensor
    """[Q + K, D]; the attention's scale is folded into the query part."""
    out: Tensor
    post_norm_H: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Qwen3Weights:
    """All weights, checked and ready: replacing them is one assignment."""

    embed_VH: Tensor
    layers: tuple[LayerWeights, ...]
    norm_H: Tensor
    head_VH: Tensor
    checksum: str


class Qwen3Model:
    """Weights and rotary tables."""

    def __init__(self, shape: Qwen3Shape, weights: Qwen3Weights, num_positions: int) -> None:
        self.shape = shape
        self.weights = weights
        # Cosines and signed sines [P, D]; with them a roll by half rotates by 90°.
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
        angles = torch.arange(num_positions).float()[:, None] / shape.rope_theta**exponents
        sin = angles.sin()
        self._cos_PD, self._sin_PD = angles.cos().repeat(1, 2), torch.cat((-sin, sin), -1)

    def new_cache(self, num_rows: int) -> Tensor:
        """Return zeroed memory [layers, 2, rows, K, P, D]; pages are taken when first written.

        Raises EngineError if the system does not reserve that much.
        """
        shape, positions = self.shape, self._cos_PD.shape[0]
        size = (shape.num_layers, 2, num_rows, shape.num_kv_heads, positions, shape.head_dim)
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
        mask = mask_BTL.repeat(1, self.shape.num_heads // self.shape.num_kv_heads, 1)[:, None]
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
        return functional.rms_norm(x, (self.shape.hidden,), weight, self.shape.eps)

    def _heads(self, x: Tensor, layer: LayerWeights, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return queries, keys and values of all heads [B, T, Q + 2K, D], the first two rotated."""
        shape = self.shape
        heads = (x @ layer.qkv.T).view(*x.shape[:2], -1, shape.head_dim)
        qk = heads[:, :, : shape.num_heads + shape.num_kv_heads]
        qk = functional.rms_norm(qk, (shape.head_dim,), None, shape.eps) * layer.qk_norm
        cos, sin = rotary
        qk = torch.addcmul(qk * cos, qk.roll(shape.head_dim // 2, -1), sin)
        return torch.cat((qk, heads[:, :, shape.num_heads + shape.num_kv_heads :]), 2)

    def _attend(self, heads: Tensor, positions_BT: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        shape = self.shape
        num_rows, num_new = positions_BT.shape
        num_kv, dim = shape.num_kv_heads, shape.head_dim
        q, k, v = torch.split(heads, [shape.num_heads, num_kv, num_kv], 2)
        row_B1 = torch.arange(num_rows)[:, None]
        kv[0][row_B1, :, positions_BT] = k
        kv[1][row_B1, :, positions_BT] = v
        # Query heads that share a key head are merged into one: [B, K, G·T, D].
        split = q.view(num_rows, num_new, num_kv, -1, dim).permute(0, 2, 3, 1, 4)
        grouped = split.reshape(num_rows, num_kv, -1, dim)
        length = mask.shape[-1]
        mixed = functional.scaled_dot_product_attention(
            grouped, kv[0, :, :, :length], kv[1, :, :, :length], attn_mask=mask, scale=1.0
        )
        per_token = mixed.view(num_rows, num_kv, -1, num_new, dim).permute(0, 3, 1, 2, 4)
        return per_token.reshape(num_rows, num_new, -1)


def read_shape(folder: Path) -> Qwen3Shape:
    """Read config.json. Raises EngineError if the model is not a dense Qwen3."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        _refuse_other_models(config)
        return _shape(config)
    except FileNotFoundError as error:
        raise EngineError(
            f"no config.json in {str(folder)!r}", hint="name a model folder in Hugging Face format"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{str(path)!r} cannot be served: {error!r}",
            hint="torch-cpu serves dense Qwen3 models; use engine.type = 'sglang' for others",
        ) from error


def read_weights(folder: Path, shape: Qwen3Shape, *, base: Path | None = None) -> Qwen3Weights:
    """Read and check a folder of weights, or of adapters (PEFT) of the model in `base`.

    Raises EngineError that names the first wrong tensor.
    """
    blobs = [path.read_bytes() for path in shards(folder)]
    checksum = digest(folder, blobs)
    tensors = {name: t for blob in blobs for name, t in load_safetensors(blob).items()}
    if base and (folder / ADAPTER_CONFIG).is_file():
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        tensors = _merged(base, tensors, scale=config["lora_alpha"] / config["r"])
    expected = _expected(shape)
    if shape.tied:
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
    return Qwen3Weights(
        embed_VH=embed_VH,
        layers=tuple(_layer(shape, tensors, index) for index in range(shape.num_layers)),
        norm_H=tensors["model.norm.weight"],
        head_VH=embed_VH if shape.tied else tensors["lm_head.weight"],
        checksum=checksum,
    )


def _refuse_other_models(config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    required = {
        "model_type": (config["model_type"], "qwen3"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias", False), False),
        "use_sliding_window": (config.get("use_sliding_window", False), False),
        "rope_type": (rope.get("rope_type", "default"), "default"),
    }
    for key, (found, supported) in required.items():
        if found != supported:
            raise ValueError(f"{key} is {found!r}, supported is {supported!r}")


def _shape(config: Mapping[str, Any]) -> Qwen3Shape:
    def count(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if type(value) is not int or value < 1:
            raise ValueError(f"{key} is {value!r}, not a positive whole number")
        return value

    rope = config.get("rope_parameters") or config
    eos = config.get("eos_token_id")
    num_heads = count("num_attention_heads")
    return Qwen3Shape(
        vocab=count("vocab_size"),
        hidden=count("hidden_size"),
        intermediate=count("intermediate_size"),
        num_layers=count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=count("num_key_value_heads", num_heads),
        head_dim=count("head_dim", count("hidden_size") // num_heads),
        eps=config["rms_norm_eps"],
        rope_theta=rope.get("rope_theta", 10000.0),
        tied=config.get("tie_word_embeddings", False),
        max_positions=count("max_position_embeddings", 32768),
        eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
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


def _expected(shape: Qwen3Shape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by its Hugging Face name."""
    hidden, inner, dim = shape.hidden, shape.intermediate, shape.head_dim
    query, key = shape.num_heads * dim, shape.num_kv_heads * dim
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not shape.tied:
        sizes["lm_head.weight"] = (shape.vocab, hidden)
    for index in range(shape.num_layers):
        parts = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        sizes |= {f"model.layers.{index}.{part}.weight": size for part, size in parts.items()}
    return sizes


def _layer(shape: Qwen3Shape, tensors: Mapping[str, Tensor], index: int) -> LayerWeights:
    def part(name: str) -> Tensor:
        return tensors[f"model.layers.{index}.{name}.weight"]

    q_norm = part("self_attn.q_norm") * shape.head_dim**-0.5
    norms = [q_norm] * shape.num_heads + [part("self_attn.k_norm")] * shape.num_kv_heads
    return LayerWeights(
        input_norm_H=part("input_layernorm"),
        qkv=torch.cat([part(f"self_attn.{name}_proj") for name in "qkv"]),
        qk_norm=torch.stack(norms),
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
