"""Qwen3-Coder: calls as `<function=NAME>` with one `<parameter=KEY>` for each value."""

from swerl.engines.families._calls import CallForm
from swerl.engines.families._template_family import builder, fitter

build = builder(CallForm.XML, name="qwen3-coder")
fits = fitter(CallForm.XML, "qwen3_moe", "qwen3_next")
