"""Qwen3 with its hybrid thinking, and Qwen3-Instruct-2507: calls as JSON objects."""

from swerl.engines.families._calls import CallForm
from swerl.engines.families._template_family import builder, fitter

build = builder(CallForm.JSON, name="qwen3")
fits = fitter(CallForm.JSON, "qwen3", "qwen3_moe", "qwen3_next")
