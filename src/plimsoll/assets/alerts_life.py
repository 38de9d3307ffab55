"""Alerts about the life of an engine (down, wedged, restarting, out of rotation) and about guard itself."""

from __future__ import annotations

from plimsoll.assets.alert import Alert, Case, Group, Needs, Severity, Thresholds
from plimsoll.assets.names import GUARD_AT, GUARD_JOB, Names, guard_page, of_rank, select, span

# Alerts about guard itself, and about what only guard can know.


def guard_alerts(names: Names, bounds: Thresholds) -> Group:
    """Alerts about guard itself, and about what only guard knows."""
    return Group(
        "plimsoll-guard", (), (_guard_stopped(names, bounds), _sick_card(names), _bad_answers(names), _guard_trouble(names))
    )


def _guard_stopped(names: Names, bounds: Thresholds) -> Alert:
    up, age, held = select("up", job=GUARD_JOB), names.guard("look_age_seconds"), names.guard("needs_a_person")
    return Alert(
        "GuardStopped", Severity.PAGE, "", Needs.GUARD, for_s=300,
        expr=f"{up} == 0\nor {age} > {bounds.look_age_s}\nor {held} == 1",
        summary="guard at {{ $labels.instance }} no longer watches or mends{{ with $labels.engine }} {{ . }}{{ end }}",
        description=f"It has not answered for five minutes, or has not looked at an engine for {bounds.look_age_s} s, or its "
        "restarts did not mend one and it needs attention.",
        means="Without an engine in the line: guard itself is down. Engines may be healthy, but nobody knows and nobody acts: "
        "`systemctl status plimsoll-guard`, then start it again; it goes on from its journal. With an engine: guard has tried "
        "and can do no more. Read its evidence (`plimsoll guardctl history`, `plimsoll doctor FOLDER`), mend it, then "
        "`plimsoll guardctl resume ENGINE`.",
        cases=(
            Case("it was killed", fires="16m", silent="9m 14m", labels=(GUARD_AT,),
                series={**guard_page(up="1x39 0x79"), **guard_page(up="1x119", at="other")}),
            Case("it lives and looks no more at one engine of two", fires="18m 24m", silent="14m 16m30s",
                labels=({**GUARD_AT, "engine": "a"},), series=guard_page(up="1x119", age_a="2x39 5+15x79", age_b="3x119")),
            Case("a restart did not mend an engine", fires="16m", silent="9m 14m", labels=({**GUARD_AT, "engine": "a"},),
                series=guard_page(up="1x119", held_a="0x39 1x79", held_b="0x119")),
            Case("it has not looked yet", silent="10m 25m", series=guard_page(up="1x119", age_a="_x120")),
            Case("it is restarted", silent="12m 20m", series=guard_page(up="1x39 0x7 1x71", age_a="3x39 _x8 3x71")),
        ),
    )  # fmt: skip


def _sick_card(names: Names) -> Alert:
    return Alert(
        "VllmSickCard", Severity.PAGE, "other.hardware", Needs.GUARD, for_s=0,
        expr=f"{names.guard('condition', condition='card')} == 1",
        summary="{{ $labels.engine }}: the driver blames its card",
        description="An Xid or an ECC error that was not mended. Nothing is restarted onto such a card.",
        means="Answers may be wrong before the engine dies, and a restart on the same card fails or lies. Take this engine "
        "out of service (`plimsoll guardctl drain ENGINE`) and the card out of the machine's hands; `nvidia-smi -q` and dmesg "
        "for the vendor.",
        cases=(
            Case("an Xid in the tenth minute; another engine has other troubles", fires="10m15s 25m", silent="9m",
                labels=({**GUARD_AT, "engine": "a", "condition": "card"},),
                series=guard_page(a_card="0x39 1x79", b_storm="1x119")),
            Case("nothing is known of the card", silent="5m 25m", series=guard_page(up="1x119", a_card="_x120")),
            Case("every other condition holds", silent="5m 25m", series=guard_page(a_card="0x119", a_storm="1x119")),
        ),
    )  # fmt: skip


