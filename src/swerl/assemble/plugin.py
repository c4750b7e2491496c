"""Builds what a section of the Recipe names."""

from __future__ import annotations

from typing import Any

from swerl import plugins
from swerl.recipe.check import PLUGIN_SECTIONS, plugin_options
from swerl.recipe.schema import Recipe


def plugin(recipe: Recipe, section: str, *needs: Any) -> Any:
    """Build (an engine: open) what a recipe's section names, with its validated settings."""
    chosen = getattr(recipe, section)
    kind = PLUGIN_SECTIONS[section]
    module = plugins.load(kind, chosen.type)
    options = plugin_options(kind, chosen, section=section)
    make = module.open if section == "engine" else module.build
    return make(*([] if options is None else [options]), *needs)
