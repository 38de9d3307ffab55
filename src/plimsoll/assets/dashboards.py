"""Two Grafana dashboards as plain JSON: the fleet, and one engine from its queue down to the bytes of its card.

Written without grafana-foundation-sdk, so that the files depend on no version of it; the tests read every dashboard with the
SDK's own types and get the same back (`tests/assets/test_dashboards.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from plimsoll.assets.alert import Thresholds
from plimsoll.assets.alerts_load import HITS, HOST, LATE, ROOM, TWICE, WAIT
from plimsoll.assets.names import GUARD_JOB, Names, select, span
from plimsoll.assets.settings import Settings

SCHEMA_VERSION = 41
WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SOURCE_VARIABLE = {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus"}


@dataclass(frozen=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel; `description` is what a reader may take from it."""

    title: str
    description: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"  # or stat, heatmap, state-timeline, table
    unit: str = "short"
    width: int = 12
    height: int = 8
    is_stacked: bool = False
    limit: float | None = None  # A line beyond which it is trouble; thresholds of a stat
    fine: str = "0"  # The state that is green in a state timeline; the other is red


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Annotation:
    """Something that happened, as a mark over every panel."""

    name: str
    expr: str
    colour: str
    text: str


@dataclass(frozen=True)
class Dashboard:
    """A Grafana dashboard."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[tuple[str, str, str], ...]  # Name, what it is called, and the query for its values
    notes: tuple[Annotation, ...] = ()
    tags: tuple[str, ...] = field(default=("plimsoll", "vllm"))


def dashboard_text(dashboard: Dashboard, made_by: Sequence[str] = ()) -> str:
    """The file that Grafana imports."""
    body = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": "\n".join([dashboard.description, *made_by]),
        "tags": list(dashboard.tags),
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": SCHEMA_VERSION,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [SOURCE_VARIABLE, *(_variable(*variable) for variable in dashboard.variables)]},
        "annotations": {"list": [_note(note) for note in dashboard.notes]},
        "panels": list(_lay_out(dashboard.rows)),
    }
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "type": "query", "name": name, "label": label, "datasource": SOURCE, "query": query, "refresh": 2, "sort": 1,
        "multi": True, "includeAll": True, "allValue": ".+", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def _note(note: Annotation) -> dict[str, Any]:
    return {
        "name": note.name, "datasource": SOURCE, "enable": True, "iconColor": note.colour, "expr": note.expr,
        "step": "15s", "titleFormat": note.name, "textFormat": note.text,
    }  # fmt: skip


def _lay_out(rows: Iterable[Row]) -> Iterable[dict[str, Any]]:
    number = top = 0
    for row in rows:
        number += 1
        at = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        yield {"type": "row", "id": number, "title": row.title, "collapsed": False, "gridPos": at, "panels": []}
        top, left, tallest = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > WIDTH:
                top, left, tallest = top + tallest, 0, 0
            number += 1
            at = {"h": panel.height, "w": panel.width, "x": left, "y": top}
            yield {"id": number, "gridPos": at, **_panel(panel)}
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind in ("timeseries", "stat"):
        defaults["min"] = 0
    if panel.limit is not None:
        steps = [{"value": None, "color": "green"}, {"value": panel.limit, "color": "red"}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line", "lineWidth": 1, "fillOpacity": 60 if panel.is_stacked else 10, "showPoints": "never",
            **({"stacking": {"mode": "normal", "group": "A"}} if panel.is_stacked else {}),
            **({"thresholdsStyle": {"mode": "line"}} if panel.limit is not None else {}),
        }  # fmt: skip
    if panel.kind == "state-timeline":
        defaults["mappings"] = [
            {"type": "value", "options": {value: {"text": text, "color": "green" if value == panel.fine else "red"}}}
            for value, text in (("0", "no"), ("1", "yes"))
        ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "targets": [_target(panel, ask, place) for place, ask in enumerate(panel.queries)],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        **({"options": _OPTIONS[panel.kind]} if panel.kind in _OPTIONS else {}),
    }


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area", "justifyMode": "auto",
        "textMode": "auto", "wideLayout": True, "showPercentChange": False, "percentChangeColorMode": "standard",
        "orientation": "auto",
    },
}  # fmt: skip


def _target(panel: Panel, ask: Query, place: int) -> dict[str, Any]:
    target: dict[str, Any] = {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": ask.expr}
    if ask.legend:
        target["legendFormat"] = ask.legend
    if panel.kind == "heatmap":
        target["format"] = "heatmap"
    elif panel.kind == "table":
        target |= {"format": "table", "instant": True, "range": False}
    return target


ENGINE_UID, FLEET_UID = "plimsoll-engine", "plimsoll-fleet"
WHERE = "{{instance}} {{engine}}"
FIRING = select("ALERTS", job=f"~$job|{GUARD_JOB}", alertstate="firing")


class Selectors:
    """Selectors with Grafana's variables in place of a job and an engine."""

    def __init__(self, names: Names, *, is_one: bool) -> None:
        self._names = names
        self._where = {"job": "~$job", "instance": "~$instance"} if is_one else {"job": "~$job"}
        self._rank = {"engine": "~$rank"} if is_one else {}

    def vllm(self, figure: str, suffix: str = "", **matchers: str) -> str:
        """The selector of one of vLLM's metrics."""
        return select(self._names.exposition(figure) + suffix, **self._where, **self._rank, **matchers)

    def of(self, name: str, **matchers: str) -> str:
        """Any other on the engine's page, or a recorded one."""
        return select(name, **self._where, **matchers)


