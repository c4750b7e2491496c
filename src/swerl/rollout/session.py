"""Opening an Episode's Session: its sampling, its caps, and its Turns told as events."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from swerl.core.chat import Role, ToolCall
from swerl.core.events import TurnEnded
from swerl.core.turn import Sampling
from swerl.gateway.limits import SessionLimits
from swerl.gateway.sessions import Session, TurnRecord
from swerl.rollout.parts import Parts


def open_session(episode_id: str, parts: Parts) -> Session:
    """Open the Session of an Episode; its draws depend on the run's seed and the id alone."""
    rollout = parts.rollout
    return parts.gateway.open(
        episode_id,
        sampling=Sampling(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            seed=seed_of(parts.seed, episode_id),
        ),
        limits=SessionLimits(
            max_turns=rollout.max_turns,
            max_context_tokens=rollout.max_context_tokens,
            model_call_s=parts.budgets.model_call_s,
        ),
        on_turn=_announce(episode_id, parts),
    )


def seed_of(seed: int, name: str) -> int:
    """Return the 31-bit seed that belongs to this name in a run of this seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4]) >> 1


def _announce(episode_id: str, parts: Parts) -> Callable[[TurnRecord], None]:
    def on_turn(record: TurnRecord) -> None:
        if parts.on_turn:
            parts.on_turn(record)
        turn = record.turn
        message = record.reply.message
        parts.emit(
            TurnEnded(
                episode=episode_id,
                turn=turn.index,
                prompt_tokens=record.reply.usage.prompt_tokens,
                output_tokens=len(turn.output_ids),
                seconds=turn.duration_s,
                said=first_line(message.text),
                calls=tuple(map(brief, message.tool_calls)),
                results=tuple(
                    first_line(m.text) for m in record.new_messages if m.role is Role.TOOL
                ),
            )
        )

    return on_turn


def brief(call: ToolCall) -> str:
    """Return a call in one line, as `name(arguments)`."""
    return f"{call.name}({first_line(json.dumps(dict(call.arguments), ensure_ascii=False))})"


def first_line(text: str, width: int = 200) -> str:
    """Return the first line that is not blank, cut at `width`."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= width else line[: width - 1] + "…"
