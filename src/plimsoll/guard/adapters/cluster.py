"""The API of a Kubernetes cluster: with the pod's own account, or with a kubeconfig from outside; and the calls guard makes.

Tokens are read anew at each call, since Kubernetes changes them every hour.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import contextvars
import json
import math
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import yaml

from plimsoll.doctor.read.redact_text import shown_line
from plimsoll.errors import BadInput
from plimsoll.guard import config_fields as key
from plimsoll.net.client import HttpClient, Loss, Lost, Reply, bearer, table

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""The folder in which Kubernetes gives every pod its token, its namespace and the cluster's CA."""
DEADLINE_S = 10.0
MOST_BYTES = 64 << 20
MOST_LINE = 4 << 20  # bytes of one watch event: an object in etcd has 1.5 MiB at most
WATCH_S = 240  # the server ends a watch after this, and guard begins it again where it ended
EXEC_S = 30.0  # for the command of a kubeconfig that prints a token
OBJECT_NAME = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
NAMESPACE = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One kind of call that guard makes: cluster.yaml."""

    verb: str
    group: str  # empty for the core group
    resource: str  # with its subresource: pods/eviction
    scope: str
    needed_for: str  # the optional part that needs it, or `observe`
    name: str = ""  # of the one object that is meant, if it is one: the Lease's


LEASE_NAME = "plimsoll-guard"
_TABLES = yaml.safe_load(files("plimsoll.guard.adapters").joinpath("cluster.yaml").read_text(encoding="utf-8"))
TAINTS: Mapping[str, str] = _TABLES["leaving"]


def _call(call: str, use: str) -> ApiCall:
    (verb, what), (scope, part) = call.split(), use.split()
    group, slash, resource = what.partition("/")
    if not slash or group == "pods":
        group, resource = "", what
    return ApiCall(verb, group, resource, *(("own", part, LEASE_NAME) if scope == "lease" else (scope, part)))


API_CALLS = tuple(_call(call, use) for call, use in _TABLES["calls"].items())


def namespace_key(text: str) -> Any:
    """Returns the configuration key of a namespace; left out, it means guard's own."""
    return key.word("", text, pattern=f"(?:{NAMESPACE})?", pattern_name="the name of a namespace")


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """Address of an API server, the certificates to trust there, and the token to send."""

    url: str
    namespace: Callable[[], str]
    token: Callable[[], str]  # called for each request; OSError or ValueError where there is none, "" where none is needed
    trust: Callable[[], ssl.SSLContext]
    is_pod: bool = True


KUBECONFIG: contextvars.ContextVar[ClusterAccess | None] = contextvars.ContextVar("kubeconfig", default=None)
"""The access of --kubeconfig and --context, in place of the pod's own account."""


def pod_access(url: str = "", folder: str = SERVICE_ACCOUNT, environ: Mapping[str, str] = os.environ) -> ClusterAccess:
    """Returns the access of the account that Kubernetes gives every pod; BadInput outside a pod."""
    place = Path(folder)
    if not url:
        host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not port.isdecimal():
            why = "this is no pod of a cluster (KUBERNETES_SERVICE_HOST is not set); give --kubeconfig or --context"
            raise BadInput(f"kubernetes: {why}")
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    def read(name: str) -> str:
        return (place / name).read_text(encoding="utf-8").strip()

    def namespace() -> str:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return read("namespace")
        return ""

    def trust() -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(place / "ca.crt"))

    try:
        if url.startswith("https:"):
            trust()
    except OSError:
        raise BadInput(f"{place / 'ca.crt'} cannot be read: is a service account mounted?") from None
    return ClusterAccess(url, namespace, lambda: read("token"), trust)


