"""What a simulated run came to, and what it waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swerl.plan.simulation.engine import Usage


@dataclass(frozen=True, slots=True)
class SimStep:
    """One step, in seconds."""

    seconds: float
    parts: Mapping[str, float]
    """What the step waited for; together its seconds. Of a rollout that is what the Episode that
    ended last was at."""
    rollout_s: float
    train_s: float
    tail_s: float
    """From the end of nine in ten Episodes to the end of the last."""
    episodes: int
    row_tokens: int
    """Of the rows that the Episodes became, prompts included."""
    sandbox_s: float
    """Of all Episodes."""
    timed_out: int
    """Episodes that the agent's budget ended."""
    staleness: float
    """Weight versions between an Episode's begin and its training, on average."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulated run."""

    mode: str
    steps: tuple[SimStep, ...]
    usage: tuple[Usage, ...]
    """Of each engine."""
    turn_times: tuple[float, ...]
    seconds: float
    """From begin to end."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, the filling of a pipeline included."""
        return self.seconds / len(self.steps)

    def hours(self, num_steps: int) -> float:
        """Return the hours of a run of so many such steps, evaluations not counted."""
        return num_steps * self.step_s / 3600

    @property
    def parts(self) -> Mapping[str, float]:
        """Share of the time by what it waited for, the largest first."""
        total: Counter[str] = Counter()
        for step in self.steps:
            total.update(step.parts)
        whole = sum(total.values())
        return {name: seconds / whole for name, seconds in total.most_common()}

    @property
    def bottleneck(self) -> str:
        """What the run waits for longest."""
        return next(iter(self.parts))

    @property
    def engine_busy(self) -> float:
        """Share of the time in which an engine reads or replies."""
        busy = sum(each.prompt_s + each.reply_s for each in self.usage)
        return busy / (len(self.usage) * self.seconds)

    @property
    def trainer_busy(self) -> float:
        """Share of the time in which the trainer trains."""
        return sum(step.train_s for step in self.steps) / self.seconds

    @property
    def replies_at_once(self) -> float:
        """Replies under way in one engine while there are any."""
        rounds = sum(each.reply_rounds for each in self.usage)
        return sum(each.sampled for each in self.usage) / max(rounds, 1e-9)

    @property
    def tokens_again(self) -> float:
        """Share of the prompt tokens computed that had been put out of a cache."""
        read = sum(each.read for each in self.usage)
        return sum(each.again for each in self.usage) / max(read, 1)

    @property
    def sandbox_s(self) -> float:
        """Sandbox-seconds of an Episode, both sandboxes together."""
        return self._sum("sandbox_s") / self._sum("episodes")

    @property
    def tail_share(self) -> float:
        """Share of the time in which fewer than one in ten Episodes are under way."""
        return self._sum("tail_s") / self.seconds

    @property
    def timed_out(self) -> float:
        """Share of Episodes that the agent's budget ended."""
        return self._sum("timed_out") / self._sum("episodes")

    @property
    def row_tokens(self) -> float:
        """Tokens of an Episode's rows."""
        return self._sum("row_tokens") / self._sum("episodes")

    def mean(self, name: str) -> float:
        """Return the mean of one number of the steps."""
        return self._sum(name) / len(self.steps)

    def turns_per_s(self, window_s: float = 10.0) -> tuple[float, float]:
        """Return turns a second at the gateway: on average, and in the busiest window."""
        times, most, first = sorted(self.turn_times), 0, 0
        for last, time in enumerate(times):
            while times[first] <= time - window_s:
                first += 1
            most = max(most, last - first + 1)
        return len(times) / self.seconds, most / window_s

    def _sum(self, name: str) -> float:
        return float(sum(getattr(step, name) for step in self.steps))


def tail(ended: Sequence[float]) -> float:
    """Return the seconds from the end of nine in ten Episodes to the end of the last."""
    times = sorted(ended)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return sum(gaps[-(-9 * len(times) // 10) - 1 :]) if gaps else 0.0