def _bad_answers(names: Names) -> Alert:
    return Alert(
        "VllmAnswersBadly", Severity.TICKET, "engine.garbage", Needs.GUARD, for_s=120,
        expr=f"{names.guard('condition', condition='~garbage|slow')} == 1",
        summary='{{ $labels.engine }}: its canary request is answered {{ if eq $labels.condition "slow" }}late{{ else }}with '
        "no text{{ end }}",
        description="Guard's request of one token, for longer than its window: see the condition {{ $labels.condition }}.",
        means="Users see the same. No text: weights that were loaded badly, a sick card, a kernel that does not fit it; take "
        "it out of service and compare with another engine. Late: something beside this engine takes its processor or its "
        "card.",
        cases=(
            Case("no text, late, and another condition", fires="13m", silent="9m 11m30s",
                labels=({**GUARD_AT, "engine": "a", "condition": "garbage"}, {**GUARD_AT, "engine": "b", "condition": "slow"}),
                series=guard_page(a_garbage="0x39 1x79", b_slow="0x39 1x79", c_storm="1x119")),
            Case("no test request is made", silent="5m 25m",
                series=guard_page(up="1x119", a_garbage="_x120", a_slow="_x120")),
            Case("for a minute", silent="11m 13m", series=guard_page(a_slow="0x39 1x3 0x75")),
        ),
    )  # fmt: skip


def _guard_trouble(names: Names) -> Alert:
    return Alert(
        "GuardInTrouble", Severity.TICKET, "", Needs.GUARD, for_s=900,
        expr=f"{names.guard('trouble')} == 1",
        summary="guard at {{ $labels.instance }} has trouble of its own: {{ $labels.what }}",
        description="For a quarter of an hour: a list that cannot be had, a webhook that takes nothing, a driver or /proc "
        "that hangs.",
        means="Engines may be healthy, and you may not hear it when not. `plimsoll guardctl status` shows the sentence.",
        cases=(
            Case("a webhook that takes nothing", fires="26m", silent="11m 24m", labels=({**GUARD_AT, "what": "webhook"},),
                series=guard_page(trouble="_x40 1x99")),
            Case("for ten minutes", silent="15m 26m", series=guard_page(trouble="_x40 1x39 stale")),
            Case("no trouble", silent="5m 25m", series=guard_page(up="1x119")),
        ),
    )  # fmt: skip


LOOP_OVER = "30m"


def life_alerts(names: Names, bounds: Thresholds) -> Group:
    """Alerts about engines that are down, wedged, restarting or out of rotation."""
    return Group(
        "vllm-life",
        (),
        (
            _engine_down(names, bounds),
            _engine_wedged(names, bounds),
            _restart_loop(names, bounds),
            _out_of_rotation(names, bounds),
            _missing_metrics(names),
            _failing_requests(names, bounds),
        ),
    )


def _engine_down(names: Names, bounds: Thresholds) -> Alert:
    up = names.of("up")
    away_s = max(bounds.start_s - bounds.outage_s, 60)
    whole = span(away_s + bounds.outage_s)
    later = span(away_s + bounds.outage_s + 60)
    second = names.other("up")
    return Alert(
        "VllmEngineDown", Severity.PAGE, "engine.dead", Needs.VLLM, for_s=bounds.outage_s,
        expr=f"({up} == 0 and on (job) max by (job) ({up}) == 0)\n"
        f"or (max_over_time({up}[{span(away_s)}]) == 0 and on (job, instance) {up} offset {span(away_s)} >= 0)",
        summary="{{ $labels.instance }} does not answer",
        description=f"Nobody of job {{{{ $labels.job }}}} has answered for {span(bounds.outage_s)}, or this engine alone for "
        f"{whole}: longer than a start may take.",
        means="Requests fail, or the other engines carry this one's share. If no one is starting it, it is dead: its log says "
        "why (`plimsoll doctor LOG`). vLLM ends with exit code 0 when its engine dies, so a supervisor that restarts only "
        "after a failure leaves it down. Save the log before you start it again.",
        cases=(
            Case("the only engine dies and nobody starts it", shape="death", fires="14m 40m", silent="12m"),
            Case("one of two dies: after as long as a start takes", fires=span(away_s + bounds.outage_s + 120), silent=whole,
                series={**names.page(up="1x3 0x500"), second: "1x503"}),
            Case("a deploy takes two minutes and a half", shape="restart", silent="12m 13m 25m"),
            Case("a new engine beside another is still loading its weights", silent=f"{span(bounds.outage_s)} {span(away_s)}",
                series={**names.page(up="0x500"), second: "1x500"}),
            Case("an idle night", shape="night", silent="1h 3h 3h20m"),
            Case("an engine that was taken off the list", silent=later,
                series={**names.page(up="1x3 0x3 stale"), second: "1x500"}),
        ),
    )  # fmt: skip