def dashboards_of(settings: Settings, bounds: Thresholds) -> tuple[Dashboard, ...]:
    """The dashboards of an engine and of the fleet."""
    names = Names(settings)
    return _engine(names, settings, bounds), _fleet(names, bounds)


def _engine(names: Names, settings: Settings, bounds: Thresholds) -> Dashboard:
    selectors = Selectors(names, is_one=True)
    running = names.exposition("running")
    return Dashboard(
        ENGINE_UID,
        f"vLLM engine: {settings.name}",
        "One engine: who waits, what the KV cache holds, how late answers are, and where the card's memory is.",
        (
            Row("At a glance", _glance(selectors, bounds)),
            Row("Load", _load(names, selectors, bounds)),
            Row("Latency: every request, not an average", _latency(names, selectors)),
            Row("Memory ledger", _memory(settings, selectors, bounds)),
            Row("Prefix cache", _prefix(names, selectors)),
            Row("Life, and guard's conditions", _life(names, selectors)),
        ),
        (
            ("job", "job", f"label_values({running}, job)"),
            ("instance", "engine", f'label_values({running}{{job=~"$job"}}, instance)'),
            ("rank", "rank", f'label_values({running}{{job=~"$job", instance=~"$instance"}}, engine)'),
        ),
        _notes(names, selectors),
    )


def _notes(names: Names, selectors: Selectors) -> tuple[Annotation, ...]:
    """What was done to the engine, by guard or by others, as the engine's own page shows it; and what was told."""
    held = names.guard("condition", condition="!prefix")
    return (
        Annotation("drained", f"{selectors.of('plimsoll_drain_phase')} > 0", "orange", "{{instance}} is drained"),
        Annotation("restarted", f"changes({selectors.of('process_start_time_seconds')}[1m]) > 0",
            "red", "{{instance}} was restarted"),
        Annotation("compacted", f"increase({selectors.of('plimsoll_calls_total')}[1m]) > 0", "blue",
            "{{instance}}: a call into its workers"),
        Annotation("sheds", f"increase({selectors.of('plimsoll_refused_total')}[1m]) > 0",
            "purple", "{{instance}} refuses: {{why}}"),
        Annotation("guard did", f"increase({names.guard('actions_total')}[1m]) > 0", "green",
            "guard: {{rung}} of {{engine}}: {{end}}"),
        Annotation("guard says", f"{held} == 1", "yellow", "{{engine}}: {{condition}}"),
        Annotation("alert", FIRING, "dark-red", "{{alertname}} {{instance}}"),
    )  # fmt: skip


