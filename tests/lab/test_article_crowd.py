"""The clients of the comparison: each request of the schedule is sent once, and only what is served has a time."""

from __future__ import annotations

import asyncio

from lab.article.crowd import Crowd
from lab.article.incidents import Arrival

DONE = b'data: {"choices": [{"text": "x", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
CUT = DONE.replace(b"length", b"abort")
ARRIVALS = [Arrival(at_s, 3, 5, False, "a b c") for at_s in (-1.0, 0.0, 1.0, 2.0)]


async def played(answers: list[bytes], *, reads: bool = False) -> tuple[Crowd, list[float]]:
    """A crowd that has asked all of these, the last of them again and again; and when each was asked."""
    loop = asyncio.get_running_loop()
    at_s: list[float] = []

    async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_s.append(loop.time())
        await reader.readuntil(b"\r\n\r\n")
        body = answers[min(len(at_s), len(answers)) - 1]
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(visited, "127.0.0.1", 0)
    async with server:
        crowd = Crowd(server.sockets[0].getsockname()[1], 10.0, seed=1)
        if reads:
            await crowd.read_on("a b c", 5, lambda: len(at_s) >= len(answers))
        else:
            await crowd.replay(ARRIVALS, loop.time() + 0.1)
        await crowd.rest(5.0)
    return crowd, at_s


def test_each_is_sent_when_it_is_due() -> None:
    """With scale 10 a second between two is a tenth."""
    crowd, at_s = asyncio.run(played([DONE]))
    assert (crowd.count.asked, crowd.count.served, len(crowd.took_s)) == (4, 4, 4)
    assert at_s[-1] - at_s[0] >= 0.25


def test_what_is_lost_has_no_time() -> None:
    """It is counted, with the reason."""
    crowd, _ = asyncio.run(played([DONE, CUT, DONE, CUT]))
    assert [one.what for one in crowd.count.lost] == ["the answer ended too soon"] * 2
    assert len(crowd.took_s) == crowd.count.served == 2


def test_a_reader_asks_again_also_after_a_failure() -> None:
    """Not at once: its next question comes when it would have come."""
    crowd, at_s = asyncio.run(played([CUT, DONE, DONE], reads=True))
    assert (crowd.count.asked, crowd.count.served) == (3, 2)
    assert at_s[1] - at_s[0] >= 0.5
