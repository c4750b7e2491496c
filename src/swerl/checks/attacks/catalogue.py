"""Every probe, in the order of the sheet."""

from __future__ import annotations

from collections.abc import Sequence

from swerl.checks.attacks import (
    files,
    gateway,
    host,
    kernel,
    life,
    network,
    powers,
    processes,
    resources,
)
from swerl.checks.attacks.registry import Probe
from swerl.core.errors import unknown

_TOPICS = (network, gateway, host, processes, kernel, powers, resources, files, life)


def all_probes() -> list[Probe]:
    """Return every probe."""
    return [part for topic in _TOPICS for part in vars(topic).values() if isinstance(part, Probe)]


def choose(names: Sequence[str]) -> list[Probe]:
    """Return the probes of these names, all where none is named. Raises UnknownNameError."""
    probes = {probe.name: probe for probe in all_probes()}
    for name in names:
        if name not in probes:
            raise unknown("probe", name, probes)
    return [probe for name, probe in probes.items() if not names or name in names]