def _glance(selectors: Selectors, bounds: Thresholds) -> tuple[Panel, ...]:
    usage = selectors.vllm("kv_cache_usage")
    return (
        _stat("Answers", "1 if it was scraped.", f"min({selectors.of('up')})"),
        _stat("Running", "Requests in the batch.", f"sum({selectors.vllm('running')})"),
        _stat("Waiting", "Requests at the door.", f"sum({selectors.vllm('waiting')})"),
        _stat("KV cache in use", "Full with a short queue is a busy, healthy server.", f"max({usage})", "percentunit"),
        _stat("A new request waits", "The gate's figure where there is one, else the queue over what ends.",
            f"max({selectors.of(WAIT)})", "s", bounds.wait_s),
        _stat("Recomputed share", "Preempted requests are computed again.", f"max({selectors.of(TWICE)})", "percentunit",
            bounds.storm_share),
    )  # fmt: skip


def _stat(title: str, description: str, expr: str, unit: str = "short", limit: float | None = None) -> Panel:
    return Panel(title, description, (Query(expr),), "stat", unit, width=4, height=4, limit=limit)


def _load(names: Names, selectors: Selectors, bounds: Thresholds) -> tuple[Panel, ...]:
    usage = selectors.vllm("kv_cache_usage")
    prompt, made = selectors.vllm("prompt_tokens"), selectors.vllm("generation_tokens")
    tokens = (
        ()
        if bounds.kv_tokens is None
        else (
            Panel(
                "Free tokens of the KV cache",
                f"Of the {bounds.kv_tokens:,} that the plan gives this model; below the line it is full.",
                (Query(f"(1 - {usage}) * {bounds.kv_tokens}", WHERE), Query(f"vector({bounds.full_tokens})", "full")),
            ),
        )
    )
    refused = [Query(f"sum by (why) (rate({selectors.of('plimsoll_refused_total')}[5m]))", "gate: {{why}}")]
    if names.has("admission_rejections"):
        valve = selectors.of(names.exposition("admission_rejections"))
        refused.append(Query(f"sum by (reason) (rate({valve}[5m]))", "vLLM: {{reason}}"))
    return (
        Panel("Requests", "A queue that grows is trouble; a short one is not.",
            (Query(selectors.vllm("running"), f"running {WHERE}"), Query(selectors.vllm("waiting"), f"waiting {WHERE}"))),
        Panel("KV cache in use", "Cached blocks that nobody references count as free.", (Query(usage, WHERE),),
            unit="percentunit", limit=bounds.full),
        *tokens,
        Panel("How long a new request waits", "The line is what was promised for the first token.",
            (Query(selectors.of(WAIT), WHERE),), unit="s", limit=bounds.wait_s),
        Panel("Recomputed share", "Preemptions as a share of all that was computed, over five minutes.",
            (Query(selectors.of(TWICE), WHERE),), unit="percentunit", limit=bounds.storm_share),
        Panel("Tokens a second", "Read and made; what is computed again is in neither.",
            (Query(f"rate({prompt}[2m])", f"prompt {WHERE}"), Query(f"rate({made}[2m])", f"made {WHERE}"))),
        Panel("Requests that end", "abort: the client left. error: the engine failed it.",
            (Query(f"sum by (finished_reason) (rate({selectors.vllm('success')}[2m]))", "{{finished_reason}}"),), unit="reqps"),
        Panel("Refused at the door", "503 with Retry-After: the gate sheds, or vLLM's own valve.", tuple(refused),
            unit="reqps"),
    )  # fmt: skip


