"""The demo's own balancer, before real sockets: who gets a request, who gets it again, and what guard may ask."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from plimsoll.demo.balancer import HOST, DemoBalancer, ask, free_port
from plimsoll.net.client import Lost, Reply
from tests.real.small_farm import Backend

TOKEN = "0123456789abcdef"
READY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Engine(Backend):
    """Ready unless told otherwise; answers a request with its name, or as it was told to."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked = 0
        self.answer: bytes | None = whole(name.encode())

    async def _visited(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /plimsoll/ready"):
            writer.write(READY)
        else:
            self.asked += 1
            writer.write(self.answer or b"")
        await writer.drain()
        writer.close()


def whole(body: bytes) -> bytes:
    """An answer with its length."""
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def played(script: Callable[[DemoBalancer, Engine, Engine], Awaitable[Any]]) -> Any:
    """Two engines behind a balancer that has found them ready."""

    async def main() -> Any:
        one, two = Engine("one"), Engine("two")
        await one.open()
        await two.open()
        balancer = DemoBalancer({"one": one.port, "two": two.port}, TOKEN)
        await balancer.start()
        try:
            while not all(backend.is_ready for backend in balancer.engines.values()):
                await asyncio.sleep(0.02)
            return await script(balancer, one, two)
        finally:
            await balancer.stop()
            one.close()
            two.close()

    return asyncio.run(asyncio.wait_for(main(), 20))


def hook(balancer: DemoBalancer, verb: str, engine: str = "one", epoch: int = 1) -> dict[str, Any]:
    return balancer.obey({"schema": "plimsoll.hook/1", "verb": verb, "engine": engine, "epoch": epoch})


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le"],
    ids=["nothing", "only the head of a stream", "half a head"],
)
def test_a_request_without_a_byte_of_an_answer_goes_to_another_engine(answer: bytes) -> None:
    """Also a stream whose head had come: it is held back until its first token."""

    async def script(balancer: DemoBalancer, one: Engine, two: Engine) -> tuple[Reply | Lost, int, int | None]:
        one.answer = answer
        return await ask(balancer.port, "/v1/completions", {}), two.asked, await balancer.count_sent_again()

    told, asked, again = played(script)
    assert (told.status, told.body, asked, again) == (200, b"two", 1, 1)


def test_an_answer_that_has_begun_is_never_begun_anew() -> None:
    """Its client sees that it broke off, and sees an orderly refusal: another engine would only be overrun next."""

    async def script(balancer: DemoBalancer, one: Engine, two: Engine) -> None:
        one.answer = whole(b"a long answer")[:-6]
        told = await ask(balancer.port, "/v1/completions", {})
        assert (isinstance(told, Lost) and told.was_begun, two.asked) == (True, 0)
        one.answer = two.answer = b"HTTP/1.1 503 Busy\r\nRetry-After: 3\r\nContent-Length: 0\r\n\r\n"
        told = await ask(balancer.port, "/v1/completions", {})
        assert (told.status, isinstance(told, Reply) and told.headers["retry-after"]) == (503, "3")

    played(script)


def test_guard_takes_an_engine_out_and_puts_it_back() -> None:
    """Out: no new request; back: requests again. Each is read back, and each may be asked twice."""

    async def script(balancer: DemoBalancer, one: Engine, two: Engine) -> None:
        assert hook(balancer, "is-out")["done"] is False
        assert await balancer.takes_work() == {"one": True, "two": True}
        for _ in range(2):
            assert hook(balancer, "take-out")["done"] is True
        assert hook(balancer, "is-out")["done"] is True
        assert await balancer.takes_work() == {"one": False, "two": True}
        for _ in range(4):
            await ask(balancer.port, "/v1/completions", {})
        assert (one.asked, two.asked) == (0, 4)
        assert hook(balancer, "put-back")["done"] is True
        for _ in range(2):
            await ask(balancer.port, "/v1/completions", {})
        assert one.asked > 0

    played(script)


def test_guard_may_not_do_everything() -> None:
    """The last engine stays in, an older guard is refused, and the webhook opens only with its token."""

    async def script(balancer: DemoBalancer, _one: Engine, _two: Engine) -> None:
        asked = {"verb": "take-out", "engine": "one", "epoch": 1}
        for token in ("", "wrong"):
            assert (await ask(balancer.hook_port, "/hook", asked, token=token)).status == 401
        assert not balancer.engines["one"].is_out
        told = await ask(balancer.hook_port, "/hook", asked, token=TOKEN)
        assert (told.status, told.table()["done"], balancer.engines["one"].is_out) == (200, True, True)
        assert hook(balancer, "take-out", "one", epoch=5)["done"] is True
        assert hook(balancer, "take-out", "two", epoch=5) == {"done": False, "says": "nobody else is in: it stays in"}
        assert hook(balancer, "put-back", "one", epoch=4)["done"] is False
        assert hook(balancer, "put-back", "three")["done"] is None
        assert hook(balancer, "connections") == {"done": True, "connections": 0}
        assert hook(balancer, "explode", epoch=6)["done"] is None

    played(script)


@pytest.mark.parametrize("bytes_", [b"nonsense\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"\xff" * 100_000])
def test_a_client_that_talks_nonsense_harms_nobody(bytes_: bytes) -> None:
    """The next one is served."""

    async def script(balancer: DemoBalancer, _one: Engine, _two: Engine) -> Reply | Lost:
        reader, writer = await asyncio.open_connection("127.0.0.1", balancer.port)
        writer.write(bytes_)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 5)
        writer.close()
        return await ask(balancer.port, "/v1/completions", {})

    assert played(script).status == 200


def test_no_port_is_given_twice_or_is_taken() -> None:
    """Whoever got one may not listen there yet; a second one who gets it would answer in its place."""
    with socket.socket() as found:
        found.bind((HOST, free_port()))
        ports = [free_port() for _ in range(300)]
        assert found.getsockname()[1] not in ports
    assert len(set(ports)) == 300
    assert all(22_000 <= port < 32_000 for port in ports)
