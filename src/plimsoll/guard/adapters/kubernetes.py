"""A pod as an engine: the cluster's state of it and of its owner, and its restart by eviction.

It is evicted through the API, so that disruption budgets apply, and its owner replaces it. The uid is sent as a precondition:
another pod of the same name is never evicted. Nothing is deleted by force, and a pod that nobody would replace is left alone.
A guard in the pod itself would evict itself, so there it only watches.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from plimsoll.doctor.read.redact_text import shown_line
from plimsoll.errors import BadInput
from plimsoll.guard import config_fields as key
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.adapters.cluster import OBJECT_NAME, TAINTS, ClusterClient, evict, namespace_key, pod_path, reason_of
from plimsoll.net.client import Lost, Reply, table, tables

LOOK_EVERY_S = 1.0
MOST_PODS = 500
USUAL_PORT = 8000
RUNNING, OVER = "Running", ("Failed", "Succeeded")
WORDS_MAX = 100
ARGUMENTS_MAX = 64 << 10  # letters of a container's command that are searched
LONGEST_RETRY_S = 60.0
LABELS = r"[A-Za-z0-9_./=!,() -]{0,512}"
_UID = re.compile(r"[A-Za-z0-9-]{1,64}")
_NAME = re.compile(OBJECT_NAME)
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z")
_GONE = "gone"
REPLACING = ("ReplicaSet", "Deployment", "StatefulSet")
"""Kinds of owners that put another pod in the place of one that is evicted, alone."""
_GROUP_LABELS = {"leaderworkerset.sigs.k8s.io/name": "LeaderWorkerSet", "ray.io/cluster": "RayCluster"}
_ROLE_LABELS = ("llm-d.ai/role", "kserve.io/component-role")
_ROLES = ("prefill", "decode")
_SHARED = re.compile(
    r"(?<![\w-])(?:--(?:kv-transfer-config|ec-transfer-config|headless|node-rank|master-addr|data-parallel-(?:address|rank|"
    r"start-rank|hybrid-lb|external-lb|multi-port-external-lb))|-dp[aehmnr])(?![\w-])"
)
_NODES = re.compile(r"(?<![\w-])--nnodes[ =]+(?:[2-9]|\d\d)")


@dataclass(frozen=True, slots=True)
class Owner:
    """A controller that makes pods."""

    kind: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod as the cluster's API shows it."""

    namespace: str
    name: str
    uid: str
    address: str
    port: int
    phase: str
    is_going: bool  # it is being deleted
    restarts: int | None  # of the container that serves the port, else of the one with the most
    ended: str  # why it has ended for good, in words; empty if it has not, or if somebody may start it again
    owner: Owner | None  # its controller
    node: str
    is_ready: bool
    created: str
    disrupted: str  # what is about to end it, by its condition DisruptionTarget
    observed: str  # why it is never restarted alone

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}"


def read_pod(item: Any, port: int | None = None) -> Pod:
    """Reads a pod of a list. Its port is `port` if given, else the one called http, else the only one, else vLLM's own."""
    about, spec, status = (table(table(item).get(key)) for key in ("metadata", "spec", "status"))
    address, phase = status.get("podIP"), str(status.get("phase", ""))
    ports = [
        (container.get("name"), entry.get("name"), number)
        for container in tables(spec.get("containers"))
        for entry in tables(container.get("ports"))
        if isinstance(number := entry.get("containerPort"), int) and 0 < number < 65_536
    ]
    if port is None:
        named = [number for _, name, number in ports if name == "http"]
        port = named[0] if named else ports[0][2] if len(ports) == 1 else USUAL_PORT
    states = tables(status.get("containerStatuses"))
    serving = [container for container, _, number in ports if number == port and isinstance(container, str)]
    states = [state for state in states if state.get("name") in serving] or states
    counts = [count for state in states if isinstance(count := state.get("restartCount"), int) and not isinstance(count, bool)]
    uid, created, conditions = about.get("uid"), about.get("creationTimestamp"), tables(status.get("conditions"))
    disrupted = [one for one in conditions if one.get("type") == "DisruptionTarget" and one.get("status") == "True"]
    owner = controller_of(item)
    return Pod(
        str(about.get("namespace", "")),
        str(about.get("name", "")),
        uid if isinstance(uid, str) and _UID.fullmatch(uid) else "",
        address if isinstance(address, str) else "",
        port,
        phase,
        bool(about.get("deletionTimestamp")),
        max((count for count in counts if count >= 0), default=None),
        _ended(owner, spec, status, states) if phase in OVER else "",
        owner,
        _name(spec.get("nodeName")),
        any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions),
        created if isinstance(created, str) and _STAMP.fullmatch(created) else "",
        _words(disrupted[0].get("reason") or "about to be ended") if disrupted else "",
        _observed(table(about.get("labels")), owner, spec),
    )


