"""A hub on loopback for the tests: a real HTTP server that serves what it is given and misbehaves as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from plimsoll.models.hub import Hub

CONFIG = {"model_type": "llama", "hidden_size": 64}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_thisIsASecret"


def shard(**tensors: int) -> bytes:
    """A safetensors file of byte tensors of these sizes."""
    header, reached = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [reached, reached + size]}
        reached += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(reached)


class Server(ThreadingHTTPServer):
    """A hub: files by name, behaviours by name, and a record of who asked for what with which token."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"config.json": json.dumps(CONFIG).encode()}
        self.acts: dict[str, Callable[[Handler], None]] = {}
        self.seen: list[tuple[str, str | None, str | None]] = []
        self.knows_ranges = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that hang up; the tests make them."""


class Handler(BaseHTTPRequestHandler):
    """One request, recorded and answered."""

    server: Server

    def do_GET(self) -> None:
        """Answer as the file's behaviour says, or serve it."""
        name = self.path.rsplit("/", 1)[-1]
        self.server.seen.append((self.path, self.headers.get("Authorization"), self.headers.get("Range")))
        if name in self.server.acts:
            self.server.acts[name](self)
        elif name in self.server.files:
            self.serve(self.server.files[name])
        else:
            self.refuse(404, "EntryNotFound")

    def serve(self, content: bytes, **headers: str) -> None:
        """The content, or the part of it that was asked for."""
        wanted = self.headers.get("Range")
        if wanted and self.server.knows_ranges:
            first, last = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
            part = content[first : last + 1]
            headers = {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(content)}"} | headers
            self.answer(206, part, **headers)
        else:
            self.answer(200, content, **headers)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        """Status, headers and body; `headers` win over what we would say."""
        self.send_response(status)
        given = {key.replace("_", "-"): value for key, value in headers.items()}
        for key, value in ({"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT} | given).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        """An error as the hub words it."""
        self.answer(status, b"no", **{"X-Error-Code": code})

    def log_message(self, *_: object) -> None:
        """Quiet."""


def hub_of(server: Server, **settings: object) -> Hub:
    """The client for that server, quick to give up."""
    return Hub(server.url, **({"timeout_s": 2.0} | settings))  # type: ignore[arg-type]


@contextmanager
def running() -> Iterator[Server]:
    """A hub that answers until the test is over."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
