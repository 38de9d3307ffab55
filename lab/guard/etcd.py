"""A real etcd for tests: one member, on ports and a folder of its own."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path


def _free_ports(count: int) -> list[int]:
    with ExitStack() as open_ones:
        sockets = [open_ones.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Etcd:
    """It answers when this returns. Its leases can be as short as a second."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program, self._folder = program, folder
        self._ports = _free_ports(2)
        self.url = f"http://127.0.0.1:{self._ports[0]}"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        peer = f"http://127.0.0.1:{self._ports[1]}"
        words = ["--data-dir", str(self._folder / "data"), "--listen-client-urls", self.url,
                 "--advertise-client-urls", self.url, "--listen-peer-urls", peer,
                 "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
                 "--heartbeat-interval", "50", "--election-timeout", "500"]  # fmt: skip
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen([self._program, *words], stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while self.ask("/v3/kv/range", {"key": "AA=="}) != 200:
            assert time.monotonic() < deadline, (self._folder / "log").read_text()[-2000:]
            time.sleep(0.05)
        return process

    def ask(self, path: str, body: dict[str, object]) -> int:
        """One question; 0 if there was no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._ports[0], timeout=5)
        try:
            connection.request("POST", path, json.dumps(body))
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        self.process = self._start()
