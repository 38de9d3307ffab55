"""Clients that count honestly: what is served, what is told to wait, what is lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from plimsoll.demo.traffic import SERVED, WAIT, ClientTraffic, Count, verdict
from plimsoll.net.client import Loss, Lost, Reply
from tests.each import each

DONE = b'{"choices": [{"text": "x", "finish_reason": "length"}]}'
NOTHING, BROKEN = Lost(Loss.SILENT, "hung up"), Lost(Loss.NONSENSE, "broke off", was_sent=True, was_begun=True)
STREAM = b'data: {"choices":[{"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'


@each(
    ("told", "stream", "is_what"),
    [
        (Reply(200, DONE, {}), False, SERVED),
        (Reply(200, STREAM, {}), True, SERVED),
        (Reply(200, STREAM[:50], {}), True, "the answer ended too soon"),  # no [DONE]
        (BROKEN, False, "the answer broke off"),
        (Reply(200, DONE.replace(b"length", b"abort"), {}), False, "the answer ended too soon"),
        (Reply(200, b'data: {"error": "x"}\n\n' + STREAM, {}), True, "the answer ended too soon"),
        (Reply(503, b"", {"retry-after": "3"}), False, WAIT),
        (Reply(429, b"", {"retry-after": "3"}), False, WAIT),
        (Reply(503, b"", {}), False, "status 503"),  # nobody said when to come again
        (Reply(503, b"", {"retry-after": "soon"}), False, "status 503"),
        (Reply(500, b"", {"retry-after": "3"}), False, "status 500"),
        (NOTHING, False, "no answer"),
    ],
)
def test_only_a_whole_answer_is_served_and_only_an_orderly_refusal_is_asked_again(
    told: Reply | Lost, is_what: str, *, stream: bool
) -> None:
    """Everything else is lost, and why is one line."""
    assert verdict(told, stream=stream) == is_what


async def _count(answer: Callable[[int], bytes], *, streams: bool = False) -> Count:
    """What one request becomes at a server that gives these answers, the first at turn 1."""
    turns = 0

    async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal turns
        turns += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(turns))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(visited, "127.0.0.1", 0)
    traffic = ClientTraffic(server.sockets[0].getsockname()[1], "m", streams=streams, chance=random.Random(1))
    await traffic.send()
    server.close()
    return traffic.count


def whole(status: str, body: bytes = b"", *headers: str) -> bytes:
    """An answer with its length."""
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]).encode() + body


def test_a_request_that_is_told_to_wait_comes_again_and_is_served() -> None:
    """It counts as served once, and as one that waited."""
    count = asyncio.run(_count(lambda turn: whole("200 OK", DONE) if turn > 2 else whole("503 Busy", b"", "Retry-After: 0")))
    assert (count.asked, count.served, count.waited, count.told_to_wait, count.lost) == (1, 1, 1, 2, [])


CUT = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\ndata: {"a": 1}\n\n\r\n'


@each(
    ("answer", "streams", "what"),
    [
        (b"", False, "no answer"),
        (whole("200 OK", DONE)[:-5], False, "the answer broke off"),
        (whole("502 Bad"), False, "status 502"),
        (CUT, True, "the answer broke off"),  # also where some of it came
    ],
)
def test_a_request_that_fails_is_lost_and_not_tried_again(answer: bytes, what: str, *, streams: bool) -> None:
    """A client that hides failures behind retries would prove nothing."""
    count = asyncio.run(_count(lambda _: answer, streams=streams))
    assert (count.served, [one.what for one in count.lost]) == (0, [what])


def test_what_is_given_up_at_the_end_is_lost_too() -> None:
    """A request that never ended is not left out of the count."""

    async def main() -> Count:
        silent = await asyncio.start_server(lambda _r, _w: asyncio.sleep(60), "127.0.0.1", 0)
        traffic = ClientTraffic(silent.sockets[0].getsockname()[1], "m", streams=False, chance=random.Random(1))
        traffic.send()
        await traffic.rest(0.2)
        silent.close()
        return traffic.count

    count = asyncio.run(main())
    assert (count.served, count.under_way, len(count.lost)) == (0, 0, 1)


def test_the_rate_does_not_hang_on_how_fast_the_machine_is() -> None:
    """A loop that is held up sends what is due at once: so many a second on average, not one for each turn of the loop."""

    async def main() -> int:
        server = await asyncio.start_server(lambda _r, writer: writer.close(), "127.0.0.1", 0)
        traffic = ClientTraffic(server.sockets[0].getsockname()[1], "m", streams=False, chance=random.Random(3))
        turns = 0

        async def hold_up() -> None:
            nonlocal turns
            while turns < 15:
                time.sleep(0.1)  # or longer, where others work on the same cores
                turns += 1
                await asyncio.sleep(0)

        await asyncio.gather(hold_up(), traffic.at_rate(lambda: 60.0, lambda: turns == 15))
        traffic.drop()
        server.close()
        return traffic.count.asked

    assert asyncio.run(main()) > 45
