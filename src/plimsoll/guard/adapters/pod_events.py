"""Writes guard's findings and actions as Events of their pods, where `kubectl describe pod` shows them.

They are few: at most BURST at once for a pod, then one in REFILL_S; a repetition of the last one is left out. An Event that
the cluster does not accept is lost: the journal and the webhook have it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from plimsoll.guard.adapters.cluster import ClusterClient, reason_of
from plimsoll.guard.adapters.kubernetes import Pod
from plimsoll.guard.judge.findings import code_of
from plimsoll.redaction import clean
from plimsoll.render.guard import Event, EventKind, sentence

BURST, REFILL_S = 10, 30.0
SAME_S = 300.0
MOST_WAITING = 200
MOST_PODS = 2_000
MESSAGE_MAX = 1_000  # letters; the API takes 1,024
FORBIDDEN_S = 600.0
_REASONS = {
    EventKind.OVER: "Recovered", EventKind.REACHED: "Reachable", EventKind.UNREACHABLE: "Unreachable",
    EventKind.NEEDS: "NeedsAttention", EventKind.ACTED: "GuardAction",
}  # fmt: skip
_WARNINGS = (EventKind.BEGINS, EventKind.UNREACHABLE, EventKind.NEEDS)


@dataclass(slots=True)
class _Meter:
    """Rate limit of one pod's Events, and the last one sent."""

    pod: Pod
    tokens: float = float(BURST)
    at_s: float = 0.0
    last: tuple[str, float] = ("", -SAME_S)


class PodEvents:
    """Writes Events. `pod` finds the pod of an engine, also of an engine that has just gone."""

    def __init__(
        self, cluster: ClusterClient, pod: Callable[[str], Pod | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster, self._pod, self._clock = cluster, pod, clock
        self._meters: dict[str, _Meter] = {}
        self._waiting: asyncio.Queue[tuple[Pod, Mapping[str, Any]]] = asyncio.Queue(MOST_WAITING)
        self.dropped = 0
        self.trouble = ""

    def put(self, event: Event) -> None:
        """Queues an Event for a change of an engine that is a pod, unless there were too many."""
        if event.what not in _REASONS and event.what is not EventKind.BEGINS:
            return
        pod, meter, now_s = self._pod(event.engine), self._meters.get(event.engine), self._clock()
        if pod is not None and (meter is None or meter.pod.uid != pod.uid):
            if len(self._meters) >= MOST_PODS:
                del self._meters[next(iter(self._meters))]
            meter = self._meters[event.engine] = _Meter(pod, at_s=now_s)
        if meter is None:
            return
        text = sentence(event)
        card = event.condition is not None and event.condition.kind == "card" and event.what is EventKind.BEGINS
        if card:
            text += f"; the next pod would get the same card: kubectl cordon {meter.pod.node or 'NODE'}"
        text = f"{text} [incident {event.incident}]" if event.incident else text
        meter.tokens, meter.at_s = min(float(BURST), meter.tokens + (now_s - meter.at_s) / REFILL_S), now_s
        if meter.tokens < 1 or (meter.last[0] == text and now_s - meter.last[1] < SAME_S):
            self.dropped += 1
            return
        meter.tokens, meter.last = meter.tokens - 1, (text, now_s)
        if self._waiting.full():
            self._waiting.get_nowait()
        self._waiting.put_nowait((meter.pod, _object(meter.pod, event, "CordonRequested" if card else _reason(event), text)))

    async def run(self) -> None:
        """Sends the queued Events, for ever."""
        while True:
            pod, body = await self._waiting.get()
            path = f"/api/v1/namespaces/{quote(pod.namespace, safe='')}/events"
            reply = await self._cluster.ask("POST", path, body)
            self.trouble = "" if reply.status in (200, 201) else f"Events cannot be written: {reason_of(reply)}"
            if reply.status == 403:
                while not self._waiting.empty():
                    self._waiting.get_nowait()
                await asyncio.sleep(FORBIDDEN_S)


def _reason(event: Event) -> str:
    """Returns the reason as Kubernetes writes it, in one word: EngineWedged."""
    if event.what is not EventKind.BEGINS or event.condition is None:
        return _REASONS.get(event.what, "Guard")
    words = re.findall(r"[a-z0-9]+", str(code_of(event.condition.kind)))
    return "".join(word.capitalize() for word in words)[:128] or "Guard"


def _object(pod: Pod, event: Event, reason: str, text: str) -> dict[str, Any]:
    stamp = datetime.fromtimestamp(event.unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1", "kind": "Event",
        "metadata": {"generateName": f"{pod.name[:200]}.", "namespace": pod.namespace,
                     "annotations": {"plimsoll.dev/incident": event.incident}},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid},
        "reason": reason, "message": clean(text)[:MESSAGE_MAX], "type": "Warning" if event.what in _WARNINGS else "Normal",
        "source": {"component": "plimsoll-guard"}, "reportingComponent": "plimsoll.dev/guard",
        "firstTimestamp": stamp, "lastTimestamp": stamp, "count": 1,
    }  # fmt: skip
