"""Qwen3.5 and Qwen3.6, thinking or not: calls as Qwen3-Coder writes them."""

from __future__ import annotations

from pathlib import Path

from swerl.core.contracts import ParserChoice
from swerl.engines.families._calls import CallForm
from swerl.engines.families._template_family import TemplateFamily, load_family


def build(model: Path | None, parser: ParserChoice | None = None) -> TemplateFamily:
    """Build the family from a model folder's tokenizer and chat template. Raises InputError."""
    return load_family(model, CallForm.XML, name="qwen3-5", parser=parser)
