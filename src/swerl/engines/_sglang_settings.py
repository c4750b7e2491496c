"""How a client treats its servers."""

from __future__ import annotations

from dataclasses import dataclass

from swerl.engines._sglang_crew import PauseMode


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What a client is told at its start."""

    pause_mode: PauseMode = PauseMode.RETRACT
    max_in_flight: int = 4096
    reply_s: float | None = None
    load_s: float = 1800.0
    routed_experts: bool = False
    retries: int = 0
    """How often a request is begun anew on another server when its own is gone."""
    wait_s: float = 0.0
    """Seconds that such a request waits for a server where none is left: one may be starting."""
    streams: bool = True
    """Whether the servers take weights without a folder in between."""
    answers_in_loads: bool = True
    """Whether the servers answer while they load weights: a silent one hangs then."""
