"""Alerts about an engine that is not there, stands still, starts over and over, or shows nothing."""

from __future__ import annotations

from plimsoll.assets.alert import Alert, Case, Group, Needs, Severity, Thresholds
from plimsoll.assets.cases import GUARD_AT, guard_page, here, of_rank, other_engine, page_of
from plimsoll.assets.names import GUARD_JOB, Names, select, span

# Alerts about guard itself, and about what only guard can know.


def guard(names: Names, bounds: Thresholds) -> Group:
    """All of them."""
    return Group("plimsoll-guard", (), (_stopped(names, bounds), _card(names), _answers(names), _trouble(names)))


def _stopped(names: Names, bounds: Thresholds) -> Alert:
    up, age, held = select("up", job=GUARD_JOB), names.guard("look_age_seconds"), names.guard("needs_a_person")
    return Alert(
        name="GuardStopped",
        severity=Severity.PAGE,
        code="",
        expr=f"{up} == 0\nor {age} > {bounds.look_age_s}\nor {held} == 1",
        for_s=300,
        summary="guard at {{ $labels.instance }} no longer watches or mends{{ with $labels.engine }} {{ . }}{{ end }}",
        description=f"It has not answered for five minutes, or has not looked at an engine for {bounds.look_age_s} s, or its "
        "restarts did not mend one and it is left to a person.",
        means="Without an engine in the line: guard itself is down. Engines may be well, but nobody knows and nobody acts: "
        "`systemctl status plimsoll-guard`, then start it again; it goes on from its journal. With an engine: guard has tried "
        "and can do no more. Read its evidence (`plimsoll guardctl history`, `plimsoll doctor FOLDER`), mend it, then "
        "`plimsoll guardctl resume ENGINE`.",
        needs=(Needs.GUARD,),
        cases=(
            Case(
                "it was killed",
                series={**guard_page(up="1x39 0x79"), **guard_page(up="1x119", at="other")},
                silent=("9m", "14m"),
                fires=("16m",),
                labels=(GUARD_AT,),
            ),
            Case(
                "it lives and looks no more at one engine of two",
                series=guard_page(up="1x119", age_a="2x39 5+15x79", age_b="3x119"),
                silent=("14m", "16m30s"),
                fires=("18m", "24m"),
                labels=({**GUARD_AT, "engine": "a"},),
            ),
            Case(
                "a restart did not mend an engine",
                series=guard_page(up="1x119", held_a="0x39 1x79", held_b="0x119"),
                silent=("9m", "14m"),
                fires=("16m",),
                labels=({**GUARD_AT, "engine": "a"},),
            ),
            Case("it has not looked yet", series=guard_page(up="1x119", age_a="_x120"), silent=("10m", "25m")),
            Case("it is restarted", series=guard_page(up="1x39 0x7 1x71", age_a="3x39 _x8 3x71"), silent=("12m", "20m")),
        ),
    )


def _card(names: Names) -> Alert:
    return Alert(
        name="VllmSickCard",
        severity=Severity.PAGE,
        code="other.hardware",
        expr=f"{names.guard('condition', condition='card')} == 1",
        for_s=0,
        summary="{{ $labels.engine }}: the driver blames its card",
        description="An Xid or an ECC error that was not mended. Nothing is restarted onto such a card.",
        means="Answers may be wrong before the engine dies, and a restart on the same card fails or lies. Take "
        "this engine out of "
        "service (`plimsoll guardctl drain ENGINE`) and the card out of the machine's hands; `nvidia-smi -q` and dmesg for the "
        "vendor.",
        needs=(Needs.GUARD,),
        cases=(
            Case(
                "an Xid in the tenth minute; another engine has other troubles",
                series=guard_page(a_card="0x39 1x79", b_storm="1x119"),
                silent=("9m",),
                fires=("10m15s", "25m"),
                labels=({**GUARD_AT, "engine": "a", "condition": "card"},),
            ),
            Case("nothing is known of the card", series=guard_page(up="1x119", a_card="_x120"), silent=("5m", "25m")),
            Case("every other condition holds", series=guard_page(a_card="0x119", a_storm="1x119"), silent=("5m", "25m")),
        ),
    )


