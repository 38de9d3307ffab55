"""The API of the cluster that guard runs in: the pod's own token, read anew each time since it changes, and its CA."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plimsoll.errors import BadInput, WorldFailed
from plimsoll.guard import config_fields as key
from plimsoll.net.client import HttpClient, Loss, Lost, Reply, bearer

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""The folder in which Kubernetes gives every pod its token, its namespace and the cluster's CA."""
DEADLINE_S = 10.0
MOST_BYTES = 64 << 20
OBJECT_NAME = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
NAMESPACE = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One kind of call that guard makes: `plimsoll assets --for guard` writes its Roles from these, and from nothing else."""

    verb: str  # as RBAC names it: get, list, watch, create, update, patch
    group: str  # empty for the core group
    resource: str  # with its subresource: pods/eviction
    scope: str = "fleet"  # fleet: every namespace with engines; own: guard's namespace; cluster: outside namespaces
    needed_for: str = "observe"  # or act, quarantine, identities: each is a part that can be left out
    name: str = ""  # the one object that is asked for, where it is one: the Lease's


LEASE_NAME = "plimsoll-guard"
API_CALLS: tuple[ApiCall, ...] = (
    ApiCall("get", "", "pods"),
    ApiCall("list", "", "pods"),
    ApiCall("create", "", "pods/eviction", needed_for="act"),
    ApiCall("get", "coordination.k8s.io", "leases", "own", name=LEASE_NAME),
    ApiCall("create", "coordination.k8s.io", "leases", "own"),  # a name cannot be asked for before it exists
    ApiCall("update", "coordination.k8s.io", "leases", "own", name=LEASE_NAME),
)


def namespace_key(text: str) -> Any:
    """The key of a namespace; guard's own where it is left out."""
    return key.word("", text, pattern=f"(?:{NAMESPACE})?", pattern_name="the name of a namespace")


def in_cluster(environ: Mapping[str, str]) -> str:
    """The address of the API server, as Kubernetes tells every pod; BadInput where this is none."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdecimal():
        raise BadInput("kubernetes: this is no pod of a cluster (KUBERNETES_SERVICE_HOST is not set)")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


class ClusterClient:
    """The API server. `url` and `folder` are those that Kubernetes gives every pod, unless a test says otherwise."""

    def __init__(self, url: str = "", folder: str = SERVICE_ACCOUNT, environ: Mapping[str, str] = os.environ) -> None:
        """BadInput where this is no pod."""
        self._folder = Path(folder)
        self._server = HttpClient(url or in_cluster(environ), tls=self._trust)
        try:
            if self._server.address.url.startswith("https:"):
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
            return Lost(Loss.SILENT, "cannot be asked: there is no token of a service account")
        data = b"" if body is None else json.dumps(body).encode()
        return await self._server.call(method, path, data, headers, deadline_s=deadline_s, most_bytes=MOST_BYTES)

    def get(self, path: str, deadline_s: float = DEADLINE_S) -> Mapping[str, Any]:
        """The object at a path, for those who wait for it, or an empty one; whatever is no answer is raised."""
        reply = asyncio.run(self.ask("GET", path, deadline_s=deadline_s))
        if isinstance(reply, Lost):
            raise reply.error("the cluster's API")
        if reply.status != 200:
            why = ": the service account may not list pods" if reply.status in (401, 403) else ""
            raise WorldFailed(f"the cluster's API answers {reply.status}{why}")
        return reply.table()

    def _trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self._folder / "ca.crt"))

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""
