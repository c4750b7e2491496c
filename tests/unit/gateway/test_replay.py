"""A Session that repeats a record: same requests, same tokens, no engine; one clear error."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from swerl.core.chat import ChatReply, ChatRequest, Message, Role, Tool, ToolCall
from swerl.core.errors import GatewayError
from swerl.core.sample import to_samples
from swerl.core.turn import Sampling
from swerl.gateway import replay as gateway_replay
from swerl.gateway.conversation import Conversation, TurnRecord
from swerl.gateway.limits import SessionLimits
from swerl.gateway.prompting import prompter
from swerl.gateway.replay import (
    WHITE_SPACE,
    Compared,
    Part,
    Replay,
    compare,
    recorded_turns,
)
from tests.unit.gateway._fakes import RecordingEngine

ASK = Message(Role.USER, "fix it")
SYSTEM = Message(Role.SYSTEM, "You work in /repo. Today is 2026-11-26.")
LOOK = Message(Role.ASSISTANT, "I look.", tool_calls=(ToolCall("", "bash", {"command": "ls"}),))
TOOLS = (Tool("bash", "Run a command."),)


def talk(
    engine: RecordingEngine,
    turns: list[TurnRecord] | None = None,
    replay: Replay | None = None,
    *,
    limits: SessionLimits | None = None,
) -> Conversation:
    live = prompter(engine, engine.family, "s")
    return Conversation(
        "s",
        replay.before(live, engine.family) if replay else live,
        sampling=Sampling(1000),
        limits=limits or SessionLimits(),
        on_turn=None if turns is None else turns.append,
    )


async def ask(
    conversation: Conversation, *messages: Message, tools: Sequence[Tool] = TOOLS
) -> Message:
    async with conversation.answer(ChatRequest(messages, tuple(tools))) as answer:
        reply: ChatReply = await answer.reply()
        answer.delivered()
        return reply.message


def result_of(reply: Message, text: str) -> Message:
    return Message(Role.TOOL, text, tool_call_id=reply.tool_calls[0].id)


async def play(conversation: Conversation, *, listed: str = "a.py", ask_for: str = "go on") -> None:
    """Play a conversation of three Turns, each with the whole history."""
    first = await ask(conversation, SYSTEM, ASK)
    history = [SYSTEM, ASK, first, result_of(first, listed)]
    second = await ask(conversation, *history)
    await ask(conversation, *history, second, Message(Role.USER, ask_for))


@pytest.fixture
async def record(engine: RecordingEngine) -> list[TurnRecord]:
    """Return three recorded Turns; the engine has said everything then."""
    engine.lines = [LOOK, Message(Role.ASSISTANT, "I see."), Message(Role.ASSISTANT, "Bye.")]
    turns: list[TurnRecord] = []
    await play(talk(engine, turns))
    return turns


def again(record: Sequence[TurnRecord], engine: RecordingEngine, num_turns: int) -> Replay:
    return Replay(recorded_turns(record), num_turns=num_turns)


async def test_the_first_turns_come_from_the_record_and_the_rest_from_the_engine(
    engine: RecordingEngine, record: list[TurnRecord]
) -> None:
    engine.calls.clear()
    engine.lines = [Message(Role.ASSISTANT, "Another end.")]
    replay = again(record, engine, 2)
    conversation = talk(engine, replay=replay)
    await play(conversation, ask_for="stop here")
    trajectory = await conversation.close()

    assert not replay.problem
    assert [turn.replayed for turn in trajectory.turns] == [True, True, False]
    for turn, known in zip(trajectory.turns[:2], record, strict=False):
        assert (turn.prompt_ids, turn.output_ids) == (known.turn.prompt_ids, known.turn.output_ids)
    assert len(engine.calls) == 1
    path = trajectory.turns
    before = [token for turn in path[:2] for token in (*turn.prompt_ids, *turn.output_ids)]
    assert engine.calls[0].prompt == (*before, *path[2].prompt_ids)


async def test_replayed_tokens_are_context_and_sampled_ones_are_trained_once(
    engine: RecordingEngine, record: list[TurnRecord]
) -> None:
    engine.lines = [Message(Role.ASSISTANT, "Another end.")]
    conversation = talk(engine, replay=again(record, engine, 2))
    await play(conversation)
    trajectory = await conversation.close()

    [row] = to_samples(trajectory, episode="e", task="t")
    assert row.num_trained_tokens == len(trajectory.turns[2].output_ids)
    assert row.num_trained_tokens == trajectory.num_sampled_tokens
    assert not any(row.mask[: -row.num_trained_tokens])


async def test_turns_of_the_same_episode_are_trained(
    engine: RecordingEngine, record: list[TurnRecord]
) -> None:
    known = recorded_turns(record)
    replay = Replay(known, num_turns=2, is_own=True)
    conversation = talk(engine, replay=replay)
    await play(conversation)
    trajectory = await conversation.close()

    sampled = sum(len(turn.output_ids) for turn in trajectory.turns)
    rows = to_samples(trajectory, episode="e", task="t")
    assert sum(row.num_trained_tokens for row in rows) == sampled
    assert trajectory.turns[0].logprobs == record[0].turn.logprobs


async def test_a_different_request_ends_the_replay_with_turn_message_and_text(
    engine: RecordingEngine, record: list[TurnRecord]
) -> None:
    replay = again(record, engine, 2)
    conversation = talk(engine, replay=replay)
    with pytest.raises(GatewayError) as caught:
        await play(conversation, listed="b.py")
    for text in ("turn 2 of 2", "result of call 1", "'a.py'", "'b.py'"):
        assert text in str(caught.value)
    assert replay.problem == str(caught.value)
    with pytest.raises(GatewayError, match="turn 2 of 2"):  # an agent may try another request
        await ask(conversation, Message(Role.USER, "summarise"))


async def outgrow(conversation: Conversation) -> None:
    """Send a prompt that is too long, then continue with a summary in its place."""
    first = await ask(conversation, SYSTEM, ASK)
    with pytest.raises(GatewayError, match="prompt is too long"):
        await ask(conversation, SYSTEM, ASK, first, result_of(first, "x" * 5000))
    await ask(conversation, SYSTEM, Message(Role.USER, "You listed the files. Go on."))


async def test_a_prompt_that_was_too_long_is_refused_again_and_the_replay_goes_on(
    engine: RecordingEngine,
) -> None:
    """An agent compacts after the refusal; the record has no Turn of the refused request."""
    short = SessionLimits(max_context_tokens=2000)
    engine.lines = [LOOK, Message(Role.ASSISTANT, "Bye.")]
    turns: list[TurnRecord] = []
    await outgrow(talk(engine, turns, limits=short))

    replay = again(turns, engine, 2)
    await outgrow(talk(engine, replay=replay, limits=short))
    assert (replay.num_played, replay.problem) == (2, "")

    # With room for it the request is one that the record lacks, and reaches no limit.
    replay = again(turns, engine, 2)
    roomy = talk(engine, replay=replay)
    first = await ask(roomy, SYSTEM, ASK)
    with pytest.raises(GatewayError, match="the record has no such request: after turn 1"):
        await ask(roomy, SYSTEM, ASK, first, result_of(first, "x" * 5000))
    assert not roomy.admission.reached

    # An agent that ends at the refusal shows the request, which may be the difference.
    replay = again(turns, engine, 2)
    ended = talk(engine, replay=replay, limits=short)
    first = await ask(ended, SYSTEM, ASK)
    with pytest.raises(GatewayError, match="prompt is too long"):
        await ask(ended, SYSTEM, ASK, first, result_of(first, "x" * 5000))
    assert "made 1 of the 2 requests to replay, then ended; one without room" in replay.problem
    assert "result of call 1" in replay.problem


async def test_other_tools_or_another_system_prompt_are_noticed(
    engine: RecordingEngine, record: list[TurnRecord]
) -> None:
    """No prompt of the tiny family has them in it."""
    other = (Tool("bash", "Run a command for 5 pages."),)
    for messages, tools, text in (
        ((SYSTEM, ASK), other, "tool bash"),
        ((Message(Role.SYSTEM, "You rest."), ASK), TOOLS, "system message"),
    ):
        conversation = talk(engine, replay=again(record, engine, 1))
        with pytest.raises(GatewayError, match=text):
            await ask(conversation, *messages, tools=tools)


@pytest.mark.parametrize("lead_waits", [True, False])
async def test_requests_and_replies_keep_their_recorded_order_over_branches(
    engine: RecordingEngine, lead_waits: bool
) -> None:
    """The lead asked for its last reply after its sub-agent's, or before, and had it after."""
    engine.lines = [Message(Role.ASSISTANT, text) for text in ("start", "part", "end")]
    turns: list[TurnRecord] = []
    lead, sub, more = (Message(Role.USER, text) for text in ("lead", "sub", "more"))
    conversation = talk(engine, turns)
    start = await ask(conversation, lead)
    await ask(conversation, sub)
    await ask(conversation, lead, start, more)
    times = (0.0, 0.01), (0.01, 0.05), (0.07 if lead_waits else 0.03, 0.05)
    for at, (started_s, duration_s) in enumerate(times):
        turn = replace(turns[at].turn, started_s=started_s, duration_s=duration_s)
        turns[at] = replace(turns[at], turn=turn)

    said: list[str] = []
    replay = again(turns, engine, 3)
    conversation = talk(engine, replay=replay)

    async def listen(*messages: Message) -> None:
        said.append((await ask(conversation, *messages)).text)

    await listen(lead)
    early, late = ((lead, start, more), (sub,)) if lead_waits else ((sub,), (lead, start, more))
    cut = asyncio.create_task(listen(*early))
    await asyncio.sleep(0.1)
    assert said == ["start"]
    cut.cancel()  # its client asks again
    await asyncio.gather(cut, return_exceptions=True)
    await asyncio.gather(listen(*early), listen(*late))
    assert said == ["start", "part", "end"]
    assert (replay.problem, replay.num_played) == ("", 3)


