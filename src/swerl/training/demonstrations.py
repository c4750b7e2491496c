"""Scripted repairs of the twin's repositories as token rows: what the warm start learns from.

A row takes the path that the built-in agent and the gateway take: the prompt is rendered once, each
reply is encoded as the model would say it, each tool result is rendered as a tail. A test compares
rows with real scripted Episodes. Some repairs begin with a slip, an edit of text that is not in the
file: the slip itself is not trained, but what to do after the tool's error is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swerl.core.chat import ChatRequest, Message, Role
from swerl.core.contracts import Family
from swerl.core.patch import FileEdit
from swerl.core.sample import Sample
from swerl.harnesses import builtin
from swerl.harnesses._editor_tools import answer, not_once
from swerl.tasks._twin_templates import Split, Variant, draw
from swerl.tasks.twin import WORKDIR

_SLIP_SHARE = 0.15
"""Share of repairs with a slip: a policy that never saw an error has nothing to say after one."""


@dataclass(frozen=True, slots=True)
class Said:
    """One message of a demonstration."""

    message: Message
    is_trained: bool = False


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A repair of one variant, right or wrong."""

    variant: Variant
    fix: str
    """The expression that replaces the wrong one."""
    slip: str = ""
    """An expression that is not in the file, edited first; empty for none."""

    def conversation(self) -> Iterator[Said]:
        """Yield the built-in agent's conversation."""
        look, change, submit = self._replies(self.variant.bad)
        yield Said(Message(Role.USER, self.variant.prompt))
        yield Said(look, is_trained=True)
        yield Said(Message(Role.TOOL, self.variant.source.rstrip("\n")))
        if self.slip:
            yield Said(self._replies(self.slip)[1])
            error = not_once(f"{WORKDIR}/{self.variant.file}", 0)
            yield Said(Message(Role.TOOL, answer(error)))
        yield Said(change, is_trained=True)
        yield Said(Message(Role.TOOL, "ok"))
        yield Said(submit, is_trained=True)

    def _replies(self, bad: str) -> Sequence[Message]:
        return builtin.script([FileEdit(self.variant.file, f"return {bad}", f"return {self.fix}")])


def demonstrations(seed: int, wrong_share: float) -> Iterator[Demonstration]:
    """Yield repairs of training variants without end.

    `wrong_share` of them make a fix picked at random, right or wrong, so that the policy is left
    something to learn.
    """
    rng = random.Random(f"demonstrations/{seed}")
    while True:
        variant = draw(rng, Split.TRAIN)
        is_random = rng.random() < wrong_share
        fix = rng.choice(variant.guesses()) if is_random else variant.good
        slip = draw(rng, Split.TRAIN).bad if rng.random() < _SLIP_SHARE else ""
        yield Demonstration(variant, fix, "" if f"return {slip}" in variant.source else slip)


def rows(family: Family, seed: int, wrong_share: float) -> Iterator[Sample]:
    """Yield the token rows of `demonstrations`."""
    for number, demonstration in enumerate(demonstrations(seed, wrong_share)):
        yield to_row(family, demonstration, f"demonstration-{number}")


def to_row(family: Family, demonstration: Demonstration, name: str) -> Sample:
    """Return a demonstration's tokens as the gateway records them."""
    ids: list[int] = []
    mask: list[int] = []
    for said in demonstration.conversation():
        if said.message.role is Role.ASSISTANT:
            added = family.encode_reply(said.message)
        elif not ids:
            added = family.render(ChatRequest((said.message,)))
        else:
            added = family.render_tail([said.message], closed=True)
        ids += added
        mask += [int(said.is_trained)] * len(added)
    return Sample(name, name, tuple(ids), tuple(mask), (0.0,) * len(ids))
