"""The fleet's lock in a service: a key of etcd, or a Lease of Kubernetes; file_lock.py has the one in a file.

A lock is for the guards of one fleet: at most one of them acts. Each time that it changes hands its epoch grows, and drains,
undrains and knobs carry it; a gate refuses an epoch older than one it has seen. So it does no harm there if a guard that was
suspended wakes up and believes that it still holds the lock. Whatever does not check the epoch (a balancer, a process that is
stopped or started) is not protected in that way: there a guard calls `renew` right before, and no lock can cover the time
between that answer and the action. Where a service counts from an earlier number again (an etcd set up anew or restored, a
Lease that was deleted), gates that saw greater epochs refuse every action until their engines start again, which is safe.
"""

from __future__ import annotations

import abc
import asyncio
import base64
import contextlib
import json
import math
import re
import secrets
import ssl
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from plimsoll.errors import BadInput
from plimsoll.guard import config_fields as key
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.adapters.cluster import NAMESPACE, OBJECT_NAME, SERVICE_ACCOUNT, ClusterClient, namespace_key
from plimsoll.net.client import HttpClient, Lost, Reply, table
from plimsoll.redaction import printable, redact

EPOCH_MAX = 2**62  # the greatest that a gate accepts
OWNER_MAX = 200
TTL_S = 30
TIMEOUT_S = 5.0
_LEAST_S = 0.05


def ttl_key() -> Any:
    """Returns the configuration key of the time for which a service grants the lock."""
    text = "of etcd's key and the Lease: so long after a guard died another may act"
    return key.duration(TTL_S, 15.0, 300.0, text, convert=int)


def now_s() -> float:
    """Returns seconds of a clock that nobody sets and that counts while the machine sleeps, as a lease does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def shown(text: object) -> str:
    """Returns a name that came from outside, fit to be shown: short, printable, without secrets."""
    words = printable(str(text)[:4096])
    return redact(" ".join(words.split()))[:OWNER_MAX] or "somebody without a name"


def is_epoch(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < EPOCH_MAX


def count(value: object) -> int | None:
    """Reads a whole number, also one that JSON carries as a text; None if it is none."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,19}", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


class Unanswered(Exception):
    """The service gave no usable answer, but may have done what was asked; the message follows the service's name."""


def believed(told: Reply | Lost) -> tuple[int, Mapping[str, Any]]:
    """Returns the status and the JSON object of an answer; Unanswered if none came, or a good status without an object."""
    if isinstance(told, Lost):
        raise Unanswered(told.why)
    found = told.table()
    if 200 <= told.status < 300 and not found:
        raise Unanswered("answers something that is not JSON")
    return told.status, found