def kubeconfig_access(path: str | None, context: str | None, environ: Mapping[str, str] = os.environ) -> ClusterAccess:
    """Returns the access of a kubeconfig's context: token, tokenFile, client certificate or exec. BadInput for the rest."""
    default = environ.get("KUBECONFIG", "").partition(os.pathsep)[0] or str(Path(environ.get("HOME", "~")) / ".kube/config")
    file = Path(path or default)
    try:
        with file.open("rb") as opened:
            tree = yaml.safe_load(opened.read(MOST_LINE))
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror or 'cannot be read'}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        raise BadInput(f"{file}: not a kubeconfig: not YAML") from None

    def named(kind: str, name: Any) -> Mapping[str, Any]:
        entries = table(tree).get(f"{kind}s")
        for entry in entries if isinstance(entries, list) else ():
            if table(entry).get("name") == name and isinstance(table(entry).get(kind), dict):
                return table(entry[kind])
        raise BadInput(f"{file}: no {kind} named {shown_line(str(name))[:100]!r}")

    def bytes_of(entry: Mapping[str, Any], name: str) -> bytes | None:
        data, path = entry.get(f"{name}-data"), entry.get(name)
        try:
            if isinstance(data, str):
                return base64.b64decode(data, validate=True)
            return (file.parent / path).read_bytes() if isinstance(path, str) else None
        except (binascii.Error, OSError):
            raise BadInput(f"{file}: {name} cannot be read") from None

    chosen = context or table(tree).get("current-context")
    about = named("context", chosen)
    cluster, user = named("cluster", about.get("cluster")), named("user", about.get("user"))
    chosen = shown_line(str(chosen))[:100]
    if user.get("username") or user.get("auth-provider"):
        raise BadInput(f"{file}: context {chosen}: only token, client certificate and exec are understood")
    ca, cert, secret = (
        bytes_of(cluster, "certificate-authority"), bytes_of(user, "client-certificate"), bytes_of(user, "client-key")
    )  # fmt: skip
    url, namespace, given, token_file, command = (
        cluster.get("server"), about.get("namespace"), user.get("token"), user.get("tokenFile"), user.get("exec")
    )  # fmt: skip

    def trust() -> ssl.SSLContext:
        made = ssl.create_default_context(cadata=None if ca is None else ca.decode("ascii"))
        if cert is not None and secret is not None:  # only a file can be loaded
            with tempfile.NamedTemporaryFile() as pair:
                pair.write(cert + b"\n" + secret)
                pair.flush()
                made.load_cert_chain(pair.name)
        return made

    try:
        trust()
    except (ssl.SSLError, OSError, ValueError):
        raise BadInput(f"{file}: the certificates of context {chosen} cannot be used") from None
    if not isinstance(url, str):
        raise BadInput(f"{file}: cluster {shown_line(str(about.get('cluster')))[:100]} has no server")
    token: Callable[[], str] = lambda: given if isinstance(given, str) else ""  # noqa: E731
    if isinstance(token_file, str):
        token = lambda: (file.parent / token_file).read_text(encoding="utf-8").strip()  # noqa: E731
    elif isinstance(command, dict) and isinstance(command.get("command"), str):
        token = _exec_token(command, file.parent)
    return ClusterAccess(url, lambda: namespace if isinstance(namespace, str) else "default", token, trust, is_pod=False)


def _exec_token(command: Mapping[str, Any], folder: Path) -> Callable[[], str]:
    """Returns a reader of the token that a kubeconfig's command prints; reruns it after a minute, or once the token expires."""
    program = str(command["command"])
    words = [str(folder / program) if "/" in program else program, *map(str, command.get("args") or [])]
    extra = {str(table(pair).get("name")): str(table(pair).get("value")) for pair in command.get("env") or []}
    info = {"apiVersion": command.get("apiVersion"), "kind": "ExecCredential", "spec": {"interactive": False}}
    environment = {**os.environ, **extra, "KUBERNETES_EXEC_INFO": json.dumps(info)}
    kept, until_s = "", 0.0

    def read() -> str:
        nonlocal kept, until_s
        if time.time() >= until_s:
            try:
                ran = subprocess.run(words, env=environment, capture_output=True, timeout=EXEC_S, check=True)  # noqa: S603
                status = table(table(json.loads(ran.stdout)).get("status"))
                over = status.get("expirationTimestamp")
                over_s = datetime.fromisoformat(over).timestamp() if isinstance(over, str) else math.inf
            except (OSError, ValueError, subprocess.SubprocessError):
                raise OSError(0, "the kubeconfig's command failed") from None
            if not isinstance(token := status.get("token"), str):
                raise OSError(0, "the kubeconfig's command gave no token")
            kept, until_s = token, min(over_s, time.time() + 60.0)  # such commands keep a cache of their own
        return kept

    return read


