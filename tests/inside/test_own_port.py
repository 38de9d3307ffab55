"""The endpoints on a place of their own: a socket for this user alone, rude clients bounded, nothing stolen."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from plimsoll.inside import tick
from plimsoll.inside.tick import MOST_CLIENTS, OwnPort, Where, _answers, where_of
from tests.fakes import TOKEN, raw_request
from tests.inside.test_gate_control import made

AUTH = f"Authorization: Bearer {TOKEN}"


async def talk(path: str, data: bytes, *, half_close: bool = False) -> bytes:
    """Send bytes to a Unix socket; all that comes back."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data)
    if half_close:
        writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def status(answer: bytes) -> int:
    """The status of a raw answer."""
    return int(answer.split(b" ", 2)[1])


def at(folder: Path, does: Callable[[str, OwnPort], Awaitable[None]], **more: Any) -> None:
    """Run it against a port that listens in the folder, with little patience."""

    async def go() -> None:
        path = str(folder / "own.sock")
        core, _ = made(folder, PLIMSOLL_LISTEN=f"unix:{path}", **more)
        port = OwnPort(core, patience_s=0.3)
        await port.open()
        try:
            await does(path, port)
        finally:
            await port.close()

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unix:/run/a.sock", Where(path="/run/a.sock")),
        ("127.0.0.1:9401", Where(host="127.0.0.1", port=9401)),
        ("[::1]:9401", Where(host="::1", port=9401)),
        (":9401", Where(host="127.0.0.1", port=9401)),
        ("9401", Where(host="127.0.0.1", port=9401)),
    ],
)
def test_where_is_read(text: str, expected: Where) -> None:
    """A path or an address; without one, this machine alone."""
    assert where_of(text) == expected


@pytest.mark.parametrize("text", ["", "unix:", "unix:a", "host:", "host:0", "host:99999", "host:-1", "host:x"])
def test_what_cannot_be_read_is_said(text: str) -> None:
    """In a sentence, not by an exception."""
    assert isinstance(where_of(text), str)


def test_requests_are_answered_with_the_token_and_not_without(tmp_path: Path) -> None:
    """On a socket that only this user may open; it goes with the server."""

    async def does(path: str, port: OwnPort) -> None:
        del port
        assert Path(path).stat().st_mode & 0o777 == 0o600
        assert status(await talk(path, raw_request("GET", "/plimsoll/ready"))) == 200
        assert status(await talk(path, raw_request("GET", "/plimsoll/state"))) == 401
        answer = await talk(path, raw_request("GET", "/plimsoll/state?x=1", b"", AUTH))
        assert status(answer) == 200
        assert b"connection: close" in answer.lower()
        drained = await talk(path, raw_request("POST", "/plimsoll/drain", b'{"epoch": 1}', AUTH))
        assert b'"phase":"leaving"' in drained
        assert status(await talk(path, raw_request("GET", "/v1/models", b"", AUTH))) == 404

    at(tmp_path, does)
    assert not (tmp_path / "own.sock").exists()


def test_without_a_token_all_but_ready_is_off(tmp_path: Path) -> None:
    """Also on a socket of its own."""

    async def does(path: str, port: OwnPort) -> None:
        del port
        assert status(await talk(path, raw_request("GET", "/plimsoll/ready"))) == 200
        assert status(await talk(path, raw_request("GET", "/plimsoll/state", b"", AUTH))) == 403

    at(tmp_path, does, PLIMSOLL_TOKEN="")


