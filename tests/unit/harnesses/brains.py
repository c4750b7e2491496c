"""A model for tests that branch: what it says depends on its prompt alone, as with a real one."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby, takewhile
from typing import TypeAlias

from swerl.core.chat import Finish, Message, Role, ToolCall
from swerl.core.contracts import Family
from swerl.core.errors import EngineLostError
from swerl.core.learning import WeightRef
from swerl.core.sample import Sample
from swerl.core.turn import Completion, Sampling, Trajectory
from swerl.engines.families import tiny

Line: TypeAlias = "Message | Sequence[int] | Exception"
"""A reply, the raw tokens of one, or the failure to give one."""
Ids: TypeAlias = tuple[int, ...]
Says: TypeAlias = "Callable[[Heard], Line]"
Shell: TypeAlias = Callable[[str], ToolCall]
"""How a model of an agent asks for a shell command."""

LEAD = "Lead the work on add."
"""A prompt that tells the lead from the sub-agents."""
FIX = "sed -i s/-/+/ calc.py"
LOOK = "seq 900; echo"
"""A shell command that prints 3,500 characters."""
SUMMARY = "What is left: add must add."


@dataclass(frozen=True, slots=True)
class Heard:
    """One prompt, as the model reads it."""

    number: int
    """Prompts that it read before, in all branches."""
    turns: tuple[tuple[str, str], ...]
    """Who said what, the tool results as a user's; the system prompt is not among them."""

    @property
    def num_replies(self) -> int:
        """Replies of the model's own in this branch."""
        return sum(who == "assistant" for who, _ in self.turns)

    @property
    def whole(self) -> str:
        """All that was said."""
        return "\n".join(said for _, said in self.turns)

    @property
    def asked(self) -> str:
        """What the user said before the model's first reply."""
        said = takewhile(lambda turn: turn[0] != "assistant", self.turns)
        return "\n".join(words for _, words in said)

    @property
    def wants_summary(self) -> bool:
        """Whether an agent asks for a summary of its history, its last words being no result."""
        who, last = self.turns[-1]
        is_result = last.startswith("<tool_response>")
        return self.num_replies > 0 and who == "user" and not is_result and "summar" in last.lower()


@dataclass
class Model:
    """Implements Engine: a function of the prompt is the model; every call is kept."""

    says: Says
    delay_s: float = 0.0
    calls: list[tuple[Ids, Ids]] = field(default_factory=list)
    """Prompt and reply of each call that succeeded."""
    num_heard: int = 0
    family: Family = field(default_factory=lambda: tiny.build(None))

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Say what the function says to this prompt."""
        heard = Heard(self.num_heard, _turns(self.family.text(ids)))
        self.num_heard += 1
        line = self.says(heard)
        await asyncio.sleep(self.delay_s)
        if isinstance(line, Exception):
            raise line
        said = self.family.encode_reply(line) if isinstance(line, Message) else line
        cut = tuple(said[: sampling.max_new_tokens])
        self.calls.append((tuple(ids), cut))
        finish = Finish.STOP if len(cut) == len(said) else Finish.LENGTH
        return Completion(cut, (-1.0,) * len(cut), finish, "v1", len(ids))

    async def abort(self, session: str) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def close(self) -> None: ...

    async def load(self, weights: WeightRef) -> str:
        return weights.version

    def assert_trained_exactly(self, samples: Sequence[Sample]) -> None:
        """Check that each reply is trained once, after exactly the prompt that it was given to.

        And that no row holds more than its last prompt and reply.
        """
        wholes = {prompt + reply for prompt, reply in self.calls}
        assert all(tuple(sample.ids) in wholes for sample in samples)
        assert Counter(span for sample in samples for span in _trained(sample)) == Counter(
            self.calls
        )


def leading(lead: Says, shell: Shell, *, num_losses: int = 0) -> Says:
    """Return a model whose sub-agents each leave a file, named by who asked first, and read it.

    `lead` answers the prompts that hold LEAD. The engine is lost at the first `num_losses` prompts
    of sub-agents.
    """
    parts = (f"part{number}" for number in count(1))
    losses = iter([EngineLostError("the engine is gone")] * num_losses)

    def says(heard: Heard) -> Line:
        if LEAD in heard.asked:
            return lead(heard)
        if lost := next(losses, None):
            return lost
        if not heard.num_replies:
            part = next(parts)
            return say("", shell(f"echo {part} is done >{part}.txt"))
        part = re.findall(r"part\d", heard.whole)[0]
        return [say("", shell(f"cat {part}.txt")), say(f"Report of {part}.")][heard.num_replies - 1]

    return says


def forgetting(shell: Shell) -> Says:
    """Return a model that looks around until its history is put into a summary, then fixes."""

    def says(heard: Heard) -> Line:
        if heard.wants_summary:
            return say(f"<summary>{SUMMARY}</summary>")
        if SUMMARY not in heard.whole:
            return say("", shell(LOOK))
        return say("Done.") if FIX in heard.whole else say("", shell(FIX))

    return says


def assert_side_by_side(trajectory: Trajectory) -> None:
    """Check that two sub-agents, which begin a branch each, spoke in turns."""
    roots = {turn.index: trajectory.path(turn)[0].index for turn in trajectory.turns}
    lead = roots[0]
    one, other = sorted(set(roots.values()) - {lead})
    spoke = [root for root in roots.values() if root != lead]
    assert spoke.index(other) < len(spoke) - 1 - spoke[::-1].index(one)


def say(text: str = "", *calls: ToolCall) -> Message:
    """Return a reply."""
    return Message(Role.ASSISTANT, text, tool_calls=calls)


def call(name: str, **arguments: str | int | bool | list[str]) -> ToolCall:
    """Return a call of a tool."""
    return ToolCall("", name, arguments)


def delegate(prompt: str, tool: str = "Agent", kind: str = "general-purpose") -> ToolCall:
    """Return a call that starts a sub-agent and waits for it, in releases that would not."""
    words = {"description": "A part", "prompt": prompt, "subagent_type": kind}
    return call(tool, run_in_background=False, **words)


def cut_in_a_call(family: Family, message: Message) -> list[int]:
    """Return a reply whose call breaks off in the middle although the reply goes on to its end."""
    ids = family.encode_reply(message)
    return [*ids[: len(ids) // 2], ids[-1]]


def _turns(prompt: str) -> tuple[tuple[str, str], ...]:
    spoken = [part.removesuffix("\n").split("<|im_end|>")[0] for part in _parts(prompt)]
    pairs = (part.partition("\n")[::2] for part in spoken)
    return tuple((who, said.strip("\n")) for who, said in pairs)


def _parts(prompt: str) -> list[str]:
    """Return the turns of a prompt without the one that it opens."""
    return prompt.split("<|im_start|>")[1:-1]


def _trained(sample: Sample) -> list[tuple[Ids, Ids]]:
    """Return the trained spans of a row, each with all that stands before it."""
    spans, start = [], 0
    for is_trained, group in groupby(sample.mask):
        end = start + len(list(group))
        if is_trained:
            spans.append((tuple(sample.ids[:start]), tuple(sample.ids[start:end])))
        start = end
    return spans
