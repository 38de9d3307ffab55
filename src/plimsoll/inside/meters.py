"""Our figures on vLLM's own /metrics page, as gauges and counters of prometheus_client.

With several API servers vLLM's page adds up the files of all of them; so what is true of the whole server is set by one of
them alone, and what each has of its own is added up.
"""

from __future__ import annotations

import importlib
import itertools
import time
from typing import Any, NamedTuple

from plimsoll.inside.admission import LEAVING, REASONS, REFUSING, expected_wait
from plimsoll.inside.door import DOOR, KINDS, WHYS
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.gate_control import GateControl
from plimsoll.inside.recorder import RECORDER
from plimsoll.inside.shared import NS

PHASES = {LEAVING: 1, REFUSING: 2}
_TOTALS: dict[tuple[str, ...], float] = {}  # what the counters were brought to: one a process, as their registry is


class Meter(NamedTuple):
    """One metric: its kind, name, labels and the sentence that the page prints with it."""

    kind: str  # "gauge", "counter"
    name: str
    says: str
    labels: tuple[str, ...] = ()
    adds_up: bool = False  # each API server has its own part


WORKER = ("engine", "worker")
ALLOCATOR = {
    "allocated": "plimsoll_torch_allocated_bytes",
    "reserved": "plimsoll_torch_reserved_bytes",
    "inactive_split": "plimsoll_torch_inactive_split_bytes",
    "releasable": "plimsoll_torch_releasable_bytes",
    "unreleasable": "plimsoll_torch_unreleasable_bytes",
    "allocated_peak": "plimsoll_torch_allocated_peak_bytes",
    "reserved_peak": "plimsoll_torch_reserved_peak_bytes",
    "segments": "plimsoll_torch_segments",
}
ALLOCATOR_TOTALS = {"alloc_retries": "plimsoll_torch_num_alloc_retries", "ooms": "plimsoll_torch_num_ooms"}
DEVICE = {
    "total": "plimsoll_device_total_bytes",
    "free": "plimsoll_device_free_bytes",
    "used": "plimsoll_device_used_bytes",
    "by_this_process": "plimsoll_device_used_by_worker_bytes",
    "by_others": "plimsoll_device_used_by_others_bytes",
}
HOST = {"resident": "plimsoll_worker_resident_bytes"}

