"""A gate that only knows epochs: it takes drains as vLLM's own API server with our gate does, and remembers who was refused.

It judges with the gate's own rule, so that a test of locks needs no engine.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from plimsoll.inside.admission import Drain, StaleEpoch, begin


class Deed(NamedTuple):
    """What somebody asked for."""

    owner: str
    epoch: int
    was_taken: bool
    current: int  # the epoch after it


class EpochGate(ThreadingHTTPServer):
    """POST /plimsoll/drain {"epoch": N}: 200, or 409 for an epoch older than one it has seen."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.deeds: list[Deed] = []
        self._drain = Drain()
        self._mutex = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def judge(self, owner: str, epoch: int) -> Deed:
        """One deed, in the order in which they come."""
        with self._mutex:
            is_taken = True
            try:
                self._drain = begin(self._drain, time.monotonic(), epoch=epoch, lease_s=1.0)
            except StaleEpoch:
                is_taken = False
            deed = Deed(owner, epoch, is_taken, self._drain.epoch)
            self.deeds.append(deed)
            return deed


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Any path: it is the epoch that matters."""
        gate = self.server
        assert isinstance(gate, EpochGate)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        deed = gate.judge(self.headers.get("X-Owner", ""), asked["epoch"])
        body = json.dumps({"epoch": deed.current}).encode()
        self.send_response(200 if deed.was_taken else 409)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def open_gate() -> Iterator[EpochGate]:
    gate = EpochGate()
    threading.Thread(target=gate.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield gate
    finally:
        gate.shutdown()
        gate.server_close()
