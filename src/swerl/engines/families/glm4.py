"""GLM 4.5 to 4.7: calls as a name with alternating `<arg_key>` and `<arg_value>`."""

from swerl.engines.families._calls import CallForm
from swerl.engines.families._template_family import builder, fitter

build = builder(CallForm.PAIRS, name="glm4")
fits = fitter(CallForm.PAIRS, "glm4_moe", "glm4_moe_lite")
