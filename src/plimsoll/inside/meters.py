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
COUNTED = ("allocator.alloc_retries", "allocator.ooms")
# Of each worker: the metric, the figure it shows (figures.py), its sentence.
WORKER_FIGURES = {
    "plimsoll_torch_allocated_bytes": ("allocator.allocated", "Bytes in live tensors."),
    "plimsoll_torch_reserved_bytes": ("allocator.reserved", "Bytes that torch holds of the device."),
    "plimsoll_torch_inactive_split_bytes": ("allocator.inactive_split", "Free bytes in segments that are partly in use."),
    "plimsoll_torch_releasable_bytes": ("allocator.releasable", "Bytes in fully free segments: what compaction gives back."),
    "plimsoll_torch_unreleasable_bytes": ("allocator.unreleasable", "Free bytes that torch cannot give back."),
    "plimsoll_torch_allocated_peak_bytes": ("allocator.allocated_peak", "The most bytes in live tensors since its last reset."),
    "plimsoll_torch_reserved_peak_bytes": ("allocator.reserved_peak", "The most bytes that torch held since its last reset."),
    "plimsoll_torch_segments": ("allocator.segments", "Segments that torch holds."),
    "plimsoll_torch_num_alloc_retries": (COUNTED[0], "Allocations that failed at first; torch gave memory back."),
    "plimsoll_torch_num_ooms": (COUNTED[1], "Allocations that failed for good."),
    "plimsoll_device_total_bytes": ("device_memory.total", "Memory of the device."),
    "plimsoll_device_free_bytes": ("device_memory.free", "Free memory of the device."),
    "plimsoll_device_used_bytes": ("device_memory.used", "Used memory of the device, by whomever."),
    "plimsoll_device_used_by_worker_bytes": (
        "device_memory.by_this_process", "Memory of the device that this worker's process holds.",
    ),
    "plimsoll_device_used_by_others_bytes": ("device_memory.by_others", "Memory of the device that other processes hold."),
    "plimsoll_worker_resident_bytes": ("host_memory.resident", "Host memory of the worker's process."),
}  # fmt: skip

METERS = (
    *(Meter("counter" if of in COUNTED else "gauge", name, says, WORKER) for name, (of, says) in WORKER_FIGURES.items()),
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
        self._set("plimsoll_in_flight", own["in_flight"])
        self._set("plimsoll_background", own["background"])
        self._count("plimsoll_begun", own["begun"])
        for why in ("drain", "shed", "dead"):
            self._count("plimsoll_refused", own[f"refused_{why}"], why)
        for does, name in (("refused", "plimsoll_door_refused"), ("would", "plimsoll_door_would_refuse")):
            for kind, why in itertools.product(KINDS, WHYS):
                if count := DOOR.own[f"door_{kind}_{does}_{why}"]:
                    self._count(name, count, kind, why)
        self._count("plimsoll_calls", gate.calls.done)
        self._count("plimsoll_recorded", RECORDER.written)
        self._count("plimsoll_record_dropped", RECORDER.dropped)
        for place, count in list(FAULTS.counts.items()):
            self._count("plimsoll_faults", count, place)
        if gate.shared.is_first:
            self._refresh_whole()
            for worker in gate.figures():
                with FAULTS.noting("a worker's metrics"):  # what one wrote must not hide the others
                    self._refresh_worker(worker)

    def _refresh_whole(self) -> None:
        gate, now = self._gate, time.monotonic()
        readiness, survive, knobs = gate.readiness(), gate.survive(), gate.knobs.words(gate.engine.client)
        self._set("plimsoll_ready", readiness.is_ready)
        for reason in REASONS:
            self._set("plimsoll_not_ready", reason == readiness.reason, reason)
        self._set("plimsoll_drain_phase", PHASES.get(gate.phase(), 0))
        self._set("plimsoll_drain_lease_seconds", max(0.0, gate.shared.drain().until - now))
        last_ns = gate.shared.latest("last_step_ns")
        self._set("plimsoll_engine_last_step_age_seconds", now - last_ns / NS if last_ns else None)
        self._set("plimsoll_engine_wedged", gate.is_wedged())
        self._set("plimsoll_expected_wait_seconds", expected_wait(gate.queue()).seconds)
        self._set("plimsoll_door_spare_bytes", None if DOOR.certificate is None else DOOR.certificate.spare_bytes)
        self._set("plimsoll_survive_armed", survive["armed"] is True)
        for key in ("contained", "aborted", "recomputed_tokens"):
            self._count(f"plimsoll_survive_{key}", survive[key])
        self._count("plimsoll_survive_stalled_seconds", survive["stalled_s"])
        self._set("plimsoll_survive_tokens_per_step", survive["tokens_per_step"]["now"])
        self._set("plimsoll_survive_tokens_per_step_start", survive["tokens_per_step"]["start"])
        self._set("plimsoll_survive_limping", survive["limping"])
        self._set("plimsoll_survive_storm", survive["storm"])
        self._set("plimsoll_knobs_lease_seconds", knobs["lease_left_s"])
        for knob, row in knobs["knobs"].items():
            for source in ("start", "containment", "lease", "in_force"):
                self._set("plimsoll_knob", row[source], knob, source)

    def _refresh_worker(self, worker: dict[str, Any]) -> None:
        labels = (str(worker.get("engine")), str(worker.get("rank")))
        self._set("plimsoll_figures_age_seconds", worker["age_s"], *labels)
        for name, (figure, _) in WORKER_FIGURES.items():
            part, _, key = figure.partition(".")
            value = (worker.get(part) or {}).get(key)
            if value is not None:
                (self._count if figure in COUNTED else self._set)(name, value, *labels)

    def _set(self, name: str, value: float | None, *labels: str) -> None:
        """Set a gauge; None is unknown: NaN."""
        metric = self._made[name].labels(*labels) if labels else self._made[name]
        metric.set(float("nan") if value is None else float(value))

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