async def test_a_reply_of_another_tokenizer_is_encoded_anew(
    engine: RecordingEngine, record: list[TurnRecord]
) -> None:
    known = recorded_turns(record)
    foreign = [
        replace(each, turn=replace(each.turn, output_ids=(10**6,), logprobs=(0.5,)))
        for each in known
    ]
    replay = Replay(foreign, num_turns=2)
    conversation = talk(engine, replay=replay)
    await play(conversation)
    trajectory = await conversation.close()
    assert trajectory.turns[0].output_ids == record[0].turn.output_ids
    assert trajectory.turns[0].logprobs == (0.0,) * len(record[0].turn.output_ids)


async def test_a_reply_names_the_random_ids_of_its_own_session(engine: RecordingEngine) -> None:
    """A sub-agent has another id; the tokens are as they were sampled."""
    old, new = "123e4567-e89b-12d3-a456-426614174000", "99999999-e89b-12d3-a456-426614174000"
    wait = ToolCall("", "wait", {"ids": [old], "session": 4711, "text": f"for {old}"})
    engine.lines = [LOOK, Message(Role.ASSISTANT, f"{old} works.", tool_calls=(wait,))]
    turns: list[TurnRecord] = []

    async def start(conversation: Conversation, text: str) -> Message:
        first = await ask(conversation, ASK)
        return await ask(conversation, ASK, first, result_of(first, text))

    await start(talk(engine, turns), f"started {old}, process id 4711")
    replay = again(turns, engine, 2)
    conversation = talk(engine, replay=replay)
    said = await start(conversation, f"started {new}, process id 9")

    assert said.text == f"{new} works."
    [call] = said.tool_calls
    assert call.arguments["text"] == f"for {new}"
    assert old not in str(call.arguments)
    assert replay.differences == {"uuid": 1, "process": 1}
    trajectory = await conversation.close()
    assert trajectory.turns[1].output_ids == turns[1].turn.output_ids


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        ("clock", "It is Thu Nov 26 05:44:24 UTC 2026.", "It is Fri Dec  4 15:00:01 UTC 2026."),
        ("clock", "-rw-r--r-- 1 a a 9 Nov 26 05:44 x", "-rw-r--r-- 1 a a 9 Dec  4 15:40 x"),
        (
            "uuid",
            "id 123e4567-e89b-12d3-a456-426614174000",
            "id 00000000-e89b-12d3-a456-426614174000",
        ),
        ("temporary path", "wrote /tmp/tmpab12/x.txt", "wrote /tmp/tmpzz99/x.txt"),
        ("duration", "3 passed in 0.12s", "3 passed in 11.40s"),
        ("hash", "[main 1a2b3c4] fix", "[main 9f8e7d6c] fix"),
        ("port", "http://127.0.0.1:8080/v1", "http://127.0.0.1:51234/v1"),
        ("process", "process id 4711 ended", "process id 9 ended"),
        ("call id", "see call_0a1b2c3d_7", "see call_ffeeddcc_7"),
        ("address", "<f at 0x7f00deadbeef>", "<f at 0x7f11deadbeef>"),
        ("nickname", '{"nickname":"Kant"}', '{"nickname":"Ada L"}'),
        (WHITE_SPACE, "one\n\ntwo ", "one\ntwo"),
    ],
)
def test_each_rule_covers_its_difference_alone(rule: str, before: str, after: str) -> None:
    compared = compare([Part("x", before)], [Part("x", after)])
    assert isinstance(compared, Compared), compared
    assert compared.counts == Counter([rule])
    changed = compare([Part("x", before)], [Part("x", f"{after} and more")])
    assert isinstance(changed, str)


