"""Answers that take long: whoever waits for something else does not wait for them, and they end when nobody wants them."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Iterator

import pytest
from starlette.types import Message, Receive, Scope, Send

from plimsoll.standin.faults import Fault
from plimsoll.standin.serve.server import Port
from tests.fakes import eventually
from tests.standin.engines import engine
from tests.standin.servers import Server, standin
from tests.standin.test_api_admin import BEARER, DEV


@pytest.fixture
def server() -> Iterator[Server]:
    with standin(DEV) as found:
        yield found


def begun(server: Server, path: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", path)
    return connection, connection.getresponse()


def answering(server: Server) -> int:
    """How many answers are in the making in the server's loop."""
    return int(server.do(lambda: sum("RequestResponseCycle" in repr(task) for task in asyncio.all_tasks(server.loop))))


def test_a_slow_answer_ends_when_its_client_leaves_or_the_fault_does(server: Server) -> None:
    """Nobody sends bytes to nobody; the rest comes at once when the fault is taken back."""
    server.ask("POST", "/standin/faults", {"kind": "slow-loris", "value": 30}, **BEARER)
    connection, answer = begun(server, "/metrics")
    assert answer.read(1)
    assert answering(server) == 1
    answer.close()
    connection.close()
    eventually(lambda: answering(server) == 0, 5)
    server.do(lambda: server.service.engine.faults.append(Fault("slow-loris", value=30.0)))
    connection, answer = begun(server, "/version")
    assert answer.read(1) == b"{"
    server.do(lambda: server.service.engine.faults.take_back("slow-loris"))
    began = time.monotonic()
    assert answer.read() == b'"version":"0.32.0"}'
    assert time.monotonic() - began < 25, "each byte took half a minute"
    connection.close()


def test_a_port_closes_though_an_answer_does_not_end() -> None:
    """Whoever has not taken the last of it after seconds is cut off."""
    ended: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
        body: Message = {"type": "http.response.body", "body": b"x", "more_body": True}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send(body)
                await asyncio.sleep(0.05)
        finally:
            ended.append("cancelled")

    async def run() -> float:
        port = Port("127.0.0.1", 0)
        await port.open(app)
        reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await reader.read(10)
        began = time.monotonic()
        await port.close()
        took = time.monotonic() - began
        await asyncio.sleep(0)
        writer.close()
        return took

    assert asyncio.run(run()) < 30
    assert ended == ["cancelled"]


def test_a_huge_page_lets_others_in_and_ends_with_its_client() -> None:
    """Whoever leaves in the middle of a page of gigabytes leaves a server that answers."""
    with standin(DEV, one=engine("huge-page=8GiB")) as server:
        connection, answer = begun(server, "/metrics")
        assert answer.read(1000)
        answer.close()
        connection.close()
        began = time.monotonic()
        assert server.ask("GET", "/health").status == 200
        assert time.monotonic() - began < 20
        eventually(lambda: answering(server) == 0, 5)
