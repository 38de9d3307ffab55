"""Two dashboards: all engines beside one another, and one engine from its queue down to the bytes of its card."""

from __future__ import annotations

from plimsoll.assets.alert import Thresholds
from plimsoll.assets.alerts_load import HITS, HOST, LATE, ROOM, TWICE, WAIT
from plimsoll.assets.names import GUARD_JOB, Names, select, span
from plimsoll.assets.panels import Ask, Dashboard, Note, Panel, Row
from plimsoll.assets.settings import Settings

ENGINE_UID, FLEET_UID = "plimsoll-engine", "plimsoll-fleet"
WHERE = "{{instance}} {{engine}}"
FIRING = select("ALERTS", job=f"~$job|{GUARD_JOB}", alertstate="firing")


class Shown:
    """Selectors with Grafana's variables in place of a job and an engine."""

    def __init__(self, names: Names, *, is_one: bool) -> None:
        self._names = names
        self._where = {"job": "~$job", "instance": "~$instance"} if is_one else {"job": "~$job"}
        self._rank = {"engine": "~$rank"} if is_one else {}

    def vllm(self, figure: str, suffix: str = "", **matchers: str) -> str:
        """One of vLLM's figures."""
        return select(self._names.exposition(figure) + suffix, **self._where, **self._rank, **matchers)

    def of(self, name: str, **matchers: str) -> str:
        """Any other on the engine's page, or a recorded one."""
        return select(name, **self._where, **matchers)


def dashboards_of(settings: Settings, bounds: Thresholds) -> tuple[Dashboard, ...]:
    """Both of them."""
    names = Names(settings)
    return _engine(names, settings, bounds), _fleet(names, bounds)


def _engine(names: Names, settings: Settings, bounds: Thresholds) -> Dashboard:
    shown = Shown(names, is_one=True)
    running = names.exposition("running")
    return Dashboard(
        ENGINE_UID,
        f"vLLM engine: {settings.name}",
        "One engine: who waits, what the KV cache holds, how late answers are, and where the card's memory is.",
        (
            Row("At a glance", _glance(shown, bounds)),
            Row("Load", _load(names, shown, bounds)),
            Row("Latency: every request, not an average", _latency(names, shown)),
            Row("Memory ledger", _memory(settings, shown, bounds)),
            Row("Prefix cache", _prefix(names, shown)),
            Row("Life, and what guard says of it", _life(names, shown)),
        ),
        (
            ("job", "job", f"label_values({running}, job)"),
            ("instance", "engine", f'label_values({running}{{job=~"$job"}}, instance)'),
            ("rank", "rank", f'label_values({running}{{job=~"$job", instance=~"$instance"}}, engine)'),
        ),
        _notes(names, shown),
    )


def _notes(names: Names, shown: Shown) -> tuple[Note, ...]:
    """What was done to the engine, by guard or by others, as the engine's own page shows it; and what was told."""
    held = names.guard("condition", condition="!prefix")
    return (
        Note("drained", f"{shown.of('plimsoll_drain_phase')} > 0", "orange", "{{instance}} is drained"),
        Note("restarted", f"changes({shown.of('process_start_time_seconds')}[1m]) > 0", "red", "{{instance}} was restarted"),
        Note(
            "compacted",
            f"increase({shown.of('plimsoll_calls_total')}[1m]) > 0",
            "blue",
            "{{instance}}: a call into its workers",
        ),
        Note("sheds", f"increase({shown.of('plimsoll_refused_total')}[1m]) > 0", "purple", "{{instance}} refuses: {{why}}"),
        Note(
            "guard did", f"increase({names.guard('actions_total')}[1m]) > 0", "green", "guard: {{rung}} of {{engine}}: {{end}}"
        ),
        Note("guard says", f"{held} == 1", "yellow", "{{engine}}: {{condition}}"),
        Note("alert", FIRING, "dark-red", "{{alertname}} {{instance}}"),
    )


