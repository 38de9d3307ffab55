"""What may be asked of a guard that acts, through its API: pause, resume, and one action on one engine at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from plimsoll.errors import PlimsollError
from plimsoll.guard.act.decide import ASKED, ActionPlan, BlockedAction, Decision, Switches
from plimsoll.guard.act.journal_entry import OPENED
from plimsoll.guard.act.journal_replay import PAUSE, RUNGS
from plimsoll.guard.act.ports import JournalWriter
from plimsoll.guard.act.steps import ActionRun, End
from plimsoll.guard.daemon.conductor import QUIET_STEPS, Conductor
from plimsoll.guard.daemon.journal import read_history
from plimsoll.guard.daemon.manual_drain import ManualDrains, ReturnToService
from plimsoll.guard.judge.tracker import Grade
from plimsoll.net.server import Answer, error
from plimsoll.render.doctor import clean
from plimsoll.render.guard import SCHEMA, entry_json

ASK_S = 6.0  # a guard that has not said by then whether it will is at work
MOST_ENTRIES = 1_000
LONGEST_TEXT = 1_000
NOT_ACTING = "guard only observes: start it with --act"
ACTS = {"compact": Grade.COMPACT, "restart": Grade.RESTART, "shed": Grade.SHED}
VERBS = ("drain", "undrain", *ACTS)
_WHO = "the API"


class RunningAction(NamedTuple):
    """An action under way."""

    course: ActionRun
    since: float | None  # seconds since 1970


class ActionControl(Protocol):
    """Who acts, as far as the API is concerned. What cannot be written down raises PlimsollError, and is not done."""

    @property
    def journal(self) -> Path:
        """Where what was done is written."""

    @property
    def trouble(self) -> str:
        """Why nothing is done any more; empty while it is."""

    @property
    def switches(self) -> Switches:
        """What people have switched off."""

    def under_way(self) -> Sequence[RunningAction]:
        """Every action that is not over."""

    def needs(self) -> Mapping[str, str]:
        """Engines that guard can do no more about, and why."""

    def ended(self) -> Mapping[tuple[str, Grade, End], int]:
        """How often each action of each engine that it may act on has ended so."""

    def pause(self, engine: str, rung: str) -> None:
        """Switch off: all of it, one engine or one rung."""

    def resume(self, engine: str, rung: str) -> None:
        """Switch on again."""

    def ask(self, grade: Grade, engine: str) -> Awaitable[Decision]:
        """One action, whatever the judge says; what speaks against it still does."""

    def drain(self, engine: str) -> Awaitable[Decision]:
        """Out of service until it is asked back."""

    def undrain(self, engine: str) -> Awaitable[Decision]:
        """Back into service."""


class ActionDesk:
    """A conductor and its drains by hand, as the API sees them."""

    def __init__(
        self,
        conductor: Conductor,
        drains: ManualDrains,
        book: JournalWriter,
        journal: Path,
        back: ReturnToService | None = None,
    ) -> None:
        self._conductor, self._drains, self._book, self.journal, self._back = conductor, drains, book, journal, back

    @property
    def trouble(self) -> str:
        """Why nothing is done any more."""
        return self._conductor.stopped_acting

    @property
    def switches(self) -> Switches:
        """What people have switched off."""
        return self._conductor.switches

    def under_way(self) -> list[RunningAction]:
        """Every action that is not over, with when it began."""
        begun = {entry.action: entry.at for entry in self._book.kept() if entry.kind == OPENED}
        return [RunningAction(one, begun.get(one.action)) for one in self._conductor.courses.values()]

    def needs(self) -> dict[str, str]:
        """Engines that restarts did not mend."""
        return self._conductor.needs()

    def ended(self) -> dict[tuple[str, Grade, End], int]:
        """Since guard began."""
        return self._conductor.ended()

    def pause(self, engine: str, rung: str) -> None:
        """Switch off."""
        self._conductor.switch(RUNGS + rung if rung else PAUSE, engine, is_on=True, who=_WHO)

    def resume(self, engine: str, rung: str) -> None:
        """Switch on again."""
        self._conductor.switch(RUNGS + rung if rung else PAUSE, engine, is_on=False, who=_WHO)

    async def ask(self, grade: Grade, engine: str) -> Decision:
        """Refused at once while guard is at work: what a person asks for is not done an hour later."""
        at_work = [name for name, one in self._conductor.courses.items() if one.step not in QUIET_STEPS]
        others = [name for name in at_work if name not in self._drains.engines]
        if others:
            return BlockedAction(engine, grade, ASKED, "Busy", f"guard is at work on {others[0]}")
        return await self._conductor.ask(grade, engine)

    async def drain(self, engine: str) -> Decision:
        """Out of service."""
        return await self._drains.drain(engine)

    async def undrain(self, engine: str) -> Decision:
        """Back into service: one that was drained by hand, or one that guard has held."""
        if self._back is not None and engine not in self._drains.engines and self._back.is_held(engine):
            return await self._back.put_back(engine)
        return await self._drains.undrain(engine)


class ActionRoutes:
    """The paths under /v1/. `actions` is None for a guard that only observes."""

    def __init__(
        self,
        actions: Callable[[], ActionControl | None],
        is_watched: Callable[[str], bool],
        name_of: Callable[[str], str] = str,
    ) -> None:
        """`name_of`: an engine's own name, for what else it may be called in a request."""
        self._actions, self._is_watched, self._name_of = actions, is_watched, name_of
        self._reading = asyncio.Lock()

    def get(self, path: str, query: Mapping[str, str]) -> Answer | Awaitable[Answer]:
        """One question."""
        actions = self._actions()
        if path not in ("/v1/actions", "/v1/journal"):
            return error(405, "POST it") if _is_deed(path) else error(404, "there is no such path (/openapi.json)")
        if actions is None:
            return _answer(503, {"says": NOT_ACTING})
        return self._journal(actions, query) if path == "/v1/journal" else _actions(actions)

    async def post(self, path: str, body: bytes) -> Answer:
        """One wish."""
        if not _is_deed(path):
            return error(404, f"there is no such path; there is: /v1/pause, /v1/resume, /v1/engines/NAME/{{{','.join(VERBS)}}}")
        asked = _object(body, ("engine", "rung") if path in ("/v1/pause", "/v1/resume") else ())
        if isinstance(asked, str):
            return error(400, asked)
        actions = self._actions()
        if actions is None:
            return _answer(503, {"says": NOT_ACTING})
        try:
            if path in ("/v1/pause", "/v1/resume"):
                return self._switch(actions, path.removeprefix("/v1/"), asked)
            engine, _, verb = path.removeprefix("/v1/engines/").rpartition("/")
            return await self._act(actions, verb, self._name_of(engine))
        except PlimsollError as problem:
            return _refused("NotWritten", f"nothing is done: {problem}")

    def _switch(self, actions: ActionControl, verb: str, asked: Mapping[str, str]) -> Answer:
        engine, rung = self._name_of(asked.get("engine", "")), asked.get("rung", "")
        if engine and rung:
            return error(400, "an engine or a rung, not both: a rung is switched for all engines")
        if rung and rung not in ACTS:
            return error(400, f"rung is one of: {', '.join(ACTS)}")
        is_left = engine in actions.switches.paused or engine in actions.needs()
        is_known = self._is_watched(engine) or (verb == "resume" and is_left)
        if engine and not is_known:
            return error(404, f"no engine is called {clean(engine)[:200]!r}")
        (actions.pause if verb == "pause" else actions.resume)(engine, rung)
        what = clean(engine) or (f"{rung} of every engine" if rung else "everything")
        said = f"{what}: {'nothing is done until it is resumed' if verb == 'pause' else 'guard acts again'}"
        return _answer(200, {"accepted": True, "plan": [], "says": said})

    async def _act(self, actions: ActionControl, verb: str, engine: str) -> Answer:
        if not self._is_watched(engine):
            return error(404, f"no engine is called {clean(engine)[:200]!r}")
        if actions.trouble and verb != "undrain":  # what is out must come back, whatever else cannot be done
            return _refused("Stopped", f"guard does not act any more: {actions.trouble}")
        wish = {"drain": actions.drain, "undrain": actions.undrain}.get(verb)
        deed = actions.ask(ACTS[verb], engine) if wish is None else wish(engine)
        try:
            # Cancelled after that: it is not to be done later, when nobody expects it.
            decision = await asyncio.wait_for(_awaited(deed), ASK_S)
        except TimeoutError:
            return _refused("Busy", "guard is at work, and has not said whether it will: ask again")
        if isinstance(decision, ActionPlan):
            said = f"{clean(engine)}: {verb} is accepted"
            return _answer(200, {"accepted": True, "plan": [clean(line) for line in decision.lines()], "says": said})
        return _refused(decision.reason, decision.message)

    async def _journal(self, actions: ActionControl, query: Mapping[str, str]) -> Answer:
        last = query.get("last", "100")
        if not last.isascii() or not last.isdecimal() or len(last) > 6 or not 0 < int(last) <= MOST_ENTRIES:
            return error(400, f"last is a whole number from 1 to {MOST_ENTRIES}")
        async with self._reading:  # one at a time: a long journal is seconds of work
            found = await asyncio.to_thread(read_history, actions.journal, int(last))
        rows = [entry_json(one) for one in found.entries]
        return _answer(200, {"entries": rows, "wrong": [clean(one.says) for one in found.wrong]})