class ClusterClient:
    """The API server, asked with the pod's own account unless --kubeconfig says otherwise."""

    def __init__(self, url: str = "", folder: str = SERVICE_ACCOUNT, environ: Mapping[str, str] = os.environ) -> None:
        """Raises BadInput outside a pod without a kubeconfig; only tests give `url` and `folder`."""
        given = None if url else KUBECONFIG.get()
        self._access = given or pod_access(url, folder, environ)
        self._server = HttpClient(self._access.url, tls=self._access.trust)
        self.is_pod = self._access.is_pod

    def namespace(self) -> str:
        """The namespace that guard runs in, or the context's; empty where it is unknown."""
        return self._access.namespace()

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        deadline_s: float = DEADLINE_S,
        *,
        content: str = "",
    ) -> Reply | Lost:
        """One request with the token as it is now; `content` is the type of a patch."""
        data = b"" if body is None else json.dumps(body).encode()
        headers = await self._login()
        if isinstance(headers, Lost):
            return headers
        headers = {**headers, "Content-Type": content} if content else headers
        return await self._server.call(method, path, data, headers, deadline_s=deadline_s, most_bytes=MOST_BYTES)

    async def watch(self, path: str, query: Mapping[str, str], take: Callable[[Mapping[str, Any]], None]) -> Reply | Lost:
        """Passes each event of a watch to `take` until the server ends the watch; skips lines that are no object."""
        headers = await self._login()
        if isinstance(headers, Lost):
            return headers
        left = b""

        def sink(piece: bytes) -> None:
            nonlocal left
            *lines, left = (left + piece).split(b"\n")
            if len(left) > MOST_LINE:
                raise ValueError("an event is too long")
            for line in lines:
                take(Reply(200, line).table())

        words = urlencode({**query, "watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)})
        return await self._server.call(
            "GET", f"{path}?{words}", b"", headers, deadline_s=WATCH_S + DEADLINE_S, most_bytes=MOST_BYTES, sink=sink
        )

    async def _login(self) -> Mapping[str, str] | Lost:
        try:
            token = await asyncio.to_thread(self._access.token)
            if self.is_pod and not token:
                raise OSError(0, "empty")
        except (OSError, UnicodeDecodeError):
            return Lost(Loss.SILENT, "cannot be asked: there is no token of a service account")
        try:
            return bearer(token) if token else {}
        except BadInput:
            return Lost(Loss.SILENT, "cannot be asked: the token holds letters that a header cannot have")


def pod_path(namespace: str, pod: str = "") -> str:
    """Returns the path of a pod, or of all pods of a namespace."""
    path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"
    return f"{path}/{quote(pod, safe='')}" if pod else path


async def evict(cluster: ClusterClient, namespace: str, pod: str, uid: str) -> Reply | Lost:
    """Asks for the eviction of just this pod: never of another one of the same name."""
    body = {
        "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace},
        "deleteOptions": {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}},
    }  # fmt: skip
    return await cluster.ask("POST", f"{pod_path(namespace, pod)}/eviction", body)


def reason_of(reply: Reply | Lost) -> str:
    """Returns why the API server did not do what was asked, in words that follow its name."""
    if isinstance(reply, Lost):
        return reply.why
    if reply.status in (401, 403):
        return f"it answers {reply.status}: the service account may not do that"
    message = reply.table().get("message")
    return f"it answers {reply.status}" + (f": {shown_line(message)[:200]}" if isinstance(message, str) else "")
