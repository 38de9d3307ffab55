"""The clients of a scene: the demo's own, sent by a schedule, and readers that ask about one document again and again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from lab.article.incidents import Arrival
from plimsoll.demo.fleet import MODEL
from plimsoll.demo.traffic import ClientTraffic

PATIENCE_S = 300.0  # after which a client hangs up
AGAIN_S = 6.0  # after a failure a reader waits as long as an answer usually takes


class Crowd(ClientTraffic):
    """`took_s` has how long each request took that was served, with the waiting that it was told to do."""

    def __init__(self, port: int, scale: float, seed: int) -> None:
        super().__init__(port, MODEL, streams=True, chance=random.Random(seed), limit_s=PATIENCE_S / scale)
        self.took_s: list[float] = []
        self._scale = scale
        self._failed: set[asyncio.Task[Any] | None] = set()

    async def replay(self, arrivals: Sequence[Arrival], begin_s: float) -> None:
        """Send each when it is due; `begin_s` is the loop's time at which the incident begins."""
        loop = asyncio.get_running_loop()
        for one in arrivals:
            await asyncio.sleep(max(0.0, begin_s + one.at_s / self._scale - loop.time()))
            self._sent(one.text, one.output, stream=one.stream)

    async def read_on(self, document: str, tokens: int, until: Callable[[], bool]) -> None:
        """One reader: a question about its document, and the next as soon as it is answered."""
        while not until():
            lost = len(self.count.lost)
            await asyncio.wait([self._sent(document, tokens, stream=self.count.asked % 2 == 0)])
            if len(self.count.lost) > lost:
                await asyncio.sleep(AGAIN_S / self._scale)

    def _sent(self, text: str, tokens: int, *, stream: bool) -> asyncio.Task[None]:
        task = asyncio.create_task(self._timed(text, tokens, stream=stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _timed(self, text: str, tokens: int, *, stream: bool) -> None:
        began_s = asyncio.get_running_loop().time()
        await self._one(self._port, text, tokens, stream=stream)
        if asyncio.current_task() in self._failed:
            self._failed.discard(asyncio.current_task())
        else:
            self.took_s.append(asyncio.get_running_loop().time() - began_s)

    def _lose(self, what: str) -> None:
        self._failed.add(asyncio.current_task())
        super()._lose(what)
