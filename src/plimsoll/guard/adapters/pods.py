"""Finds engines among a cluster's pods: lists them once, then watches their changes; with `act`, their owners and nodes too.

A watch that ends is resumed where it ended. One that the server has forgotten (410 Gone) begins with a new list.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

from plimsoll.errors import BadInput
from plimsoll.guard import config_fields as key
from plimsoll.guard.adapters.cluster import NAMESPACE, ClusterClient, pod_path, reason_of
from plimsoll.guard.adapters.hooks import ReadinessConfig
from plimsoll.guard.adapters.kubernetes import (
    LABELS,
    RUNNING,
    Owner,
    OwnerStatus,
    Pod,
    PodConfig,
    node_leaving,
    owner_status,
    read_pod,
    retry_after_s,
    top_owner,
)
from plimsoll.guard.engine_config import LONGEST_NAME, EngineConfig
from plimsoll.net.address import server_address
from plimsoll.net.client import Lost, Reply, table

MOST_PODS = 5_000
MOST_PAGES = 100
PAGE_PODS = 500
MOST_NAMESPACES = 50
LIST_S = 30.0  # for all pages of a list
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
FLAPS_S = 900.0  # missing pods count against the fewest that the owner wanted in this time: an autoscaler may flap
FORBIDDEN_S = 600.0  # no question about nodes for this long after a 403
TROUBLES_SAID = 3


def few_of(troubles: Sequence[str]) -> str:
    """Returns the first of them, and how many more there are."""
    more = len(troubles) - TROUBLES_SAID
    return "; ".join([*troubles[:TROUBLES_SAID], *([f"and {more} more"] if more > 0 else [])])


def _namespaces(texts: tuple[str, ...]) -> tuple[str, ...]:
    if len(texts) > MOST_NAMESPACES:
        raise ValueError(f"at most {MOST_NAMESPACES} namespaces")
    for text in texts:
        if not re.fullmatch(NAMESPACE, text):
            raise ValueError(f"{text[:80]!r} is not the name of a namespace")
    return tuple(dict.fromkeys(texts))


@dataclass(frozen=True, slots=True)
class PodsConfig(key.ConfigTable):
    """[discover.kubernetes]: which pods are engines."""

    short_key: ClassVar[str] = "selector"

    selector: str = key.word(
        None, "labels of the pods; needed", example='"app=vllm"', pattern=f"(?!$){LABELS}", pattern_name="a label selector"
    )
    namespaces: tuple[str, ...] = key.words((), "one or several; default: guard's own", key="namespace", convert=_namespaces)
    port: int | None = key.count(None, 1, 65_535, "default: the port called http, else the only one, else 8000")
    scheme: str = key.choice("http", ("http", "https"), "how they are asked; whom guard believes by https: [tls]")
    act: bool = key.switch("with --act, pods of a Deployment or StatefulSet may be restarted too, by eviction")
    quarantine_label: str = key.word(
        "", "the label by which the Service selects: guardctl quarantine removes it, and so the pod from its owner",
        pattern=r"(?:[A-Za-z0-9./_-]{1,317})?", pattern_name="the name of a label",
    )  # fmt: skip
    quarantine_s: float = key.duration(3_600.0, 60.0, 14_400.0, "after which a pod in quarantine is evicted")


@dataclass(frozen=True, slots=True)
class PodStanding:
    """The cluster's reasons for and against an action on a pod."""

    group: str = ""  # its owner
    observed: str = ""  # why it is only observed
    leaving: str = ""  # it is ended by somebody else: deleted, or its node is taken back
    cordoned: str = ""
    rollout: str = ""
    wanted: int | None = None  # pods of its owner
    missing: int = 0  # pods that its owner has wanted for a while and that are not ready


@dataclass(slots=True)
class _Known:
    """An owner with its last known status."""

    top: Owner
    status: OwnerStatus | str
    wanted: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=1_000))  # when, and how many pods