def _glance(shown: Shown, bounds: Thresholds) -> tuple[Panel, ...]:
    usage = shown.vllm("kv_cache_usage")
    return (
        _stat("Answers", "1 if it was scraped.", f"min({shown.of('up')})"),
        _stat("Running", "Requests in the batch.", f"sum({shown.vllm('running')})"),
        _stat("Waiting", "Requests at the door.", f"sum({shown.vllm('waiting')})"),
        _stat("KV cache in use", "Full with a short queue is a busy, healthy server.", f"max({usage})", "percentunit"),
        _stat(
            "A new request waits",
            "The gate's figure where there is one, else the queue over what ends.",
            f"max({shown.of(WAIT)})",
            "s",
            bounds.wait_s,
        ),
        _stat(
            "Work done twice",
            "Preempted requests are computed again.",
            f"max({shown.of(TWICE)})",
            "percentunit",
            bounds.storm_share,
        ),
    )


def _stat(title: str, says: str, expr: str, unit: str = "short", limit: float | None = None) -> Panel:
    return Panel(title, says, (Ask(expr),), "stat", unit, width=4, height=4, limit=limit)


def _load(names: Names, shown: Shown, bounds: Thresholds) -> tuple[Panel, ...]:
    usage = shown.vllm("kv_cache_usage")
    prompt, made = shown.vllm("prompt_tokens"), shown.vllm("generation_tokens")
    tokens = (
        ()
        if bounds.kv_tokens is None
        else (
            Panel(
                "Free tokens of the KV cache",
                f"Of the {bounds.kv_tokens:,} that the plan gives this model; below the line it is full.",
                (Ask(f"(1 - {usage}) * {bounds.kv_tokens}", WHERE), Ask(f"vector({bounds.full_tokens})", "full")),
            ),
        )
    )
    refused = [Ask(f"sum by (why) (rate({shown.of('plimsoll_refused_total')}[5m]))", "gate: {{why}}")]
    if names.has("admission_rejections"):
        valve = shown.of(names.exposition("admission_rejections"))
        refused.append(Ask(f"sum by (reason) (rate({valve}[5m]))", "vLLM: {{reason}}"))
    return (
        Panel(
            "Requests",
            "A queue that grows is trouble; a short one is not.",
            (Ask(shown.vllm("running"), f"running {WHERE}"), Ask(shown.vllm("waiting"), f"waiting {WHERE}")),
        ),
        Panel(
            "KV cache in use",
            "Cached blocks that nobody references count as free.",
            (Ask(usage, WHERE),),
            unit="percentunit",
            limit=bounds.full,
        ),
        *tokens,
        Panel(
            "How long a new request waits",
            "The line is what was promised for the first token.",
            (Ask(shown.of(WAIT), WHERE),),
            unit="s",
            limit=bounds.wait_s,
        ),
        Panel(
            "Work done twice",
            "Preemptions as a share of all that was computed, over five minutes.",
            (Ask(shown.of(TWICE), WHERE),),
            unit="percentunit",
            limit=bounds.storm_share,
        ),
        Panel(
            "Tokens a second",
            "Read and made; what is computed again is in neither.",
            (Ask(f"rate({prompt}[2m])", f"prompt {WHERE}"), Ask(f"rate({made}[2m])", f"made {WHERE}")),
        ),
        Panel(
            "Requests that end",
            "abort: the client left. error: the engine failed it.",
            (Ask(f"sum by (finished_reason) (rate({shown.vllm('success')}[2m]))", "{{finished_reason}}"),),
            unit="reqps",
        ),
        Panel(
            "Refused at the door", "503 with Retry-After: the gate sheds, or vLLM's own valve.", tuple(refused), unit="reqps"
        ),
    )