class ServiceLock(abc.ABC):
    """One guard's handle on a lock. Its methods end within `timeout_s`, and never raise for what the service does."""

    def __init__(self, service: str, label: str, ttl_s: int, timeout_s: float) -> None:
        """`service` and `label` are the names of the service and of the lock in messages."""
        self._service, self.label = service, label
        self._ttl_s, self._timeout_s = ttl_s, timeout_s
        self._mark = secrets.token_hex(8)  # distinguishes us from any other guard with the same name, also an earlier one
        self._epoch, self._until_s = 0, -math.inf  # epoch 0: not held; after that time, by now_s, somebody else may have it
        self._one_at_a_time = asyncio.Lock()

    @property
    def left_s(self) -> float:
        """Seconds for which the lock is held without renewal."""
        return round(max(0.0, self._until_s - now_s()), 3)

    async def acquire(self, owner: str) -> Outcome:
        """Takes the lock: done with its epoch, failed if somebody else has it, unsure if the service cannot be asked."""
        async with self._one_at_a_time:
            deadline = now_s() + self._timeout_s
            if self._epoch:
                again = await self._renew(deadline)
                if again.is_done is not False:
                    return again
            try:
                return await self._acquire(owner, deadline)
            except Unanswered as problem:
                return unsure(f"the lock cannot be taken: {self._service} {problem}")

    async def renew(self) -> Outcome:
        """Renews it: failed once it is lost; unsure while the service cannot be asked and the lease still runs."""
        async with self._one_at_a_time:
            return await self._renew(now_s() + self._timeout_s) if self._epoch else failed("the lock is not ours")

    async def release(self) -> Outcome:
        """Releases it. Unsure means: it ends when its lease expires, or with another try."""
        async with self._one_at_a_time:
            if not self._epoch:
                return done("the lock was not ours")
            try:
                await self._free(now_s() + self._timeout_s)
            except Unanswered as problem:
                return unsure(f"the lock ends by itself, in {self.left_s:.0f} s at most: {self._service} {problem}")
            epoch, self._epoch = self._epoch, 0
            return done("the lock is given up", epoch=epoch)

    async def _renew(self, deadline: float) -> Outcome:
        began = now_s()
        try:
            found = await self._prolong(deadline)
        except Unanswered as problem:
            why, left_s = f"{self._service} {problem}", self.left_s
            if left_s:
                return unsure(f"{why}; the lock is ours for {left_s:.1f} s more", epoch=self._epoch, left_s=left_s)
            self._epoch = 0
            return failed(f"{why}, and the time for which the lock was granted is over: it is lost", lost=True)
        if isinstance(found, str):
            self._epoch = 0
            return failed(f"the lock is not ours any more{found}", lost=True)
        return self._take(self._epoch, began + found)

    def _take(self, epoch: int, until_s: float) -> Outcome:
        """Records a granted lock; unsure if the answer was read after its lease expired (guard was suspended in between)."""
        self._epoch, self._until_s = epoch, until_s
        left_s = self.left_s
        if not left_s:
            return unsure("the answer came too late to tell whether the lock is ours", epoch=epoch, left_s=0.0)
        return done(f"the lock is ours (epoch {epoch}) for {left_s:.0f} s", epoch=epoch, left_s=left_s)

    @abc.abstractmethod
    async def _acquire(self, owner: str, deadline: float) -> Outcome: ...  # called only if not held, so far as we know

    @abc.abstractmethod
    async def _prolong(self, deadline: float) -> int | str:
        """Returns the seconds granted from the moment of the request; where it is lost, a text with the details."""

    @abc.abstractmethod
    async def _free(self, deadline: float) -> None: ...  # no error if it was lost already


# etcd, by its JSON gateway: a key that lives as long as its lease, and whose create revision is the epoch: that grows with
# every change of anything in etcd, so each holder's epoch is greater than all before. A holder that was killed keeps the others
# waiting for the rest of its lease. One that was stopped (SIGSTOP) for longer has lost the lock, and `renew` fails.

ETCD_BYTES = 1 << 20  # whatever the key's value, somebody holds the lock
_UNAUTHENTICATED = ("invalid auth token", "user name is empty", "revision of auth store is old")


@dataclass(frozen=True, slots=True)
class EtcdLockConfig(key.ConfigTable):
    """[lock] with etcd."""

    endpoints: tuple[str, ...] = key.other(
        "urls", "etcd's addresses, for guards on several hosts", (), key="etcd", example='"http://HOST:2379"'
    )
    lock_key: str = key.word("plimsoll/guard", "the lock's key there; one for each fleet", key="key")
    ttl_s: int = ttl_key()
    user: str = key.word("", "of etcd")
    password: str | None = key.secret("of that user", shortest=1)
    ca_file: str = key.path("who vouches for etcd's certificate", "")
    cert_file: str = key.path("guard's own certificate for etcd", "")
    key_file: str = key.path("its key", "")

    def checked(self, given: Collection[str]) -> Self:
        """Returns itself; raises WrongKey without an address or a key, a user's password, or a certificate's key."""
        if not self.endpoints or not self.lock_key:
            raise key.WrongKey("key" if self.endpoints else "etcd", "etcd needs an address and a key")
        if ("user" in given) != ("password_file" in given) or ("cert_file" in given) != ("key_file" in given):
            raise key.WrongKey("", "user and password_file go together, and so do cert_file and key_file")
        return self

    def build(self) -> EtcdLock:
        return EtcdLock(self)


