"""What guard's API answers; who may ask is the server's business, and what is done that of whoever acts."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import plimsoll
from plimsoll.guard.adapters.webhook import Counts
from plimsoll.guard.api.metrics import CONTENT_TYPE, page
from plimsoll.guard.api.openapi import document
from plimsoll.guard.api.requests import Actions, Asks
from plimsoll.guard.daemon.loop import CHANGES_KEPT, Fleet
from plimsoll.guard.page.page import Page
from plimsoll.net.server import Answer, Stream, error
from plimsoll.render.doctor import clean, finding_json
from plimsoll.render.guard import (
    SCHEMA,
    Trouble,
    condition_json,
    engine_detail_json,
    engine_json,
    status_line,
    told_json,
    trouble_json,
)

NAMED, LONGEST = 20, 400  # engines and letters in an answer to a name that is none's


class Own(NamedTuple):
    """How guard itself is."""

    notifications: Counts = Counts()
    troubles: tuple[Trouble, ...] = ()
    lost_lines: int = 0


class Api:
    """The paths of docs/guard.md over one fleet. `actions` tells who acts, and None while nobody does."""

    def __init__(
        self,
        fleet: Fleet,
        started_unix_s: float,
        own: Callable[[], Own] = Own,
        actions: Callable[[], Actions | None] = lambda: None,
    ) -> None:
        self._fleet, self._started_unix_s, self._own, self._actions = fleet, started_unix_s, own, actions
        self._page = Page(fleet, lambda: own().troubles, actions)
        self.files = self._page.files
        self._asks = Asks(actions, lambda name: fleet.view(name) is not None, self._page.name_of)
        self._paths = {
            "/healthz": self._health, "/engines": self._engines, "/conditions": self._conditions, "/findings": self._findings,
            "/history": self._history, "/metrics": self._metrics, "/openapi.json": self._openapi,
        }  # fmt: skip

    async def post(self, path: str, body: bytes) -> Answer:
        """One wish."""
        return await self._asks.post(path, body)

    def answer(self, path: str, query: Mapping[str, str]) -> Answer | Stream | Awaitable[Answer]:
        """One question."""
        shown = self._page.answer(path, query)
        if shown is not None:
            return shown
        if path.startswith("/v1/"):
            return self._asks.get(path, query)
        if path.startswith("/engines/"):
            return self._engine(path.removeprefix("/engines/"))
        found = self._paths.get(path)
        known = ", ".join((*self._paths, "/events", "/journal"))
        return error(404, f"there is no such path; there is: {known}") if found is None else found(query)

    def _health(self, _: Mapping[str, str]) -> Answer:
        """Whether guard itself looks; nothing about any engine, since no token is needed."""
        is_well = self._fleet.is_looking(self._fleet.stale_after_s)
        return Answer(200 if is_well else 503, json.dumps({"status": "ok" if is_well else "it does not look"}).encode())

    def _engines(self, _: Mapping[str, str]) -> Answer:
        views, troubles, moment = self._fleet.views(), self._own().troubles, self._fleet.moment()
        return _json({
            "status": status_line(views, troubles), "engines": [engine_json(view) for view in views],
            "troubles": [trouble_json(one, moment) for one in troubles],
        })  # fmt: skip

    def _engine(self, name: str) -> Answer:
        view = self._fleet.view(name)
        if view is None:
            known = ", ".join(clean(one.name) for one in self._fleet.views()[:NAMED])
            return error(404, f"no engine is called {clean(name)[:200]!r}; there is: {known[:LONGEST]}")
        return _json({"engine": engine_detail_json(view, self._fleet.moment())})

    def _conditions(self, query: Mapping[str, str]) -> Answer:
        moment, wanted = self._fleet.moment(), {key: query[key] for key in ("engine", "kind", "status") if key in query}
        rows = [condition_json(view, one, moment) for view in self._fleet.views() for one in view.conditions]
        return _json({"conditions": [row for row in rows if all(row[key] == value for key, value in wanted.items())]})

    def _findings(self, query: Mapping[str, str]) -> Answer:
        views = [view for view in self._fleet.views() if query.get("engine", view.name) == view.name]
        rows = [{"engine": clean(view.name), **finding_json(one)} for view in views for one in view.findings]
        return _json({"findings": rows})

    def _history(self, query: Mapping[str, str]) -> Answer:
        limit = query.get("limit", str(CHANGES_KEPT))
        if not limit.isdecimal() or not 0 < len(limit) <= 6:
            return error(400, "limit is a whole number")
        rows = [
            told_json(told) for told in self._fleet.changes if query.get("engine", clean(told.engine)) == clean(told.engine)
        ]
        return _json({"told": self._fleet.told, "changes": rows[max(0, len(rows) - int(limit)) :]})

    def _metrics(self, _: Mapping[str, str]) -> Answer:
        own, actions = self._own(), self._actions()
        text = page(
            self._fleet.views(), version=plimsoll.__version__, started_unix_s=self._started_unix_s,
            notifications=own.notifications._asdict(), told=self._fleet.told, mistakes=self._fleet.mistakes,
            troubles=own.troubles, lost_lines=own.lost_lines, ended=None if actions is None else actions.ended(),
        )  # fmt: skip
        return Answer(200, text.encode(), CONTENT_TYPE)

    def _openapi(self, _: Mapping[str, str]) -> Answer:
        return Answer(200, json.dumps(document(plimsoll.__version__)).encode())


def _json(body: Mapping[str, Any]) -> Answer:
    return Answer(200, json.dumps({"schema": SCHEMA, **body}, ensure_ascii=False).encode())
