"""The price book: what things cost, from where, as of when."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files


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


def price_book() -> Mapping[str, Price]:
    """Return every entry of prices.toml by name."""
    text = (files("swerl.cost") / "prices.toml").read_text(encoding="utf-8")
    return {name: Price(name, **entry) for name, entry in tomllib.loads(text).items()}