class PodFinder:
    """The pods of a label selector that have an address; with `act` also their owners, and what blocks a restart."""

    def __init__(
        self, asked: PodsConfig, cluster: ClusterClient, every_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._asked, self._cluster, self._every_s, self._clock = asked, cluster, every_s, clock
        self.label = f"kubernetes {asked.selector}"
        self.is_acting = asked.act
        self.restarts: Mapping[str, int] = {}  # of the container, by the engine's name
        self.ended: Mapping[str, str] = {}  # why it will not come back
        self.left: dict[str, str] = {}  # why an engine is no longer listed
        self._pods: dict[str, dict[str, Pod]] = {}  # by namespace and name
        self._versions: dict[str, str] = {}  # of the last list or event, by namespace
        self._troubles: dict[str, str] = {}
        self._engines: dict[str, EngineConfig] = {}
        self._owners: dict[str, _Known] = {}  # by the uid of the pod's own controller
        self._nodes: dict[str, tuple[str, bool]] = {}
        self._nodes_from_s = 0.0
        self._wakes = asyncio.Event()

    @property
    def namespaces(self) -> tuple[str, ...]:
        return self._asked.namespaces or tuple(filter(None, (self._cluster.namespace(),)))

    @property
    def trouble(self) -> str:
        """The current problem, in words; while there is one, the last list stays in use."""
        if not self.namespaces:
            return "guard's own namespace cannot be read: is a service account mounted?"
        return few_of([text for text in self._troubles.values() if text])

    async def refresh(self) -> tuple[EngineConfig, ...]:
        """Lists every namespace; returns all engines."""
        await asyncio.gather(*map(self._list, self.namespaces))
        await self._mind_owners()
        return self.engines()

    async def follow(self, changed: Callable[[], None]) -> None:
        """Calls `changed` whenever a pod, an owner or a node has changed, for ever."""
        async with asyncio.TaskGroup() as tasks:
            for namespace in self.namespaces:
                tasks.create_task(self._watch(namespace, changed))
            while True:
                await self._mind_owners()
                changed()
                try:
                    async with asyncio.timeout(self._every_s):
                        await self._wakes.wait()
                except TimeoutError:
                    continue
                self._wakes.clear()
                await asyncio.sleep(min(1.0, self._every_s))  # an owner's status follows its pods

    def engines(self) -> tuple[EngineConfig, ...]:
        """Returns the running pods, named namespace/pod, without those that are being deleted.

        A pod that has run and ended for good stays, with the reason of its end, until it is deleted.
        """
        known, found, troubles = self._engines, dict[str, EngineConfig](), []
        pods = {pod.full_name[:LONGEST_NAME]: pod for inner in self._pods.values() for pod in inner.values()}
        for name, pod in pods.items():
            if pod.is_going:
                continue
            if pod.ended and name in known:
                found[name] = known[name]
            elif pod.phase == RUNNING and pod.address:
                host = f"[{pod.address}]" if ":" in pod.address else pod.address
                url = f"{self._asked.scheme}://{host}:{pod.port}"
                restart = PodConfig(pod.name, pod.namespace, self._asked.selector, pod.uid, is_owner_checked=True)
                acts = (ReadinessConfig(), restart) if self.is_acting else (None, None)
                try:
                    server_address(url)
                    found[name] = EngineConfig(name, url, balancer=acts[0], restart=acts[1])
                except BadInput as error:
                    troubles.append(f"{name}: {error}")
        for name in known.keys() - found.keys():
            gone = pods.get(name)
            self.left[name] = "its pod is gone" if gone is None else "its pod is being deleted" if gone.is_going else (
                f"its pod is {gone.phase or 'not running'}"
            )  # fmt: skip
        self.left = {name: why for name, why in self.left.items() if name not in found}
        self._engines = found
        self._troubles["pods"] = few_of(troubles)
        self.restarts = {name: pod.restarts for name, pod in pods.items() if pod.restarts is not None and name in found}
        self.ended = {name: pod.ended for name, pod in pods.items() if pod.ended and name in found}
        return tuple(found.values())

    def pod(self, name: str) -> Pod | None:
        """Returns the pod of an engine, also of one that has just left; None where it is unknown."""
        namespace, _, short = name.partition("/")
        return self._pods.get(namespace, {}).get(short)

    def standing(self, name: str) -> PodStanding:
        """Returns the cluster's reasons for and against an action on a discovered pod."""
        pod = self.pod(name)
        if pod is None:
            return PodStanding(observed="its pod is not known any more")
        if pod.observed or pod.owner is None:
            return PodStanding(observed=pod.observed or "its owner is not known")
        node, is_taken = self._nodes.get(pod.node, ("", False))
        leaving = "its pod is being deleted" if pod.is_going else f"its pod is about to be ended ({pod.disrupted})"
        leaving = leaving if pod.is_going or pod.disrupted else node if is_taken else ""
        known = self._owners.get(pod.owner.uid)
        if known is None or isinstance(known.status, str):
            return PodStanding(observed="its owner is not known yet" if known is None else str(known.status), leaving=leaving)
        status, group = known.status, f"{pod.namespace}/{known.top.kind}/{known.top.name}"
        if status.wanted == 0:
            leaving = leaving or f"{known.top} is scaled to zero"
        fewest = min((count for _, count in known.wanted), default=status.wanted)
        return PodStanding(
            group, "", leaving, "" if is_taken else node, status.rollout, status.wanted, max(0, fewest - status.ready)
        )

    # Pods

    async def _list(self, namespace: str) -> float:
        """Reads all pods of a namespace; returns the seconds until the next try, 0 where it worked."""
        query, found = {"labelSelector": self._asked.selector, "limit": str(PAGE_PODS)}, dict[str, Pod]()
        end_s = self._clock() + LIST_S
        for _ in range(MOST_PAGES):
            reply = await self._cluster.ask("GET", f"{pod_path(namespace)}?{urlencode(query)}")
            page = reply.table()
            items, about = page.get("items"), table(page.get("metadata"))
            if isinstance(reply, Lost) or reply.status != 200 or not isinstance(items, list):
                why = reason_of(reply) if reply.status != 200 else "it answers no list of pods"
                return self._failed(namespace, f"the pods of {namespace} cannot be listed: {why}", reply)
            found |= {pod.name: pod for item in items if (pod := read_pod(item, self._asked.port)).name}
            if len(found) > MOST_PODS:
                return self._failed(namespace, f"{namespace} has more than {MOST_PODS:,} pods of this selector", reply)
            if not about.get("continue"):
                self._pods[namespace], self._versions[namespace] = found, str(about.get("resourceVersion") or "")
                self._troubles[namespace] = ""
                return 0.0
            query["continue"] = str(about["continue"])
            if self._clock() > end_s:
                return self._failed(namespace, f"the pods of {namespace} were not listed within {LIST_S:g} s", reply)
        return self._failed(namespace, f"the list of the pods of {namespace} does not end", reply)

    def _failed(self, namespace: str, why: str, reply: Reply | Lost) -> float:
        self._troubles[namespace] = f"{why}; the last list stays in use"
        return (None if isinstance(reply, Lost) else retry_after_s(reply)) or FIRST_PAUSE_S

    async def _watch(self, namespace: str, changed: Callable[[], None]) -> None:
        pause_s = FIRST_PAUSE_S

        def take(event: Mapping[str, Any]) -> None:
            if self._take(namespace, event):
                self._wakes.set()
                changed()

        while True:
            if not self._versions.get(namespace):
                wait_s = await self._list(namespace)
                changed()
                if wait_s:
                    await asyncio.sleep(max(wait_s, pause_s))
                    pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
                    continue
            began_s = self._clock()
            query = {"labelSelector": self._asked.selector, "resourceVersion": self._versions[namespace]}
            reply = await self._cluster.watch(pod_path(namespace), query, take)
            if reply.status == 410:
                self._versions[namespace] = ""
            elif reply.status != 200 and not (isinstance(reply, Lost) and reply.was_begun):
                wait_s = self._failed(namespace, f"the pods of {namespace} cannot be watched: {reason_of(reply)}", reply)
                changed()
                await asyncio.sleep(max(wait_s, pause_s))
                # The server may have dropped the missed events: list everything again.
                self._versions[namespace] = ""
            elif self._clock() - began_s < FIRST_PAUSE_S:
                await asyncio.sleep(pause_s)  # a server that ends every watch at once
            pause_s = FIRST_PAUSE_S if self._clock() - began_s > LONGEST_PAUSE_S else min(LONGEST_PAUSE_S, 2 * pause_s)

    def _take(self, namespace: str, event: Mapping[str, Any]) -> bool:
        """Applies an event; True if it changed a pod."""
        kind, item = event.get("type"), table(event.get("object"))
        if kind == "ERROR":
            self._versions[namespace] = ""  # too old, or another error: list everything again
            return False
        version = table(item.get("metadata")).get("resourceVersion")
        if isinstance(version, str) and version:
            self._versions[namespace] = version
        pod = read_pod(item, self._asked.port)
        if kind not in ("ADDED", "MODIFIED", "DELETED") or not pod.name:
            return False
        pods = self._pods.setdefault(namespace, {})
        if kind == "DELETED":
            return pods.pop(pod.name, None) is not None
        before = pods.get(pod.name)
        if before is None and len(pods) >= MOST_PODS:
            self._troubles["pods"] = f"{namespace} has more than {MOST_PODS:,} pods of this selector"
            return False
        pods[pod.name] = pod
        return pod != before

    # Owners and nodes

    async def _mind_owners(self) -> None:
        """Asks for the owners of all pods and for their nodes, where guard may act."""
        if not self._asked.act:
            return
        pods = [pod for inner in self._pods.values() for pod in inner.values()]
        owners = {pod.owner: pod.namespace for pod in pods if pod.owner is not None and not pod.observed}
        self._owners = {owner.uid: self._owners[owner.uid] for owner in owners if owner.uid in self._owners}
        await asyncio.gather(*(self._mind_owner(owner, namespace) for owner, namespace in owners.items()))
        nodes = {pod.node for pod in pods if pod.node}
        if self._clock() >= self._nodes_from_s:
            self._nodes = {name: leaving for name, leaving in self._nodes.items() if name in nodes}
            await asyncio.gather(*map(self._mind_node, nodes))

    async def _mind_owner(self, owner: Owner, namespace: str) -> None:
        known, now_s = self._owners.get(owner.uid), self._clock()
        top = known.top if known is not None else await top_owner(self._cluster, namespace, owner)
        if isinstance(top, str):
            self._owners[owner.uid] = _Known(owner, top)
            return
        status = await owner_status(self._cluster, namespace, top)
        known = self._owners[owner.uid] = known or _Known(top, status)
        if isinstance(known.status, str) or not isinstance(status, str):
            known.status = status  # keep the last known status: the eviction asks once more
        if isinstance(status, OwnerStatus):
            known.wanted.append((now_s, status.wanted))
        while known.wanted and known.wanted[0][0] < now_s - FLAPS_S:
            known.wanted.popleft()

    async def _mind_node(self, name: str) -> None:
        reply = await self._cluster.ask("GET", f"/api/v1/nodes/{quote(name, safe='')}")
        if reply.status == 200:
            self._nodes[name] = node_leaving(reply.table())
        elif reply.status == 403:  # an optional right: without it a drained node shows by its pods
            self._nodes_from_s = self._clock() + FORBIDDEN_S
