"""Qwen3.5 and Qwen3.6, with or without thinking: calls in the format of Qwen3-Coder."""

from swerl.engines.families._calls import CallForm
from swerl.engines.families._template_family import builder, fitter

build = builder(CallForm.XML, name="qwen3-5")
fits = fitter(CallForm.XML, "qwen3_5", "qwen3_5_moe")
