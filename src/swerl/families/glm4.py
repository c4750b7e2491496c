"""GLM 4.5 to 4.7: calls as a name with `<arg_key>` and `<arg_value>` in turns."""

from __future__ import annotations

from pathlib import Path

from swerl.families._calls import CallForm
from swerl.families._template_family import TemplateFamily, load_family
from swerl.interfaces import ParserChoice


def build(model: Path | None, parser: ParserChoice | None = None) -> TemplateFamily:
    """Build the family from a model folder's tokenizer and chat template. Raises InputError."""
    return load_family(model, CallForm.PAIRS, name="glm4", parser=parser)
