"""Clients that read streams of tokens, all at once, and keep the time of every piece; nothing but the standard library.

Closed loop: each client sends its next request when the last one has ended. A piece is one event of the stream; vLLM puts
several tokens into one where its API server lags behind, so tokens are counted by the usage that ends a stream.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

PIECE = b'data: {"'
DONE = b"data: [DONE]"
REQUEST_LIMIT_S = 120.0
POOL = 48  # bodies made beforehand: making them while streams are timed would disturb the times
HEAD_BYTES, END_BYTES = 400, 1500
USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')


class Shape(NamedTuple):
    """The traffic: how many clients, and from where to where prompts and answers go, in tokens."""

    clients: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    long_prompt: tuple[int, int] = (0, 0)
    long_every: int = 0
    """Every so many-th request has a long prompt; 0 for none."""


class Answer(NamedTuple):
    """One request: when it was sent, when its pieces came, and what was wrong with it."""

    sent: float
    pieces: tuple[float, ...]
    tokens: int
    wrong: str | None


class Gap(NamedTuple):
    """The time between two pieces of one stream, and when it ended."""

    at: float
    seconds: float


class _Reading(asyncio.Protocol):
    """One connection with one request on it; `over` is set when the server has closed it."""

    def __init__(self, request: bytes, over: asyncio.Future[None]) -> None:
        self._request, self._over = request, over
        self.pieces: list[float] = []
        self.head = self.end = self._seam = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self.pieces += [now] * (self._seam + data).count(PIECE)
        self._seam = (self._seam + data)[-len(PIECE) + 1 :]
        if len(self.head) < HEAD_BYTES:
            self.head = (self.head + data)[:HEAD_BYTES]
        self.end = (self.end + data)[-END_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if not self._over.done():
            self._over.set_result(None)


def judge(head: bytes, end: bytes, asked: int) -> tuple[int, str | None]:
    """The tokens that the usage tells of, and what is wrong with an answer that begins and ends so; None if nothing is."""
    found = USAGE.search(end)
    tokens = int(found[1]) if found else 0
    if not head.startswith(b"HTTP/1.1 200"):
        return tokens, (head.decode(errors="replace") or "no answer")[:300]
    if b'"error"' in end:
        return tokens, end.decode(errors="replace")[-300:]
    if DONE not in end:
        return tokens, "the stream broke off"
    return tokens, None if tokens == asked else f"{tokens} tokens of {asked}"


def bodies(model: str, shape: Shape, seed: int) -> list[tuple[bytes, int]]:
    """The pool: the end of each body, which lacks its first two tokens, and the tokens it asks for."""
    dice = random.Random(seed)
    pool = []
    for number in range(POOL):
        is_long = shape.long_every > 0 and number % shape.long_every == 0
        low, high = shape.long_prompt if is_long else shape.prompt
        output = dice.randint(*shape.output)
        ids = [dice.randrange(3, 2000) for _ in range(dice.randint(low, high) - 2)]
        body = {"model": model, "max_tokens": output, "ignore_eos": True, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True}, "prompt": ids}  # fmt: skip
        pool.append((json.dumps(body, separators=(",", ":")).encode(), output))
    return pool


def request_of(body: bytes, number: int) -> bytes:
    """The request; its first two tokens are its number, so that no prefix of an earlier one fits."""
    first = b'"prompt":[%d,%d,' % (3 + number % 1900, 3 + number // 1900 % 1900)
    body = body.replace(b'"prompt":[', first)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


class Streams:
    """The clients in a thread of their own, from now on for some seconds; what is begun is read to its end."""

    _numbers = itertools.count()

    def __init__(self, port: int, model: str, shape: Shape, seconds: float, seed: int = 0) -> None:
        self.answers: list[Answer] = []
        self._port, self._shape = port, shape
        self._pool = bodies(model, shape, seed)
        self.begin = time.monotonic()
        self.end = self.begin + seconds
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop_early()

    def stop_early(self) -> None:
        """Begin no further request."""
        self.end = min(self.end, time.monotonic())

    def finish(self) -> list[Answer]:
        """Wait for the end; all answers."""
        self._thread.join(max(0.0, self.end - time.monotonic()) + REQUEST_LIMIT_S + 10)
        return list(self.answers)

    async def _all(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self._shape.clients)))

    async def _client(self) -> None:
        while time.monotonic() < self.end:
            number = next(self._numbers)
            body, asked = self._pool[number % len(self._pool)]
            answer = await read_stream(self._port, request_of(body, number), asked)
            self.answers.append(answer)
            if answer.wrong is not None:
                await asyncio.sleep(0.2)  # a server that is gone must not be asked a million times


async def read_stream(port: int, request: bytes, asked: int, limit_s: float = REQUEST_LIMIT_S) -> Answer:
    """Send one request over a connection of its own and read its answer to the end."""
    sent = time.monotonic()
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    reading = _Reading(request, over)
    try:
        transport, _ = await loop.create_connection(lambda: reading, "127.0.0.1", port)
    except OSError as error:
        return Answer(sent, (), 0, repr(error))
    try:
        await asyncio.wait_for(over, limit_s)
    except TimeoutError:
        return Answer(sent, tuple(reading.pieces), 0, f"no end after {limit_s:.0f} s")
    finally:
        transport.close()
    tokens, wrong = judge(reading.head, reading.end, asked)
    return Answer(sent, tuple(reading.pieces[:-1]), tokens, wrong)  # the last one is the usage


# What can be read from the answers


def gaps(answers: Iterable[Answer], begin: float, end: float) -> list[Gap]:
    """Every gap that ended between the two times."""
    pairs = (pair for answer in answers for pair in itertools.pairwise(answer.pieces))
    return [Gap(last, last - before) for before, last in pairs if begin <= last < end]


def longest_gap_s(found: Iterable[Gap], begin: float, end: float) -> float | None:
    """The longest gap of any stream that lies at least partly between the two times; None where there is none."""
    return max((gap.seconds for gap in found if gap.at >= begin and gap.at - gap.seconds <= end), default=None)


def tokens_between(answers: Iterable[Answer], begin: float, end: float) -> float:
    """Tokens delivered between the two times: of each stream the share of its pieces that came then."""
    inside = ((answer, sum(begin <= at < end for at in answer.pieces)) for answer in answers if answer.pieces)
    return sum(answer.tokens * count / len(answer.pieces) for answer, count in inside)


def first_tokens_s(answers: Iterable[Answer], begin: float, end: float) -> list[float]:
    """The waits for the first token of requests sent between the two times."""
    return [answer.pieces[0] - answer.sent for answer in answers if answer.pieces and begin <= answer.sent < end]


def failures(answers: Iterable[Answer]) -> list[str]:
    """What was wrong, one line for each request that failed."""
    return [answer.wrong for answer in answers if answer.wrong is not None]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that this share of them does not exceed; None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def summary(answers: Sequence[Answer], begin: float, end: float) -> dict[str, Any]:
    """Throughput and latencies between the two times."""
    waits = [gap.seconds for gap in gaps(answers, begin, end)]
    firsts = first_tokens_s(answers, begin, end)
    wrong = failures(answers)
    tokens = tokens_between(answers, begin, end)
    return {
        "seconds": round(end - begin, 3), "tokens": round(tokens), "tokens_per_s": tokens / (end - begin),
        "requests": len(answers), "failed": len(wrong), "first_failures": wrong[:3],
        "gap_p50_ms": _ms(percentile(waits, 0.5)), "gap_p99_ms": _ms(percentile(waits, 0.99)),
        "gap_max_ms": _ms(max(waits, default=None)), "gaps": len(waits),
        "first_token_p50_ms": _ms(percentile(firsts, 0.5)), "first_token_p99_ms": _ms(percentile(firsts, 0.99)),
    }  # fmt: skip


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