def _latency(names: Names, selectors: Selectors) -> tuple[Panel, ...]:
    latencies = (
        ("ttft", "Time to the first token"),
        ("inter_token", "Time between two tokens"),
        ("queue_time", "Time in the queue, before it was first scheduled"),
        ("e2e", "Whole time of a request"),
    )
    return tuple(
        Panel(
            title,
            "The darker, the more requests.",
            (Query(f"sum by (le) (increase({selectors.vllm(figure, '_bucket')}[$__rate_interval]))", "{{le}}"),),
            "heatmap",
            "s",
        )
        for figure, title in latencies
        if names.has(figure)
    )


def _memory(settings: Settings, selectors: Selectors, bounds: Thresholds) -> tuple[Panel, ...]:
    whose = "{{instance}} worker {{worker}}"
    allocated, gaps = selectors.of("plimsoll_torch_allocated_bytes"), selectors.of("plimsoll_torch_unreleasable_bytes")
    releasable, own = selectors.of("plimsoll_torch_releasable_bytes"), selectors.of("plimsoll_device_used_by_worker_bytes")
    reserved, others = selectors.of("plimsoll_torch_reserved_bytes"), selectors.of("plimsoll_device_used_by_others_bytes")
    plan = settings.plan
    planned = (
        ()
        if plan is None
        else (
            Panel(
                "What the plan gives each part",
                f"{plan.model} on {plan.gpu}; compare with the picture beside it.",
                tuple(
                    Query(f"vector({size})", part)
                    for part, size in (
                        ("budget", plan.requested_bytes),
                        ("weights", plan.weights_bytes),
                        ("KV cache", plan.kv_bytes),
                        ("slack", plan.slack_bytes),
                    )
                ),
                unit="bytes",
            ),
        )
    )
    return (
        Panel(
            "Where the card's memory is",
            "Stacked, they fill the card. Live tensors hold weights and KV cache and hardly move.",
            (
                Query(allocated, f"live tensors {whose}"),
                Query(gaps, f"gaps, not to be given back {whose}"),
                Query(releasable, f"unused, could be given back {whose}"),
                Query(f"{own} - {reserved}", f"outside torch {whose}"),
                Query(others, f"other processes {whose}"),
                Query(selectors.of("plimsoll_device_free_bytes"), f"free {whose}"),
            ),
            unit="bytes",
            is_stacked=True,
        ),
        *planned,
        Panel("What is left for the next step", "Free, and what torch could give back; below the line a step may fail.",
            (Query(selectors.of(ROOM), whose), Query(f"vector({bounds.thin_bytes})", "thin")), unit="bytes"),
        Panel("Allocations that failed at first", "The leading sign: torch gave its cache back and tried again.",
            (Query(f"increase({selectors.of('plimsoll_torch_num_alloc_retries_total')}[10m])", whose),)),
        _contained(selectors, bounds),
        Panel("Host memory", "Of all workers; of the API server where there is no probe.",
            (Query(selectors.of(HOST), "{{instance}}"),), unit="bytes"),
    )  # fmt: skip


def _contained(selectors: Selectors, bounds: Thresholds) -> Panel:
    over = span(bounds.contained_s)
    queries = (
        Query(f"increase({selectors.of(f'plimsoll_survive_{name}_total')}[{over}])", f"{name} {{{{instance}}}}")
        for name in ("contained", "aborted")
    )
    description = "Containment kept the engine alive; their requests were computed again."
    return Panel("Steps that ran out of memory and were contained", description, tuple(queries))


def _prefix(names: Names, selectors: Selectors) -> tuple[Panel, ...]:
    found = [
        Panel(
            "Found in the prefix cache",
            "Of the tokens looked up in half an hour. A matter of speed, never of memory.",
            (Query(selectors.of(HITS), WHERE),),
            unit="percentunit",
        )
    ]
    if names.has("prompt_tokens_by_source"):
        expr = f"sum by (source) (rate({selectors.vllm('prompt_tokens_by_source')}[5m]))"
        found.append(
            Panel(
                "Where prompt tokens come from",
                "Computed here, found here, or brought.",
                (Query(expr, "{{source}}"),),
                is_stacked=True,
            )
        )
    return tuple(found)


