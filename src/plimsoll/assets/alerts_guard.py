"""Alerts about guard itself, and about what only guard can know."""

from __future__ import annotations

from plimsoll.assets.alert import Alert, Case, Group, Needs, Severity
from plimsoll.assets.cases import GUARD_AT, guard_page
from plimsoll.assets.names import GUARD_JOB, Names, select
from plimsoll.assets.thresholds import Thresholds


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
