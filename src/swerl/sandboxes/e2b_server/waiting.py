"""Two ways to wait: for a task that gets something ready, and for what may stay silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

T = TypeVar("T")


async def wait_ready(holder: asyncio.Task[None], ready: asyncio.Future[T]) -> T:
    """Return what a task got ready and goes on to hold, or raise what ended it before.

    Who is cancelled while it waits cancels the task.
    """
    both: list[asyncio.Future[Any]] = [holder, ready]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        holder.cancel()
        raise
    if not ready.done():
        holder.result()
    return ready.result()


async def with_silences(
    items: AsyncIterator[T], silence_s: float
) -> AsyncGenerator[T | None, None]:
    """Yield the items, and None whenever none has come for so many seconds."""
    while True:
        coming = asyncio.ensure_future(anext(items))
        try:
            while not (await asyncio.wait([coming], timeout=silence_s))[0]:
                yield None
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait([coming])
        try:
            yield coming.result()
        except StopAsyncIteration:
            return
