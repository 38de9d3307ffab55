"""An engine that is a pod: evicted through the API, so that disruption budgets hold, and replaced by whoever owns it.

The uid goes along as a precondition: another pod of the same name is never evicted. Nothing is deleted by force, and a pod that
nobody would replace is left alone. A guard in the pod itself would evict itself, so there it only watches.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from plimsoll.doctor.read.redact_text import shown_line
from plimsoll.errors import BadInput
from plimsoll.guard import config_fields as key
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.adapters.cluster import OBJECT_NAME, ClusterClient, namespace_key
from plimsoll.net.client import Lost, Reply, table

LOOK_EVERY_S = 1.0
MOST_PODS = 500
_LABELS = r"[A-Za-z0-9_./=!,() -]{0,512}"
_UID = re.compile(r"[A-Za-z0-9-]{1,64}")
_GONE = "gone"


@dataclass(frozen=True, slots=True)
class PodConfig(key.ConfigTable):
    """restart = {kubernetes = ...}."""

    pod: str = key.word(
        None, "a pod by its name, which is evicted",
        key="kubernetes", example='"vllm-0"', pattern=OBJECT_NAME, pattern_name="the name of a pod",
    )  # fmt: skip
    namespace: str = namespace_key("of the pod; default: guard's own")
    selector: str = key.word(
        "", "labels by which the pod that takes its place is known", pattern=_LABELS, pattern_name="a label selector"
    )

    def build(self) -> PodEviction:
        """The pod; BadInput where guard runs in no cluster."""
        return PodEviction(self.pod, self.namespace, selector=self.selector)


class PodEviction:
    """One pod: the one that bears this name when it is first looked at, or the one with `uid`.

    What `learn` tells is to be written down before `stop`, and given back by `recall` to a guard that comes later: only so does
    that one know the old pod from the new, which may bear the same name.

    Experimental: no Kubernetes runs where the tests run, only the bytes are known.
    """

    replaces = True

    def __init__(
        self,
        pod: str,
        namespace: str = "",
        *,
        uid: str = "",
        selector: str = "",
        cluster: ClusterClient | None = None,
        environ: Mapping[str, str] = os.environ,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        """`selector` narrows the search for the replacement. BadInput for what cannot be a name, or where this is no pod."""
        self._cluster = cluster or ClusterClient(environ=environ)
        own = self._cluster.namespace()
        namespace = namespace or own
        if not re.fullmatch(OBJECT_NAME, pod) or not re.fullmatch(OBJECT_NAME, namespace):
            raise BadInput(f"{shown_line(f'{namespace}/{pod}')!r} is no name of a pod")
        if not re.fullmatch(_LABELS, selector) or (uid and not _UID.fullmatch(uid)):
            raise BadInput("the selector or the uid holds letters that it cannot have")
        here = {environ.get(name, "") for name in ("PLIMSOLL_POD", "POD_NAME", "HOSTNAME")}
        self.is_own_pod = pod in here and own in ("", namespace)
        self._pod, self._namespace, self._selector = pod, namespace, selector
        self._given, self._uid, self._owner = uid, uid, ""
        self._siblings: frozenset[str] = frozenset()
        self._look_every_s = look_every_s
        self.label = f"the pod {namespace}/{pod}"

    async def learn(self) -> Outcome:
        """Which pod it is, who owns it and who else is there: as facts, for the record, before anything is done."""
        if self.is_own_pod:
            return failed("guard runs in this pod: a sidecar only watches", own_pod=True)
        # An action begins: one of the same name that replaced the last is another pod.
        self._uid, self._owner, self._siblings = self._given, "", frozenset()
        answer = await self._look()
        if isinstance(answer, Outcome):
            return answer
        if isinstance(answer, str):
            return failed("that pod is gone already", was_running=False)
        return await self._learn(answer) or done(f"it is {self.label}, and will be replaced", **self._facts())

    def recall(self, facts: Mapping[str, str | int | float | bool]) -> None:
        """What an earlier guard learned of it; anything odd is left out."""
        uid, owner, siblings = (facts.get(name) for name in ("uid", "owner", "siblings"))
        self._uid = uid if isinstance(uid, str) and _UID.fullmatch(uid) else self._uid
        self._owner = owner if isinstance(owner, str) and _UID.fullmatch(owner) else self._owner
        if isinstance(siblings, str):
            self._siblings = frozenset(item for item in siblings.split(",") if _UID.fullmatch(item))

    async def is_running(self) -> bool | None:
        """Whether that very pod is still there, also while it ends; None where nobody knows."""
        answer = await self._look()
        return None if isinstance(answer, Outcome) else answer != _GONE

    async def pids(self) -> tuple[int, ...]:
        """None that guard could see from here."""
        return ()

    async def stop(self, deadline_s: float) -> Outcome:
        """Evict it and wait until it is gone; past the deadline it is left to Kubernetes, and that is said."""
        if self.is_own_pod:
            return failed("guard runs in this pod: a sidecar only watches", own_pod=True)
        answer = await self._look()
        if isinstance(answer, Outcome):
            return answer
        if isinstance(answer, str):
            return done("that pod is gone already", was_running=False, **self._facts())
        if not self._owner and (why := await self._learn(answer)) is not None:
            return why
        if not table(answer.get("metadata")).get("deletionTimestamp"):
            evicted = await self._evict()
            if evicted is not None:
                return evicted
        return await self._wait_gone(deadline_s)

    async def start(self) -> Outcome:
        """Whoever owns the pod makes a new one: done as soon as it is there, with `ready` and its name and address."""
        if not self._owner:
            return unsure("who would make the new pod is not known: the pod was not evicted by this guard")
        pods = await self._pods()
        if isinstance(pods, Outcome):
            return pods
        fresh = [pod for pod in pods if _uid(pod) not in self._siblings and _uid(pod) != self._uid]
        fresh = [pod for pod in fresh if not table(pod.get("metadata")).get("deletionTimestamp")]
        if not fresh:
            return failed("there is no new pod yet", waiting=True)
        newest = max(fresh, key=lambda pod: (_is_ready(pod), str(table(pod.get("metadata")).get("creationTimestamp"))))
        name = shown_line(str(table(newest.get("metadata")).get("name")))[:253]
        address = table(newest.get("status")).get("podIP")
        facts: dict[str, str | float | bool] = {"pod": name, "new_uid": _uid(newest), "ready": _is_ready(newest)}
        facts |= {"ip": shown_line(address)[:45]} if isinstance(address, str) else {}
        return done(f"the new pod is {name}" + (", and ready" if facts["ready"] else ", and not ready yet"), **facts)

    # The pod

    async def _look(self) -> Mapping[str, Any] | str | Outcome:
        """The pod, or that it is gone, or why nobody knows."""
        reply = await self._cluster.ask("GET", self._path(f"pods/{quote(self._pod, safe='')}"))
        if reply.status == 404 and reply.table().get("kind") == "Status":
            return _GONE
        if reply.status != 200:
            return unsure(f"the cluster does not say how the pod is: {_reason(reply)}", **_status(reply))
        answer = reply.table()
        uid = _uid(answer)
        if not uid or table(answer.get("metadata")).get("name") != self._pod:
            return unsure("the cluster answers something that is not this pod")
        self._uid = self._uid or uid
        return answer if uid == self._uid else _GONE

    async def _learn(self, pod: Mapping[str, Any]) -> Outcome | None:
        """Who will replace it, and who is there already; a reason not to go on, if there is one."""
        owner = next((item for item in _list(pod, "metadata", "ownerReferences") if item.get("controller") is True), {})
        kind, uid = owner.get("kind"), owner.get("uid")
        if not isinstance(uid, str) or not _UID.fullmatch(uid) or kind == "Job":
            return failed("nobody would replace this pod: it has no controller that does", bare=True)
        self._owner = uid
        pods = await self._pods()
        if isinstance(pods, Outcome):
            return pods
        self._siblings = frozenset(_uid(item) for item in pods if _uid(item))
        return None

    async def _pods(self) -> list[Mapping[str, Any]] | Outcome:
        query = f"?limit={MOST_PODS}" + (f"&labelSelector={quote(self._selector, safe='')}" if self._selector else "")
        reply = await self._cluster.ask("GET", self._path("pods") + query)
        if reply.status != 200:
            return unsure(f"the cluster does not list its pods: {_reason(reply)}", **_status(reply))
        answer = reply.table()
        if not isinstance(answer.get("items"), list) or table(answer.get("metadata")).get("continue"):
            return unsure("the cluster lists more pods than guard reads, or none: give a selector")
        return [
            pod
            for pod in _list(answer, "items")
            if self._owner in [one.get("uid") for one in _list(pod, "metadata", "ownerReferences")]
        ]

    # The eviction

    async def _evict(self) -> Outcome | None:
        """None where it was taken, or had become needless; else why not."""
        body = {
            "apiVersion": "policy/v1", "kind": "Eviction",
            "metadata": {"name": self._pod, "namespace": self._namespace},
            "deleteOptions": {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": self._uid}},
        }  # fmt: skip
        reply = await self._cluster.ask("POST", self._path(f"pods/{quote(self._pod, safe='')}/eviction"), body)
        if isinstance(reply, Lost):
            # Asking again does the same as asking once: the uid is the precondition.
            says = f"whether the pod was evicted is not known: {reply.why}"
            return unsure(says, **self._facts()) if reply.was_sent else failed(says, unreachable=True)
        if reply.status in (200, 201) or reply.status in (404, 409):
            return None  # gone, or another pod bears the name: the wait for it tells
        if reply.status == 429:
            causes = _list(reply.table(), "details", "causes")
            is_budget = any(cause.get("reason") == "DisruptionBudget" for cause in causes)
            why = "its disruption budget does not allow it now" if is_budget else "the cluster has too much to do"
            return failed(f"the pod was not evicted: {why}", budget=is_budget, status=429)
        if reply.status >= 500:
            return unsure(f"whether the pod was evicted is not known: {_reason(reply)}", status=reply.status)
        return failed(f"the pod was not evicted: {_reason(reply)}", status=reply.status)

    async def _wait_gone(self, deadline_s: float) -> Outcome:
        end = time.monotonic() + deadline_s
        while True:
            answer = await self._look()
            if isinstance(answer, str):
                return done("the pod was evicted and is gone", was_running=True, **self._facts())
            if time.monotonic() >= end:
                says = answer.message if isinstance(answer, Outcome) else "it is still ending"
                return unsure(f"the pod was evicted, but {says}", **self._facts())
            await asyncio.sleep(self._look_every_s)

    def _facts(self) -> dict[str, str | float | bool]:
        return {"uid": self._uid, "owner": self._owner, "siblings": ",".join(sorted(self._siblings))}

    def _path(self, rest: str) -> str:
        return f"/api/v1/namespaces/{quote(self._namespace, safe='')}/{rest}"


def _list(answer: Mapping[str, Any], *path: str) -> Iterator[Mapping[str, Any]]:
    """The objects of a list that may not be there."""
    *outer, last = path
    for name in outer:
        answer = table(answer.get(name))
    items = answer.get(last)
    return (item for item in (items if isinstance(items, list) else ()) if isinstance(item, dict))


def _uid(pod: Mapping[str, Any]) -> str:
    uid = table(pod.get("metadata")).get("uid")
    return uid if isinstance(uid, str) and _UID.fullmatch(uid) else ""


def _is_ready(pod: Mapping[str, Any]) -> bool:
    ready = (item for item in _list(pod, "status", "conditions") if item.get("type") == "Ready")
    return any(item.get("status") == "True" for item in ready)


def _status(reply: Reply | Lost) -> dict[str, int]:
    return {"status": reply.status} if reply.status else {}


def _reason(reply: Reply | Lost) -> str:
    if isinstance(reply, Lost):
        return reply.why
    if reply.status in (401, 403):
        return f"it answers {reply.status}: the service account may not do that"
    message = reply.table().get("message")
    return f"it answers {reply.status}" + (f": {shown_line(message)[:200]}" if isinstance(message, str) else "")
