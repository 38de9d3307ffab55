"""Asks the cluster who a user of guard's API is (TokenReview) and what the user may do (SubjectAccessReview).

A user who may `get` pods in every namespace of the fleet may read; one who may `create` `pods/eviction` for a pod may act on
that engine; one who may `update` the Lease of guard's namespace may act on everything. Answers are kept for a minute.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from plimsoll.doctor.read.redact_text import shown_line
from plimsoll.guard.adapters.cluster import LEASE_NAME, ClusterClient, reason_of
from plimsoll.guard.adapters.kubernetes import Pod
from plimsoll.net.client import table
from plimsoll.net.server import HttpAnswer, error

BELIEVED_S = 60.0
MOST_KEPT = 1_000
TIMEOUT_S = 5.0
_TOKENS = "/apis/authentication.k8s.io/v1/tokenreviews"
_ACCESS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


class ClusterIdentities:
    """Identifies users by the cluster. `asked_about` returns the engine of a path, `pod` the pod of an engine."""

    def __init__(
        self,
        cluster: ClusterClient,
        namespaces: Sequence[str],
        asked_about: Callable[[str], str],
        pod: Callable[[str], Pod | None],
        clock: Callable[[], float] = time.monotonic,
        lease: str = LEASE_NAME,
    ) -> None:
        self._lease = lease
        self._cluster, self._asked_about, self._pod, self._clock = cluster, asked_about, pod, clock
        self._namespaces = tuple(namespaces) or (cluster.namespace(),)
        self._known: dict[bytes, tuple[float, str | HttpAnswer]] = {}

    async def identify(self, token: str, method: str, path: str) -> str | HttpAnswer:
        """Returns the user's name, or an answer: 401 for an unknown token, 403 for a missing right, 503 without the cluster."""
        pod = self._pod(self._asked_about(path)) if method == "POST" else None
        # What the user must be allowed to do with kubectl.
        needs = [{"verb": "get", "resource": "pods", "namespace": space} for space in self._namespaces]
        if pod is not None:
            about = {"namespace": pod.namespace, "name": pod.name}
            needs = [{"verb": "create", "resource": "pods", "subresource": "eviction", **about}]
        elif method == "POST":
            about = {"namespace": self._cluster.namespace(), "name": self._lease}
            needs = [{"verb": "update", "group": "coordination.k8s.io", "resource": "leases", **about}]
        key = hashlib.sha256(repr((token, needs)).encode()).digest()
        until_s, found = self._known.get(key, (0.0, ""))
        if self._clock() < until_s:
            return found
        found = await self._ask(token, needs)
        if not isinstance(found, HttpAnswer) or found.status != 503:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            self._known[key] = self._clock() + BELIEVED_S, found
        return found

    async def _ask(self, token: str, needs: list[dict[str, str]]) -> str | HttpAnswer:
        body: dict[str, Any] = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        reply = await self._cluster.ask("POST", _TOKENS, body, TIMEOUT_S)
        if reply.status not in (200, 201):
            return error(503, f"the cluster cannot say whose token this is: {reason_of(reply)}")
        status = table(reply.table().get("status"))
        user = table(status.get("user"))
        name = user.get("username")
        if status.get("authenticated") is not True or not isinstance(name, str) or not name:
            return error(401, "neither guard nor the cluster knows this token")
        shown, groups = shown_line(name)[:200], user.get("groups")
        for wanted in needs:
            spec = {"user": name, "groups": groups if isinstance(groups, list) else [], "resourceAttributes": wanted}
            spec |= {key: user[key] for key in ("uid", "extra") if user.get(key)}  # a cloud's authorizer may need them
            body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
            reply = await self._cluster.ask("POST", _ACCESS, body, TIMEOUT_S)
            if reply.status not in (200, 201):
                return error(503, f"the cluster cannot say what {shown} may do: {reason_of(reply)}")
            if table(reply.table().get("status")).get("allowed") is not True:
                what = f"{wanted['verb']} {wanted['resource']}{'/eviction' if 'subresource' in wanted else ''}"
                return error(403, f"{shown} may not {what} in namespace {wanted['namespace']}, so may not do this here")
        return shown
