"""Takes a pod out of its Service and away from its owner for inspection, at a person's request: one at a time, for a time.

Guard removes the label by which the Service selects, so its owner makes another pod and this one keeps its GPUs and its memory.
It has no owner then: at the end guard evicts it. The journal has the quarantine, so that a later guard can do it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from plimsoll.guard.act.decide import ASKED, BlockedAction, consider
from plimsoll.guard.act.journal_entry import SWITCH, Entry
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.adapters.cluster import ClusterClient, evict, pod_path, reason_of
from plimsoll.guard.adapters.kubernetes import Pod
from plimsoll.guard.daemon.conductor import ActionPorts, Announcement
from plimsoll.guard.judge.tracker import Grade

QUARANTINE = "quarantine"  # the step of its journal entries
LONGEST_S = 14_400.0
LOOK_EVERY_S = 10.0
NOTE = "plimsoll.dev/quarantined"


class Quarantine:
    """Quarantines one pod at a time. `label` is the one that is removed; `pod` finds the pod of an engine."""

    def __init__(
        self,
        label: str,
        ports: ActionPorts,
        policy: ActPolicy,
        cluster: ClusterClient,
        pod: Callable[[str], Pod | None],
        kept: Callable[[], list[Entry]],
    ) -> None:
        self._label, self._ports, self._policy, self._cluster, self._pod, self._kept = label, ports, policy, cluster, pod, kept

    def held(self) -> Entry | None:
        """Returns the journal entry of the pod in quarantine; None if there is none."""
        last = {entry.engine: entry for entry in self._kept() if entry.kind == SWITCH and entry.step == QUARANTINE}
        return next((entry for entry in last.values() if entry.fields.get("on")), None)

    async def begin(self, engine: str, for_s: float, who: str) -> Outcome:
        """Removes the label; failed, with the reason, where a restart of the pod would be blocked."""
        if (held := self.held()) is not None:
            return failed(f"{held.engine} is in quarantine: one at a time")
        pod, view = self._pod(engine), self._ports.view(frozenset())
        status = next((one for one in view.engines if one.name == engine), None)
        if pod is None or status is None:
            return failed("it is no pod that was found")
        decision = consider(view, self._policy, status, Grade.RESTART, ASKED, "")
        if isinstance(decision, BlockedAction):
            return failed(decision.message)
        lock = await self._ports.lock.acquire(f"quarantine of {engine}")
        if not lock.is_done:
            return lock
        try:
            until = self._ports.wall() + min(for_s, LONGEST_S)
            fields = {"on": True, "who": who, "until": until, "namespace": pod.namespace, "pod": pod.name, "uid": pod.uid}
            self._ports.journal.append(SWITCH, engine=engine, step=QUARANTINE, fields=fields)  # first: its end must be known
            note, path = {NOTE: f"{until:.0f} by {who}"}, pod_path(pod.namespace, pod.name)
            patch = {"metadata": {"uid": pod.uid, "labels": {self._label: None}, "annotations": note}}
            reply = await self._cluster.ask("PATCH", path, patch, content="application/merge-patch+json")
        finally:
            await self._ports.lock.release()
        if reply.status == 200:
            span = f"for {min(for_s, LONGEST_S) / 60:.0f} min by {who}"
            says = f"in quarantine {span}: label {self._label} removed; its owner makes another pod"
            self._ports.tell(Announcement(engine, says))
            return done(says)
        if not reply.status:
            return unsure(f"whether its label was removed is not known: {reason_of(reply)}")
        self._end(engine)
        return failed(f"its label was not removed: {reason_of(reply)}")

    async def look(self) -> None:
        """Evicts the pod whose time is over."""
        held = self.held()
        until = None if held is None else held.fields.get("until")
        if held is not None and (not isinstance(until, int | float) or self._ports.wall() >= until):
            await self._evict(held)
        await asyncio.sleep(LOOK_EVERY_S)

    async def _evict(self, held: Entry) -> None:
        reply = await evict(self._cluster, *(str(held.fields.get(name)) for name in ("namespace", "pod", "uid")))
        if reply.status in (200, 201, 404, 409):
            self._end(held.engine)
            self._ports.tell(Announcement(held.engine, "its quarantine is over: the pod was evicted, or is gone"))

    def _end(self, engine: str) -> None:
        self._ports.journal.append(SWITCH, engine=engine, step=QUARANTINE, fields={"on": False})
