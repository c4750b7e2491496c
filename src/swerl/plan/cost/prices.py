"""The price book: what things cost, from where, as of when."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from swerl.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Price:
    """One entry of the price book."""

    name: str
    value: float
    """US dollars per `unit`."""
    unit: str
    source: str
    date: str
    """When the source was read, as year and month."""


def price_book(own: Mapping[str, float] | None = None) -> Mapping[str, Price]:
    """Return every entry of prices.toml by name; `own` are a recipe's `cost.prices`, on top."""
    text = (files("swerl.plan.cost") / "prices.toml").read_text(encoding="utf-8")
    book = {name: Price(name, **entry) for name, entry in tomllib.loads(text).items()}
    return book | {name: _own(name, value) for name, value in (own or {}).items()}


def used_prices(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the prices that a run has: of its sandboxes, and of its GPUs if any."""
    kind, cluster = recipe.sandbox.type, recipe.cluster
    gpus = (f"{cluster.gpu}_hour",) if cluster.gpus_per_node else ()
    return (f"{kind}_vcpu_second", f"{kind}_gib_second", *gpus)


def _own(name: str, value: float) -> Price:
    return Price(name, value, f"$ per {name.rpartition('_')[2]}", "recipe: cost.prices", "yours")