def _latency(names: Names, shown: Shown) -> tuple[Panel, ...]:
    told = (
        ("ttft", "Time to the first token"),
        ("inter_token", "Time between two tokens"),
        ("queue_time", "Time in the queue, before it was first scheduled"),
        ("e2e", "Whole time of a request"),
    )
    return tuple(
        Panel(
            title,
            "The darker, the more requests.",
            (Ask(f"sum by (le) (increase({shown.vllm(figure, '_bucket')}[$__rate_interval]))", "{{le}}"),),
            "heatmap",
            "s",
        )
        for figure, title in told
        if names.has(figure)
    )


def _memory(settings: Settings, shown: Shown, bounds: Thresholds) -> tuple[Panel, ...]:
    whose = "{{instance}} worker {{worker}}"
    allocated, gaps = shown.of("plimsoll_torch_allocated_bytes"), shown.of("plimsoll_torch_unreleasable_bytes")
    releasable, own = shown.of("plimsoll_torch_releasable_bytes"), shown.of("plimsoll_device_used_by_worker_bytes")
    reserved, others = shown.of("plimsoll_torch_reserved_bytes"), shown.of("plimsoll_device_used_by_others_bytes")
    plan = settings.plan
    planned = (
        ()
        if plan is None
        else (
            Panel(
                "What the plan gives each part",
                f"{plan.model} on {plan.gpu}; compare with the picture beside it.",
                tuple(
                    Ask(f"vector({size})", part)
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
                Ask(allocated, f"live tensors {whose}"),
                Ask(gaps, f"gaps, not to be given back {whose}"),
                Ask(releasable, f"unused, could be given back {whose}"),
                Ask(f"{own} - {reserved}", f"outside torch {whose}"),
                Ask(others, f"other processes {whose}"),
                Ask(shown.of("plimsoll_device_free_bytes"), f"free {whose}"),
            ),
            unit="bytes",
            is_stacked=True,
        ),
        *planned,
        Panel(
            "What is left for the next step",
            "Free, and what torch could give back; below the line a step may fail.",
            (Ask(shown.of(ROOM), whose), Ask(f"vector({bounds.thin_bytes})", "thin")),
            unit="bytes",
        ),
        Panel(
            "Allocations that failed at first",
            "The leading sign: torch gave its cache back and tried again.",
            (Ask(f"increase({shown.of('plimsoll_torch_num_alloc_retries_total')}[10m])", whose),),
        ),
        _contained(shown, bounds),
        Panel(
            "Host memory",
            "Of all workers; of the API server where there is no probe.",
            (Ask(shown.of(HOST), "{{instance}}"),),
            unit="bytes",
        ),
    )


def _contained(shown: Shown, bounds: Thresholds) -> Panel:
    over = span(bounds.contained_s)
    asks = (
        Ask(f"increase({shown.of(f'plimsoll_survive_{name}_total')}[{over}])", f"{name} {{{{instance}}}}")
        for name in ("contained", "aborted")
    )
    says = "Containment kept the engine alive; their requests were computed again."
    return Panel("Steps that ran out of memory and were contained", says, tuple(asks))


def _prefix(names: Names, shown: Shown) -> tuple[Panel, ...]:
    found = [
        Panel(
            "Found in the prefix cache",
            "Of the tokens looked up in half an hour. A matter of speed, never of memory.",
            (Ask(shown.of(HITS), WHERE),),
            unit="percentunit",
        )
    ]
    if names.has("prompt_tokens_by_source"):
        expr = f"sum by (source) (rate({shown.vllm('prompt_tokens_by_source')}[5m]))"
        found.append(
            Panel(
                "Where prompt tokens come from",
                "Computed here, found here, or brought.",
                (Ask(expr, "{{source}}"),),
                is_stacked=True,
            )
        )
    return tuple(found)


def _life(names: Names, shown: Shown) -> tuple[Panel, ...]:
    steps = shown.vllm("step_tokens", "_count")
    return (
        Panel("Steps a second", "None with work there is an engine that is stuck.", (Ask(f"rate({steps}[1m])", WHERE),)),
        Panel(
            "How long it has run",
            "A saw is a restart loop.",
            (Ask(f"time() - {shown.of('process_start_time_seconds')}", "{{instance}}"),),
            unit="s",
        ),
        Panel(
            "Not ready, and why",
            "Its gate's word to the balancer.",
            (Ask(shown.of("plimsoll_not_ready"), "{{instance}} {{reason}}"),),
            "state-timeline",
        ),
        Panel(
            "Answers by their status",
            "5xx: the engine failed a request, or its own valve refused it.",
            (Ask(f"sum by (status) (rate({shown.of('http_requests_total')}[5m]))", "{{status}}"),),
            unit="reqps",
        ),
        Panel(
            "Guard's conditions",
            "1 it holds, 0 it does not, a gap: it is not known.",
            (Ask(names.guard("condition"), "{{engine}} {{condition}}"),),
            "state-timeline",
            width=24,
            height=12,
        ),
    )


def _fleet(names: Names, bounds: Thresholds) -> Dashboard:
    shown = Shown(names, is_one=False)
    running = names.exposition("running")
    return Dashboard(
        FLEET_UID,
        "vLLM fleet",
        "All engines beside one another: who is away, who is full, who waits.",
        (
            Row("At a glance", _glance(shown, bounds)),
            Row(
                "Told",
                (
                    Panel(
                        "Alerts that fire",
                        "The annotations say what to do.",
                        (Ask(f"sum by (alertname, severity, job, instance, engine) ({FIRING})"),),
                        "table",
                        width=24,
                    ),
                ),
            ),
            Row("Engines", _engines(shown, bounds)),
            Row("Guard", _guard(names)),
        ),
        (("job", "job", f"label_values({running}, job)"),),
        _notes(names, shown),
    )


def _engines(shown: Shown, bounds: Thresholds) -> tuple[Panel, ...]:
    return (
        Panel("Answers", "Scraped or not.", (Ask(shown.of("up"), "{{instance}}"),), "state-timeline", fine="1"),
        Panel("Waiting", "", (Ask(shown.vllm("waiting"), WHERE),)),
        Panel("KV cache in use", "", (Ask(shown.vllm("kv_cache_usage"), WHERE),), unit="percentunit", limit=bounds.full),
        Panel("How long a new request waits", "", (Ask(shown.of(WAIT), WHERE),), unit="s", limit=bounds.wait_s),
        Panel("First token, one in twenty is later", "", (Ask(shown.of(LATE), WHERE),), unit="s", limit=bounds.ttft_s),
        Panel("Work done twice", "", (Ask(shown.of(TWICE), WHERE),), unit="percentunit", limit=bounds.storm_share),
        Panel("Tokens made a second", "", (Ask(f"rate({shown.vllm('generation_tokens')}[2m])", WHERE),), is_stacked=True),
        Panel(
            "What is left of each card",
            "Free, and what torch could give back.",
            (Ask(shown.of(ROOM), "{{instance}} {{worker}}"),),
            unit="bytes",
        ),
    )


def _guard(names: Names) -> tuple[Panel, ...]:
    return (
        Panel(
            "Conditions that hold",
            "Of all engines that guard watches.",
            (Ask(f"{names.guard('condition')} == 1", "{{engine}} {{condition}}"),),
            "state-timeline",
        ),
        Panel("How long ago guard looked", "", (Ask(names.guard("look_age_seconds"), "{{engine}}"),), unit="s"),
        Panel(
            "Looks that brought nothing",
            "",
            (Ask(f"sum by (engine, reach) (rate({names.guard('look_failures_total')}[5m]))", "{{engine}} {{reach}}"),),
        ),
        Panel(
            "Notifications",
            "What became of them.",
            (Ask(f"sum by (outcome) (rate({names.guard('notifications_total')}[5m]))", "{{outcome}}"),),
        ),
    )
