"""Our figures on vLLM's own /metrics page, as gauges and counters of prometheus_client.

With several API servers vLLM's page adds up the files of all of them; so only one of them sets the figures of the whole
server, and each sets its own part of the figures that add up.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import operator
from typing import Any, NamedTuple

from plimsoll.inside.admission import LEAVING, REASONS, REFUSING
from plimsoll.inside.door import DOOR, KINDS, WHYS
from plimsoll.inside.endpoints import state_of
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.gate_control import GateControl
from plimsoll.inside.recorder import RECORDER
from plimsoll.inside.settings import data_table

PHASES = {LEAVING: 1, REFUSING: 2}
_TOTALS: dict[tuple[str, ...], float] = {}  # the counters' present totals: one table for each process, like their registry


class Meter(NamedTuple):
    """One row of data/meters.json: a metric with its kind, labels and the sentence that the page prints with it."""

    kind: str  # "gauge", "counter"
    name: str
    says: str
    labels: tuple[str, ...] = ()
    adds_up: bool = False  # each API server has its own part
    figure: str = ""  # the worker's figure that it shows, by its name in figures.py
    state: str = ""  # what it shows of the whole server, by its place in /plimsoll/state


METERS = tuple(Meter(**{**row, "labels": tuple(row.get("labels", ()))}) for row in data_table("meters"))
OF_WORKERS, OF_SERVERS = (tuple(meter for meter in METERS if getattr(meter, of)) for of in ("figure", "state"))


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
                with FAULTS.noting("a worker's metrics"):  # one worker's bad figures must not hide the others'
                    self._refresh_worker(worker)

    def _refresh_whole(self) -> None:
        state = state_of(self._gate)
        for meter in OF_SERVERS:
            self._show(meter, state, meter.state)
        for reason in REASONS:
            self._set("plimsoll_not_ready", reason == state["reason"], reason)
        self._set("plimsoll_survive_armed", state["survive"]["armed"] is True)
        self._set("plimsoll_drain_phase", PHASES.get(state["drain"]["phase"], 0))
        for knob, row in state["knobs"]["knobs"].items():
            for source in ("start", "containment", "lease", "in_force"):
                self._set("plimsoll_knob", row[source], knob, source)

    def _refresh_worker(self, worker: dict[str, Any]) -> None:
        labels = (str(worker.get("engine")), str(worker.get("rank")))
        self._set("plimsoll_figures_age_seconds", worker["age_s"], *labels)
        for meter in OF_WORKERS:
            part, _, key = meter.figure.partition(".")
            if (worker.get(part) or {}).get(key) is not None:
                self._show(meter, worker, meter.figure, *labels)

    def _show(self, meter: Meter, figures: Any, path: str, *labels: str) -> None:
        value = functools.reduce(operator.getitem, path.split("."), figures)
        (self._count if meter.kind == "counter" else self._set)(meter.name, value, *labels)

    def _set(self, name: str, value: float | None, *labels: str) -> None:
        """Sets a gauge; None (unknown) becomes NaN."""
        metric = self._made[name].labels(*labels) if labels else self._made[name]
        metric.set(float("nan") if value is None else float(value))

    def _count(self, name: str, total: float, *labels: str) -> None:
        """Brings a counter to this total; it never goes back. A smaller total comes from a new worker, which began at 0."""
        key = (name, *labels)
        before = self._totals.get(key, 0.0)
        metric = self._made[name].labels(*labels) if labels else self._made[name]
        metric.inc(total - before if total >= before else total)
        self._totals[key] = total


def _make(client: Any, meter: Meter, registry: Any) -> Any:
    """Registers a metric, or returns the registered one of that name."""
    try:
        if meter.kind == "counter":
            return client.Counter(meter.name, meter.says, meter.labels, registry=registry)
        mode = "livesum" if meter.adds_up else "livemostrecent"
        return client.Gauge(meter.name, meter.says, meter.labels, multiprocess_mode=mode, registry=registry)
    except ValueError:
        metric = registry._names_to_collectors[meter.name]  # noqa: SLF001 - there is no other door to it
        assert metric is not None
        return metric