@pytest.mark.parametrize(
    ("before", "after"),
    [("Marker", "Market"), ("May I", "May we"), ("process a", "process b"), ("3 files", "4 files"),
     ("msg_content", "msg_contents"), ("exit code 0", "exit code 1"), ("a\n", "b\n")],
)  # fmt: skip
def test_no_rule_covers_an_ordinary_difference(before: str, after: str) -> None:
    assert isinstance(compare([Part("x", before)], [Part("x", after)]), str)


async def test_branches_are_replayed_in_any_order_and_twins_each_once(
    engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_replay, "_OVERDUE_S", 0.01)
    twin, other = Message(Role.USER, "part one"), Message(Role.USER, "part two")
    engine.lines = [Message(Role.ASSISTANT, text) for text in ("one", "uno", "two")]
    turns: list[TurnRecord] = []
    conversation = talk(engine, turns)
    await asyncio.gather(ask(conversation, twin), ask(conversation, twin))
    await ask(conversation, other)
    engine.calls.clear()

    replay = again(turns, engine, 3)
    conversation = talk(engine, replay=replay)
    assert (await ask(conversation, other)).text == "two"
    said = await asyncio.gather(ask(conversation, twin), ask(conversation, twin))
    assert {message.text for message in said} == {"one", "uno"}
    assert (replay.problem, engine.calls) == ("", [])