METERS = (
    Meter("gauge", "plimsoll_torch_allocated_bytes", "Bytes in live tensors.", WORKER),
    Meter("gauge", "plimsoll_torch_reserved_bytes", "Bytes that torch holds of the device.", WORKER),
    Meter("gauge", "plimsoll_torch_inactive_split_bytes", "Free bytes in segments that are partly in use.", WORKER),
    Meter("gauge", "plimsoll_torch_releasable_bytes", "Bytes in fully free segments: what compaction gives back.", WORKER),
    Meter("gauge", "plimsoll_torch_unreleasable_bytes", "Free bytes that torch cannot give back.", WORKER),
    Meter("gauge", "plimsoll_torch_allocated_peak_bytes", "The most bytes in live tensors since its last reset.", WORKER),
    Meter("gauge", "plimsoll_torch_reserved_peak_bytes", "The most bytes that torch held since its last reset.", WORKER),
    Meter("gauge", "plimsoll_torch_segments", "Segments that torch holds.", WORKER),
    Meter("counter", "plimsoll_torch_num_alloc_retries", "Allocations that failed at first; torch gave memory back.", WORKER),
    Meter("counter", "plimsoll_torch_num_ooms", "Allocations that failed for good.", WORKER),
    Meter("gauge", "plimsoll_device_total_bytes", "Memory of the device.", WORKER),
    Meter("gauge", "plimsoll_device_free_bytes", "Free memory of the device.", WORKER),
    Meter("gauge", "plimsoll_device_used_bytes", "Used memory of the device, by whomever.", WORKER),
    Meter("gauge", "plimsoll_device_used_by_worker_bytes", "Memory of the device that this worker's process holds.", WORKER),
    Meter("gauge", "plimsoll_device_used_by_others_bytes", "Memory of the device that other processes hold.", WORKER),
    Meter("gauge", "plimsoll_worker_resident_bytes", "Host memory of the worker's process.", WORKER),
    Meter("gauge", "plimsoll_figures_age_seconds", "Seconds since the worker wrote its figures.", WORKER),
    Meter("gauge", "plimsoll_ready", "1 when a balancer may send work here."),
    Meter("gauge", "plimsoll_not_ready", "1 for the reason why it may not.", ("reason",)),
    Meter("gauge", "plimsoll_drain_phase", "0 serving, 1 leaving, 2 refusing."),
    Meter("gauge", "plimsoll_drain_lease_seconds", "Seconds until the drain ends unless it is renewed."),
    Meter("gauge", "plimsoll_engine_last_step_age_seconds", "Seconds since the engine's last step was seen."),
    Meter("gauge", "plimsoll_engine_wedged", "1 when the engine was proven stuck."),
    Meter("gauge", "plimsoll_expected_wait_seconds", "Seconds a request that comes now would wait; NaN when unknown."),
    Meter("gauge", "plimsoll_in_flight", "Requests that have come in and not ended.", adds_up=True),
    Meter("gauge", "plimsoll_background", "Responses that run in the background.", adds_up=True),
    Meter("counter", "plimsoll_begun", "Requests that were let in.", adds_up=True),
    Meter("counter", "plimsoll_refused", "Requests refused.", ("why",), adds_up=True),
    Meter("counter", "plimsoll_door_refused", "Requests that the certificate does not cover.", ("kind", "why"), adds_up=True),
    Meter("counter", "plimsoll_door_would_refuse", "The same, only counted.", ("kind", "why"), adds_up=True),
    Meter("gauge", "plimsoll_door_spare_bytes", "Spare memory of a step by the certificate; NaN without one."),
    Meter("gauge", "plimsoll_survive_armed", "1 when steps that run out of device memory are contained."),
    Meter("counter", "plimsoll_survive_contained", "Steps that ran out of device memory and were contained."),
    Meter("counter", "plimsoll_survive_aborted", "Requests aborted because they ran out of device memory alone."),
    Meter("counter", "plimsoll_survive_recomputed_tokens", "Tokens computed again after contained failures."),
    Meter("counter", "plimsoll_survive_stalled_seconds", "Seconds until every stream went on after contained failures."),
    Meter("gauge", "plimsoll_survive_tokens_per_step", "Tokens that a step may hold now."),
    Meter("gauge", "plimsoll_survive_tokens_per_step_start", "Tokens that a step could hold at the start."),
    Meter("gauge", "plimsoll_survive_limping", "1 when steps have been far smaller than usual for minutes."),
    Meter("gauge", "plimsoll_survive_storm", "1 when there were so many contained failures that a restart is better."),
    Meter("gauge", "plimsoll_knob", "One knob: start, containment, lease or in_force; NaN: none.", ("knob", "of")),
    Meter("gauge", "plimsoll_knobs_lease_seconds", "Seconds until the lease on the knobs ends."),
    Meter("counter", "plimsoll_calls", "Calls into the workers that ended.", adds_up=True),
    Meter("counter", "plimsoll_recorded", "Requests recorded.", adds_up=True),
    Meter("counter", "plimsoll_record_dropped", "Requests that could not be recorded.", adds_up=True),
    Meter("counter", "plimsoll_faults", "Faults of our own, by place; the server went on.", ("place",), adds_up=True),
)  # fmt: skip


