"""What every Episode of a run shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swerl.gateway.sessions import SessionSource, TurnRecord
from swerl.interfaces import Harness
from swerl.recipe.schema import BudgetsSection, RolloutSection
from swerl.rollout.provision import Provisioner
from swerl.rollout.reward import Rule
from swerl.run.events import Emit
from swerl.run.expert_spool import ExpertSpool


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