class _Key(NamedTuple):
    """The lock's key as etcd has it."""

    epoch: int
    lease: int
    owner: str
    mark: str


class _NoLease(Unanswered):
    """The named lease has expired."""


class EtcdLock(ServiceLock):
    """The lock under one key, at any endpoint that answers."""

    def __init__(self, config: EtcdLockConfig, *, timeout_s: float = TIMEOUT_S) -> None:
        if any("?" in endpoint or endpoint.startswith("unix:") for endpoint in config.endpoints):
            raise BadInput("a lock's address must look like http://HOST:PORT or https://HOST:PORT")
        self._servers = [HttpClient(endpoint, tls=self._trust) for endpoint in config.endpoints]
        places = ", ".join(urlsplit(server.shown).netloc for server in self._servers)
        super().__init__("etcd", f"etcd key {shown(config.lock_key)} at {places}", config.ttl_s, timeout_s)
        self._key = base64.b64encode(config.lock_key.encode("utf-8", "surrogateescape")).decode()
        self._config, self._token = config, ""
        self._lease = self._last_epoch = 0

    async def _acquire(self, owner: str, deadline: float) -> Outcome:
        found = await self._look(deadline)
        if found is None:
            began = now_s()
            body = await self._ask("/v3/lease/grant", {"TTL": str(self._ttl_s)}, deadline)
            lease, ttl_s = count(body.get("ID")), count(body.get("TTL"))  # etcd may give more than was asked for
            if not lease or not ttl_s:
                raise Unanswered("answers something odd instead of a lease")
            found = await self._put(owner, lease, deadline)
            if found.lease == lease and found.epoch > self._last_epoch:
                self._lease, self._last_epoch = lease, found.epoch
                return self._take(found.epoch, began + ttl_s)
            with contextlib.suppress(Unanswered):  # it ends by itself
                await self._revoke(lease, deadline)
            if found.lease == lease:
                went_back = f"etcd's revision went back from {self._last_epoch} to {found.epoch}"
                return unsure(f"{went_back}: was it restored from a backup?")
        if found.mark != self._mark:
            return failed(f"the lock is held by {shown(found.owner)} (epoch {found.epoch})", holder=shown(found.owner))
        # Our own earlier try, whose answer was lost: only etcd can tell how much of its lease is left.
        self._lease, self._last_epoch = found.lease, found.epoch
        self._epoch, self._until_s = found.epoch, now_s()
        return await self._renew(deadline)

    async def _prolong(self, deadline: float) -> int | str:
        body = await self._ask("/v3/lease/keepalive", {"ID": str(self._lease)}, deadline)
        result = body.get("result")
        ttl_s = count(result.get("TTL", 0)) if isinstance(result, dict) else None
        if ttl_s is None:
            raise Unanswered("answers something odd to a renewal")
        found = await self._look(deadline) if ttl_s else None
        if found is not None and (found.epoch, found.mark) == (self._epoch, self._mark):
            return ttl_s
        now = f"held by {shown(found.owner)} (epoch {found.epoch})" if found else "free, or soon somebody else's"
        return f": it is {now}"

    async def _free(self, deadline: float) -> None:
        await self._revoke(self._lease, deadline)

    async def _look(self, deadline: float) -> _Key | None:
        return _key_in(await self._ask("/v3/kv/range", {"key": self._key}, deadline))

    async def _put(self, owner: str, lease: int, deadline: float) -> _Key:
        """Creates the key if there is none; returns the key that is there then, ours or another's."""
        value = {"owner": owner[:OWNER_MAX], "mark": self._mark, "since": round(time.time(), 3)}
        put = {"key": self._key, "lease": str(lease), "value": base64.b64encode(json.dumps(value).encode()).decode()}
        look = {"request_range": {"key": self._key}}
        body = await self._ask("/v3/kv/txn", {
            "compare": [{"key": self._key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
            "success": [{"request_put": put}, look],
            "failure": [look],
        }, deadline)  # fmt: skip
        answers = body.get("responses")
        last = answers[-1] if isinstance(answers, list) and answers else None
        answer = table(last).get("response_range")
        found = _key_in(answer) if isinstance(answer, dict) else None
        if found is None or (body.get("succeeded") is True) != (found.lease == lease and found.mark == self._mark):
            raise Unanswered("answers something odd instead of the key")
        return found

    async def _revoke(self, lease: int, deadline: float) -> None:
        with contextlib.suppress(_NoLease):  # it was over already
            await self._ask("/v3/lease/revoke", {"ID": str(lease)}, deadline)

    async def _ask(self, path: str, body: Mapping[str, Any], deadline: float) -> Mapping[str, Any]:
        if self._config.user and not self._token:
            await self._authenticate(deadline)
        status, found = await self._anywhere(path, body, deadline)
        if self._config.user and status in (400, 401) and any(words in _error(found) for words in _UNAUTHENTICATED):
            await self._authenticate(deadline)  # etcd's tokens expire after some minutes
            status, found = await self._anywhere(path, body, deadline)
        if status == 200:
            return found
        if status == 404 and "lease not found" in _error(found):
            raise _NoLease("knows the lease no more")
        raise Unanswered(f"refuses: {status} {_error(found)}".rstrip())

    async def _authenticate(self, deadline: float) -> None:
        self._token = ""
        asked = {"name": self._config.user, "password": self._config.password or ""}
        status, found = await self._anywhere("/v3/auth/authenticate", asked, deadline)
        token = found.get("token")
        if status == 200 and isinstance(token, str) and token:
            self._token = token
        elif "authentication is not enabled" not in _error(found):
            raise Unanswered(f"does not take the login: {status} {_error(found)}".rstrip())

    async def _anywhere(self, path: str, body: Mapping[str, Any], deadline: float) -> tuple[int, Mapping[str, Any]]:
        """Returns the first answer of a working endpoint, and asks that endpoint first the next time."""
        last = Unanswered("cannot be asked")
        data, headers = json.dumps(body).encode(), {"Authorization": self._token} if self._token else {}
        for index, server in enumerate(tuple(self._servers)):
            seconds = (deadline - now_s()) / (len(self._servers) - index)
            if seconds < _LEAST_S:
                break
            reply = await server.call("POST", path, data, headers, deadline_s=seconds, most_bytes=ETCD_BYTES)
            try:
                status, found = believed(reply)
            except Unanswered as problem:
                last = problem
                continue
            if status < 500:
                self._servers = [server, *(other for other in self._servers if other is not server)]
                return status, found
            last = Unanswered(f"is in trouble: {status} {_error(found)}".rstrip())
        raise last

    def _trust(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._config.ca_file or None)
        if self._config.cert_file:
            context.load_cert_chain(self._config.cert_file, self._config.key_file or None)
        return context


def _error(body: Mapping[str, Any]) -> str:
    found = body.get("error")
    return shown(found) if isinstance(found, str) and found else ""


def _key_in(answer: Mapping[str, Any]) -> _Key | None:
    """Returns the key in the answer to a range, None if there is none; with any other value, somebody holds it."""
    found = answer.get("kvs")
    if not found and "header" in answer:
        return None
    kv = table(found[0]) if isinstance(found, list) and len(found) == 1 else {}
    epoch, lease = count(kv.get("create_revision")), count(kv.get("lease", 0))
    if epoch is None or lease is None or not is_epoch(epoch):
        raise Unanswered("answers something odd instead of the key")
    try:
        names = table(json.loads(base64.b64decode(kv.get("value", ""), validate=True)))
    except (ValueError, TypeError, RecursionError):
        names = {}
    return _Key(epoch, lease, str(names.get("owner", "somebody else")), str(names.get("mark", "")))


# A Lease of Kubernetes (coordination.k8s.io/v1), by plain HTTPS with the pod's own token. `holderIdentity` says who holds it,
# `leaseTransitions` is the epoch, and every change names the `resourceVersion` that it was made from, so of two at once one
# is refused. Clocks are never compared: a lease is over when this guard has seen it unchanged for as long as it says it lasts.
# So a guard that has just started waits that long after a holder died, and one that was suspended and wakes is refused by the
# API server. The service account needs `get`, `create` and `update` on `leases` in the namespace.

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
        """Returns the lock; BadInput where guard runs in no cluster."""
        return LeaseLock(self.name, self.namespace, ttl_s=self.ttl_s)


class LeaseLock(ServiceLock):
    """The lock in one Lease. `url` and `folder` are those that Kubernetes gives every pod; only tests give others."""

    def __init__(
        self, name: str, namespace: str = "", *,
        url: str = "", folder: str = SERVICE_ACCOUNT, ttl_s: int = TTL_S, timeout_s: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        self._cluster = ClusterClient(url, folder)
        namespace = namespace or self._cluster.namespace()
        if not re.fullmatch(NAMESPACE, namespace):
            raise BadInput("a Lease needs a namespace: this is no pod of a cluster that could tell its own")
        super().__init__("the cluster's API", f"Lease {namespace}/{name}", ttl_s, timeout_s)
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name, self._identity = name, ""
        self._seen: tuple[tuple[str, ...], float] = (), 0.0  # how the Lease looked, and since when
        self._lease: dict[str, Any] = {}  # as the server last answered it

    # Annotations beside the lock

    @property
    def paused(self) -> str:
        """Why all guards of this Lease are paused, as last read; "" where they are not."""
        is_paused = self._annotation(PAUSE).strip().lower() in ("true", "1", "yes", "on")
        return f"{self.label} has the annotation {PAUSE}" if is_paused else ""

    @property
    def state(self) -> str:
        """The shared state that guards keep in an annotation of the Lease, as last read."""
        return self._annotation(STATE)

    def _annotation(self, name: str) -> str:
        found = table(table(self._lease.get("metadata")).get("annotations")).get(name)
        return found if isinstance(found, str) else ""

    async def look(self) -> str:
        """Reads the Lease; returns why that failed, or ""."""
        async with self._one_at_a_time:
            try:
                lease = await self._get(now_s() + self._timeout_s)
                self._lease = self._lease if lease is None and self._epoch else lease or {}
            except Unanswered as problem:
                return f"{self._service} {problem}"
            return ""

    async def save(self, state: str) -> str:
        """Saves a text beside the lock, whoever holds it; returns why that failed, or ""."""
        async with self._one_at_a_time:
            deadline = now_s() + self._timeout_s
            try:
                for _ in range(3):
                    about = table(self._lease.get("metadata"))
                    notes = {**table(about.get("annotations")), STATE: state}
                    if self._lease:
                        lease = {**self._lease, "metadata": {**about, "annotations": notes}}
                        status, answer = await self._ask("PUT", f"/{self._name}", lease, deadline)
                    else:
                        status, answer = await self._ask("POST", "", self._new({}, annotations=notes), deadline)
                    if status not in (404, 409):
                        self._lease = dict(answer)
                        return ""
                    self._lease = await self._get(deadline) or {}
            except Unanswered as problem:
                return f"{self._service} {problem}"
            return f"{self._service} changes the Lease faster than it can be written"

    def _new(self, spec: Mapping[str, Any], **about: Any) -> dict[str, Any]:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, **about},
            "spec": spec,
        }

    # The lock

    async def _acquire(self, owner: str, deadline: float) -> Outcome:
        self._identity = f"{shown(owner)[:100]}_{self._mark}"
        found, began = await self._get(deadline), now_s()
        spec = _spec(found or {})
        epoch, holder = _epoch(spec), spec.get("holderIdentity") or ""
        if found is not None:
            self._lease = found
            look = tuple(repr(spec.get(name)) for name in ("holderIdentity", "renewTime", "acquireTime", "leaseTransitions"))
            if self._seen[0] != look:
                self._seen = look, began
            if holder == self._identity:  # our own earlier try, whose answer was lost
                self._epoch, self._until_s = epoch, began
                return await self._renew(deadline)
            waits_s = self._seen[1] + (count(spec.get("leaseDurationSeconds")) or self._ttl_s) - began
            if holder and waits_s > 0:
                held = f"the lock is held by {shown(holder)} (epoch {epoch})"
                says = f"{held}; it is over if nothing changes for {waits_s:.0f} s"
                return failed(says, holder=shown(holder), waits_s=round(waits_s, 3))
        began, now = now_s(), _stamp()
        taken = {**spec, "holderIdentity": self._identity, "acquireTime": now, "renewTime": now,
                 "leaseDurationSeconds": self._ttl_s, "leaseTransitions": epoch + 1}  # fmt: skip
        if found is None:
            status, lease = await self._ask("POST", "", self._new(taken), deadline)
        else:
            status, lease = await self._ask("PUT", f"/{self._name}", {**found, "spec": taken}, deadline)
        if status == 409:
            return failed("somebody else took the lock at the same moment")
        self._check(lease, epoch + 1)
        self._lease = dict(lease)
        return self._take(epoch + 1, began + self._ttl_s)

    async def _prolong(self, deadline: float) -> int | str:
        if not await self._change(deadline, leaseDurationSeconds=self._ttl_s):
            return ""
        self._check(self._lease, self._epoch)
        return self._ttl_s

    async def _free(self, deadline: float) -> None:
        await self._change(deadline, holderIdentity=None, leaseDurationSeconds=1)

    async def _change(self, deadline: float, **fields: object) -> bool:
        """Changes the Lease that we hold; False if it is lost. Tries again after somebody else's change, such as a label."""
        for _ in range(3):
            spec = _spec(self._lease)
            if spec.get("holderIdentity") != self._identity or _epoch(spec) != self._epoch:
                return False
            changed = {name: value for name, value in {**spec, "renewTime": _stamp(), **fields}.items() if value is not None}
            status, answer = await self._ask("PUT", f"/{self._name}", {**self._lease, "spec": changed}, deadline)
            if status not in (404, 409):
                self._lease = dict(answer)
                return True
            found = None if status == 404 else await self._get(deadline)
            if found is None:
                return False
            self._lease = found
        raise Unanswered("changes the Lease faster than it can be renewed")

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
        """Returns an answer that is 2xx, 404 or 409; Unanswered for the rest, which says nothing about the lock."""
        seconds = max(_LEAST_S, deadline - now_s())
        status, found = believed(await self._cluster.ask(method, self._path + path, body, seconds))
        if status in (401, 403):
            raise Unanswered(f"answers {status}: the service account may not {method} this Lease")
        if not (200 <= status < 300 or status == 409 or (status == 404 and method != "POST")):
            raise Unanswered(f"answers {status}")
        return status, found


def _spec(lease: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns its spec; a Lease without one was never held."""
    spec = lease.get("spec") or {}
    if lease.get("kind", "Lease") != "Lease" or not isinstance(spec, dict):
        raise Unanswered("answers something that is no Lease")
    if not isinstance(spec.get("holderIdentity") or "", str):
        raise Unanswered("answers something that is no Lease")
    return spec


def _epoch(spec: Mapping[str, Any]) -> int:
    found = spec.get("leaseTransitions") or 0
    if found == 0 or is_epoch(found):
        return int(found)
    raise Unanswered("answers a Lease whose leaseTransitions is no count")


def _stamp() -> str:
    """Returns the time now, for people to read: no guard compares it with its own clock."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
