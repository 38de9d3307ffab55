"""Guard's own page of metrics, in Prometheus's text form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from plimsoll.guard.act.steps import End
from plimsoll.guard.judge.findings import code_of
from plimsoll.guard.judge.policy import GRADES
from plimsoll.guard.judge.tracker import Grade
from plimsoll.render.guard import EngineView, Trouble
from plimsoll.unknown import Status
from plimsoll.vllm.metrics_page import escaped_label

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_VALUES = {Status.TRUE: 1.0, Status.FALSE: 0.0, Status.UNKNOWN: math.nan}


def page(
    views: Sequence[EngineView],
    *,
    version: str,
    started_unix_s: float,
    notifications: Mapping[str, int],
    told: int,
    mistakes: Mapping[str, int],
    troubles: Sequence[Trouble] = (),
    lost_lines: int = 0,
    ended: Mapping[tuple[str, Grade, End], int] | None = None,
) -> str:
    """All of it."""
    lines = [
        *_metric("build_info", "gauge", "Always 1, with guard's version.", [({"version": version}, 1.0)]),
        *_metric("start_time_seconds", "gauge", "When guard began, on the wall's clock.", [({}, started_unix_s)]),
        *_metric("engines", "gauge", "Engines that are watched.", [({}, float(len(views)))]),
        *_metric("changes_total", "counter", "Changes that were told.", [({}, float(told))]),
        *_metric("looks_total", "counter", "Looks at an engine.", [({"engine": v.name}, float(v.looks)) for v in views]),
        *_metric(
            "look_failures_total", "counter", "Looks that brought no figures, by what became of them.",
            [({"engine": v.name, "reach": reach}, float(n)) for v in views for reach, n in sorted(v.failures.items())],
        ),
        *_metric(
            "look_age_seconds", "gauge", "How long ago the last look began; NaN before the first.",
            [({"engine": v.name}, math.nan if v.look_age_s is None else v.look_age_s) for v in views],
        ),
        *_metric(
            "look_duration_seconds", "gauge", "How long the last look took; NaN before the first.",
            [({"engine": v.name}, math.nan if v.look_s is None else v.look_s) for v in views],
        ),
        *_metric(
            "unreachable", "gauge", "1 if it was told not to answer, or never has; 0 if it answers.",
            [({"engine": v.name}, float(v.unreachable_since_s is not None)) for v in views],
        ),
        *_metric(
            "needs_a_person", "gauge", "1 if restarts did not mend it, until one does or it is resumed; else 0.",
            [({"engine": v.name}, float(bool(v.needs))) for v in views],
        ),
        *_metric(
            "condition", "gauge", "1 if it holds, 0 if not, NaN if it is not known.",
            [
                ({"engine": v.name, "condition": c.kind, "code": str(code_of(c.kind) or ""),
                  "grade": str(GRADES.get(c.kind, "advice"))}, _VALUES[c.status])
                for v in views for c in v.conditions
            ],
        ),
        *_metric(
            "notifications_total", "counter", "Notifications by what became of them; a try that failed is made again.",
            [({"outcome": name}, float(count)) for name, count in notifications.items() if name != "waiting"],
        ),
        *_metric(
            "notifications_waiting", "gauge", "Notifications that wait to be sent.",
            [({}, float(notifications.get("waiting", 0)))],
        ),
        *_metric(
            "actions_total", "counter", "Actions that have ended, by rung and end; only of a guard that acts.",
            [({"engine": of[0], "rung": str(of[1]), "end": str(of[2])}, float(n)) for of, n in (ended or {}).items()],
        ),
        *_metric("lines_lost_total", "counter", "Lines that standard output did not take.", [({}, float(lost_lines))]),
        *_metric(
            "trouble", "gauge", "1 for each trouble of guard's own that lasts.", [({"what": t.what}, 1.0) for t in troubles]
        ),
        *_metric(
            "mistakes_total", "counter", "Mistakes of guard's own that were caught, by where and what.",
            [({"kind": name}, float(count)) for name, count in sorted(mistakes.items())],
        ),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, says: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    if not samples:
        return
    yield f"# HELP plimsoll_guard_{name} {says}"
    yield f"# TYPE plimsoll_guard_{name} {kind}"
    for labels, value in samples:
        inner = ",".join(f'{key}="{escaped_label(text)}"' for key, text in labels.items())
        yield f"plimsoll_guard_{name}{f'{{{inner}}}' if inner else ''} {_number(value)}"


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else repr(value)
