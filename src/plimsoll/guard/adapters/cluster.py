"""The API of the cluster that guard runs in, for those who write to it: the pod's own token, read anew each time, its CA."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plimsoll.errors import BadInput
from plimsoll.guard import config_fields as key
from plimsoll.net.cluster import SERVICE_ACCOUNT, bearer, in_cluster
from plimsoll.net.http_call import Lost, Reply, Server

DEADLINE_S = 10.0
MOST_BYTES = 16 << 20
OBJECT_NAME = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
NAMESPACE = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"


def namespace_key(text: str) -> Any:
    """The key of a namespace; guard's own where it is left out."""
    return key.word("", text, pattern=f"(?:{NAMESPACE})?", pattern_name="the name of a namespace")


class ClusterClient:
    """The API server. `url` and `folder` are those that Kubernetes gives every pod, unless a test says otherwise."""

    def __init__(self, url: str = "", folder: str = SERVICE_ACCOUNT, environ: Mapping[str, str] = os.environ) -> None:
        """BadInput where this is no pod."""
        self._folder = Path(folder)
        self._server = Server(url or in_cluster(environ), self._trust)
        try:
            if self._server.is_secure:
                self._trust()
        except OSError:
            raise BadInput(f"{self._folder / 'ca.crt'} cannot be read: is a service account mounted?") from None

    def namespace(self) -> str:
        """The one that guard runs in; empty where it is not told."""
        return self._read("namespace")

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, deadline_s: float = DEADLINE_S
    ) -> Reply | Lost:
        """One request with the token as it is now."""
        try:
            headers = bearer(self._read("token"))
        except BadInput:
            return Lost("cannot be asked: there is no token of a service account", was_sent=False)
        data = b"" if body is None else json.dumps(body).encode()
        return await self._server.call(method, path, data, headers, deadline_s, MOST_BYTES)

    def _trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self._folder / "ca.crt"))

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""
