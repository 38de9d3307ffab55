"""The gate under a real uvicorn: sockets that are half closed, reset, reused, piled up or slow leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll.inside.answers import Receive, Scope, Send
from plimsoll.inside.gate_control import GateControl
from tests.fakes import eventually, hello, raw_request, read_all, served
from tests.inside.test_gate import gated

CHUNKS = 40


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Streams slowly, raises, floods, or says hello, as the path says; reads the body first, as vLLM does."""
    if scope["type"] != "http" or scope["path"] not in ("/v1/stream", "/v1/raise", "/v1/flood", "/v1/wait"):
        return await hello(scope, receive, send)
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/v1/raise":
        raise RuntimeError("a handler's own")
    if scope["path"] == "/v1/wait":
        while (await receive())["type"] != "http.disconnect":
            pass
        return None
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(CHUNKS):
        await send(
            {"type": "http.response.body", "body": b"x" * (200_000 if scope["path"] == "/v1/flood" else 10), "more_body": True}
        )
        await asyncio.sleep(0.005)
    return await send({"type": "http.response.body", "body": b"END"})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[int, GateControl]]:
    """A real server; when it ends nothing is in flight."""
    gate, core = gated(app, tmp_path)
    with served(gate) as port:
        yield port, core
        eventually(lambda: core.shared.total("in_flight") == 0)
        assert core.in_layer == 0


@contextlib.contextmanager
def client(port: int, data: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as found:
        found.sendall(data)
        yield found


def in_flight(core: GateControl, count: int) -> None:
    eventually(lambda: core.shared.total("in_flight") == count)


def test_one_who_leaves_is_not_counted(server: tuple[int, GateControl]) -> None:
    """While the app waits for it, or in the middle of its body."""
    port, core = server
    with client(port, raw_request("POST", "/v1/wait", b"{}")):
        in_flight(core, 1)
    in_flight(core, 0)
    port, core = server
    with client(port, raw_request("POST", "/v1/stream", b"{" * 100)[:-50]):
        in_flight(core, 1)
    in_flight(core, 0)


def test_requests_piled_up_on_one_connection_are_each_counted(server: tuple[int, GateControl]) -> None:
    """Three at once, answered in order."""
    port, core = server
    last = raw_request("POST", "/v1/completions", b"{}", "Connection: close")
    with client(port, raw_request("POST", "/v1/completions", b"{}") * 2 + last) as piled:
        assert read_all(piled).count(b"200 OK") == 3
    in_flight(core, 0)
    assert core.shared.total("begun") == 3


def test_many_mixed_clients_at_once_leave_nothing(server: tuple[int, GateControl]) -> None:
    """Streams read to the end, resets, half-closed ones and raising handlers, together."""
    port, core = server
    with contextlib.ExitStack() as stack:
        open_ones = [
            stack.enter_context(client(port, raw_request("POST", path, b"{}", "Connection: close")))
            for _ in range(12)
            for path in ("/v1/stream", "/v1/raise", "/v1/wait", "/v1/completions")
        ]
        eventually(lambda: core.shared.total("begun") == 48)
        assert core.shared.total("in_flight") >= 12
        for place, found in enumerate(open_ones):
            if place % 4 == 0 and place % 8:
                found.shutdown(socket.SHUT_WR)
            if place % 4 == 2:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                found.close()
        for place in range(0, 48, 8):
            assert read_all(open_ones[place]).endswith(b"END\r\n0\r\n\r\n")
    in_flight(core, 0)
