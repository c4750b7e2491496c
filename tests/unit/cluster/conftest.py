"""A Ray cluster of two logical nodes on this machine, a lost one, and the trainer tests' model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from swerl.cluster.node import LocalNode, LocalProcess, ProcessSpec
from swerl.core.errors import ClusterError

from ..training.conftest import options, random_batch, tiny_model  # noqa: F401

TRIES = 4
"""Ray gives a node 30 seconds to start, which a busy machine may not keep."""


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Any]:
    """Two nodes of one CPU each: daemons of their own, one machine."""
    pytest.importorskip("ray", reason="needs the extra swerl[cluster]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = _started()
        try:
            yield cluster
        finally:
            cluster.shutdown()


def _started() -> Any:
    from ray.cluster_utils import Cluster

    for left in reversed(range(TRIES)):
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=1, include_dashboard=False)
            cluster.add_node(num_cpus=1)
        except Exception as error:  # Ray raises no narrower one
            cluster.shutdown()
            if not left or "timed out" not in str(error):
                raise
        else:
            return cluster
    raise AssertionError


class Lost(LocalNode):
    """A machine that goes after its first start."""

    started = 0

    async def start(self, order: ProcessSpec) -> LocalProcess:
        self.started += 1
        if self.started > 1:
            raise ClusterError("the machine is gone", hint="")
        return await super().start(order)
