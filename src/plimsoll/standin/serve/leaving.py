"""Clients that leave while their answer is being sent: an answer that takes long is not sent to nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from plimsoll.inside.answers import Message, Receive, Send

LOOK_S = 0.1  # how soon a slow answer sees that it need not be slow any more


class Leaving:
    """An ear on one client; begun when its body has been read, or is of no interest any more."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    @property
    def is_gone(self) -> bool:
        """Whether it has left, as far as was heard."""
        return self._task is not None and self._task.done()

    def begin(self) -> None:
        """Listen from now on; once more is as good as once."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._listen())

    async def wait(self, seconds: float) -> None:
        """So long, or until it leaves."""
        self.begin()
        assert self._task is not None, "it was begun"
        await asyncio.wait({self._task}, timeout=seconds)

    def end(self) -> None:
        """Listen no more."""
        if self._task is not None:
            self._task.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


@contextlib.asynccontextmanager
async def listening(receive: Receive) -> AsyncIterator[Leaving]:
    """An ear on a client for as long as the block runs."""
    found = Leaving(receive)
    try:
        yield found
    finally:
        found.end()


def byte_by_byte(send: Send, client: Leaving, pause_s: Callable[[], float | None]) -> Send:
    """A `send` with a pause behind every byte; `pause_s` is asked for each, and None ends the slowness."""

    async def pause() -> bool:
        """Whether the next byte is to be alone, too."""
        passed = 0.0
        while (wanted := pause_s()) is not None and not client.is_gone:
            if passed >= wanted:
                return True
            piece = min(LOOK_S, wanted - passed)
            await client.wait(piece)
            passed += piece
        return False

    async def slowly(message: Message) -> None:
        body: bytes = message.get("body", b"")
        sent = 0
        if message["type"] == "http.response.body":
            while sent < len(body) - 1 and not client.is_gone:
                await send({"type": "http.response.body", "body": body[sent : sent + 1], "more_body": True})
                sent += 1
                if not await pause():
                    break
        await send({**message, "body": body[sent:]} if body else message)

    return slowly
