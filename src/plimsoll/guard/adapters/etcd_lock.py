"""The fleet's lock in etcd, by its JSON gateway: a key that lives as long as its lease, and whose create revision is the epoch.

etcd's revision grows with every change of anything in it, for as long as the cluster lives, so each holder's epoch is greater
than all before. A cluster that was set up anew or restored from a backup counts from an earlier number: then gates that saw
greater epochs refuse every deed until their engines start again, which is safe. A holder that was killed keeps the others
waiting for the rest of its lease. One that was stopped (SIGSTOP) for longer than that has lost the lock: `renew` tells it so.
"""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from plimsoll.errors import BadInput
from plimsoll.guard import config_fields as key
from plimsoll.guard.act.ports import Outcome, failed, unsure
from plimsoll.guard.adapters.locks import (
    OWNER_MAX,
    TIMEOUT_S,
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
from plimsoll.net.client import HttpClient

MOST_BYTES = 1 << 20  # whatever lies under the key, somebody holds it
_LEAST_S = 0.05
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
        """An address and a key; a user with a password, a certificate with its key."""
        if not self.endpoints or not self.lock_key:
            raise key.WrongKey("key" if self.endpoints else "etcd", "etcd needs an address and a key")
        if ("user" in given) != ("password_file" in given) or ("cert_file" in given) != ("key_file" in given):
            raise key.WrongKey("", "user and password_file go together, and so do cert_file and key_file")
        return self

    def build(self) -> EtcdLock:
        return EtcdLock(self)


class _Key(NamedTuple):
    """What lies under the key."""

    epoch: int
    lease: int
    owner: str
    mark: str


class EtcdLock(ServiceLock):
    """The lock under one key, at whichever endpoint answers."""

    def __init__(self, config: EtcdLockConfig, *, timeout_s: float = TIMEOUT_S) -> None:
        endpoints, lock_key, ttl_s = config.endpoints, config.lock_key, config.ttl_s
        if not endpoints or not lock_key or not 1 <= ttl_s <= 3600:
            raise BadInput("a lock in etcd needs an endpoint, a key, and 1 to 3600 seconds to live")
        if any("?" in endpoint or endpoint.startswith("unix:") for endpoint in endpoints):
            raise BadInput("a lock's address must look like http://HOST:PORT or https://HOST:PORT")
        self._servers = [HttpClient(endpoint, tls=self._trust) for endpoint in endpoints]
        places = ", ".join(urlsplit(server.shown).netloc for server in self._servers)
        super().__init__("etcd", f"etcd key {shown(lock_key)} at {places}", ttl_s, timeout_s)
        self._key = base64.b64encode(lock_key.encode("utf-8", "surrogateescape")).decode()
        self._config, self._token = config, ""
        self._lease = self._last_epoch = 0

    async def _acquire(self, owner: str, deadline: float) -> Outcome:
        found = await self._look(deadline)
        if found is None:
            began = now_s()
            lease, ttl_s = await self._grant(deadline)
            found = await self._put(owner, lease, deadline)
            if found.lease == lease:
                return await self._take(found, began + ttl_s, deadline)
            await self._forget(lease, deadline)
        if found.mark != self._mark:
            return failed(f"the lock is held by {shown(found.owner)} (epoch {found.epoch})", holder=shown(found.owner))
        # An earlier try of ours, whose answer was lost: how much of its lease is left, only etcd can tell.
        self._lease, self._last_epoch = found.lease, found.epoch
        self._held = Grant(found.epoch, now_s())
        return await self._renew(self._held, deadline)

    async def _take(self, found: _Key, until_s: float, deadline: float) -> Outcome:
        if found.epoch <= self._last_epoch:
            await self._forget(found.lease, deadline)
            return unsure(f"etcd's revision went back from {self._last_epoch} to {found.epoch}: was it restored from a backup?")
        self._lease, self._last_epoch = found.lease, found.epoch
        self._held = Grant(found.epoch, until_s)
        return ours(self._held)

    async def _prolong(self, held: Grant, deadline: float) -> int | str:
        body = await self._ask("/v3/lease/keepalive", {"ID": str(self._lease)}, deadline)
        result = body.get("result")
        ttl_s = count(result.get("TTL", 0)) if isinstance(result, dict) else None
        if ttl_s is None:
            raise Unanswered("answers something odd to a renewal")
        found = await self._look(deadline) if ttl_s else None
        if found is not None and (found.epoch, found.mark) == (held.epoch, self._mark):
            return ttl_s
        now = f"held by {shown(found.owner)} (epoch {found.epoch})" if found else "free, or soon somebody else's"
        return f": it is {now}"

    async def _free(self, held: Grant, deadline: float) -> None:
        del held
        await self._revoke(self._lease, deadline)

    async def _look(self, deadline: float) -> _Key | None:
        return _key_in(await self._ask("/v3/kv/range", {"key": self._key}, deadline))

    async def _grant(self, deadline: float) -> tuple[int, int]:
        """A lease and its seconds: etcd may give more than was asked for."""
        body = await self._ask("/v3/lease/grant", {"TTL": str(self._ttl_s)}, deadline)
        lease, ttl_s = count(body.get("ID")), count(body.get("TTL"))
        if not lease or not ttl_s:
            raise Unanswered("answers something odd instead of a lease")
        return lease, ttl_s

    async def _put(self, owner: str, lease: int, deadline: float) -> _Key:
        """Make the key if there is none; what lies there then, ours or another's."""
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
        answer = last.get("response_range") if isinstance(last, dict) else None
        found = _key_in(answer) if isinstance(answer, dict) else None
        if found is None or (body.get("succeeded") is True) != (found.lease == lease and found.mark == self._mark):
            raise Unanswered("answers something odd instead of the key")
        return found

    async def _revoke(self, lease: int, deadline: float) -> None:
        try:
            await self._ask("/v3/lease/revoke", {"ID": str(lease)}, deadline)
        except _NoLease:
            return  # it was over already

    async def _forget(self, lease: int, deadline: float) -> None:
        """A lease that is not needed; if this fails it ends by itself."""
        with contextlib.suppress(Unanswered):
            await self._revoke(lease, deadline)

    async def _ask(self, path: str, body: Mapping[str, Any], deadline: float) -> Mapping[str, Any]:
        if self._config.user and not self._token:
            await self._authenticate(deadline)
        status, found = await self._anywhere(path, body, deadline)
        if self._config.user and status in (400, 401) and any(words in _error(found) for words in _UNAUTHENTICATED):
            await self._authenticate(deadline)  # a token of etcd's lasts some minutes
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
        """The first answer of an endpoint that is not in trouble; that one is asked first the next time."""
        last = Unanswered("cannot be asked")
        data, headers = json.dumps(body).encode(), {"Authorization": self._token} if self._token else {}
        for index, server in enumerate(tuple(self._servers)):
            seconds = (deadline - now_s()) / (len(self._servers) - index)
            if seconds < _LEAST_S:
                break
            try:
                status, found = believed(
                    await server.call("POST", path, data, headers, deadline_s=seconds, most_bytes=MOST_BYTES)
                )
            except Unanswered as problem:
                last = problem
                continue
            if status < 500:
                self._servers = [server, *(other for other in self._servers if other is not server)]
                return status, found
            last = Unanswered(f"is in trouble: {status} {_error(found)}".rstrip())
        raise last

    def _trust(self) -> ssl.SSLContext:
        config = self._config
        context = ssl.create_default_context(cafile=config.ca_file or None)
        if config.cert_file:
            context.load_cert_chain(config.cert_file, config.key_file or None)
        return context


class _NoLease(Unanswered):
    """The lease that was named is over."""


def _error(body: Mapping[str, Any]) -> str:
    found = body.get("error")
    return shown(found) if isinstance(found, str) and found else ""


def _key_in(answer: Mapping[str, Any]) -> _Key | None:
    """The key in the answer to a range; whatever else lies under it, somebody holds it."""
    found = answer.get("kvs")
    if not found and "header" in answer:
        return None
    kv = found[0] if isinstance(found, list) and len(found) == 1 else None
    epoch, lease = (count(kv.get("create_revision")), count(kv.get("lease", 0))) if isinstance(kv, dict) else (None, None)
    if kv is None or epoch is None or lease is None or not is_epoch(epoch):
        raise Unanswered("answers something odd instead of the key")
    try:
        value = json.loads(base64.b64decode(kv.get("value", ""), validate=True))
    except (ValueError, TypeError, RecursionError):
        value = None
    names = value if isinstance(value, dict) else {}
    return _Key(epoch, lease, str(names.get("owner", "somebody else")), str(names.get("mark", "")))
