"""The lab's model: an Engine that plays a Case with whatever tools an agent offers.

Where it stands is written in the conversation itself: each reply says a mark such as `lab-main-3`.
So a repeated request gets the same reply, sub-agents and the main conversation do not mix, and a
compaction carries the place on in the summary that the model is asked for.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from swerl.checks.compat import phrases
from swerl.checks.compat.cases import (
    FILL_CHARS,
    Await,
    Broken,
    Case,
    Delegate,
    Fill,
    Move,
    Run,
    Say,
    Unknown,
)
from swerl.checks.compat.ear import Ear, Heard
from swerl.core.chat import Finish, Message, Role, ToolCall
from swerl.core.errors import EngineLostError
from swerl.core.learning import WeightRef
from swerl.core.turn import Completion, Sampling

PROMPT = "Work on lab-task: look around in this repository as you see fit, then stop."
_ERRAND_PROMPT = "Your errand is lab-{name}: list the folder and say what is there."
_COMPACTED = "lab-compacted"
_TASK = "lab-task"
_ERRAND = re.compile(r"lab-(errand-\d+)(?!-?\d)")
_FILL = f"seq 1000 {1000 + FILL_CHARS // 5}  # part {{}}"
"""Numbered, for some agents end a run whose model repeats a call."""
_VERSION = "lab"
_SUMMARY = f"Summary for lab-task, {_COMPACTED}: the folder was listed{{}}; go on."
_TROUBLED = ("main", 1)
"""The reply that a slow or lost engine delays."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a conversation stands."""

    conversation: str
    """`main`, `after`, an errand, `summary`, or `other`: what no script asks for."""
    number: int = 0