def _engine_wedged(names: Names, bounds: Thresholds) -> Alert:
    running, waiting, steps = names.vllm("running"), names.vllm("waiting"), names.vllm("step_tokens", "_count")
    still = f"({running} + {waiting} > 0\n  and increase({steps}[{span(bounds.still_s)}]) == 0)"
    if has_sleep := names.has("sleep_state"):
        asleep = names.vllm("sleep_state", sleep_state="awake")
        still = f"({still}\n  unless on (job, instance, engine) {asleep} == 0)"
    proved, judged = names.of("plimsoll_engine_wedged"), names.guard("condition", condition="~wedged|hung")
    sleeper = Case("it sleeps with a request at its door", shape="wedge", series=names.page(awake="0x99"), silent="20m 24m")
    return Alert(
        "VllmEngineWedged", Severity.PAGE, "engine.wedged", Needs.VLLM, for_s=180, by=("engine", "model_name"),
        expr=f"{still}\nor {proved} == 1\nor {judged} == 1",
        summary="{{ $labels.instance }} has work and makes no step",
        description="No step for five minutes with requests there, or a canary request that got no answer. /health says 200 "
        "all the while.",
        means="Clients wait and get nothing, and /health stays 200, so no balancer takes it out. It does not come back by "
        "itself. Keep the evidence first (`plimsoll doctor --bundle F`, py-spy), then restart this engine. A paused engine "
        "(`/pause`) with requests at its door looks the same.",
        cases=(
            Case("no step from the tenth minute on", shape="wedge", fires="15m30s 24m", silent="14m",
                series=names.page(weights_offloaded="0x99")),
            Case("of two ranks one stands still among the work of the other", fires="15m30s", silent="11m 14m",
                labels=({**names.here("engine", "model_name"), "engine": "1"},),
                series={**names.page(running="4x99", waiting="0x99", steps="0+50x99"),
                    **of_rank("1", names.page(running="3x99", waiting="0x99", steps="0+50x39 1950x59"))}),
            Case("the gate's test request got no answer while nothing showed", shape="burst", fires="19m", silent="14m 17m",
                labels=(names.here(),), series=names.page(wedged="0x59 1x59")),
            Case("guard has proved one stuck, and one that is idle; what it knows of other conditions is not meant",
                fires="14m", silent="9m 12m",
                labels=({**GUARD_AT, "engine": "a", "condition": "wedged"}, {**GUARD_AT, "engine": "b", "condition": "hung"}),
                series=guard_page(a_wedged="0x39 1x99", b_hung="0x39 1x99", c_stalled="1x139")),
            Case("an idle night", shape="night", silent="1h 2h 3h 3h20m"),
            Case("a restart under load", shape="restart", silent="11m 13m 14m 20m"),
            *((sleeper,) if has_sleep else ()),
        ),
    )  # fmt: skip


def _restart_loop(names: Names, bounds: Thresholds) -> Alert:
    began, steps = names.of("process_start_time_seconds"), names.vllm("step_tokens", "_count")
    return Alert(
        "VllmRestartLoop", Severity.PAGE, "engine.crash-loop", Needs.VLLM, for_s=0,
        expr=f"max by (job, instance) (changes({began}[{LOOP_OVER}])) >= {bounds.loop_starts}\n"
        f"or max by (job, instance) (resets({steps}[{LOOP_OVER}])) >= {bounds.loop_starts}",
        summary="{{ $labels.instance }} starts, fails and starts again",
        description=f"{{{{ $value }}}} starts within {LOOP_OVER}.",
        means="Each start costs minutes and ends the same way: faster restarts only hide the reason. Stop the supervisor, "
        "read the log of one whole life from its start (`plimsoll doctor LOG`), mend that, then start it once.",
        cases=(
            Case("four restarts, five minutes apart", shape="loop", fires="22m", silent="10m 19m"),
            Case("several API servers show no start time: counters that fall tell it", shape="loop", fires="22m", silent="19m",
                series=names.page(start_time="_x159")),
            Case("two quick restarts", shape="reset", silent="15m 25m"),
            Case("one deploy", shape="restart", silent="20m 29m"),
        ),
    )  # fmt: skip


