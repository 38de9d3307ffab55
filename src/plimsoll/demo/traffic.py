"""Clients, and an honest count of each request's outcome.

A request is served when its answer came whole and ended as it should. Told to wait (503 or 429 with Retry-After), a client
waits that long and asks again, as a good client does. Everything else is lost: an error, silence, an answer that breaks off.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from plimsoll.demo.balancer import ask
from plimsoll.net.client import Lost, Reply

LIMIT_S = 90.0
MOST_TRIES = 40
LATEST_S = 2.0  # a greater delay is not made up for
LONGEST_WAIT_S = 15.0
SERVED, WAIT = "served", "wait"
WORDS = "the tide rises and the ship sits deeper than the line on her hull allows so part of the cargo goes ashore".split()


class LostRequest(NamedTuple):
    at_s: float  # since the clients began
    what: str


@dataclass
class Count:
    asked: int = 0
    served: int = 0
    tokens: int = 0
    told_to_wait: int = 0  # such answers
    waited: int = 0  # requests that were told so at least once
    under_way: int = 0
    lost: list[LostRequest] = field(default_factory=list)


def verdict(told: Reply | Lost, *, stream: bool) -> str:
    """Returns SERVED, WAIT if the client has to ask again later, or why the request is lost."""
    if isinstance(told, Lost):
        return "the answer broke off" if told.was_begun else "no answer"
    if told.status in (429, 503) and told.headers.get("retry-after", "").strip().isdigit():
        return WAIT
    if told.status != 200:
        return f"status {told.status}"
    is_ended = b'"finish_reason":"length"' in told.body.replace(b" ", b"") and b'"error"' not in told.body
    return SERVED if is_ended and (not stream or b"[DONE]" in told.body) else "the answer ended too soon"


class ClientTraffic:
    """Sends requests through one port; many at once, each in its own task."""

    def __init__(self, port: int, model: str, *, streams: bool, chance: random.Random, limit_s: float = LIMIT_S) -> None:
        self.count = Count()
        self._port, self._model, self._streams, self._chance, self._limit_s = port, model, streams, chance, limit_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._began_s = asyncio.get_running_loop().time()

    def send(self, words: int = 24, tokens: int = 48, *, port: int | None = None) -> asyncio.Task[None]:
        """Sends one request, every other one for a stream."""
        stream = self._streams and self.count.asked % 2 == 0
        text = " ".join(self._chance.choices(WORDS, k=words))
        task = asyncio.create_task(self._one(port or self._port, text, tokens, stream=stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def at_rate(self, per_s: Callable[[], float], until: Callable[[], bool], words: int = 24, tokens: int = 48) -> None:
        """Sends so many requests a second, with random pauses, until `until` is true.

        The schedule does not depend on this machine's speed: a late request is sent at once, and does not delay the next.
        """
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while not until():
            due_s = max(due_s + min(2.0, self._chance.expovariate(max(0.1, per_s()))), loop.time() - LATEST_S)
            if (early_s := due_s - loop.time()) > 0:
                await asyncio.sleep(early_s)
            if not until():
                self.send(words, tokens)

    async def rest(self, within_s: float) -> None:
        """Waits until no request is in flight, at most so long; the rest are lost."""
        tasks = set(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)
        self.drop()
        await asyncio.gather(*tasks, return_exceptions=True)  # each is counted before this returns

    def drop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _one(self, port: int, text: str, tokens: int, *, stream: bool) -> None:
        count = self.count
        count.asked += 1
        count.under_way += 1
        body = {"model": self._model, "prompt": text, "max_tokens": tokens, "stream": stream, "ignore_eos": True}
        tries = 0
        try:
            while True:
                told = await ask(port, "/v1/completions", body, limit_s=self._limit_s)
                found = verdict(told, stream=stream)
                tries += 1
                if found != WAIT or tries >= MOST_TRIES:
                    break
                count.told_to_wait += 1
                count.waited += tries == 1
                pause_s = min(LONGEST_WAIT_S, float(told.headers["retry-after"]) if isinstance(told, Reply) else 0.0)
                await asyncio.sleep(pause_s * self._chance.uniform(1.0, 1.3))  # so that not all come back at once
        except asyncio.CancelledError:
            self._lose("given up when the demo ended")
            raise
        finally:
            count.under_way -= 1
        if found == SERVED:
            count.served += 1
            count.tokens += tokens
        else:
            self._lose("told to wait again and again" if found == WAIT else found)

    def _lose(self, what: str) -> None:
        self.count.lost.append(LostRequest(asyncio.get_running_loop().time() - self._began_s, what))
