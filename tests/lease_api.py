"""The part of a cluster's API server that Leases need, over a real socket: names, versions, conflicts, validation, a token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
TOKEN = "the-pod's-own-token"


class LeaseApi(ThreadingHTTPServer):
    """Keeps Leases; `trouble` makes it answer one way for a while: "lost" does what is asked and then hangs up."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.leases: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.trouble: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.mutex = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spec(self) -> dict[str, Any]:
        (lease,) = self.leases.values()
        found: dict[str, Any] = lease["spec"]
        return found

    def keep(self, name: str, lease: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        lease["metadata"] = {**lease["metadata"], "name": name, "namespace": "default", "resourceVersion": str(self.version)}
        self.leases[name] = lease
        return lease

    def judge(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        name = path.removeprefix(LEASES).strip("/")
        if not path.startswith(LEASES):
            return 404, {"kind": "Status"}
        if method == "GET":
            return (200, self.leases[name]) if name in self.leases else (404, {"kind": "Status", "code": 404})
        assert body is not None
        spec = body["spec"]
        if spec.get("leaseDurationSeconds", 1) <= 0 or spec.get("leaseTransitions", 0) < 0 or spec.get("holderIdentity") == "":
            return 422, {"kind": "Status", "code": 422}
        if method == "POST":
            name = body["metadata"]["name"]
            return (409, {"kind": "Status", "code": 409}) if name in self.leases else (201, self.keep(name, body))
        if name not in self.leases:
            return 404, {"kind": "Status", "code": 404}
        if body["metadata"].get("resourceVersion") != self.leases[name]["metadata"]["resourceVersion"]:
            return 409, {"kind": "Status", "code": 409, "message": "the object has been modified"}
        return 200, self.keep(name, body)


class _Handler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        api = self.server
        assert isinstance(api, LeaseApi)
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size)) if size else None
        with api.mutex:
            api.asked.append((self.command, self.path))
            trouble = api.trouble.pop(0) if api.trouble else ""
            status, found = 401, {"kind": "Status"}
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                status, found = (int(trouble), {}) if trouble.isdecimal() else api.judge(self.command, self.path, body)
            data = json.dumps(found).encode()
        if trouble == "lost":
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _answer  # noqa: N815  (names that http.server looks for)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def lease_api() -> Iterator[LeaseApi]:
    api = LeaseApi()
    threading.Thread(target=api.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield api
    finally:
        api.shutdown()
        api.server_close()
