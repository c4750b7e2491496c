"""The engine's memory: its weights, and how many tokens its cache holds."""

from __future__ import annotations

from dataclasses import dataclass

from swerl.core.errors import RecipeError
from swerl.plan.layout import Layout
from swerl.plan.parameters import model_params
from swerl.plan.shape import Shape
from swerl.recipe.schema import Recipe

STATIC_SHARE = 0.85
"""Share of a GPU for weights and cache, where the engine's flags do not say: about what SGLang
takes by itself. Its flag is `--mem-fraction-static`."""
_FLAG = "--mem-fraction-static"
_BF16 = 2
_FP32 = 4
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class KvCache:
    """What one GPU of an engine holds, in GiB, and what that is good for."""

    weights: float
    pool: float
    """Keys, values and linear attention's states."""
    tokens: int
    """Tokens of attention that the engine's cache holds."""
    contexts: float
    """The same in contexts of full length."""
    sequences: int
    """Episodes that the engine serves at once."""


def kv_cache(recipe: Recipe, shape: Shape, layout: Layout, *, gpu_gib: float) -> KvCache:
    """Return what fits an engine's part of a GPU.

    A token keeps a key and a value for every key-value head of every attention layer, in bf16 (Kwon
    et al. 2023, arXiv 2309.06180, section 3.1); heads are split over the engine's GPUs, never below
    one. A sequence keeps each linear layer's fp32 state, key width times value width a head, and
    the last positions before its convolution, whatever its length.
    """
    weights = model_params(shape).total * _BF16 / layout.gpus_per_engine / _GIB
    pool = max(0.0, static_share(recipe) * gpu_gib - weights)
    sequences = -(-recipe.rollout.concurrency // layout.num_engines)
    left = pool * _GIB - sequences * state_bytes(shape, layout.gpus_per_engine)
    tokens = max(0, int(left / token_bytes(shape, layout.gpus_per_engine)))
    return KvCache(
        weights=weights,
        pool=pool,
        tokens=tokens,
        contexts=tokens / recipe.rollout.max_context_tokens,
        sequences=sequences,
    )


def token_bytes(shape: Shape, num_gpus: int) -> float:
    """Return what one token keeps on each GPU of an engine."""
    heads = max(shape.num_kv_heads / num_gpus, 1)
    return 2 * shape.num_attention_layers * heads * shape.head_dim * _BF16


def state_bytes(shape: Shape, num_gpus: int) -> float:
    """Return what one sequence keeps on each GPU of an engine in linear attention."""
    if not shape.num_linear_layers:
        return 0.0
    keys, values = shape.linear_key_size, shape.linear_value_size
    recurrent = values * keys / shape.linear_num_key_heads * _FP32
    convolution = (shape.linear_conv_size - 1) * (2 * keys + values) * _BF16
    return shape.num_linear_layers * (recurrent + convolution) / num_gpus


def static_share(recipe: Recipe) -> float:
    """Return the share of a GPU that an engine takes for weights and cache. Raises RecipeError."""
    flags = " ".join(str(flag) for flag in recipe.engine.options.get("flags", ()))
    _, found, after = flags.replace("=", " ").partition(_FLAG)
    if not found:
        return STATIC_SHARE
    value = after.split()[0] if after.split() else ""
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise RecipeError(
            f"engine.flags has {_FLAG} {value!r}, which is no share of a GPU",
            hint="give a number between 0 and 1, such as 0.8",
        )
    return share