class Model:
    """Implements Engine."""

    def __init__(self, case: Case, ear: Ear, *, closing: Sequence[ToolCall] = ()) -> None:
        """`closing` are the calls with which this agent's model says that it is done, if any."""
        self.answered: list[Place] = []
        """Where it gave a reply, call by call."""
        self.lacks = ""
        """What the script needed and was not there; empty while nothing was missing."""
        self._case = case
        self._ear = ear
        self._closing = closing
        self._num_lost = 0
        self._mistakes: dict[Place, int] = {}
        """Where it made a mistake, with the hash of the prompt."""

    @property
    def num_needed(self) -> int:
        """Return the replies that the script takes, each once, and one summary to compact."""
        moves = self._case.moves
        said = {
            place
            for place in self.answered
            if place.number < len(moves.get(place.conversation, ()))
        }
        compacts = self._case.needs == "compaction" and self._num_summaries() > 0
        return len(said) + int(compacts)

    @property
    def finished(self) -> bool:
        """Say whether the script's last reply was given."""
        closings = self._case.closings
        return any((place.conversation, place.number) in closings for place in self.answered)

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Play the next move."""
        heard = self._ear.hear(ids)
        place = self._after_mistake(self._place(heard), hash(tuple(ids)))
        await self._trouble(place)
        self.answered.append(place)
        spoken = self._speak(place, heard)
        cut = tuple(spoken[: sampling.max_new_tokens])
        return Completion(
            ids=cut,
            logprobs=(0.0,) * len(cut),
            finish=Finish.STOP if len(cut) == len(spoken) else Finish.LENGTH,
            weight_version=_VERSION,
            prompt_tokens=len(ids),
        )

    async def abort(self, session: str) -> None:
        """Nothing to do: a reply takes no time but what a cancelled call gives up."""

    async def pause(self) -> None:
        """Nothing to do: the lab loads no weights."""

    async def load(self, weights: WeightRef) -> str:
        """Take no weights."""
        return _VERSION

    async def resume(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    def _place(self, heard: Heard) -> Place:
        new = "\n".join(m.text for m in heard.new if m.role is not Role.ASSISTANT)
        is_known = any(_mark_of(name) in heard.text for name in self._case.moves)
        if phrases.SUMMARIES.search(new) and is_known:
            return Place("summary", self._num_summaries())
        conversation = self._conversation(heard)
        if conversation not in self._case.moves or not heard.root.tools:
            return Place("other", len(self.answered))
        marks = re.findall(_mark_of(conversation) + r"(\d+)", heard.text)
        return Place(conversation, max(map(int, marks), default=-1) + 1)

    def _after_mistake(self, place: Place, prompt: int) -> Place:
        """Return the next place where an agent hides the model's mistake from it."""
        moves = self._case.moves.get(place.conversation, ())
        if place.number >= len(moves) or not isinstance(moves[place.number], Broken | Unknown):
            return place
        is_repeated = self._mistakes.setdefault(place, prompt) == prompt
        return place if is_repeated else Place(place.conversation, place.number + 1)

    def _conversation(self, heard: Heard) -> str:
        """Tell by what was said to it at its start which conversation this is."""
        said = [message.text for message in heard.root.messages if message.role is not Role.TOOL]
        if any(_COMPACTED in text for text in said):
            return "after"
        for text in reversed(said):
            if _TASK in text:
                return "main"
            if found := _ERRAND.search(text):
                return found[1]
        return "other"

    def _num_summaries(self) -> int:
        return sum(place.conversation == "summary" for place in self.answered)

    async def _trouble(self, place: Place) -> None:
        if (place.conversation, place.number) != _TROUBLED:
            return
        if self._num_lost < self._case.num_lost:
            self._num_lost += 1
            raise EngineLostError("the lab's engine is away", hint="it comes back")
        await asyncio.sleep(self._case.slow_s)

    def _speak(self, place: Place, heard: Heard) -> list[int]:
        moves = self._case.moves.get(place.conversation, ())
        if place.conversation == "summary":
            return self._encode(_SUMMARY.format(self._known(heard)))
        if place.number >= len(moves):
            return self._encode("Nothing more.")
        text = f"Next, {_mark_of(place.conversation)}{place.number}."
        move = moves[place.number]
        if isinstance(move, Broken):
            return self._broken(text, heard)
        if isinstance(move, Say):
            is_errand = place.conversation not in ("main", "after")
            return self._encode(f"{text} {move.text}", () if is_errand else self._closing)
        return self._encode(text, self._calls(move, heard, place.number))

    def _known(self, heard: Heard) -> str:
        """Return what a summary must say, so that a second compaction does not begin anew."""
        marks = re.findall(_mark_of("after") + r"\d+", heard.text)
        return f", up to {marks[-1]}" if marks else ""

    def _calls(self, move: Move, heard: Heard, number: int = 0) -> list[ToolCall]:
        tools = heard.root.tools
        match move:
            case Run(commands):
                found = [phrases.run(tools, command) for command in commands]
            case Fill():
                found = [phrases.run(tools, _FILL.format(number))]
            case Delegate(errands):
                prompts = [(name, _ERRAND_PROMPT.format(name=name)) for name in errands]
                found = [phrases.delegate(tools, phrases.Errand(*each)) for each in prompts]
            case Await():
                found = [phrases.wait(tools, heard.text) or phrases.run(tools, "true")]
            case _:
                found = [ToolCall("", "lab_no_such_tool", {"text": "hello"})]
        if None in found:
            meant = "starts sub-agents" if isinstance(move, Delegate) else "runs commands"
            self.lacks = f"no tool on offer {meant}"
        return [call for call in found if call]

    def _encode(self, text: str, calls: Sequence[ToolCall] = ()) -> list[int]:
        return self._ear.encode_reply(Message(Role.ASSISTANT, text, tool_calls=tuple(calls)))

    def _broken(self, text: str, heard: Heard) -> list[int]:
        """Return a reply whose call lacks its end."""
        whole = self._encode(text, self._calls(Run(("echo broken",)), heard))
        for end in range(len(whole) - 2, 0, -1):
            ids = [*whole[:end], whole[-1]]
            if self._ear.parse(ids).malformed_calls:
                return ids
        self.lacks = "no way to break this family's calls"
        return whole


def _mark_of(conversation: str) -> str:
    return f"lab-{conversation}-"
