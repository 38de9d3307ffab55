"""Notifications over real sockets: in order, tried again, bounded, and given up where there is no sense in going on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from plimsoll.guard.adapters.webhook import MOST_WAITING, DeliveryCounts, WebhookNotifier
from plimsoll.net.address import address


class Receiver(ThreadingHTTPServer):
    """Takes what is sent, with the statuses it was told to answer first."""

    daemon_threads = True

    def __init__(self, statuses: list[int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses = statuses
        self.got: list[tuple[str, str | None, Any]] = []

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_address[1]}/api/v2/alerts?x=1"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Receiver)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = server.statuses.pop(0) if server.statuses else 200
        server.got.append((self.path, self.headers.get("Authorization"), body))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def receiving(*statuses: int) -> Iterator[Receiver]:
    """One until the test is over."""
    server = Receiver(list(statuses))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run(act: Callable[[], Awaitable[None]]) -> None:
    """In a loop of its own."""

    async def inner() -> None:
        async with asyncio.timeout(30):
            await act()

    asyncio.run(inner())


async def until(done: Callable[[], bool]) -> None:
    """Wait for it."""
    while not done():
        await asyncio.sleep(0.01)


def test_they_arrive_in_order_and_once() -> None:
    """Each is one request with its body, the path as given, and the login in its header."""
    with receiving() as receiver:

        async def act() -> None:
            hook = WebhookNotifier(address(receiver.url)._replace(login="Basic abc"), first_pause_s=0.01)
            task = asyncio.create_task(hook.run())
            for number in range(5):
                hook.put([{"labels": {"n": str(number)}}])
            await until(lambda: hook.counts.sent == 5)
            task.cancel()
            assert hook.counts == DeliveryCounts(sent=5)

        run(act)
    assert [body[0]["labels"]["n"] for _, _, body in receiver.got] == ["0", "1", "2", "3", "4"]
    assert {(path, login) for path, login, _ in receiver.got} == {("/api/v2/alerts?x=1", "Basic abc")}


def test_a_receiver_in_trouble_is_tried_again() -> None:
    """Its own errors and too many requests pass; the order stays."""
    with receiving(500, 429, 503) as receiver:

        async def act() -> None:
            hook = WebhookNotifier(address(receiver.url), first_pause_s=0.01)
            task = asyncio.create_task(hook.run())
            hook.put([{"a": 1}])
            hook.put([{"a": 2}])
            await until(lambda: hook.counts.sent == 2)
            task.cancel()
            assert hook.counts == DeliveryCounts(sent=2, failed=3)
            assert hook.trouble == ""

        run(act)
    assert [body[0]["a"] for _, _, body in receiver.got] == [1, 1, 1, 1, 2]


def test_what_is_refused_for_good_is_dropped() -> None:
    """A receiver that does not take it now will not take it later; the next one has its chance."""
    with receiving(400) as receiver:

        async def act() -> None:
            hook = WebhookNotifier(address(receiver.url), first_pause_s=0.01)
            task = asyncio.create_task(hook.run())
            hook.put([{"a": 1}])
            hook.put([{"a": 2}])
            await until(lambda: hook.counts.sent == 1)
            task.cancel()
            assert hook.counts == DeliveryCounts(sent=1, failed=1, dropped=1)

        run(act)


def test_nobody_there() -> None:
    """The newest wait, the oldest go; nothing is raised, and the end is not held up."""

    async def act() -> None:
        hook = WebhookNotifier(address("http://127.0.0.1:9/x"), first_pause_s=0.01)
        task = asyncio.create_task(hook.run())
        for number in range(MOST_WAITING + 15):
            hook.put([{"a": number}])
        await until(lambda: hook.counts.failed > 2)
        assert hook.counts.waiting == MOST_WAITING
        assert hook.counts.dropped == 15
        assert "cannot be reached" in hook.trouble
        task.cancel()
        await hook.flush(0.2)

    run(act)


def test_what_waits_at_the_end_gets_one_chance() -> None:
    """Guard's last words are sent before it goes."""
    with receiving() as receiver:

        async def act() -> None:
            hook = WebhookNotifier(address(receiver.url))
            hook.put([{"a": 1}])
            hook.put([{"a": 2}])
            await hook.flush(5.0)
            assert hook.counts == DeliveryCounts(sent=2)

        run(act)
    assert len(receiver.got) == 2


def test_a_receiver_that_speaks_no_http() -> None:
    """It counts as one that did not take it."""

    async def act() -> None:
        async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-what\r\n")
            writer.close()

        server = await asyncio.start_server(babble, "127.0.0.1", 0)
        hook = WebhookNotifier(address(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"), first_pause_s=0.01)
        hook.put([{}])
        task = asyncio.create_task(hook.run())
        await until(lambda: hook.counts.failed > 0)
        task.cancel()
        server.close()
        assert "not HTTP" in hook.trouble

    run(act)
