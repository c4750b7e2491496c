"""The scripted engine says each session's lines in order, in real tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from swerl.core.chat import Message, Role
from swerl.core.contracts import EngineSetup
from swerl.core.errors import InputError
from swerl.core.turn import Sampling
from swerl.engines import scripted
from swerl.engines.families import tiny

FAMILY = tiny.build(None)
MANY = Sampling(max_new_tokens=100)


def script(session: str) -> Sequence[Message]:
    return [Message(Role.ASSISTANT, f"{session} one"), Message(Role.ASSISTANT, f"{session} two")]


def setup(tmp_path: Path) -> EngineSetup:
    return EngineSetup(FAMILY, tmp_path, script=script)


async def test_each_session_gets_its_lines_then_the_end(tmp_path: Path) -> None:
    async with scripted.open(scripted.Options(), setup(tmp_path)) as engine:
        said = []
        for session, prompt in [("a", 1), ("b", 1), ("a", 2), ("a", 3), ("b", 2)]:
            completion = await engine.generate([prompt], MANY, session)
            said.append(FAMILY.parse(completion.ids).text)

    assert said == ["a one", "b one", "a two", "Done.", "b two"]


async def test_a_side_request_takes_no_line_of_the_conversation(tmp_path: Path) -> None:
    main, side = list(range(100)), list(range(500, 540))
    prompts = [side, main, [*main, 1, 2], [*side, 3], [*main[:95], 7, 8, 9], side]
    async with scripted.open(scripted.Options(), setup(tmp_path)) as engine:
        said = [await engine.generate(prompt, MANY, "a") for prompt in prompts]

    texts = [FAMILY.parse(each.ids).text for each in said]
    assert texts == ["a one", "a one", "a two", "a two", "Done.", "a one"]


async def test_an_engine_without_a_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no script"):
        async with scripted.open(scripted.Options(), EngineSetup(FAMILY, tmp_path)):
            pass
