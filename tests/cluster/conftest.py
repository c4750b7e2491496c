"""A Ray cluster of two logical nodes on this machine, and the trainer tests' model and rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ..training.conftest import options, random_batch, tiny_model  # noqa: F401


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """Two nodes of one CPU each: daemons of their own, one machine."""
    pytest.importorskip("ray", reason="needs the extra swerl[cluster]")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
        )
        cluster.add_node(num_cpus=1)
        try:
            yield cluster
        finally:
            cluster.shutdown()
