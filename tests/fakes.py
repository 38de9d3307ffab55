"""Small honest programs for the gate's tests: apps, an engine client shaped like vLLM's, a real server, rude clients."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from plimsoll.inside.answers import App, Message, Receive, Scope, Send
from plimsoll.inside.settings import InsideSettings

TOKEN = "a-token-that-is-long-enough"
BEARER = (b"authorization", b"Bearer " + TOKEN.encode())


def settings(folder: object, **more: str) -> InsideSettings:
    """Settings with a token and a folder of the test's own."""
    return InsideSettings({"PLIMSOLL_TOKEN": TOKEN, "PLIMSOLL_DIR": str(folder), **more})


# The engine, as an API server sees it
class EngineClient:
    """Has the names of vLLM's AsyncLLM that the gate looks at; a call with a timeout is a test that fails."""

    def __init__(self, places: int = 4) -> None:
        self.errored = False
        self.output_processor = SimpleNamespace(request_states={})
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=places), parallel_config=SimpleNamespace(data_parallel_size=1)
        )
        self.logger_manager = None
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.may_answer = asyncio.Event()
        self.generate_does = "answer"

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Answers when it may; it remembers what was asked."""
        assert timeout is None, "a late reply is read as the next step's result and kills the engine"
        assert not kwargs
        self.calls.append((method, args))
        await self.may_answer.wait()
        return [{"released_bytes": 1}]

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[str]:
        """One token, none for ever, an error, or deaf to being cancelled."""
        del prompt, params
        self.output_processor.request_states[request_id] = SimpleNamespace()
        try:
            if self.generate_does == "raise":
                raise ValueError("no")
            while self.generate_does == "hang":
                await asyncio.sleep(3600)
            while self.generate_does == "deaf":
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)
            yield "a token"
        finally:
            self.output_processor.request_states.pop(request_id, None)

    def add(self, name: str, prompt_len: int, *, is_prefilling: bool = True) -> None:
        self.output_processor.request_states[name] = SimpleNamespace(prompt_len=prompt_len, is_prefilling=is_prefilling)


class State:
    """As starlette's: what is set on it lies in a dict."""

    def __init__(self, **values: Any) -> None:
        self._state = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_state"][name]
        except KeyError:
            raise AttributeError(name) from None


# Apps, and a hand to drive them without sockets
class Got(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[str]:
        """The events of a stream, without the word before each."""
        parts = self.body.decode().split("\n\n")
        assert parts[-1] == "", "a stream ends with an empty line"
        assert all(part.startswith("data: ") for part in parts[:-1])
        return [part.removeprefix("data: ") for part in parts[:-1]]


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await live(scope, receive, send)
    elif scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close", "code": 1000})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})


async def live(scope: Scope, receive: Receive, send: Send) -> None:
    del scope
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def http_scope(method: str, path: str, headers: Sequence[tuple[bytes, bytes]] = (), **more: Any) -> Scope:
    return {
        "type": "http", "method": method, "path": path, "headers": list(headers), "query_string": b"", "root_path": "",
        "app": SimpleNamespace(state=State()), **more,
    }  # fmt: skip


class Wire:
    """A client's end of a connection: what it sends, the last of it again and again, and what it was sent."""

    def __init__(self, *coming: Message) -> None:
        self._coming, self.sent = list(coming), list[Message]()

    async def receive(self) -> Message:
        return self._coming.pop(0) if len(self._coming) > 1 else self._coming[0]

    async def send(self, message: Message) -> None:
        self.sent.append(message)


async def ask(
    app: App,
    method: str,
    path: str,
    body: bytes | Sequence[bytes] = b"",
    headers: Sequence[tuple[bytes, bytes]] = (),
    **more: Any,
) -> Got:
    """One request through an app; the body whole or in chunks."""
    chunks = [body] if isinstance(body, bytes) else list(body)
    coming = [
        {"type": "http.request", "body": chunk, "more_body": place + 1 < len(chunks)} for place, chunk in enumerate(chunks)
    ] or [{"type": "http.request", "body": b"", "more_body": False}]
    wire = Wire(*coming, {"type": "http.disconnect"})
    await app(http_scope(method, path, headers, **more), wire.receive, wire.send)
    start = next(message for message in wire.sent if message["type"] == "http.response.start")
    said = b"".join(message.get("body", b"") for message in wire.sent if message["type"] == "http.response.body")
    return Got(start["status"], {bytes(n).decode(): bytes(v).decode() for n, v in start["headers"]}, said)


# A real server, and clients that misbehave
def asked(port: int, method: str, path: str, body: object = None, **headers: str) -> Got:
    """One request over a socket; the body is JSON unless it is bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    sent = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    try:
        connection.request(method, path, data, sent)
        answer = connection.getresponse()
        return Got(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


@contextlib.contextmanager
def served(app: App) -> Iterator[int]:
    """A real uvicorn around the app, in a thread; its port."""
    import uvicorn

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, lifespan="on", log_level="critical", timeout_keep_alive=5, timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
        thread.start()
        eventually(lambda: server.started)
        try:
            yield taken.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(10)


def eventually(holds: Any, within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.01)


def raw_request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: here", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
