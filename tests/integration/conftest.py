"""Fixtures of the unit tests that integration tests use too."""

from __future__ import annotations

from tests.unit.cluster.conftest import ray_cluster  # noqa: F401
from tests.unit.training.conftest import options, random_batch, tiny_model  # noqa: F401
