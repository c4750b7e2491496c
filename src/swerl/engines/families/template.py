"""Any model with a tokenizer and a chat template; the template shows the form of its calls."""

from swerl.engines.families._template_family import builder

build = builder(None, name="template")
