"""One incident under one watcher, from a fresh fleet to what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lab.article import measure
from lab.article.crowd import Crowd
from lab.article.fleet import GUARD, NOBODY, SIDECAR, WatchedFleet
from lab.article.incidents import LEAD_S, VICTIM, Incident, documents, schedule
from lab.article.measure import Seen, Word
from plimsoll.demo.balancer import ask
from plimsoll.demo.fleet import NAMES
from plimsoll.errors import WorldFailed
from plimsoll.guard.act.journal_entry import OPENED
from plimsoll.guard.daemon.journal import read_journal

LOOK_S = 1.0  # between two looks at the fleet, in the article's seconds; no more than five a second of ours
FIGURES_EVERY = 5  # looks
REST_S = 60.0  # after the end, for what is still under way
TRIES = 3
KEPT_EVERY_S = 20.0  # how fine the course of it is kept


class Settings(NamedTuple):
    """What all scenes of a run have in common."""

    scale: float
    seed: int
    use_haproxy: bool


async def play(incident: Incident, watcher: str, settings: Settings) -> dict[str, Any]:
    """All of it; whatever happens, what was started is ended. Where many start at once, two may have drawn the same port."""
    for tries in range(TRIES):
        try:
            return await _played(incident, watcher, settings)
        except WorldFailed:
            if tries + 1 == TRIES:
                raise
    raise AssertionError("it was played or not")


async def _played(incident: Incident, watcher: str, settings: Settings) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="plimsoll-article-"))
    try:
        fleet = WatchedFleet(folder, watcher, settings.scale, use_haproxy=settings.use_haproxy)
        try:
            await fleet.start()
            return await Scene(fleet, incident, settings).played()
        finally:
            await fleet.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Scene:
    """On a fleet that is ready."""

    def __init__(self, fleet: WatchedFleet, incident: Incident, settings: Settings) -> None:
        self._fleet, self._incident, self._settings = fleet, incident, settings
        self._scale = settings.scale
        self._crowd = Crowd(fleet.balancer.port, settings.scale, settings.seed)
        self._rows: list[Seen] = []
        loop = asyncio.get_running_loop()
        lead_s = LEAD_S / self._scale
        self._born_s, self._begin_s, self._begin_unix_s = loop.time(), loop.time() + lead_s, time.time() + lead_s
        self._first = self._pids()

    async def played(self) -> dict[str, Any]:
        """Play it and sum it up."""
        incident, loop = self._incident, asyncio.get_running_loop()
        end_s = self._begin_s + incident.lasts_s / self._scale
        tasks = [asyncio.create_task(self._look_on())]
        tasks.append(asyncio.create_task(self._crowd.replay(schedule(incident, self._settings.seed), self._begin_s)))
        try:
            await asyncio.sleep(self._begin_s - loop.time())
            if incident.fault:
                await self._fleet.fault(VICTIM, incident.fault)
            tasks += [
                asyncio.create_task(self._crowd.read_on(text, incident.answer, lambda: loop.time() >= end_s))
                for text in documents(incident, self._settings.seed)
            ]
            await asyncio.sleep(end_s - loop.time())
            self._stop(tasks[:1])
            sent_again = await self._fleet.balancer.count_sent_again()
            await self._crowd.rest(REST_S / self._scale)
            return self._summed(sent_again)
        finally:
            self._crowd.drop()
            self._stop(tasks)
            await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    def _stop(tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()

    # Looking

    async def _look_on(self) -> None:
        turn = 0
        while True:
            figures = await self._figures() if turn % FIGURES_EVERY == 0 else {}
            takes_work = await self._fleet.balancer.takes_work()
            at_s = self._scaled(asyncio.get_running_loop().time() - self._begin_s)
            self._rows.append(Seen(at_s, takes_work, self._pids(), self._crowd.count.under_way, figures))
            turn += 1
            await asyncio.sleep(max(0.2, LOOK_S / self._scale))

    async def _figures(self) -> dict[str, tuple[float, int, int, int]]:
        fleet = self._fleet
        told = await asyncio.gather(
            *(ask(fleet.ports[name], "/standin/state", token=fleet.gate_token, limit_s=1.0) for name in NAMES)
        )
        found = {name: one.table() for name, one in zip(NAMES, told, strict=True) if one.status == 200}
        return {
            name: (round(float(one["kv_usage"]), 3), int(one["running"]), int(one["waiting"]), int(one["preemptions"]))
            for name, one in found.items() if isinstance(one, dict)
        }  # fmt: skip

    def _pids(self) -> dict[str, int]:
        found = {}
        for name in NAMES:
            with contextlib.suppress(OSError, ValueError, KeyError):
                found[name] = int(json.loads((self._fleet.folder / name / "engine.json").read_text(encoding="utf-8"))["pid"])
        return found

    def _scaled(self, seconds: float) -> float:
        return round(seconds * self._scale, 1)

    # What the watcher said

    def _words(self) -> list[Word]:
        said = {NOBODY: (), SIDECAR: self._of_sidecars(), GUARD: self._of_guard()}[self._fleet.watcher]
        return sorted(said)

    def _of_sidecars(self) -> Iterator[Word]:
        for name in NAMES:
            for told in _lines(self._fleet.said_by_sidecar(name)):
                if told["what"] == "decided":
                    at_s = self._scaled(told["at"] - self._begin_unix_s)
                    yield Word(at_s, name, "act", "restart")

    def _of_guard(self) -> Iterator[Word]:
        guard = self._fleet.guard
        for told in _lines(guard.said):
            if told.get("what") in ("begins", "unreachable"):
                at_s = self._scaled(float(told["at"]) - self._begin_unix_s)
                yield Word(at_s, str(told.get("engine")), "notice", str(told.get("code") or "guard.unreachable"))
        entries = read_journal(guard.journal).entries if guard.journal.exists() else ()
        for entry in entries:
            if entry.kind == OPENED:
                at_s = self._scaled(entry.at - self._begin_unix_s)
                yield Word(at_s, entry.engine, "act", str(entry.fields.get("grade")))

    # Summing up

    def _summed(self, sent_again: int | None) -> dict[str, Any]:
        incident, rows, first, count, words = self._incident, self._rows, self._first, self._crowd.count, self._words()
        out = measure.out_of_service_s(incident, rows, first)
        took = [self._scaled(one) for one in self._crowd.took_s]
        lag_s = self._begin_s - self._born_s
        return {
            "incident": incident.name,
            "watcher": self._fleet.watcher,
            "watched_s": incident.lasts_s,
            "asked": count.asked,
            "served": count.served,
            "lost": len(count.lost),
            "lost_how": measure.lost_how([one.what for one in count.lost]),
            "lost_at_s": [self._scaled(one.at_s - lag_s) for one in count.lost],
            "told_to_wait": count.waited,
            "sent_again": sent_again,
            "restarts": measure.restarts(rows, first),
            "out_of_service_s": {name: round(seconds, 1) for name, seconds in out.items()},
            "fewest_in_service": measure.fewest_in_service(incident, rows, first),
            "noticed_s": measure.first_s(words, "notice", "act"),
            "acted_s": measure.first_s(words, "act"),
            "whole_again_s": measure.whole_again_s(incident, rows, first),
            "took_s": {"p50": measure.percentile(took, 0.5), "p99": measure.percentile(took, 0.99)},
            "peaks": measure.peaks(rows),
            "words": [word._asdict() for word in words],
            "course": [
                {"at_s": row.at_s, "under_way": row.under_way, "in_service": sum(row.takes_work.values()), **_by_engine(row)}
                for row in _thinned(rows)
            ],
        }


def _by_engine(row: Seen) -> dict[str, Any]:
    return {"figures": {name: list(one) for name, one in row.figures.items()}}


def _thinned(rows: list[Seen]) -> Iterator[Seen]:
    """Those with figures, one in twenty seconds."""
    last_s = float("-inf")
    for row in rows:
        if row.figures and row.at_s - last_s >= KEPT_EVERY_S:
            last_s = row.at_s
            yield row


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found
