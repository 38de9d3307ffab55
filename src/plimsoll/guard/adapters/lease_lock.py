"""The fleet's lock as a Lease of Kubernetes (coordination.k8s.io/v1), by plain HTTPS with the pod's own token.

`holderIdentity` says who holds it, `leaseTransitions` is the epoch, and every change names the `resourceVersion` that it was
made from, so that of two at once one is refused. Clocks are never compared: a lease is over when this guard has seen it
unchanged for as long as it says it lasts. So a guard that has just started waits that long for a holder that died, and one
that was paused and wakes is refused by the API server. If the Lease is deleted it counts from one again: gates that saw
greater epochs refuse every deed until their engines start again, which is safe. The service account needs `get`, `create`
and `update` on `leases` in the namespace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from plimsoll.errors import BadInput
from plimsoll.guard import config_fields as key
from plimsoll.guard.act.ports import Outcome, failed
from plimsoll.guard.adapters.cluster import NAMESPACE, OBJECT_NAME, SERVICE_ACCOUNT, ClusterClient, namespace_key
from plimsoll.guard.adapters.locks import (
    TIMEOUT_S,
    TTL_S,
    Grant,
    ServiceLock,
    Unanswered,
    believed,
    count,
    is_epoch,
    now_s,
    ours,
    shown,
    ttl_key,
)
from plimsoll.net.client import table

PAUSE = "plimsoll.dev/pause"  # "true": no guard of this Lease acts, as kubectl annotate sets it
STATE = "plimsoll.dev/journal"


@dataclass(frozen=True, slots=True)
class LeaseLockConfig(key.ConfigTable):
    """[lock] with lease."""

    name: str = key.word(
        None, "the name of a Kubernetes Lease",
        key="lease", example='"plimsoll-guard"', pattern=OBJECT_NAME, pattern_name="the name of a Lease",
    )  # fmt: skip
    namespace: str = namespace_key("of the Lease; default: guard's own")
    ttl_s: int = ttl_key()

    def build(self) -> LeaseLock:
        """The lock; BadInput where guard runs in no cluster."""
        return LeaseLock(self.name, self.namespace, ttl_s=self.ttl_s)


class _LeaseRecord(NamedTuple):
    """A Lease as it was last read, and since when it has looked like that."""

    record: tuple[object, ...]
    since_s: float


class LeaseLock(ServiceLock):
    """The lock in one Lease. `url` and `folder` are those that Kubernetes gives every pod, unless a test says otherwise."""

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
        self._cluster = ClusterClient(url, folder)
        namespace = namespace or self._cluster.namespace()
        if not namespace:
            raise BadInput("a Lease needs a namespace: this is no pod of a cluster that could tell its own")
        if not re.fullmatch(OBJECT_NAME, name) or not re.fullmatch(NAMESPACE, namespace) or not 1 <= ttl_s <= 3600:
            raise BadInput("a Lease needs a name and a namespace as Kubernetes has them, and 1 to 3600 seconds to live")
        super().__init__("the cluster's API", f"Lease {namespace}/{name}", ttl_s, timeout_s)
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name, self._identity = name, ""
        self._seen: _LeaseRecord | None = None
        self._lease: dict[str, Any] = {}  # as the server last answered it

    # What stands beside the lock, in annotations

    @property
    def paused(self) -> str:
        """Why all guards of this Lease are to do nothing, as it was last read; "" where they may."""
        is_paused = self._annotation(PAUSE).strip().lower() in ("true", "1", "yes", "on")
        return f"{self.label} has the annotation {PAUSE}" if is_paused else ""

    @property
    def state(self) -> str:
        """What guards keep there for each other."""
        return self._annotation(STATE)

    def _annotation(self, name: str) -> str:
        found = table(table(self._lease.get("metadata")).get("annotations")).get(name)
        return found if isinstance(found, str) else ""

    async def look(self) -> str:
        """Reads the Lease; why that failed, or ""."""
        async with self._one_at_a_time:
            try:
                lease = await self._get(now_s() + self._timeout_s)
                self._lease = self._lease if lease is None and self._held is not None else lease or {}
            except Unanswered as problem:
                return f"{self._service} {problem}"
            return ""

    async def save(self, state: str) -> str:
        """Keeps a text beside the lock, whoever holds that; why it failed, or ""."""
        async with self._one_at_a_time:
            deadline = now_s() + self._timeout_s
            try:
                for _ in range(3):
                    about = table(self._lease.get("metadata"))
                    notes = {**table(about.get("annotations")), STATE: state}
                    if not self._lease:
                        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": {}}
                        lease["metadata"] = {"name": self._name, "annotations": notes}
                        status, answer = await self._ask("POST", "", lease, deadline)
                    else:
                        lease = {**self._lease, "metadata": {**about, "annotations": notes}}
                        status, answer = await self._ask("PUT", f"/{self._name}", lease, deadline)
                    if status not in (404, 409):
                        self._lease = dict(answer)
                        return ""
                    self._lease = await self._get(deadline) or {}
            except Unanswered as problem:
                return f"{self._service} {problem}"
            return f"{self._service} changes the Lease faster than it can be written"

    async def _acquire(self, owner: str, deadline: float) -> Outcome:
        self._identity = f"{shown(owner)[:100]}_{self._mark}"
        lease, began = await self._get(deadline), now_s()
        if lease is None:
            meta = {"name": self._name}
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": self._taken({})}
            return self._took(*await self._ask("POST", "", lease, deadline), began, 1)
        self._lease = lease
        spec = _spec(lease)
        holder = spec.get("holderIdentity") or ""
        waits_s = self._observe(spec, began)
        if holder == self._identity:  # a try of ours whose answer was lost
            self._lease, self._held = lease, Grant(_epoch(spec), began)
            return await self._renew(self._held, deadline)
        if holder and waits_s > 0:
            says = (
                f"the lock is held by {shown(holder)} (epoch {_epoch(spec)}); it is over if nothing changes for {waits_s:.0f} s"
            )
            return failed(says, holder=shown(holder), waits_s=round(waits_s, 3))
        began = now_s()
        answer = await self._ask("PUT", f"/{self._name}", {**lease, "spec": self._taken(spec)}, deadline)
        return self._took(*answer, began, _epoch(spec) + 1)

    def _took(self, status: int, lease: Mapping[str, Any], began: float, epoch: int) -> Outcome:
        if status == 409:
            return failed("somebody else took the lock at the same moment")
        self._check(lease, epoch)
        self._lease, self._held = dict(lease), Grant(epoch, began + self._ttl_s)
        return ours(self._held)

    async def _prolong(self, held: Grant, deadline: float) -> int | str:
        found = await self._change(held, self._renewed, deadline)
        if found is None:
            return ""
        self._check(found, held.epoch)
        return self._ttl_s

    async def _free(self, held: Grant, deadline: float) -> None:
        await self._change(held, self._freed, deadline)

    async def _change(
        self, held: Grant, change: Callable[[Mapping[str, Any]], dict[str, Any]], deadline: float
    ) -> dict[str, Any] | None:
        """Our Lease after this change; None if it is not ours any more. Somebody's new label is no reason to lose it."""
        for _ in range(3):
            spec = _spec(self._lease)
            if spec.get("holderIdentity") != self._identity or _epoch(spec) != held.epoch:
                return None
            status, answer = await self._ask("PUT", f"/{self._name}", {**self._lease, "spec": change(spec)}, deadline)
            if status not in (404, 409):
                self._lease = dict(answer)
                return self._lease
            found = None if status == 404 else await self._get(deadline)
            if found is None:
                return None
            self._lease = found
        raise Unanswered("changes the Lease faster than it can be renewed")

    def _observe(self, spec: Mapping[str, Any], at_s: float) -> float:
        """How long the Lease as it is now has still to be seen unchanged before it counts as over."""
        record = tuple(repr(spec.get(name)) for name in ("holderIdentity", "renewTime", "acquireTime", "leaseTransitions"))
        if self._seen is None or self._seen.record != record:
            self._seen = _LeaseRecord(record, at_s)
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
        status, found = await self._ask("GET", f"/{self._name}", None, deadline)
        return None if status == 404 else dict(found)

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float
    ) -> tuple[int, Mapping[str, Any]]:
        """An answer that is 2xx, 404 or 409; the rest says nothing about the lock."""
        seconds = max(0.05, deadline - now_s())
        status, found = believed(await self._cluster.ask(method, self._path + path, body, seconds))
        if status in (401, 403):
            raise Unanswered(f"answers {status}: the service account may not {method} this Lease")
        if not (200 <= status < 300 or status == 409 or (status == 404 and method != "POST")):
            raise Unanswered(f"answers {status}")
        return status, found


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
