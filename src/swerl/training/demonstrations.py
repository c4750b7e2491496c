"""Scripted repairs of the twin's repositories as token rows: what the warm start learns from.

A row takes the path that the built-in agent and the gateway take: the prompt is rendered once, each
reply is encoded as the model would say it, each tool result is rendered as a tail. A test compares
a row with a real scripted Episode.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from swerl.chat import ChatRequest, Message, Role
from swerl.harnesses import builtin
from swerl.interfaces import Family
from swerl.patch import FileEdit
from swerl.sample import Sample
from swerl.tasks._twin_templates import Split, Variant, draw


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A repair of one variant, right or wrong."""

    variant: Variant
    fix: str
    """The expression that replaces the wrong one."""

    def messages(self) -> list[Message]:
        """Return the built-in agent's conversation."""
        variant = self.variant
        edit = FileEdit(variant.file, f"return {variant.bad}", f"return {self.fix}")
        look, change, submit = builtin.script([edit])
        return [
            Message(Role.USER, variant.prompt),
            look,
            Message(Role.TOOL, variant.source.rstrip("\n")),
            change,
            Message(Role.TOOL, "ok"),
            submit,
        ]


def demonstrations(seed: int, wrong_share: float) -> Iterator[Demonstration]:
    """Yield repairs of training variants without end.

    `wrong_share` of them make a fix picked at random, right or wrong, so that the policy is left
    something to learn.
    """
    rng = random.Random(f"demonstrations/{seed}")
    while True:
        variant = draw(rng, Split.TRAIN)
        is_random = rng.random() < wrong_share
        yield Demonstration(variant, rng.choice(variant.guesses()) if is_random else variant.good)


def rows(family: Family, seed: int, wrong_share: float) -> Iterator[Sample]:
    """Yield the token rows of `demonstrations`."""
    for number, demonstration in enumerate(demonstrations(seed, wrong_share)):
        yield to_row(family, demonstration.messages(), f"demonstration-{number}")


def to_row(family: Family, messages: list[Message], name: str) -> Sample:
    """Return the tokens of a conversation as the gateway records it; the replies are trained."""
    ids: list[int] = []
    mask: list[int] = []
    for message in messages:
        is_reply = message.role is Role.ASSISTANT
        if is_reply:
            added = family.encode_reply(message)
        elif not ids:
            added = family.render(ChatRequest((message,)))
        else:
            added = family.render_tail([message], closed=True)
        ids += added
        mask += [int(is_reply)] * len(added)
    return Sample(name, name, tuple(ids), tuple(mask), (0.0,) * len(ids))