async def _awaited(deed: Awaitable[Decision]) -> Decision:
    return await deed


def _is_deed(path: str) -> bool:
    if path in ("/v1/pause", "/v1/resume"):
        return True
    engine, _, verb = path.removeprefix("/v1/engines/").rpartition("/")
    return path.startswith("/v1/engines/") and bool(engine) and verb in VERBS


def _object(body: bytes, known: Sequence[str]) -> dict[str, str] | str:
    """What was posted, or what is wrong with it; nothing at all is an empty object."""
    try:
        found = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError):
        return "this is not JSON"
    if not isinstance(found, dict):
        return "post an object: {}"
    for name, value in found.items():
        if name not in known:
            return f"there is no {clean(name)[:40]!r}; known: {', '.join(known) or 'nothing'}"
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            return f"{name} is a text"
    return {name: str(value) for name, value in found.items()}


def _actions(actions: ActionControl) -> Answer:
    switches = actions.switches
    rows = [
        {
            "engine": clean(one.engine), "action": one.action, "grade": str(one.grade), "kind": one.kind,
            "step": None if one.step is None else str(one.step), "undoing": one.is_undoing, "since": since,
        }
        for one, since in actions.under_way()
    ]  # fmt: skip
    off = {
        "all": switches.is_paused, "engines": sorted(clean(name) for name in switches.paused),
        "rungs": sorted(str(rung) for rung in switches.rungs_off),
    }  # fmt: skip
    needs = [{"engine": clean(name), "says": clean(says)} for name, says in sorted(actions.needs().items())]
    return _answer(200, {"actions": rows, "paused": off, "needs": needs, "trouble": clean(actions.trouble)})


def _refused(reason: str, says: str) -> Answer:
    return _answer(409, {"accepted": False, "reason": reason, "says": clean(says)})


def _answer(status: int, body: Mapping[str, Any]) -> Answer:
    return Answer(status, json.dumps({"schema": SCHEMA, **body}, ensure_ascii=False).encode())
