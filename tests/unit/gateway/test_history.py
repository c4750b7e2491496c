"""History: the branch that a request continues."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from swerl.core.chat import ChatRequest, Finish, Json, Message, Role, Tool, ToolCall
from swerl.gateway.history import MessageTree, ReplyNode
from swerl.gateway.prompting import path_ids

ASK = Message(Role.USER, "fix it")
SYSTEM = Message(Role.SYSTEM, "be brief")
CALLS = Message(
    Role.ASSISTANT,
    "I look.",
    "Hm.",
    (
        ToolCall("c1", "bash", {"cmd": "ls", "n": 5, "all": True}),
        ToolCall("c2", "bash", {"cmd": "pwd"}),
    ),
)
RESULTS = (
    Message(Role.TOOL, "a b", tool_call_id="c1"),
    Message(Role.TOOL, "/", tool_call_id="c2"),
)


def node(parent: ReplyNode | None = None, output: tuple[int, ...] = (3,)) -> ReplyNode:
    return ReplyNode(
        parent=parent,
        prompt_ids=array("i", (1, 2)),
        output_ids=array("i", output),
        logprobs=array("d", (0.0,) * len(output)),
        finish=Finish.STOP,
        weight_version="v1",
        started_s=0.0,
        duration_s=0.0,
        trainable=True,
        malformed_calls=0,
    )


def request(*messages: Message, tools: tuple[Tool, ...] = ()) -> ChatRequest:
    return ChatRequest(messages, tools)


def known(reply: Message = CALLS) -> tuple[MessageTree, ReplyNode]:
    history, first = MessageTree(), node()
    history.add(history.match(request(SYSTEM, ASK)), reply, first)
    return history, first


def arguments(**values: Json) -> Message:
    """The first reply with other arguments in its first call."""
    return replace(CALLS, tool_calls=(ToolCall("c1", "bash", values), CALLS.tool_calls[1]))


@pytest.mark.parametrize(
    "replayed",
    [
        CALLS,
        replace(CALLS, thinking=""),
        replace(CALLS, text="I look.  "),
        replace(CALLS, text=""),
        arguments(n="5", cmd="ls", all="true"),
        arguments(cmd="something else"),
        replace(CALLS, tool_calls=CALLS.tool_calls[::-1]),
        replace(CALLS, tool_calls=CALLS.tool_calls[1:]),
    ],
)
def test_a_reply_is_known_by_the_call_ids_minted_in_it(replayed: Message) -> None:
    history, first = known()

    match = history.match(request(SYSTEM, ASK, replayed, *RESULTS))

    assert match.parent is first
    assert match.new == RESULTS


@pytest.mark.parametrize(
    ("values", "is_known"),
    [
        ({"n": "5", "all": "true", "cmd": "ls "}, True),
        ({"n": 5.0, "all": True, "cmd": "ls"}, True),
        ({"n": "005", "all": True, "cmd": "ls"}, True),
        ({"n": "5x", "all": True, "cmd": "ls"}, False),
        ({"n": 6, "all": True, "cmd": "ls"}, False),
        ({"n": 5, "all": True, "cmd": "ls", "x": 1}, False),
    ],
)
def test_a_client_that_makes_its_own_call_ids_is_known_by_content(
    values: dict[str, Json], is_known: bool
) -> None:
    history, first = known(replace(CALLS, tool_calls=CALLS.tool_calls[:1]))
    own = replace(CALLS, tool_calls=(ToolCall("mine", "bash", values),))

    match = history.match(request(SYSTEM, ASK, own, ASK))

    assert match.parent is (first if is_known else None)


def test_the_longest_known_branch_wins_and_only_what_follows_is_new() -> None:
    history, first = known()
    second = node(first)
    done = Message(Role.ASSISTANT, "Done.")
    history.add(history.match(request(SYSTEM, ASK, CALLS, *RESULTS)), done, second)
    more = Message(Role.USER, "more")

    match = history.match(request(SYSTEM, ASK, CALLS, *RESULTS[::-1], done, more))
    fork = history.match(request(SYSTEM, ASK, CALLS, *RESULTS, more))

    assert (match.parent, match.new) == (second, (more,))
    assert (fork.parent, fork.new) == (first, (*RESULTS, more))


@pytest.mark.parametrize(
    "messages",
    [
        (Message(Role.SYSTEM, "sub-agent"), ASK, CALLS),
        (SYSTEM, Message(Role.USER, "summary"), CALLS),
        (ASK, CALLS),
    ],
)
def test_a_different_first_message_is_another_root(messages: tuple[Message, ...]) -> None:
    history, _ = known()

    match = history.match(request(*messages, *RESULTS))

    assert match.parent is None
    assert match.new == (*messages, *RESULTS)


def test_other_tools_are_another_root() -> None:
    history, _ = known()
    tools = (Tool("bash"),)

    assert history.match(request(SYSTEM, ASK, CALLS, *RESULTS, tools=tools)).parent is None


def test_a_tool_result_that_was_rewritten_forks_before_it() -> None:
    history, first = known()
    history.add(history.match(request(SYSTEM, ASK, CALLS, *RESULTS)), CALLS, node(first))
    cleared = replace(RESULTS[0], text="[cleared]")

    match = history.match(request(SYSTEM, ASK, CALLS, cleared, RESULTS[1], CALLS))

    assert match.parent is first


def test_blank_messages_of_the_client_may_come_and_go() -> None:
    history, first = known()
    blank = Message(Role.USER, " \n")

    assert history.match(request(blank, SYSTEM, blank, ASK, CALLS, ASK)).parent is first


def test_of_two_replies_with_the_same_text_the_newest_is_continued() -> None:
    history, first = known(Message(Role.ASSISTANT, "Done."))
    second = node(output=(4,))
    asked = history.match(request(SYSTEM, ASK))
    history.add(asked, Message(Role.ASSISTANT, "Done."), second)
    again = request(SYSTEM, ASK, Message(Role.ASSISTANT, "Done."), ASK)

    assert history.match(again).parent is second
    history.discard(asked, Message(Role.ASSISTANT, "Done."), second)
    assert history.match(again).parent is first


def test_a_discarded_reply_with_calls_is_not_continued() -> None:
    history, first = known()
    history.discard(history.match(request(SYSTEM, ASK)), CALLS, first)

    assert history.match(request(SYSTEM, ASK, CALLS, *RESULTS)).parent is None


def test_asking_without_adding_leaves_nothing_behind() -> None:
    history = MessageTree()
    for number in range(5):
        history.match(request(ASK, tools=(Tool(f"tool{number}"),)))

    assert history._roots == {}


def test_a_path_is_every_token_from_the_root() -> None:
    first = node()

    assert path_ids(node(first, (4, 5))).tolist() == [1, 2, 3, 1, 2, 4, 5]
    assert path_ids(None).tolist() == []
