"""From a function with one sentence to a probe."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swerl.checks.attacks.finding import Finding
from swerl.checks.attacks.lab import Lab
from swerl.core.sandbox import Limits

LIMITS = Limits(memory_mib=256, num_processes=64, num_cpus=1.0, disk_mib=64, lifetime_s=120)
"""What the sandboxes of probes may use: little, so that bombs meet their limit soon."""
_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Probe:
    """One attack."""

    name: str
    sentence: str
    """What it tries."""
    attack: Callable[[Lab], Awaitable[Finding]]
    timeout_s: float
    limits: Limits
    """Limits of the sandbox that it gets."""
    alone: bool = False
    """Whether it measures, and so runs when no other probe does."""


def probe(
    sentence: str,
    *,
    timeout_s: float = _TIMEOUT_S,
    limits: Limits = LIMITS,
    alone: bool = False,
) -> Callable[[Callable[[Lab], Awaitable[Finding]]], Probe]:
    """Make a probe of a function; its name is the function's, with dashes."""

    def make(attack: Callable[[Lab], Awaitable[Finding]]) -> Probe:
        name = attack.__name__.replace("_", "-")
        return Probe(name, sentence, attack, timeout_s, limits, alone)

    return make
