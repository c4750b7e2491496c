"""History: the branch that a request continues."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from swerl.core.chat import ChatRequest, Finish, Json, Message, Role, Tool, ToolCall
from swerl.gateway.history import MessageTree, ReplyNode

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