def controller_of(item: Any) -> Owner | None:
    """Returns the owner that controls an object; None where it names none."""
    for owner in tables(table(table(item).get("metadata")).get("ownerReferences")):
        kind, name, uid = owner.get("kind"), _name(owner.get("name")), owner.get("uid")
        if owner.get("controller") is True and isinstance(kind, str) and isinstance(uid, str) and _UID.fullmatch(uid):
            return Owner(_words(kind), name, uid)
    return None


def _ended(owner: Owner | None, spec: Mapping[str, Any], status: Mapping[str, Any], states: list[Mapping[str, Any]]) -> str:
    """Returns why it has ended for good: the node may not start it again, and no controller would replace it; else ""."""
    if spec.get("restartPolicy") != "Never" or owner is not None:
        return ""
    for state in states:
        over = table(table(state.get("state")).get("terminated"))
        if isinstance(code := over.get("exitCode"), int):
            reason = str(over.get("reason") or "")[:WORDS_MAX]
            words = f" ({reason})" if reason and reason.isprintable() and reason not in ("Error", "Completed") else ""
            return f"its container ended with exit code {code}{words} and is not started again: restartPolicy is Never"
    return f"its pod is over ({_words(status.get('reason') or status.get('phase'))}), and restartPolicy is Never"


def _observed(labels: Mapping[str, Any], owner: Owner | None, spec: Mapping[str, Any]) -> str:
    """Returns why this pod is never restarted alone: it serves together with others, or nobody would replace it."""
    for label, kind in _GROUP_LABELS.items():
        if labels.get(label):
            return f"it is a pod of {kind} {_words(labels[label])}: guard never restarts one pod of such a group"
    role = next((labels[label] for label in _ROLE_LABELS if labels.get(label) in _ROLES), "")
    if role:
        return f"its role is {role}: requests live in two engines, and guard only observes those"
    containers = tables(spec.get("containers"))
    lists = [one.get(name) for one in containers for name in ("command", "args")]
    words = [str(word) for words in lists if isinstance(words, list) for word in words]
    # KServe passes flags in an environment variable, and so do scripts.
    words += [str(variable.get("value")) for one in containers for variable in tables(one.get("env"))]
    text = " ".join(words)[:ARGUMENTS_MAX].replace("_", "-")
    found = _SHARED.search(text)
    if found or _NODES.search(text):
        flag = found[0] if found else "--nnodes"
        return f"its command has {flag}: it serves together with other engines, and guard only observes those"
    if owner is None:
        return "nobody would replace this pod: it has no controller"
    if owner.kind not in REPLACING:
        return f"its owner is a {owner.kind}: guard only restarts pods of a Deployment, ReplicaSet or StatefulSet"
    return ""


@dataclass(frozen=True, slots=True)
class OwnerStatus:
    """The pods that an owner wants, those that are ready, and the rollout that runs now, if any."""

    wanted: int
    ready: int
    rollout: str = ""


def read_owner(owner: Owner, item: Mapping[str, Any]) -> OwnerStatus | None:
    """Reads an owner's status; None where the answer is about another object."""
    about, spec, status = (table(item.get(name)) for name in ("metadata", "spec", "status"))
    if about.get("uid") != owner.uid:
        return None
    wanted, total, ready, updated = (
        _count(place.get(name), default)
        for place, name, default in ((spec, "replicas", 1), (status, "replicas", 0), (status, "readyReplicas", 0),
                                     (status, "updatedReplicas", 0))
    )  # fmt: skip
    is_seen = _count(status.get("observedGeneration"), 0) >= _count(about.get("generation"), 0)
    rollout = ""
    if owner.kind != "ReplicaSet" and wanted and total and updated < total:
        is_same = owner.kind == "StatefulSet" and status.get("currentRevision") == status.get("updateRevision")
        rollout = "" if is_same else f"a rollout of {owner} is in progress: {updated} of {total} pods are of its new version"
    elif not is_seen and total:
        rollout = f"{owner} was changed a moment ago"
    return OwnerStatus(wanted, ready, rollout)


