"""Reads values out of a model's config.json, with one clear error for each that is odd."""

from __future__ import annotations

from collections.abc import Mapping

from swerl.core.chat import Json
from swerl.core.errors import InputError

HfConfig = Mapping[str, Json]


def text_config(whole: HfConfig) -> HfConfig:
    """Return the part about the language model; models with a vision tower nest it."""
    nested = whole.get("text_config")
    return nested if isinstance(nested, Mapping) else whole


def whole_number(config: HfConfig, key: str) -> int:
    """Return an integer. Raises InputError where there is none."""
    value = config.get(key)
    if not isinstance(value, int):
        raise InputError(
            f"the model's config.json has no whole number {key!r}: {value!r}",
            hint="use the config.json that came with the model",
        )
    return value


def number(value: Json, key: str) -> float:
    """Return a number as float. Raises InputError on anything else."""
    if not isinstance(value, int | float):
        raise InputError(
            f"{key!r} in the model's config.json must be a number, not {value!r}",
            hint="use the config.json that came with the model",
        )
    return float(value)


def rope_value(config: HfConfig, key: str, default: float) -> float:
    """Return a setting of the rotary embedding, nested in `rope_parameters` or not."""
    nested = config.get("rope_parameters")
    found = nested.get(key) if isinstance(nested, Mapping) else None
    return number(config.get(key, default) if found is None else found, key)


def refuse(config: HfConfig, odd: Mapping[str, bool]) -> None:
    """Raise InputError that names the first key marked as odd."""
    for key, is_odd in odd.items():
        if is_odd:
            kind = config.get("model_type")
            raise InputError(
                f"a {kind} model with {key} = {config.get(key)!r} cannot be trained",
                hint=f"look at {key} in the model's config.json",
            )


def refuse_unusual(config: HfConfig) -> None:
    """Raise InputError on what no trained line has: scaled rope, windows, other activations."""
    nested = config.get("rope_parameters") or config.get("rope_scaling")
    kind = nested.get("rope_type", "default") if isinstance(nested, Mapping) else "default"
    if kind != "default":
        raise InputError(
            f"a model with rope_type {kind!r} cannot be trained",
            hint="look at rope_type in the model's config.json",
        )
    refuse(
        config,
        {
            "use_sliding_window": bool(config.get("use_sliding_window")),
            "hidden_act": config.get("hidden_act", "silu") != "silu",
        },
    )
