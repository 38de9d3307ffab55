"""A server of pages on loopback for the tests, which answers as it is told and remembers who asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAGE = b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
SECRET = "hunter2"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("Authorization")))  # type: ignore[attr-defined]
        self.server.act(self)  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.path, self.headers.get("Authorization"), body))  # type: ignore[attr-defined]
        self.server.act(self)  # type: ignore[attr-defined]

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def say(self, text: bytes) -> None:
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Quiet."""


class Server(ThreadingHTTPServer):
    """A server that does what it is told and remembers who asked."""

    daemon_threads = True

    def __init__(self, act: Callable[[Handler], None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.act = act
        self.seen: list[tuple[str, str | None]] = []
        self.got: list[tuple[str, str | None, Any]] = []  # what was posted

    @property
    def url(self) -> str:
        return f"http://{self.host}/api/v2/alerts?x=1"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that hang up; the tests make them."""


@contextmanager
def serving(act: Callable[[Handler], None]) -> Iterator[Server]:
    server = Server(act)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def receiving(*statuses: int) -> AbstractContextManager[Server]:
    """A receiver of notifications that answers with these statuses first, then 200."""
    left = list(statuses)
    return serving(lambda handler: handler.answer(b"", left.pop(0) if left else 200))