def _out_of_rotation(names: Names, bounds: Thresholds) -> Alert:
    after_s = max(1_800, bounds.start_s)
    late, later = 40 + after_s // 15 - 4, 40 + after_s // 15 + 4
    return Alert(
        "VllmKeptOut", Severity.TICKET, "", Needs.GATE, for_s=after_s, by=("reason",),
        expr=f"{names.of('plimsoll_not_ready')} == 1",
        summary="{{ $labels.instance }} takes no work: {{ $labels.reason }}",
        description=f'Its gate has said "not ready, {{{{ $labels.reason }}}}" for {span(after_s)}.',
        means="It runs and costs, and the balancer sends it nothing. A drain that somebody forgot, or an engine that was put "
        "to sleep: `plimsoll guardctl status`, then `plimsoll guardctl undrain ENGINE`.",
        cases=(
            Case("drained and forgotten", fires=f"{later * 15}s", silent=f"9m {late * 15}s",
                series=names.page(not_ready=f"0x39 1x{later + 20}")),
            Case("a drain of five minutes", silent="12m 41m", series=names.page(not_ready="0x39 1x19 0x200")),
            Case("an idle night", shape="night", silent="1h 3h"),
        ),
    )  # fmt: skip


def _missing_metrics(names: Names) -> Alert:
    return Alert(
        "VllmFiguresMissing", Severity.TICKET, "", Needs.VLLM, for_s=600,
        expr=f"{names.of('up')} == 1 unless on (job, instance) {names.vllm('running')}",
        summary="{{ $labels.instance }} answers and shows no figures of its engine",
        description="/metrics is there for ten minutes without vLLM's own metrics: every other alert about this engine is "
        "blind.",
        means="Nothing is wrong with serving, but nobody would see it if there were. Usually `--disable-log-stats`, a proxy "
        "that answers in the engine's place, or a release whose names differ from the one these rules were made for.",
        cases=(
            Case("--disable-log-stats", fires="11m", silent="9m",
                series={**names.page(up="1x99"), names.other("up"): "1x99", names.other("running"): "0x99"}),
            Case("an engine that is down", shape="death", silent="25m 40m"),
            Case("an idle night", shape="night", silent="1h 3h"),
        ),
    )  # fmt: skip


def _failing_requests(names: Names, bounds: Thresholds) -> Alert:
    asked = f"sum by (job, instance) (increase({names.of('http_requests_total')}[10m]))"
    failed = f"sum by (job, instance) (increase({names.of('http_requests_total', status='~5..')}[10m]))"
    return Alert(
        "VllmRequestsFail", Severity.TICKET, "other.engine-error", Needs.VLLM, for_s=300,
        expr=f"{failed} / {asked} > {bounds.errors_share:g}\nand {failed} >= {bounds.errors_least}",
        summary="{{ $labels.instance }} answers with errors",
        description="{{ $value | humanizePercentage }} of the requests of the last ten minutes ended with a 5xx.",
        means="It lives and serves, and some requests fail inside it. Its log has a traceback for each. Where vLLM's own "
        "`--max-num-queued-reqs` is set, its refusals (503) are counted here too: then it is load, not a fault.",
        cases=(
            Case("a tenth of the requests fail", fires="22m", silent="9m 18m",
                series=names.page(http_2xx="0+90x119", http_5xx="0x39 10+10x79")),
            Case("one in a hundred fails", silent="20m 29m", series=names.page(http_2xx="0+99x119", http_5xx="0+1x119")),
            Case("three of four at night fail: too few to tell", silent="15m 20m",
                series=names.page(http_2xx="0x39 1x79", http_5xx="0x39 3x79")),
            Case("an idle night", shape="night", silent="1h 3h"),
        ),
    )  # fmt: skip