def node_leaving(item: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns why a node is about to lose its pods, and True if it is being taken back, False if it is only cordoned."""
    name, spec = _name(table(item.get("metadata")).get("name")), table(item.get("spec"))
    for taint in tables(spec.get("taints")):
        known = TAINTS.get(str(taint.get("key")))
        if known or taint.get("effect") == "NoExecute":
            return f"its node {name} has the taint {_words(taint.get('key'))}: {known or 'its pods are evicted'}", True
    return (f"its node {name} is cordoned", False) if spec.get("unschedulable") is True else ("", False)


@dataclass(frozen=True, slots=True)
class PodConfig(key.ConfigTable):
    """restart = {kubernetes = ...}."""

    pod: str = key.word(
        None, "a pod by its name, which is evicted",
        key="kubernetes", example='"vllm-0"', pattern=OBJECT_NAME, pattern_name="the name of a pod",
    )  # fmt: skip
    namespace: str = namespace_key("of the pod; default: guard's own")
    selector: str = key.word(
        "", "labels by which the pod that takes its place is known", pattern=LABELS, pattern_name="a label selector"
    )
    uid: str = ""  # of a pod that was discovered
    is_owner_checked: bool = False  # whether a rollout of its owner blocks a restart

    def build(self) -> PodEviction:
        """Returns the pod's restarter; BadInput where guard runs in no cluster."""
        return PodEviction(self)


class PodEviction:
    """One pod: the one that has this name at the first look, or the one with `uid`.

    The facts of `learn` must be in the journal before `stop`, and go to a later guard by `recall`: only so can it tell the old
    pod from the new one, which may have the same name.
    """

    replaces = True

    look_every_s = LOOK_EVERY_S

    def __init__(
        self, config: PodConfig, *, cluster: ClusterClient | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        """Raises BadInput for what cannot be a name (a cluster or an older journal may say anything), or outside a cluster."""
        self._cluster = cluster or ClusterClient(environ=environ)
        own, pod, selector, uid = self._cluster.namespace(), config.pod, config.selector, config.uid
        namespace = config.namespace or own
        if not re.fullmatch(OBJECT_NAME, pod) or not re.fullmatch(OBJECT_NAME, namespace):
            raise BadInput(f"{shown_line(f'{namespace}/{pod}')!r} is no name of a pod")
        if not re.fullmatch(LABELS, selector) or (uid and not _UID.fullmatch(uid)):
            raise BadInput("the selector or the uid holds letters that it cannot have")
        here = {environ.get(name, "") for name in ("PLIMSOLL_POD", "POD_NAME", "HOSTNAME")}
        self.is_own_pod = self._cluster.is_pod and pod in here and own in ("", namespace)
        self._pod, self._namespace, self._selector = pod, namespace, selector
        self._given, self._uid, self._owner = uid, uid, ""
        self._since, self._siblings = "", frozenset[str]()  # the newest pods of the owner while this one still existed
        self._is_owner_checked = config.is_owner_checked
        self._top: Owner | None = None
        self.label = f"the pod {namespace}/{pod}"

    async def learn(self) -> Outcome:
        """Returns the pod's uid, its owner and its siblings as facts for the journal, before anything is done."""
        if self.is_own_pod:
            return failed("guard runs in this pod: a sidecar only watches", own_pod=True)
        # A new action: a pod of the same name that replaced the last one is another pod.
        self._uid, self._owner, self._siblings = self._given, "", frozenset()
        answer = await self._look()
        if isinstance(answer, Outcome):
            return answer
        if isinstance(answer, str):
            return failed("that pod is gone already", was_running=False)
        if self._is_owner_checked and read_pod(answer).is_going:
            return failed("its pod is being deleted, by somebody else than guard")
        return await self._learn(answer) or done(f"it is {self.label}, and will be replaced", **self._facts())

    def recall(self, facts: Mapping[str, str | int | float | bool]) -> None:
        """Takes over the facts that an earlier guard learned; ignores malformed ones."""
        uid, owner, since, siblings = (facts.get(name) for name in ("uid", "owner", "since", "siblings"))
        self._uid = uid if isinstance(uid, str) and _UID.fullmatch(uid) else self._uid
        self._owner = owner if isinstance(owner, str) and _UID.fullmatch(owner) else self._owner
        self._since = since if isinstance(since, str) and _STAMP.fullmatch(since) else self._since
        if isinstance(siblings, str):
            self._siblings = frozenset(item for item in siblings.split(",") if _UID.fullmatch(item))

    async def is_running(self) -> bool | None:
        """True if that very pod still exists, also while it ends; None where unknown."""
        answer = await self._look()
        return None if isinstance(answer, Outcome) else answer != _GONE

    async def pids(self) -> tuple[int, ...]:
        """Returns none: guard cannot see a pod's processes."""
        return ()

    async def stop(self, deadline_s: float) -> Outcome:
        """Evicts it and waits until it is gone; past the deadline it is left to Kubernetes, and the outcome says so."""
        if self.is_own_pod:
            return failed("guard runs in this pod: a sidecar only watches", own_pod=True)
        answer = await self._look()
        if isinstance(answer, Outcome):
            return answer
        if isinstance(answer, str):
            return done("that pod is gone already", was_running=False, **self._facts())
        if not self._owner and (why := await self._learn(answer)) is not None:
            return why
        end_s = time.monotonic() + deadline_s
        if not table(answer.get("metadata")).get("deletionTimestamp"):
            evicted = await self._evict(end_s)
            if evicted is not None:
                return evicted
        while (answer := await self._look()) != _GONE:
            if time.monotonic() >= end_s:
                says = answer.message if isinstance(answer, Outcome) else "it is still ending"
                return unsure(f"the pod was evicted, but {says}", **self._facts())
            await asyncio.sleep(self.look_every_s)
        return done("the pod was evicted and is gone", was_running=True, **self._facts())

    async def start(self) -> Outcome:
        """Waits for the pod that the owner makes: done once it exists, with `ready` and its name and address."""
        if not self._owner:
            return unsure("who would make the new pod is not known: the pod was not evicted by this guard")
        pods = await self._pods()
        if isinstance(pods, Outcome):
            return pods
        fresh = [
            pod for pod in pods
            if pod.uid not in self._siblings and pod.uid != self._uid and pod.created >= self._since and not pod.is_going
        ]  # fmt: skip
        if not fresh:
            status = "" if self._top is None else await owner_status(self._cluster, self._namespace, self._top)
            if isinstance(status, str) or status.ready < status.wanted:
                return failed("there is no new pod yet", waiting=True)
            # Its owner was scaled down, or others of it came in its place.
            says = f"no pod takes its place: {self._top} wants {status.wanted}, and {status.ready} are ready"
            return done(says, no_replacement=True)
        newest = max(fresh, key=lambda pod: (pod.is_ready, pod.created))
        facts: dict[str, str | float | bool] = {"pod": newest.name, "new_uid": newest.uid, "ready": newest.is_ready}
        facts |= {"ip": shown_line(newest.address)[:45]} if newest.address else {}
        facts |= {"replacement": newest.full_name} if self._is_owner_checked else {}
        return done(f"the new pod is {newest.name}" + (", and ready" if newest.is_ready else ", and not ready yet"), **facts)

    # The pod

    async def _look(self) -> Mapping[str, Any] | str | Outcome:
        """Returns the pod, `_GONE`, or an outcome that says why it is unknown."""
        reply = await self._cluster.ask("GET", pod_path(self._namespace, self._pod))
        if reply.status == 404 and reply.table().get("kind") == "Status":
            return _GONE
        if reply.status != 200:
            return unsure(f"the cluster does not say how the pod is: {reason_of(reply)}")
        answer = reply.table()
        pod = read_pod(answer)
        if not pod.uid or pod.name != self._pod:
            return unsure("the cluster answers something that is not this pod")
        self._uid = self._uid or pod.uid
        return answer if pod.uid == self._uid else _GONE

    async def _learn(self, answer: Mapping[str, Any]) -> Outcome | None:
        """Learns its owner and its siblings; returns a reason not to go on, None if there is none."""
        pod = read_pod(answer)
        if pod.owner is None or pod.owner.kind == "Job":
            return failed("nobody would replace this pod: it has no controller that does", bare=True)
        if self._is_owner_checked:
            if pod.observed:
                return failed(pod.observed)
            top = self._top or await top_owner(self._cluster, self._namespace, pod.owner)
            if isinstance(top, str):
                return failed(top)
            self._top = top
            status = await owner_status(self._cluster, self._namespace, top)
            if isinstance(status, str) or status.rollout:
                return failed(status if isinstance(status, str) else status.rollout)
        self._owner = pod.owner.uid
        pods = await self._pods()
        if isinstance(pods, Outcome):
            return pods
        self._since = max((item.created for item in pods), default="")
        self._siblings = frozenset(item.uid for item in pods if item.uid and item.created == self._since)
        return None

    async def _pods(self) -> list[Pod] | Outcome:
        query = f"?limit={MOST_PODS}" + (f"&labelSelector={quote(self._selector, safe='')}" if self._selector else "")
        reply = await self._cluster.ask("GET", pod_path(self._namespace) + query)
        if reply.status != 200:
            return unsure(f"the cluster does not list its pods: {reason_of(reply)}")
        answer = reply.table()
        if not isinstance(answer.get("items"), list) or table(answer.get("metadata")).get("continue"):
            return unsure("the cluster lists more pods than guard reads, or none: give a selector")
        pods = [read_pod(item) for item in answer["items"]]
        return [pod for pod in pods if pod.owner is not None and pod.owner.uid == self._owner and _NAME.fullmatch(pod.name)]

    # The eviction

    async def _evict(self, end_s: float) -> Outcome | None:
        """Evicts it: None if accepted, or if the pod is gone already; else why not. Waits for a Retry-After within time."""
        while True:
            reply = await evict(self._cluster, self._namespace, self._pod, self._uid)
            if isinstance(reply, Lost):
                # Repeating is safe: the uid is the precondition.
                says = f"whether the pod was evicted is not known: {reply.why}"
                return unsure(says, **self._facts()) if reply.was_sent else failed(says, unreachable=True)
            if reply.status in (200, 201) or reply.status in (404, 409):
                return None  # gone, or another pod has the name: the wait for its end tells
            if reply.status != 429:
                break
            after_s = retry_after_s(reply)
            if after_s is None or time.monotonic() + after_s >= end_s:
                causes = tables(table(reply.table().get("details")).get("causes"))
                is_budget = any(cause.get("reason") == "DisruptionBudget" for cause in causes)
                why = "its disruption budget does not allow it now" if is_budget else "the cluster has too much to do"
                return failed(f"the pod was not evicted: {why}", budget=is_budget, status=429)
            await asyncio.sleep(after_s)
        if reply.status >= 500:
            return unsure(f"whether the pod was evicted is not known: {reason_of(reply)}", status=reply.status)
        return failed(f"the pod was not evicted: {reason_of(reply)}", status=reply.status)

    def _facts(self) -> dict[str, str | float | bool]:
        known = {"uid": self._uid, "owner": self._owner, "since": self._since, "siblings": ",".join(sorted(self._siblings))}
        return {**self.identity(), **known}

    def identity(self) -> dict[str, str]:
        """Returns the pod's name, namespace, selector and uid if it was discovered: a later guard may no longer find it."""
        if not self._is_owner_checked:
            return {}
        return {"pod": self._pod, "namespace": self._namespace, "selector": self._selector, "uid": self._uid}


async def top_owner(cluster: ClusterClient, namespace: str, owner: Owner) -> Owner | str:
    """Returns the Deployment of a ReplicaSet, or the owner itself; a text that says why where it is unknown."""
    if owner.kind != "ReplicaSet" or not owner.name:
        return owner
    reply = await cluster.ask("GET", _owner_path(namespace, owner))
    if reply.status != 200:
        return f"who owns {owner} is not known: {reason_of(reply)}"
    return controller_of(reply.table()) or owner


async def owner_status(cluster: ClusterClient, namespace: str, owner: Owner) -> OwnerStatus | str:
    """Returns an owner's status; a text that says why where it is unknown."""
    if owner.kind not in REPLACING or not owner.name:
        return f"its owner is a {owner.kind}: guard only restarts pods of a Deployment, ReplicaSet or StatefulSet"
    reply = await cluster.ask("GET", _owner_path(namespace, owner))
    status = read_owner(owner, reply.table()) if reply.status == 200 else None
    return status or f"whether a rollout of {owner} is in progress is not known: {reason_of(reply)}"


def _owner_path(namespace: str, owner: Owner) -> str:
    return f"/apis/apps/v1/namespaces/{quote(namespace, safe='')}/{owner.kind.lower()}s/{quote(owner.name, safe='')}"


def retry_after_s(reply: Reply) -> float | None:
    """Returns how long the server asks to wait; None where it does not say."""
    text = reply.headers.get("Retry-After", "")
    return min(LONGEST_RETRY_S, float(text)) if re.fullmatch(r"[0-9]{1,6}", text) else None


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else default


def _name(value: Any) -> str:
    return value if isinstance(value, str) and _NAME.fullmatch(value) else ""


def _words(value: Any) -> str:
    return shown_line(str(value)[: 4 * WORDS_MAX])[:WORDS_MAX] or "no reason given"
