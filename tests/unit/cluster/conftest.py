"""A Ray cluster of two logical nodes on this machine, and the trainer tests' model and rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

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
