"""From a Recipe to wired objects: the one place that knows which part goes where.

Read `machine.py` first: it opens the parts of a run in order. `training_run.py` calls it;
`tasks.py`, `sandboxes.py`, `serving.py` and `learning.py` each make what one side of it needs, and
`plugin.py` builds whatever a section of the Recipe names. Commands and integrations that need a
few parts only take them from here.
"""

from swerl.assemble.machine import parts_of
from swerl.assemble.plugin import plugin
from swerl.assemble.sandboxes import open_backend, reap_leftovers, sandbox_backend
from swerl.assemble.serving import family_of, gateway_of
from swerl.assemble.tasks import tasks_of
from swerl.assemble.training_run import train

__all__ = [
    "family_of",
    "gateway_of",
    "open_backend",
    "parts_of",
    "plugin",
    "reap_leftovers",
    "sandbox_backend",
    "tasks_of",
    "train",
]