def test_head_has_no_body_and_two_requests_get_one_answer(tmp_path: Path) -> None:
    """One request a connection; what is sent after it is not read."""

    async def does(path: str, port: OwnPort) -> None:
        del port
        head, _, body = (await talk(path, raw_request("HEAD", "/plimsoll/ready"))).partition(b"\r\n\r\n")
        assert status(head) == 200
        assert b"content-length" in head.lower()
        assert body == b""
        assert (await talk(path, raw_request("GET", "/plimsoll/ready") * 2)).count(b"HTTP/1.1") == 1
        assert status(await talk(path, raw_request("GET", "/plimsoll/ready"), half_close=True)) == 200

    at(tmp_path, does)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03garbage\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET /plimsoll/state HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 200_000 + b"\r\n\r\n", 431),
        (raw_request("POST", "/plimsoll/drain", b"x" * 70_000, AUTH), 413),
    ],
)
def test_rubbish_gets_an_answer_and_the_next_one_is_served(tmp_path: Path, data: bytes, expected: int) -> None:
    """Not HTTP, too long, too large."""

    async def does(path: str, port: OwnPort) -> None:
        del port
        answer = await talk(path, data)
        assert answer == b"" or status(answer) in (expected, 400)
        assert status(await talk(path, raw_request("GET", "/plimsoll/ready"))) == 200

    at(tmp_path, does)


def test_a_client_that_says_nothing_is_left_after_a_while(tmp_path: Path) -> None:
    """Slow or silent ones are cut off, and more than so many at once are not heard."""

    async def does(path: str, port: OwnPort) -> None:
        port._patience_s = 60.0  # all of them must be there at once, on a busy machine too
        held = [await asyncio.open_unix_connection(path) for _ in range(MOST_CLIENTS)]
        for _, writer in held:
            writer.write(b"GET /plimsoll/ready HTTP/1.1\r\n")
        while port._clients < MOST_CLIENTS:
            await asyncio.sleep(0.01)
        assert await talk(path, raw_request("GET", "/plimsoll/ready")) == b""
        for _, writer in held:
            writer.close()
        while port._clients:
            await asyncio.sleep(0.01)
        port._patience_s = 0.2
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /plimsoll/ready HTTP/1.1\r\n")
        assert await reader.read() == b""
        writer.close()
        port._patience_s = 60.0
        assert status(await talk(path, raw_request("GET", "/plimsoll/ready"))) == 200

    at(tmp_path, does)


def test_a_socket_left_behind_is_replaced_a_live_one_is_not_stolen(tmp_path: Path) -> None:
    """And a file that is no socket is never taken away."""
    path = tmp_path / "own.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))  # never listens: its server is gone

    async def does(where: str, port: OwnPort) -> None:
        del port
        core, _ = made(tmp_path, PLIMSOLL_LISTEN=f"unix:{where}")
        second = OwnPort(core)
        await second.open()
        assert second._server is None
        await second.close()
        assert status(await talk(where, raw_request("GET", "/plimsoll/ready"))) == 200

    at(tmp_path, does)
    path.write_text("precious")

    async def taken(where: str, port: OwnPort) -> None:
        assert port._server is None
        assert Path(where).read_text() == "precious"

    at(tmp_path, taken)
    assert path.read_text() == "precious"


async def test_tcp_serves_this_machine_and_others_only_with_a_token(tmp_path: Path) -> None:
    """An address that others reach is not even opened without one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    for host, token, opens in (("127.0.0.1", "", True), ("0.0.0.0", "", False), ("0.0.0.0", TOKEN, True)):
        core, _ = made(tmp_path, PLIMSOLL_LISTEN=f"{host}:{number}", PLIMSOLL_TOKEN=token)
        port = OwnPort(core)
        await port.open()
        assert (port._server is not None) is opens
        if opens:
            reader, writer = await asyncio.open_connection("127.0.0.1", number)
            writer.write(raw_request("GET", "/plimsoll/state"))
            assert status(await reader.read()) == (401 if token else 403)
            writer.close()
        await port.close()


def test_names_of_this_machine_are_known() -> None:
    """And no others."""
    assert all(tick._is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(tick._is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.com", ""))


def test_a_server_with_a_full_queue_is_alive_and_keeps_its_socket(tmp_path: Path) -> None:
    """And to find that out does not wait for a place in the queue: the one that asks is in vLLM's event loop."""
    path = str(tmp_path / "own.sock")
    clients = [socket.socket(socket.AF_UNIX) for _ in range(8)]
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(path)
        busy.listen(0)
        for client in clients:
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(path)
        began = time.monotonic()
        assert _answers(path)
        assert time.monotonic() - began < 10
    for client in clients:
        client.close()
    assert not _answers(path), "its server is gone"
