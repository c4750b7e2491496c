"""Prefix sampling: some attempts of a Group start from the first Turns of another attempt.

Of a Task that is solved too rarely, attempts go on after the last Turns of a solved attempt; of one
that is solved too often, after the first Turns of a failed one (arXiv 2605.05112). The rate is that
of the Group's own attempts from the start, so it is of the weights in training. The choice depends
on the run's seed and on recorded Episodes, and is written before an attempt uses it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from swerl.core.episode import Episode, Fork
from swerl.core.errors import RunError
from swerl.core.files import disk_errors, read_json, write_json
from swerl.core.grade import Verdict
from swerl.gateway.replay import RecordedTurn, Replay
from swerl.recipe.schema import PrefixSection
from swerl.rollout import record
from swerl.runs import index
from swerl.runs.layout import RunFolder


@dataclass(frozen=True, slots=True)
class ChosenPrefix:
    """The first Turns of a recorded Episode, which other attempts repeat."""

    fork: Fork
    recorded: tuple[RecordedTurn, ...]

    def replay(self) -> Replay:
        """Return a new Replay of these Turns, for one Session."""
        return Replay(self.recorded, num_turns=self.fork.turn)

    def begins(self, recorded: Sequence[RecordedTurn]) -> bool:
        """Return True if an interrupted Episode repeated all Turns of the prefix."""
        wanted = Counter(each.turn.output_ids for each in self.recorded[: self.fork.turn])
        return wanted <= Counter(each.turn.output_ids for each in recorded if each.turn.replayed)


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """A Group that may use a prefix: its place, and the attempts that come in question."""

    folder: RunFolder
    stage: str
    task: str
    """The Task's id as part of a file name."""
    agent: str
    size: int
    seed: int

    @property
    def choice(self) -> Path:
        """The file with the choice; nothing is chosen before it exists."""
        return self.folder.episode(self.stage, f"{self.task}.prefix.json")

    def choose(self, firsts: Sequence[Episode], section: PrefixSection) -> ChosenPrefix | None:
        """Return the prefix for the Group's other attempts; None if they start as `firsts` did.

        A choice that was written is repeated while its Episode is there. A damaged Episode is
        passed over. Raises RunError if the choice cannot be written.
        """
        with suppress(RunError, KeyError, TypeError):
            fork = read_json(self.choice)["fork"]
            return self._read(Fork(**fork)) if fork else None
        rate = solved_share(firsts)
        found = self._find(rate, section) if rate is not None else None
        with disk_errors(self.choice):
            self.choice.parent.mkdir(parents=True, exist_ok=True)
        fork = asdict(found.fork) if found else None
        write_json(self.choice, {"solve_rate": rate, "fork": fork})
        return found

    def _read(self, fork: Fork) -> ChosenPrefix:
        return ChosenPrefix(fork, record.read_turns(self.folder.root / fork.folder))

    def _find(self, rate: float, section: PrefixSection) -> ChosenPrefix | None:
        if abs(rate - section.target) <= section.margin:
            return None
        wanted = Verdict.SOLVED if rate < section.target else Verdict.UNSOLVED
        draw = random.Random(f"{self.seed}/prefix/{self.stage}/{self.task}")
        # The newest attempts are nearest to the policy, those of the Group itself above all.
        for stage in self._stages():
            found = [*self._attempts(stage, wanted)]
            draw.shuffle(found)
            for episode, folder, num_turns in found:
                turn = num_replayed(rate, section.target, num_turns)
                path = folder.relative_to(self.folder.root).as_posix()
                with suppress(RunError):
                    return self._read(Fork(episode, path, turn))
        return None

    def _stages(self) -> Iterator[str]:
        """Yield the Group's own stage, then the earlier ones of training, newest first."""
        episodes = self.folder.root / "episodes"
        names = (path.name for path in episodes.iterdir() if path.name.isdecimal())
        earlier = (name for name in names if int(name) < int(self.stage))
        yield self.stage
        yield from sorted(earlier, key=int, reverse=True)

    def _attempts(self, stage: str, wanted: Verdict) -> Iterator[tuple[str, Path, int]]:
        """Yield (id, folder, Turns) of attempts from the start that can give a prefix."""
        for number in range(self.size):
            folder = self.folder.episode(stage, f"{self.task}.{number}")
            if not record.is_finished(folder):
                continue
            with suppress(RunError, *index.DAMAGE):
                about = read_json(folder / "episode.json")
                is_mine = about["verdict"] == wanted and about.get("agent", "") == self.agent
                if is_mine and about["turns"] > 1 and "fork" not in about:
                    yield about["id"], folder, about["turns"]


def num_forked(section: PrefixSection, size: int) -> int:
    """Return how many attempts of a Group may start from a prefix."""
    return round(section.share * size)


def solved_share(episodes: Iterable[Episode]) -> float | None:
    """Return the share of solved among learnable Episodes; None if there are none."""
    seen = [each.verdict is Verdict.SOLVED for each in episodes if each.learnable]
    return sum(seen) / len(seen) if seen else None


def num_replayed(rate: float, target: float, num_turns: int) -> int:
    """Return the Turns to replay, 1 to `num_turns` - 1, of a Task that is solved at this rate.

    The rate is taken to go linearly from `rate` without a prefix to 1 after all Turns of a solved
    attempt, or to 0 after all of a failed one.
    """
    end = 1.0 if rate < target else 0.0
    part = (target - rate) / (end - rate)
    return min(max(round(part * num_turns), 1), num_turns - 1)
