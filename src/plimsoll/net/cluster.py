"""Reads the API of the cluster that guard runs in, with the pod's own token, which changes, and its CA."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from plimsoll.errors import BadInput, TimedOut, TooLarge, WorldFailed
from plimsoll.net.http_get import within

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""The folder in which Kubernetes gives every pod its token, its namespace and the cluster's CA."""


def bearer(token: str) -> dict[str, str]:
    """The header that shows a token; BadInput if it is none that a header can hold."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise BadInput("the token holds letters that a token cannot have")
    return {"Authorization": f"Bearer {token}"}


def in_cluster(environ: Mapping[str, str]) -> str:
    """The address of the API server, as Kubernetes tells every pod; BadInput where this is none."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdecimal():
        raise BadInput("kubernetes: this is no pod of a cluster (KUBERNETES_SERVICE_HOST is not set)")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


MOST_BYTES = 64 << 20
TIMEOUT_S = 10.0


class Cluster:
    """The API server. `url` and `folder` are those that Kubernetes gives every pod, unless a test says otherwise."""

    def __init__(self, url: str = "", folder: str = SERVICE_ACCOUNT, timeout_s: float = TIMEOUT_S) -> None:
        self._url = urlsplit(url or in_cluster(os.environ))
        self._folder = Path(folder)
        self._timeout_s = timeout_s

    def namespace(self) -> str:
        """The one that guard runs in."""
        return self._read("namespace")

    def get(self, path: str) -> dict[str, Any]:
        """One answer, within the time."""
        late = f"the cluster's API did not answer within {self._timeout_s:g} s"
        return within(self._timeout_s, lambda: self._exchange(path), late)

    def _exchange(self, path: str) -> dict[str, Any]:
        host, port = self._url.hostname or "", self._url.port
        connection: http.client.HTTPConnection
        try:
            if self._url.scheme == "https":
                trust = ssl.create_default_context(cafile=str(self._folder / "ca.crt"))
                connection = http.client.HTTPSConnection(host, port or 443, timeout=self._timeout_s, context=trust)
            else:
                connection = http.client.HTTPConnection(host, port or 80, timeout=self._timeout_s)
            headers = {"Authorization": f"Bearer {self._read('token')}", "Accept": "application/json"}
            try:
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
                body = answer.read(MOST_BYTES + 1)
            finally:
                connection.close()
        except TimeoutError:
            raise TimedOut(f"the cluster's API did not answer within {self._timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise WorldFailed(f"the cluster's API cannot be asked ({getattr(error, 'strerror', '') or error})") from None
        if len(body) > MOST_BYTES:
            raise TooLarge(f"the cluster's API answers with more than {MOST_BYTES >> 20} MiB")
        return _read_answer(answer.status, body)

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            raise WorldFailed(f"{self._folder / name} cannot be read: is a service account mounted?") from None


def _read_answer(status: int, body: bytes) -> dict[str, Any]:
    if status in (401, 403):
        raise WorldFailed(f"the cluster's API answers {status}: the service account may not list pods")
    if status != 200:
        raise WorldFailed(f"the cluster's API answers {status}")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise WorldFailed("the cluster's API answers something that is not JSON")
    return found
