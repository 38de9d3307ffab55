"""Guard's page: its files, the event stream of changes, and the journal in sentences. `page.engine` makes its data."""

from __future__ import annotations

import asyncio
import json
import math
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any, cast

import plimsoll
from plimsoll.guard.api.actions import NOT_ACTING, ActionDesk, json_answer
from plimsoll.guard.daemon.journal import read_journal
from plimsoll.guard.daemon.observer import Fleet, WatchedEngine
from plimsoll.guard.judge.judge import Judge
from plimsoll.guard.judge.load import RATE_S, expected_wait, mean_latency, recompute_share
from plimsoll.guard.judge.look import Reach
from plimsoll.guard.page.engine import EngineControl, EngineState, id_of, journal, row, sections, shown, tidy
from plimsoll.net.server import HttpAnswer, Stream, error
from plimsoll.render.guard import Clock, Trouble, trouble_json
from plimsoll.render.journal import entry_json
from plimsoll.unknown import Reading, Unknown

Row = Mapping[str, Any]
QUIET = b": nothing has changed\n\n"


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """Returns a server-sent event. The data is ASCII on one line, so that no text in it can end the event."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode("ascii")


def rows_changed(before: Mapping[str, Row], now: Mapping[str, Row]) -> tuple[list[Row], list[str]]:
    """Returns the new and changed lines, and the ids of those that are gone."""
    changed = [row for key, row in now.items() if (old := before.get(key)) is not row and old != row]
    return changed, [key for key in before if key not in now]


def sections_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the changed sections; of the series only the points after the last one sent, if it still has that one."""
    changed = {name: section for name, section in now.items() if before.get(name) != section}
    old = before.get("series", {"t": []})
    if "series" in changed and old["t"] and old.keys() == changed["series"].keys():
        times, last = changed["series"]["t"], old["t"][-1]
        place = bisect_right(times, last)
        if place and times[place - 1] == last:
            changed["more"] = {name: list(values[place:]) for name, values in changed.pop("series").items()}
    return changed


KINDS = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8",
         "svg": "image/svg+xml"}  # fmt: skip


def page_files() -> dict[str, tuple[bytes, str]]:
    """Returns the page's files with their content type, by path; the page draws with the script of the reports."""
    shipped = [*(files("plimsoll.guard.page") / "static").iterdir(), files("plimsoll.render") / "templates" / "plot.js"]
    return {
        "/" if file.name == "index.html" else f"/page/{file.name}": (file.read_bytes(), KINDS[file.name.rpartition(".")[2]])
        for file in shipped
    }


MOST_LISTENERS = 24
LOOKS_S = 0.25  # between two checks for a change
LEAST_S = 0.5  # between two events
QUIET_S = 10.0  # without a change, before a keep-alive is sent
SHOWN_S = 1_800.0
JOURNAL_READ = 1_000
SERIES = {"kv": "kv_cache_usage", "waiting": "waiting", "running": "running"}


Controls = Mapping[str, EngineControl]
"""What guard may do and is doing to each engine, by name; under "" what holds for all of them."""