class Meters:
    """The metrics of one API server; `refresh` sets them all."""

    def __init__(self, gate: GateControl) -> None:
        self._gate = gate
        client = importlib.import_module("prometheus_client")
        registry = client.REGISTRY if gate.alone is None else gate.alone.registry
        self._totals = _TOTALS if gate.alone is None else {}
        self._made = {meter.name: _make(client, meter, registry) for meter in METERS}

    def refresh(self) -> None:
        gate = self._gate
        own = gate.shared.own
        self._made["plimsoll_in_flight"].set(own["in_flight"])
        self._made["plimsoll_background"].set(own["background"])
        self._count("plimsoll_begun", own["begun"])
        self._count("plimsoll_refused", own["refused_drain"], "drain")
        self._count("plimsoll_refused", own["refused_shed"], "shed")
        self._count("plimsoll_refused", own["refused_dead"], "dead")
        for does, name in (("refused", "plimsoll_door_refused"), ("would", "plimsoll_door_would_refuse")):
            for kind, why in itertools.product(KINDS, WHYS):
                if count := DOOR.own_count(does, kind, why):
                    self._count(name, count, kind, why)
        self._count("plimsoll_calls", gate.calls.done)
        self._count("plimsoll_recorded", RECORDER.written)
        self._count("plimsoll_record_dropped", RECORDER.dropped)
        for place, count in list(FAULTS.counts.items()):
            self._count("plimsoll_faults", count, place)
        if gate.shared.is_first:
            self._refresh_whole()
            for worker in gate.figures():
                try:
                    self._refresh_worker(worker)
                except Exception as error:  # what one wrote must not hide the others
                    FAULTS.note("a worker's metrics", error)

    def _refresh_whole(self) -> None:
        gate, now = self._gate, time.monotonic()
        readiness = gate.readiness()
        self._made["plimsoll_ready"].set(int(readiness.is_ready))
        for reason in REASONS:
            self._made["plimsoll_not_ready"].labels(reason).set(int(reason == readiness.reason))
        self._made["plimsoll_drain_phase"].set(PHASES.get(gate.phase(), 0))
        self._made["plimsoll_drain_lease_seconds"].set(max(0.0, gate.shared.drain().until - now))
        last_ns = gate.shared.latest("last_step_ns")
        self._made["plimsoll_engine_last_step_age_seconds"].set(now - last_ns / NS if last_ns else float("nan"))
        self._made["plimsoll_engine_wedged"].set(int(gate.is_wedged()))
        table = DOOR.certificate
        self._made["plimsoll_door_spare_bytes"].set(float("nan") if table is None else table.spare_bytes)
        self._refresh_survive(gate.survive())
        self._refresh_knobs(gate.knobs.words(gate.engine.client))
        wait = expected_wait(gate.queue())
        self._made["plimsoll_expected_wait_seconds"].set(float("nan") if wait.seconds is None else wait.seconds)

    def _refresh_survive(self, report: dict[str, Any]) -> None:
        self._made["plimsoll_survive_armed"].set(int(report["armed"] is True))
        for key in ("contained", "aborted", "recomputed_tokens"):
            self._count(f"plimsoll_survive_{key}", report[key])
        self._count("plimsoll_survive_stalled_seconds", report["stalled_s"])
        for end, name in (("now", "plimsoll_survive_tokens_per_step"), ("start", "plimsoll_survive_tokens_per_step_start")):
            size = report["tokens_per_step"][end]
            self._made[name].set(float("nan") if size is None else size)
        self._made["plimsoll_survive_limping"].set(int(report["limping"]))
        self._made["plimsoll_survive_storm"].set(int(report["storm"]))

    def _refresh_knobs(self, words: dict[str, Any]) -> None:
        self._made["plimsoll_knobs_lease_seconds"].set(words["lease_left_s"])
        for knob, row in words["knobs"].items():
            for source in ("start", "containment", "lease", "in_force"):
                value = row[source]
                self._made["plimsoll_knob"].labels(knob, source).set(float("nan") if value is None else value)

    def _refresh_worker(self, worker: dict[str, Any]) -> None:
        labels = (str(worker.get("engine")), str(worker.get("rank")))
        self._made["plimsoll_figures_age_seconds"].labels(*labels).set(worker["age_s"])
        for part, names in (("allocator", ALLOCATOR), ("device_memory", DEVICE), ("host_memory", HOST)):
            figures = worker.get(part) or {}
            for key, name in names.items():
                if figures.get(key) is not None:
                    self._made[name].labels(*labels).set(figures[key])
        for key, name in ALLOCATOR_TOTALS.items():
            total = (worker.get("allocator") or {}).get(key)
            if total is not None:
                self._count(name, total, *labels)

    def _count(self, name: str, total: float, *labels: str) -> None:
        """Bring a counter to this total; it never goes back. A smaller total began anew, with a new worker."""
        key = (name, *labels)
        before = self._totals.get(key, 0.0)
        metric = self._made[name].labels(*labels) if labels else self._made[name]
        metric.inc(total - before if total >= before else total)
        self._totals[key] = total


def _make(client: Any, meter: Meter, registry: Any) -> Any:
    """Register it, or take the one of that name which is there."""
    try:
        if meter.kind == "counter":
            return client.Counter(meter.name, meter.says, meter.labels, registry=registry)
        mode = "livesum" if meter.adds_up else "livemostrecent"
        return client.Gauge(meter.name, meter.says, meter.labels, multiprocess_mode=mode, registry=registry)
    except ValueError:
        metric = registry._names_to_collectors[meter.name]  # noqa: SLF001 - there is no other door to it
        assert metric is not None
        return metric
