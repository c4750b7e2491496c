"""What every Episode of a run shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swerl.core.contracts import Harness
from swerl.core.events import Emit
from swerl.core.experts import ExpertSpool
from swerl.gateway.sessions import SessionSource, TurnRecord
from swerl.recipe.schema import BudgetsSection, RolloutSection
from swerl.rollout.provision import Provisioner
from swerl.rollout.reward import Rule


@dataclass(frozen=True, slots=True)
class Parts:
    """What every Episode of a run shares."""

    gateway: SessionSource
    provisioner: Provisioner
    harness: Harness
    reward: Rule
    rollout: RolloutSection
    budgets: BudgetsSection
    seed: int
    emit: Emit
    on_turn: Callable[[TurnRecord], None] | None = None
    """Told of every Turn with all its words, which events leave out; for transcripts."""
    spool: ExpertSpool | None = None
    """Where the gateway keeps recorded experts until an Episode is written."""
