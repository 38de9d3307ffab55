"""The fleet's lock as a Lease of Kubernetes (coordination.k8s.io/v1), by plain HTTPS with the pod's own token.

`holderIdentity` says who holds it, `leaseTransitions` is the epoch, and every change names the `resourceVersion` that it was
made from, so that of two at once one is refused. Clocks are never compared: a lease is over when this guard has seen it
unchanged for as long as it says it lasts. So a guard that has just started waits that long for a holder that died, and one
that was paused and wakes is refused by the API server. If the Lease is deleted it counts from one again: gates that saw
greater epochs refuse every deed until their engines start again, which is safe. The service account needs `get`, `create`
and `update` on `leases` in the namespace.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import ssl
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from plimsoll.actuators.lock_http import Reply, Unanswered, call, place_of
from plimsoll.actuators.lock_parts import Held, count, is_epoch, not_renewed, now_s, ours, shown
from plimsoll.domain.outcome import Outcome, done, failed, unsure
from plimsoll.errors import BadInput

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
TTL_S = 30
TIMEOUT_S = 5.0
_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")


class _Seen(NamedTuple):
    """A Lease as it was last read, and since when it has looked like that."""

    record: tuple[object, ...]
    since_s: float


class LeaseLock:
    """One guard's hand on the lock. Its methods end within `timeout_s`, and never raise for what the API server does.

    `url` and `folder` are those that Kubernetes gives every pod, unless a test says otherwise.
    """

    def __init__(
        self,
        name: str,
        namespace: str = "",
        *,
        url: str = "",
        folder: str = SERVICE_ACCOUNT,
        ttl_s: int = TTL_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._folder = Path(folder)
        namespace = namespace or self._own_namespace()
        if not _NAME.fullmatch(name) or not _NAMESPACE.fullmatch(namespace) or not 1 <= ttl_s <= 3600:
            raise BadInput("a Lease needs a name and a namespace as Kubernetes has them, and 1 to 3600 seconds to live")
        self._place = place_of(url or _in_cluster(os.environ))
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name, self._ttl_s, self._timeout_s = name, ttl_s, timeout_s
        self._mark = secrets.token_hex(8)  # a pod that comes back under its old name is another holder
        self._identity = ""
        self._seen: _Seen | None = None
        self._lease: dict[str, Any] = {}  # as the server last answered it
        self._held: Held | None = None
        self._one_at_a_time = asyncio.Lock()
        self.said = f"Lease {namespace}/{name}"

    async def acquire(self, owner: str) -> Outcome:
        """Take the lock: done with its epoch, failed if somebody else has it, unsure if the cluster's API cannot be asked."""
        async with self._one_at_a_time:
            deadline = now_s() + self._timeout_s
            if self._held is not None:
                again = await self._renew(self._held, deadline)
                if again.is_done is not False:
                    return again
            self._identity = f"{shown(owner)[:100]}_{self._mark}"
            try:
                return await self._acquire(deadline)
            except Unanswered as problem:
                return unsure(f"the lock cannot be taken: the cluster's API {problem.why}")

    async def renew(self) -> Outcome:
        """Prolong it: failed as soon as it is not ours any more; unsure while nobody can be asked and its time still runs."""
        async with self._one_at_a_time:
            if self._held is None:
                return failed("the lock is not ours")
            return await self._renew(self._held, now_s() + self._timeout_s)

    async def release(self) -> Outcome:
        """Give it up. Unsure means: it ends when its time is over, or with another try."""
        async with self._one_at_a_time:
            if self._held is None:
                return done("the lock was not ours")
            try:
                await self._change(self._freed, now_s() + self._timeout_s)
            except Unanswered as problem:
                left_s = self._held.left_s
                return unsure(f"the lock ends by itself, in {left_s:.0f} s at most: the cluster's API {problem.why}")
            epoch, self._held = self._held.epoch, None
            return done("the lock is given up", epoch=epoch)

    async def _acquire(self, deadline: float) -> Outcome:
        lease, began = await self._get(deadline), now_s()
        if lease is None:
            meta = {"name": self._name}
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": self._taken({})}
            return self._took(await self._ask("POST", "", lease, deadline), began, 1)
        spec = _spec(lease)
        holder = spec.get("holderIdentity") or ""
        waits_s = self._observe(spec, began)
        if holder == self._identity:  # a try of ours whose answer was lost
            self._lease, self._held = lease, Held(_epoch(spec), began)
            return await self._renew(self._held, deadline)
        if holder and waits_s > 0:
            says = (
                f"the lock is held by {shown(holder)} (epoch {_epoch(spec)}); it is over if nothing changes for {waits_s:.0f} s"
            )
            return failed(says, holder=shown(holder), waits_s=round(waits_s, 3))
        began = now_s()
        reply = await self._ask("PUT", f"/{self._name}", {**lease, "spec": self._taken(spec)}, deadline)
        return self._took(reply, began, _epoch(spec) + 1)

    def _took(self, reply: Reply, began: float, epoch: int) -> Outcome:
        if reply.status == 409:
            return failed("somebody else took the lock at the same moment")
        self._check(reply.body, epoch)
        self._lease, self._held = dict(reply.body), Held(epoch, began + self._ttl_s)
        return ours(self._held)

    async def _renew(self, held: Held, deadline: float) -> Outcome:
        began = now_s()
        try:
            found = await self._change(self._renewed, deadline)
            if found is not None:
                self._check(found, held.epoch)
        except Unanswered as problem:
            outcome = not_renewed(held, f"the cluster's API {problem.why}")
            self._held = held if outcome.is_done is None else None
            return outcome
        if found is None:
            self._held = None
            return failed("the lock is not ours any more", lost=True)
        self._held = Held(held.epoch, began + self._ttl_s)
        return ours(self._held)

    async def _change(self, change: Callable[[Mapping[str, Any]], dict[str, Any]], deadline: float) -> Mapping[str, Any] | None:
        """Our Lease after this change; None if it is not ours any more. Somebody's new label is no reason to lose it."""
        assert self._held is not None
        for _ in range(3):
            spec = _spec(self._lease)
            if spec.get("holderIdentity") != self._identity or _epoch(spec) != self._held.epoch:
                return None
            reply = await self._ask("PUT", f"/{self._name}", {**self._lease, "spec": change(spec)}, deadline)
            if reply.status == 404:
                return None
            if reply.status != 409:
                self._lease = dict(reply.body)
                return reply.body
            found = await self._get(deadline)
            if found is None:
                return None
            self._lease = found
        raise Unanswered("changes the Lease faster than it can be renewed")

    def _observe(self, spec: Mapping[str, Any], at_s: float) -> float:
        """How long the Lease as it is now has still to be seen unchanged before it counts as over."""
        record = tuple(repr(spec.get(name)) for name in ("holderIdentity", "renewTime", "acquireTime", "leaseTransitions"))
        if self._seen is None or self._seen.record != record:
            self._seen = _Seen(record, at_s)
        return self._seen.since_s + (count(spec.get("leaseDurationSeconds")) or self._ttl_s) - at_s

    def _taken(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        now = _stamp()
        return {**spec, "holderIdentity": self._identity, "acquireTime": now, "renewTime": now,
                "leaseDurationSeconds": self._ttl_s, "leaseTransitions": _epoch(spec) + 1}  # fmt: skip

    def _renewed(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        return {**spec, "renewTime": _stamp(), "leaseDurationSeconds": self._ttl_s}

    def _freed(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in spec.items() if name != "holderIdentity"}
        return {**rest, "renewTime": _stamp(), "leaseDurationSeconds": 1}

    def _check(self, lease: Mapping[str, Any], epoch: int) -> None:
        spec = _spec(lease)
        if spec.get("holderIdentity") != self._identity or _epoch(spec) != epoch:
            raise Unanswered("answers another Lease than the one that was written")

    async def _get(self, deadline: float) -> dict[str, Any] | None:
        reply = await self._ask("GET", f"/{self._name}", None, deadline)
        return None if reply.status == 404 else dict(reply.body)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float) -> Reply:
        """An answer that is 2xx, 404 or 409; the rest says nothing about the lock."""
        try:
            token = (self._folder / "token").read_text(encoding="ascii").strip()  # at each call: it changes
        except (OSError, ValueError):
            raise Unanswered("cannot be asked: there is no token of a service account", was_sent=False) from None
        reply = await call(self._place, method, self._path + path, body, seconds=max(0.05, deadline - now_s()),
                           trust=self._trust, login=f"Bearer {token}")  # fmt: skip
        if reply.status in (401, 403):
            raise Unanswered(f"answers {reply.status}: the service account may not {method} this Lease")
        if not (200 <= reply.status < 300 or reply.status == 409 or (reply.status == 404 and method != "POST")):
            raise Unanswered(f"answers {reply.status}")
        return reply

    def _trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self._folder / "ca.crt"))

    def _own_namespace(self) -> str:
        try:
            return (self._folder / "namespace").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            raise BadInput("a Lease needs a namespace: this is no pod of a cluster that could tell its own") from None


def _in_cluster(environ: Mapping[str, str]) -> str:
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise BadInput("a Lease needs the cluster's API: this is no pod of a cluster (KUBERNETES_SERVICE_HOST is not set)")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _spec(lease: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its spec; one without is a Lease that nobody has held yet."""
    spec, holder = lease.get("spec") or {}, None
    if isinstance(spec, dict):
        holder = spec.get("holderIdentity") or ""
    if lease.get("kind", "Lease") != "Lease" or not isinstance(spec, dict) or not isinstance(holder, str):
        raise Unanswered("answers something that is no Lease")
    return spec


def _epoch(spec: Mapping[str, Any]) -> int:
    found = spec.get("leaseTransitions") or 0
    if found == 0 or is_epoch(found):
        return int(found)
    raise Unanswered("answers a Lease whose leaseTransitions is no count")


def _stamp() -> str:
    """Now, for people to read: no guard compares it with its own clock."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
