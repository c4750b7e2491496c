"""The relay's lines: lost ones are resent, duplicates count once, invalid ones are refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from swerl.sandboxes import _relay
from swerl.sandboxes import _relay_inside as inside
from swerl.sandboxes._relay import Frame, FrameKind, ListenerSocket, RelayedConnections, Wire


def greeted(*frames: Frame) -> Wire:
    wire = Wire()
    list(wire.take(b"H 0\n"))
    for frame in frames:
        wire.push(frame)
    return wire


async def said(wire: Wire) -> list[bytes]:
    return (await wire.outgoing()).splitlines()


ONE, TWO = Frame(FrameKind.DATA, 1, "b25l"), Frame(FrameKind.END, 1)


async def test_frames_wait_for_the_greeting_of_the_other_half() -> None:
    wire = Wire()
    wire.push(ONE)
    assert await said(wire) == [b"H 0"]
    list(wire.take(b"H 0\n"))
    assert await said(wire) == [b"F 1 D 1 b25l"]


async def test_a_new_link_resends_unacknowledged_frames() -> None:
    wire = greeted(ONE, TWO)
    await said(wire)
    wire.begin_link()
    list(wire.take(b"H 1\n"))
    assert await said(wire) == [b"H 0", b"F 2 E 1 "]


async def test_a_duplicate_frame_counts_once_and_is_acknowledged() -> None:
    wire = greeted()
    await said(wire)
    assert list(wire.take(b"F 1 O 1 \nF 1 O")) == [Frame(FrameKind.OPEN, 1)]
    wire.begin_link()
    assert list(wire.take(b"H 0\nF 1 O 1 \nF 2 E 1 \n")) == [Frame(FrameKind.END, 1)]
    assert await said(wire) == [b"H 1", b"A 2"]


@pytest.mark.parametrize(
    "line", [b"F 2 D 1 eA==\n", b"F 1 Z 1 \n", b"F x D 1 \n", b"\xff\n", b"hello\n", b"A\n"]
)
def test_an_invalid_line_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        list(greeted().take(line))


def test_an_endless_line_is_refused() -> None:
    with pytest.raises(ValueError, match="endless"):
        list(greeted().take(bytes(100_000)))


def test_a_half_that_never_acknowledges_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_relay, "_MAX_KEPT_BYTES", 1000)
    wire = greeted()
    for number in range(1, 201):
        wire.push(ONE)
        list(wire.take(b"A %d\n" % number))
    for _ in range(100):
        wire.push(ONE)
    with pytest.raises(ValueError, match="acknowledges nothing"):
        list(wire.take(b"F 1 O 1 \n"))


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([Frame(FrameKind.OPEN, n) for n in range(1, 1000)], "more connections"),
        ([Frame(FrameKind.OPEN, 2), Frame(FrameKind.OPEN, 2)], "twice"),
        (
            [Frame(FrameKind.OPEN, 1), Frame(FrameKind.END, 1), Frame(FrameKind.END, 1)],
            "continues after an end",
        ),
        ([Frame(FrameKind.OPEN, 1), *[Frame(FrameKind.DATA, 1, "")] * 2], "continues after an end"),
        ([Frame(FrameKind.OPEN, 1), Frame(FrameKind.WINDOW, 1, "1")], "more than it received"),
        (
            [Frame(FrameKind.OPEN, 1), *[Frame(FrameKind.DATA, 1, "AAAA" * 8000)] * 30],
            "more than it may",
        ),
    ],
)
async def test_a_half_that_breaks_the_rules_is_refused(frames: list[Frame], complaint: str) -> None:
    listening = ListenerSocket()
    joined = RelayedConnections(listening, lambda _: None)
    try:
        with pytest.raises(ValueError, match=complaint):
            for frame in frames:
                joined.handle(frame)
    finally:
        listening.close()
        await joined.close()


async def test_frames_of_ended_connections_are_ignored() -> None:
    RelayedConnections(SimpleNamespace(), lambda _: None).handle(Frame(FrameKind.DATA, 7, "eA=="))  # type: ignore[arg-type]
    await asyncio.sleep(0)


def test_both_halves_keep_the_same_limits() -> None:
    assert inside.WINDOW == _relay.WINDOW
    assert inside.MAX_CONNECTIONS == _relay.MAX_CONNECTIONS
