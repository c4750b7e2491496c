"""A machine of a run that is lost."""

from __future__ import annotations

from swerl.cluster.node import LocalNode, LocalProcess, ProcessSpec
from swerl.core.errors import ClusterError


class Lost(LocalNode):
    """A machine that goes after its first start."""

    started = 0

    async def start(self, order: ProcessSpec) -> LocalProcess:
        self.started += 1
        if self.started > 1:
            raise ClusterError("the machine is gone", hint="")
        return await super().start(order)
