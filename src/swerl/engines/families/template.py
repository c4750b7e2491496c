"""Any model with a tokenizer and a chat template, of which the form of its calls is read off."""

from __future__ import annotations

from pathlib import Path

from swerl.core.contracts import ParserChoice
from swerl.engines.families._template_family import TemplateFamily, load_family


def build(model: Path | None, parser: ParserChoice | None = None) -> TemplateFamily:
    """Build the family from a model folder's tokenizer and chat template. Raises InputError."""
    return load_family(model, None, name="template", parser=parser)