def _life(names: Names, selectors: Selectors) -> tuple[Panel, ...]:
    steps = selectors.vllm("step_tokens", "_count")
    return (
        Panel("Steps a second", "None with work there is an engine that is stuck.", (Query(f"rate({steps}[1m])", WHERE),)),
        Panel("How long it has run", "A saw is a restart loop.",
            (Query(f"time() - {selectors.of('process_start_time_seconds')}", "{{instance}}"),), unit="s"),
        Panel("Not ready, and why", "Its gate's word to the balancer.",
            (Query(selectors.of("plimsoll_not_ready"), "{{instance}} {{reason}}"),), "state-timeline"),
        Panel("Answers by their status", "5xx: the engine failed a request, or its own valve refused it.",
            (Query(f"sum by (status) (rate({selectors.of('http_requests_total')}[5m]))", "{{status}}"),), unit="reqps"),
        Panel("Guard's conditions", "1 true, 0 false, a gap: unknown.",
            (Query(names.guard("condition"), "{{engine}} {{condition}}"),), "state-timeline", width=24, height=12),
    )  # fmt: skip


def _fleet(names: Names, bounds: Thresholds) -> Dashboard:
    selectors = Selectors(names, is_one=False)
    running = names.exposition("running")
    return Dashboard(
        FLEET_UID,
        "vLLM fleet",
        "All engines beside one another: who is away, who is full, who waits.",
        (
            Row("At a glance", _glance(selectors, bounds)),
            Row(
                "Told",
                (
                    Panel(
                        "Alerts that fire",
                        "The annotations say what to do.",
                        (Query(f"sum by (alertname, severity, job, instance, engine) ({FIRING})"),),
                        "table",
                        width=24,
                    ),
                ),
            ),
            Row("Engines", _engines(selectors, bounds)),
            Row("Guard", _guard(names)),
        ),
        (("job", "job", f"label_values({running}, job)"),),
        _notes(names, selectors),
    )


def _engines(selectors: Selectors, bounds: Thresholds) -> tuple[Panel, ...]:
    return (
        Panel("Answers", "Scraped or not.", (Query(selectors.of("up"), "{{instance}}"),), "state-timeline", fine="1"),
        Panel("Waiting", "", (Query(selectors.vllm("waiting"), WHERE),)),
        Panel("KV cache in use", "", (Query(selectors.vllm("kv_cache_usage"), WHERE),), unit="percentunit", limit=bounds.full),
        Panel("How long a new request waits", "", (Query(selectors.of(WAIT), WHERE),), unit="s", limit=bounds.wait_s),
        Panel("First token, one in twenty is later", "", (Query(selectors.of(LATE), WHERE),), unit="s", limit=bounds.ttft_s),
        Panel("Recomputed share", "", (Query(selectors.of(TWICE), WHERE),), unit="percentunit", limit=bounds.storm_share),
        Panel("Tokens made a second", "", (Query(f"rate({selectors.vllm('generation_tokens')}[2m])", WHERE),), is_stacked=True),
        Panel("What is left of each card", "Free, and what torch could give back.",
            (Query(selectors.of(ROOM), "{{instance}} {{worker}}"),), unit="bytes"),
    )  # fmt: skip


def _guard(names: Names) -> tuple[Panel, ...]:
    return (
        Panel("Conditions that are true", "Of all engines that guard watches.",
            (Query(f"{names.guard('condition')} == 1", "{{engine}} {{condition}}"),), "state-timeline"),
        Panel("How long ago guard looked", "", (Query(names.guard("look_age_seconds"), "{{engine}}"),), unit="s"),
        Panel("Looks that brought nothing", "",
            (Query(f"sum by (engine, reach) (rate({names.guard('look_failures_total')}[5m]))", "{{engine}} {{reach}}"),)),
        Panel("Notifications", "What became of them.",
            (Query(f"sum by (outcome) (rate({names.guard('notifications_total')}[5m]))", "{{outcome}}"),)),
    )  # fmt: skip