def _answers(names: Names) -> Alert:
    return Alert(
        name="VllmAnswersBadly",
        severity=Severity.TICKET,
        code="engine.garbage",
        expr=f"{names.guard('condition', condition='~garbage|slow')} == 1",
        for_s=120,
        summary="{{ $labels.engine }}: its test request is answered "
        '{{ if eq $labels.condition "slow" }}late{{ else }}with no text{{ end }}',
        description="Guard's request of one token, for longer than its window: see the condition {{ $labels.condition }}.",
        means="Users see the same. No text: weights that were loaded badly, a sick card, a kernel that does not "
        "fit it; take it out of "
        "service and compare with another engine. Late: something beside this engine takes its processor or its card.",
        needs=(Needs.GUARD,),
        cases=(
            Case(
                "no text, late, and another condition",
                series=guard_page(a_garbage="0x39 1x79", b_slow="0x39 1x79", c_storm="1x119"),
                silent=("9m", "11m30s"),
                fires=("13m",),
                labels=({**GUARD_AT, "engine": "a", "condition": "garbage"}, {**GUARD_AT, "engine": "b", "condition": "slow"}),
            ),
            Case(
                "no test request is made",
                series=guard_page(up="1x119", a_garbage="_x120", a_slow="_x120"),
                silent=("5m", "25m"),
            ),
            Case("for a minute", series=guard_page(a_slow="0x39 1x3 0x75"), silent=("11m", "13m")),
        ),
    )


def _trouble(names: Names) -> Alert:
    return Alert(
        name="GuardInTrouble",
        severity=Severity.TICKET,
        code="",
        expr=f"{names.guard('trouble')} == 1",
        for_s=900,
        summary="guard at {{ $labels.instance }} has trouble of its own: {{ $labels.what }}",
        description="For a quarter of an hour: a list that cannot be had, a webhook that takes nothing, a driver "
        "or /proc that hangs.",
        means="Engines may be well, and you may not hear it when they are not. `plimsoll guardctl status` shows the sentence.",
        needs=(Needs.GUARD,),
        cases=(
            Case(
                "a webhook that takes nothing",
                series=guard_page(trouble="_x40 1x99"),
                silent=("11m", "24m"),
                fires=("26m",),
                labels=({**GUARD_AT, "what": "webhook"},),
            ),
            Case("for ten minutes", series=guard_page(trouble="_x40 1x39 stale"), silent=("15m", "26m")),
            Case("no trouble", series=guard_page(up="1x119"), silent=("5m", "25m")),
        ),
    )


LOOP_OVER = "30m"


def life(names: Names, bounds: Thresholds) -> Group:
    """All of them."""
    return Group(
        "vllm-life",
        (),
        (
            _down(names, bounds),
            _wedged(names, bounds),
            _loop(names, bounds),
            _kept_out(names, bounds),
            _no_figures(names),
            _errors(names, bounds),
        ),
    )


def _down(names: Names, bounds: Thresholds) -> Alert:
    up = names.of("up")
    away_s = max(bounds.start_s - bounds.outage_s, 60)
    whole = span(away_s + bounds.outage_s)
    later = span(away_s + bounds.outage_s + 60)
    second = other_engine(names, "up")
    return Alert(
        name="VllmEngineDown",
        severity=Severity.PAGE,
        code="engine.dead",
        expr=f"({up} == 0 and on (job) max by (job) ({up}) == 0)\n"
        f"or (max_over_time({up}[{span(away_s)}]) == 0 and on (job, instance) {up} offset {span(away_s)} >= 0)",
        for_s=bounds.outage_s,
        summary="{{ $labels.instance }} does not answer",
        description=f"Nobody of job {{{{ $labels.job }}}} has answered for {span(bounds.outage_s)}, or this "
        f"engine alone for {whole}: "
        "longer than a start may take.",
        means="Requests fail, or the other engines carry this one's share. If no one is starting it, it is dead: "
        "its log says why "
        "(`plimsoll doctor LOG`). vLLM ends with exit code 0 when its engine dies, so a supervisor that restarts only after a "
        "failure leaves it down. Save the log before you start it again.",
        needs=(Needs.VLLM,),
        cases=(
            Case(
                "the only engine dies and nobody starts it",
                shape="death",
                silent=("12m",),
                fires=("14m", "40m"),
                labels=(here(names),),
            ),
            Case(
                "one of two dies: after as long as a start takes",
                series={**page_of(names, up="1x3 0x500"), second: "1x503"},
                silent=(whole,),
                fires=(span(away_s + bounds.outage_s + 120),),
                labels=(here(names),),
            ),
            Case("a deploy takes two minutes and a half", shape="restart", silent=("12m", "13m", "25m")),
            Case(
                "a new engine beside another is still loading its weights",
                series={**page_of(names, up="0x500"), second: "1x500"},
                silent=(span(bounds.outage_s), span(away_s)),
            ),
            Case("an idle night", shape="night", silent=("1h", "3h", "3h20m")),
            Case(
                "an engine that was taken off the list",
                series={**page_of(names, up="1x3 0x3 stale"), second: "1x500"},
                silent=(later,),
            ),
        ),
    )