class GuardPage:
    """The page of one fleet."""

    def __init__(
        self,
        fleet: Fleet,
        troubles: Callable[[], Sequence[Trouble]] = tuple,
        actions: Callable[[], ActionDesk | None] = lambda: None,
    ) -> None:
        self._fleet, self._troubles, self._actions = fleet, troubles, actions
        self.files = {path: HttpAnswer(200, body, kind) for path, (body, kind) in page_files().items()}
        moment = fleet.moment()
        self._offset_s = moment.unix_s - moment.now_s  # one offset for all points, so that those already sent stay in place
        self._kept: dict[str, tuple[tuple[Any, ...], Row]] = {}  # each line with the key of the data it was made from
        self._names: dict[str, str] = {}  # by id
        self._reading = asyncio.Lock()
        self._seen_at_s, self._last_seen = -math.inf, (cast("Controls", {}), cast("Mapping[str, Row]", {}))
        self.listeners = 0

    def name_of(self, said: str) -> str:
        """Returns the engine's name for a name or an id."""
        if said.startswith("~") and self._fleet.engine(said) is None:
            if self._names.get(said) not in self._kept:
                self._rows(self._state())
            return self._names.get(said, said)
        return said

    def answer(self, path: str, query: Mapping[str, str]) -> HttpAnswer | Stream | Awaitable[HttpAnswer] | None:
        """Answers a GET; None if the path is not one of the page's."""
        if path == "/events":
            if self.listeners >= MOST_LISTENERS:
                return error(503, f"{MOST_LISTENERS} pages are open already")
            return Stream(self._listen(query.get("engine", "")))
        return self._journal(query.get("engine")) if path == "/journal" else None

    async def _journal(self, said: str | None) -> HttpAnswer:
        actions = self._actions()
        if actions is None:
            return json_answer(200, {"entries": [], "wrong": [], "says": NOT_ACTING})
        async with self._reading:
            found = await asyncio.to_thread(read_journal, actions.journal, JOURNAL_READ)
        rows = journal([entry_json(one) for one in found.entries], None if said is None else self.name_of(said))
        return json_answer(200, {"entries": rows, "wrong": [shown(one.message) for one in found.wrong], "says": ""})

    # Listening

    async def _listen(self, said: str) -> AsyncGenerator[bytes]:
        """Sends everything once, then the changes, at most twice a second."""
        rows: Mapping[str, Row] = {}
        about: Mapping[str, Any] = {}
        shown_sections: Mapping[str, Any] = {}
        key: tuple[Any, ...] = ()
        last_s = -math.inf
        self.listeners += 1
        try:
            while True:
                now_s = time.monotonic()
                if now_s - last_s >= LEAST_S:
                    state, now = self._seen(now_s)
                    now_about = self._about(state)
                    changed, gone = rows_changed(rows, now)
                    found = b""
                    if changed or gone or now_about != about or last_s == -math.inf:
                        found = event("fleet", {"all": last_s == -math.inf, "rows": changed, "gone": gone, "about": now_about})
                    if said and (new_key := self._key(said, state)) != key:
                        before, key = shown_sections, new_key
                        shown_sections = self._detail(self.name_of(said), state)
                        more = sections_changed(before, shown_sections)
                        found += event("engine", {"id": said, **more}) if more else b""
                    if found or now_s - last_s >= QUIET_S:
                        last_s = now_s
                        yield found or QUIET
                    rows, about = now, now_about
                await asyncio.sleep(LOOKS_S)
        finally:
            self.listeners -= 1

    def _seen(self, now_s: float) -> tuple[Controls, Mapping[str, Row]]:
        """Returns guard's state and every line, made once for all listeners."""
        if now_s - self._seen_at_s >= LOOKS_S / 2:
            state = self._state()
            self._seen_at_s, self._last_seen = now_s, (state, self._rows(state))
        return self._last_seen

    def _key(self, said: str, state: Controls) -> tuple[Any, ...]:
        """Returns the key of an engine's sections: they are unchanged while it is."""
        name = self.name_of(said)
        one = self._fleet.engine(name)
        if one is None:
            return ("none",)
        return (name, one.looks, one.since_s, self._fleet.told, self._fleet.needs.get(name, ""), state[name])

    def _state(self) -> Controls:
        actions, names = self._actions(), ("", *self._fleet.names())
        if actions is None:
            return dict.fromkeys(names, EngineControl())
        switches = actions.switches
        doing = {run.engine: run for run, _ in actions.under_way()}
        rungs = tuple(sorted(str(one) for one in switches.rungs_off))
        approvals = {one.engine: one.id for one in actions.pending()}
        return {
            name: EngineControl(
                not actions.trouble, switches.is_paused or name in switches.paused, rungs, doing.get(name),
                approvals.get(name, ""),
            )
            for name in names
        }  # fmt: skip

    def _about(self, state: Controls) -> Mapping[str, Any]:
        troubles, moment, actions = self._troubles(), self._fleet.moment(), self._actions()
        return {
            "version": plimsoll.__version__, "every_s": self._fleet.every_s, "acting": state[""].is_acting,
            "paused": state[""].is_paused, "told": self._fleet.told,
            "paused_engines": 0 if actions is None else len(actions.switches.paused),
            "trouble": "" if actions is None else shown(actions.trouble),
            "troubles": [tidy({**trouble_json(one, moment), "since": round(moment.unix(one.since_s))}) for one in troubles],
        }  # fmt: skip

    def _rows(self, state: Controls) -> Mapping[str, Row]:
        """Returns every line as of now; an unchanged one is the same object as before."""
        kept, now_s = {}, self._fleet.moment().now_s
        for name in self._fleet.names():
            one = self._fleet.engine(name)
            assert one is not None, "it is in the list"
            guarding, needs = state[name], self._fleet.needs.get(name, "")
            key = (one.looks, one.since_s, guarding, needs)
            old_key, old = self._kept.get(name, ((), {}))
            if old_key != key:
                made = row(EngineState(one.view(now_s)._replace(needs=needs), readings(one.judge), guarding))
                old = old if old == made else made
            kept[name] = (key, old)
        if kept.keys() != self._kept.keys():
            self._names = {id_of(name): name for name in kept}
        self._kept = kept
        return {str(line["id"]): line for _, line in kept.values()}

    def _detail(self, name: str, state: Controls) -> Mapping[str, Any]:
        one, view, moment = self._fleet.engine(name), self._fleet.view(name), self._fleet.moment()
        if one is None or view is None:
            return {"none": f"no engine named {shown(name)}"}
        changes = [event for event in self._fleet.changes if event.engine == name]
        bound_s = one.judge.policy.number("saturated", "wait")
        steady = Clock(moment.now_s, moment.now_s + self._offset_s)
        facts = EngineState(view, readings(one.judge), state[name], self._series(one), changes)
        return {**sections(facts, steady), "none": "", "bound_s": bound_s}

    def _series(self, one: WatchedEngine) -> dict[str, list[float | None]]:
        """Returns the series of the last half hour, a point for each successful look."""
        windows = {name: one.judge.history.since(figure, SHOWN_S) for name, figure in SERIES.items()}
        points = {name: dict(zip(window.times, window.values, strict=True)) for name, window in windows.items()}
        times = sorted({at_s for found in points.values() for at_s in found})
        series: dict[str, list[float | None]] = {"t": [at_s + self._offset_s for at_s in times]}
        return series | {name: [found.get(at_s) for at_s in times] for name, found in points.items()}


def readings(judge: Judge) -> dict[str, Reading]:
    """Returns the figures of an engine's page, by name."""
    history = judge.history
    is_there = history.last is not None and history.last.reach is Reach.ANSWERS
    tokens = history.rise("generation_tokens", RATE_S)
    uses = [card.use for card in history.last.cards if card.use is not None] if history.last is not None else []
    return {
        **{name: history.now(name) for name in ("kv_cache_usage", "running", "waiting", "in_flight")},
        "expected_wait": expected_wait(history) if is_there else history.now("waiting"),
        "twice": recompute_share(history, judge.policy.number("storm", "over")),
        "first_token": mean_latency(history, "ttft"),
        "per_token": mean_latency(history, "inter_token"),
        "tokens_rate": tokens if isinstance(tokens, Unknown) else tokens / RATE_S,
        "gpu_use": sum(uses) / len(uses) if uses else Unknown("no NVML on this host, or the engine runs on another host"),
    }
