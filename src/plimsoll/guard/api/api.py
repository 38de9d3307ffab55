"""Guard's HTTP API: status and metrics. `net.server` checks access, `api.actions` takes requests."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

import yaml

import plimsoll
from plimsoll.guard.act.steps import End
from plimsoll.guard.adapters.webhook import DeliveryCounts
from plimsoll.guard.api.actions import ActionDesk, ActionRoutes, json_answer
from plimsoll.guard.api.openapi import document
from plimsoll.guard.api.recordings import PATH as RECORDINGS
from plimsoll.guard.api.recordings import Recordings
from plimsoll.guard.daemon.observer import CHANGES_KEPT, Fleet
from plimsoll.guard.judge.findings import code_of
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.guard.judge.policy import GRADES
from plimsoll.guard.judge.tracker import Grade
from plimsoll.guard.page.page import GuardPage
from plimsoll.net.server import HttpAnswer, Stream, error
from plimsoll.redaction import clean
from plimsoll.render.doctor import finding_json
from plimsoll.render.guard import (
    EngineView,
    Trouble,
    condition_json,
    engine_detail_json,
    engine_json,
    event_json,
    status_line,
    trouble_json,
)
from plimsoll.unknown import Status
from plimsoll.vllm.metrics_page import escaped_label

# Guard's own page of metrics, in Prometheus's text form.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[Mapping[str, str], float]
_VALUES = {Status.TRUE: 1.0, Status.FALSE: 0.0, Status.UNKNOWN: math.nan}


@functools.cache
def _metrics() -> Mapping[str, tuple[str, str]]:
    rows: Mapping[str, tuple[str, str]] = yaml.safe_load(
        files("plimsoll.guard.api").joinpath("metrics.yaml").read_text("utf-8")
    )
    return rows


def metrics_page(
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
    def by_engine(value: Callable[[EngineView], float | None]) -> list[Sample]:
        return [({"engine": v.name}, math.nan if (found := value(v)) is None else float(found)) for v in views]

    samples: dict[str, list[Sample]] = {
        "guard_build_info": [({"version": version}, 1.0)],
        "guard_start_time_seconds": [({}, started_unix_s)],
        "guard_engines": [({}, float(len(views)))],
        "guard_changes_total": [({}, float(told))],
        "guard_looks_total": by_engine(lambda v: v.looks),
        "guard_look_failures_total": [
            ({"engine": v.name, "reach": reach}, float(n)) for v in views for reach, n in sorted(v.failures.items())
        ],
        "guard_look_age_seconds": by_engine(lambda v: v.look_age_s),
        "guard_look_duration_seconds": by_engine(lambda v: v.look_s),
        "guard_unreachable": by_engine(lambda v: v.unreachable_since_s is not None),
        "guard_needs_a_person": by_engine(lambda v: bool(v.needs)),
        "guard_condition": [
            ({"engine": v.name, "condition": c.kind, "code": str(code_of(c.kind)),
              "grade": str(GRADES.get(c.kind, "advice"))}, _VALUES[c.status])
            for v in views for c in v.conditions
        ],
        "guard_notifications_total": [({"outcome": name}, float(n)) for name, n in notifications.items() if name != "waiting"],
        "guard_notifications_waiting": [({}, float(notifications.get("waiting", 0)))],
        "guard_actions_total": [
            ({"engine": of[0], "rung": str(of[1]), "end": str(of[2])}, float(n)) for of, n in (ended or {}).items()
        ],
        # After an upgrade of vLLM a part may be missing without a message.
        "armed": [
            ({"engine": v.name, "feature": feature}, float(is_armed))
            for v in views for feature, is_armed in _features(v.look).items()
        ],
        "guard_lines_lost_total": [({}, float(lost_lines))],
        "guard_trouble": [({"what": t.what}, 1.0) for t in troubles],
        "guard_mistakes_total": [({"kind": name}, float(n)) for name, n in sorted(mistakes.items())],
    }  # fmt: skip
    lines = []
    for name, (kind, says) in _metrics().items():
        lines += [f"# HELP plimsoll_{name} {says}", f"# TYPE plimsoll_{name} {kind}"] if samples[name] else []
        for labels, value in samples[name]:
            inner = ",".join(f'{key}="{escaped_label(text)}"' for key, text in labels.items())
            number = "NaN" if math.isnan(value) else repr(value)
            lines.append(f"plimsoll_{name}{f'{{{inner}}}' if inner else ''} {number}")
    return "\n".join(lines) + "\n"


def _features(look: Look | None) -> dict[str, bool]:
    """Returns, by name, whether each part of plimsoll.inside works in an engine that answers; {} if it does not answer."""
    if look is None or look.reach is not Reach.ANSWERS:
        return {}
    armed = None if look.gate is None or look.gate.survival is None else look.gate.survival.armed
    return {"gate": look.gate is not None, "probe": bool(look.workers)} | ({} if armed is None else {"survive": armed})


NAMED, LONGEST = 20, 400  # engines and letters in an answer to an unknown name


class GuardHealth(NamedTuple):
    """The state of guard itself."""

    notifications: DeliveryCounts = DeliveryCounts()
    troubles: tuple[Trouble, ...] = ()
    lost_lines: int = 0
    stopped_acting: str = ""  # why an acting guard cannot act


class GuardApi:
    """The paths of docs/guard.md over one fleet. `actions` returns None for a guard that only observes."""

    def __init__(
        self,
        fleet: Fleet,
        started_unix_s: float,
        own: Callable[[], GuardHealth] = GuardHealth,
        actions: Callable[[], ActionDesk | None] = lambda: None,
        recordings: Mapping[str, str] | None = None,
    ) -> None:
        """`recordings`: the recording folder of each engine that has one."""
        self._recordings = Recordings(recordings or {})
        self._fleet, self._started_unix_s, self._own, self._actions = fleet, started_unix_s, own, actions
        self._page = GuardPage(fleet, lambda: own().troubles, actions)
        self.files = self._page.files
        self._routes = ActionRoutes(actions, lambda name: fleet.view(name) is not None, self._page.name_of)
        self.post = self._routes.post
        self._paths: dict[str, Callable[[Mapping[str, str]], HttpAnswer]] = {
            "/healthz": self._health, "/engines": self._engines, "/conditions": self._conditions, "/findings": self._findings,
            "/history": self._history, "/metrics": self._metrics,
            "/openapi.json": lambda _: HttpAnswer(200, json.dumps(document(plimsoll.__version__)).encode()),
        }  # fmt: skip

    def answer(self, path: str, query: Mapping[str, str]) -> HttpAnswer | Stream | Awaitable[HttpAnswer]:
        shown = self._page.answer(path, query)
        if shown is not None:
            return shown
        if path.startswith("/v1/"):
            return self._routes.get(path, query)
        if path.startswith(RECORDINGS):
            return self._recordings.answer(path, query)
        if path.startswith("/engines/"):
            return self._engine(path.removeprefix("/engines/"))
        found = self._paths.get(path)
        known = ", ".join((*self._paths, "/events", "/journal", RECORDINGS))
        return error(404, f"no such path; paths: {known}") if found is None else found(query)

    def _health(self, _: Mapping[str, str]) -> HttpAnswer:
        # Nothing about engines, since no token is needed.
        is_looking = self._fleet.is_looking(self._fleet.stale_after_s)
        status = "not watching" if not is_looking else "cannot act" if self._own().stopped_acting else "ok"
        return HttpAnswer(200 if status == "ok" else 503, json.dumps({"status": status}).encode())

    def _engines(self, _: Mapping[str, str]) -> HttpAnswer:
        views, troubles, moment = self._fleet.views(), self._own().troubles, self._fleet.moment()
        return json_answer(200, {
            "status": status_line(views, troubles), "engines": [engine_json(view) for view in views],
            "troubles": [trouble_json(one, moment) for one in troubles],
        })  # fmt: skip

    def _engine(self, name: str) -> HttpAnswer:
        view = self._fleet.view(name)
        if view is None:
            known = ", ".join(clean(one.name) for one in self._fleet.views()[:NAMED])
            return error(404, f"no engine named {clean(name)[:200]!r}; engines: {known[:LONGEST]}")
        return json_answer(200, {"engine": engine_detail_json(view, self._fleet.moment())})

    def _conditions(self, query: Mapping[str, str]) -> HttpAnswer:
        moment, wanted = self._fleet.moment(), {key: query[key] for key in ("engine", "kind", "status") if key in query}
        rows = [condition_json(view, one, moment) for view in self._fleet.views() for one in view.conditions]
        return json_answer(
            200, {"conditions": [row for row in rows if all(row[key] == value for key, value in wanted.items())]}
        )

    def _findings(self, query: Mapping[str, str]) -> HttpAnswer:
        views = [view for view in self._fleet.views() if query.get("engine", view.name) == view.name]
        rows = [{"engine": clean(view.name), **finding_json(one)} for view in views for one in view.findings]
        return json_answer(200, {"findings": rows})

    def _history(self, query: Mapping[str, str]) -> HttpAnswer:
        limit = query.get("limit", str(CHANGES_KEPT))
        if not limit.isdecimal() or not 0 < len(limit) <= 6:
            return error(400, "limit must be a whole number")
        rows = [
            event_json(event)
            for event in self._fleet.changes
            if query.get("engine", clean(event.engine)) == clean(event.engine)
        ]
        return json_answer(200, {"told": self._fleet.told, "changes": rows[max(0, len(rows) - int(limit)) :]})

    def _metrics(self, _: Mapping[str, str]) -> HttpAnswer:
        own, actions = self._own(), self._actions()
        text = metrics_page(
            self._fleet.views(), version=plimsoll.__version__, started_unix_s=self._started_unix_s,
            notifications=own.notifications._asdict(), told=self._fleet.told, mistakes=self._fleet.mistakes,
            troubles=own.troubles, lost_lines=own.lost_lines, ended=None if actions is None else actions.ended(),
        )  # fmt: skip
        return HttpAnswer(200, text.encode(), CONTENT_TYPE)