def _wedged(names: Names, bounds: Thresholds) -> Alert:
    running, waiting, steps = names.vllm("running"), names.vllm("waiting"), names.vllm("step_tokens", "_count")
    still = f"({running} + {waiting} > 0\n  and increase({steps}[{span(bounds.still_s)}]) == 0)"
    if has_sleep := names.has("sleep_state"):
        asleep = names.vllm("sleep_state", sleep_state="awake")
        still = f"({still}\n  unless on (job, instance, engine) {asleep} == 0)"
    proved, judged = names.of("plimsoll_engine_wedged"), names.guard("condition", condition="~wedged|hung")
    sleeper = Case(
        "it sleeps with a request at its door", shape="wedge", series=page_of(names, awake="0x99"), silent=("20m", "24m")
    )
    return Alert(
        name="VllmEngineWedged",
        severity=Severity.PAGE,
        code="engine.wedged",
        expr=f"{still}\nor {proved} == 1\nor {judged} == 1",
        for_s=180,
        summary="{{ $labels.instance }} has work and makes no step",
        description="No step for five minutes with requests there, or a test request that got no answer. /health "
        "says 200 all the while.",
        means="Clients wait and get nothing, and /health stays 200, so no balancer takes it out. It does not "
        "come back by itself. "
        "Keep the evidence first (`plimsoll doctor --bundle F`, py-spy), then restart this engine. A paused engine "
        "(`/pause`) with requests at its door looks the same.",
        needs=(Needs.VLLM,),
        cases=(
            Case(
                "no step from the tenth minute on",
                shape="wedge",
                series=page_of(names, weights_offloaded="0x99"),
                silent=("14m",),
                fires=("15m30s", "24m"),
                labels=(here(names, "engine", "model_name"),),
            ),
            Case(
                "of two ranks one stands still among the work of the other",
                series={
                    **page_of(names, running="4x99", waiting="0x99", steps="0+50x99"),
                    **of_rank("1", page_of(names, running="3x99", waiting="0x99", steps="0+50x39 1950x59")),
                },
                silent=("11m", "14m"),
                fires=("15m30s",),
                labels=({**here(names, "engine", "model_name"), "engine": "1"},),
            ),
            Case(
                "the gate's test request got no answer while nothing showed",
                shape="burst",
                series=page_of(names, wedged="0x59 1x59"),
                silent=("14m", "17m"),
                fires=("19m",),
                labels=(here(names),),
            ),
            Case(
                "guard has proved one stuck, and one that is idle; what it knows of other conditions is not meant",
                series=guard_page(a_wedged="0x39 1x99", b_hung="0x39 1x99", c_stalled="1x139"),
                silent=("9m", "12m"),
                fires=("14m",),
                labels=({**GUARD_AT, "engine": "a", "condition": "wedged"}, {**GUARD_AT, "engine": "b", "condition": "hung"}),
            ),
            Case("an idle night", shape="night", silent=("1h", "2h", "3h", "3h20m")),
            Case("a restart under load", shape="restart", silent=("11m", "13m", "14m", "20m")),
            *((sleeper,) if has_sleep else ()),
        ),
    )


def _loop(names: Names, bounds: Thresholds) -> Alert:
    began, steps = names.of("process_start_time_seconds"), names.vllm("step_tokens", "_count")
    return Alert(
        name="VllmRestartLoop",
        severity=Severity.PAGE,
        code="engine.crash-loop",
        expr=f"max by (job, instance) (changes({began}[{LOOP_OVER}])) >= {bounds.loop_starts}\n"
        f"or max by (job, instance) (resets({steps}[{LOOP_OVER}])) >= {bounds.loop_starts}",
        for_s=0,
        summary="{{ $labels.instance }} starts, fails and starts again",
        description=f"{{{{ $value }}}} starts within {LOOP_OVER}.",
        means="Each start costs minutes and ends the same way: faster restarts only hide the reason. Stop the "
        "supervisor, read the "
        "log of one whole life from its start (`plimsoll doctor LOG`), mend that, then start it once.",
        needs=(Needs.VLLM,),
        cases=(
            Case(
                "four restarts, five minutes apart", shape="loop", silent=("10m", "19m"), fires=("22m",), labels=(here(names),)
            ),
            Case(
                "several API servers show no start time: counters that fall tell it",
                shape="loop",
                series=page_of(names, start_time="_x159"),
                silent=("19m",),
                fires=("22m",),
                labels=(here(names),),
            ),
            Case("two quick restarts", shape="reset", silent=("15m", "25m")),
            Case("one deploy", shape="restart", silent=("20m", "29m")),
        ),
    )


