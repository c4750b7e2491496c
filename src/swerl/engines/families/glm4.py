"""GLM 4.5 to 4.7: calls as a name with `<arg_key>` and `<arg_value>` in turns."""

from __future__ import annotations

from pathlib import Path

from swerl.core.contracts import ParserChoice
from swerl.engines.families._calls import CallForm
from swerl.engines.families._template_family import TemplateFamily, load_family


def build(model: Path | None, parser: ParserChoice | None = None) -> TemplateFamily:
    """Build the family from a model folder's tokenizer and chat template. Raises InputError."""
    return load_family(model, CallForm.PAIRS, name="glm4", parser=parser)