def _kept_out(names: Names, bounds: Thresholds) -> Alert:
    after_s = max(1_800, bounds.start_s)
    late, later = 40 + after_s // 15 - 4, 40 + after_s // 15 + 4
    return Alert(
        name="VllmKeptOut",
        severity=Severity.TICKET,
        code="",
        expr=f"{names.of('plimsoll_not_ready')} == 1",
        for_s=after_s,
        summary="{{ $labels.instance }} takes no work: {{ $labels.reason }}",
        description=f'Its gate has said "not ready, {{{{ $labels.reason }}}}" for {span(after_s)}.',
        means="It runs and costs, and the balancer sends it nothing. A drain that somebody forgot, or an engine "
        "that was put to "
        "sleep: `plimsoll guardctl status`, then `plimsoll guardctl undrain ENGINE`.",
        needs=(Needs.GATE,),
        cases=(
            Case(
                "drained and forgotten",
                series=page_of(names, not_ready=f"0x39 1x{later + 20}"),
                silent=("9m", f"{late * 15}s"),
                fires=(f"{later * 15}s",),
                labels=(here(names, "reason"),),
            ),
            Case("a drain of five minutes", series=page_of(names, not_ready="0x39 1x19 0x200"), silent=("12m", "41m")),
            Case("an idle night", shape="night", silent=("1h", "3h")),
        ),
    )


def _no_figures(names: Names) -> Alert:
    return Alert(
        name="VllmFiguresMissing",
        severity=Severity.TICKET,
        code="",
        expr=f"{names.of('up')} == 1 unless on (job, instance) {names.vllm('running')}",
        for_s=600,
        summary="{{ $labels.instance }} answers and shows no figures of its engine",
        description="/metrics is there for ten minutes without vLLM's own metrics: every other alert about this "
        "engine is blind.",
        means="Nothing is wrong with serving, but nobody would see it if there were. Usually "
        "`--disable-log-stats`, a proxy that "
        "answers in the engine's place, or a release whose names differ from the one these rules were made for.",
        needs=(Needs.VLLM,),
        cases=(
            Case(
                "--disable-log-stats",
                series={**page_of(names, up="1x99"), other_engine(names, "up"): "1x99", other_engine(names, "running"): "0x99"},
                silent=("9m",),
                fires=("11m",),
                labels=(here(names),),
            ),
            Case("an engine that is down", shape="death", silent=("25m", "40m")),
            Case("an idle night", shape="night", silent=("1h", "3h")),
        ),
    )


def _errors(names: Names, bounds: Thresholds) -> Alert:
    asked = f"sum by (job, instance) (increase({names.of('http_requests_total')}[10m]))"
    failed = f"sum by (job, instance) (increase({names.of('http_requests_total', status='~5..')}[10m]))"
    return Alert(
        name="VllmRequestsFail",
        severity=Severity.TICKET,
        code="other.engine-error",
        expr=f"{failed} / {asked} > {bounds.errors_share:g}\nand {failed} >= {bounds.errors_least}",
        for_s=300,
        summary="{{ $labels.instance }} answers with errors",
        description="{{ $value | humanizePercentage }} of the requests of the last ten minutes ended with a 5xx.",
        means="It lives and serves, and some requests fail inside it. Its log has a traceback for each. Where vLLM's own "
        "`--max-num-queued-reqs` is set, its refusals (503) are counted here too: then it is load, not a fault.",
        needs=(Needs.VLLM,),
        cases=(
            Case(
                "a tenth of the requests fail",
                series=page_of(names, http_2xx="0+90x119", http_5xx="0x39 10+10x79"),
                silent=("9m", "18m"),
                fires=("22m",),
                labels=(here(names),),
            ),
            Case(
                "one in a hundred fails", series=page_of(names, http_2xx="0+99x119", http_5xx="0+1x119"), silent=("20m", "29m")
            ),
            Case(
                "three of four at night fail: too few to tell",
                series=page_of(names, http_2xx="0x39 1x79", http_5xx="0x39 3x79"),
                silent=("15m", "20m"),
            ),
            Case("an idle night", shape="night", silent=("1h", "3h")),
        ),
    )
