"""Requests to an acting guard through its API: pause, resume, and one action on one engine at a time."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plimsoll.errors import BadInput, PlimsollError
from plimsoll.guard.act.decide import ASKED, ActionPlan, BlockedAction, Decision, Switches
from plimsoll.guard.act.journal_entry import OPENED
from plimsoll.guard.act.journal_replay import PAUSE, RUNGS
from plimsoll.guard.act.ports import JournalWriter, Outcome, failed
from plimsoll.guard.act.steps import ActionRun
from plimsoll.guard.config_reader import knob_values
from plimsoll.guard.daemon.conductor import QUIET_STEPS, Conductor
from plimsoll.guard.daemon.journal import read_journal
from plimsoll.guard.daemon.knob_settings import KnobSettings
from plimsoll.guard.daemon.manual_drain import ManualDrains, ReturnToService
from plimsoll.guard.judge.policy import amount
from plimsoll.guard.judge.tracker import Grade
from plimsoll.inside.knobs import KNOBS, LONGEST_LEASE_S
from plimsoll.net.server import HttpAnswer, error
from plimsoll.redaction import clean
from plimsoll.render.journal import SCHEMA, entry_json

ASK_S = 6.0  # a guard that has not decided by then is busy
MOST_ENTRIES = 1_000
LONGEST_TEXT = 1_000
NOT_ACTING = "guard only observes: start it with --act"
ACTS = {"compact": Grade.COMPACT, "restart": Grade.RESTART, "shed": Grade.SHED}
APPROVALS = "/v1/approvals/"
SET = "set"
VERBS = ("drain", "undrain", *ACTS, SET, "quarantine")
_WHO = "the API"


class ActionDesk:
    """The conductor and the manual drains, as the API sees them. A call whose journal entry fails raises, and does nothing."""

    def __init__(
        self,
        conductor: Conductor,
        drains: ManualDrains,
        book: JournalWriter,
        journal: Path,
        back: ReturnToService | None = None,
        knobs: KnobSettings | None = None,
    ) -> None:
        self._conductor, self._drains, self._book, self.journal, self._back = conductor, drains, book, journal, back
        self._knobs = knobs
        self.quarantines: Callable[[str, str], Awaitable[Outcome]] | None = None
        self.needs, self.ended, self.drain = conductor.needs, conductor.ended, drains.drain
        self.pending, self.answer = conductor.approvals.pending, conductor.approvals.decide

    @property
    def trouble(self) -> str:
        return self._conductor.stopped_acting

    @property
    def switches(self) -> Switches:
        return self._conductor.switches

    def under_way(self) -> list[tuple[ActionRun, float | None]]:
        """Returns every action in progress, with its start in seconds since 1970."""
        begun = {entry.action: entry.at for entry in self._book.kept() if entry.kind == OPENED}
        return [(one, begun.get(one.action)) for one in self._conductor.runs.values()]

    def switch(self, engine: str, rung: str, *, is_paused: bool, who: str = _WHO) -> None:
        """Pauses or resumes everything, one engine or one rung."""
        self._conductor.switch(RUNGS + rung if rung else PAUSE, engine, is_on=is_paused, who=who)

    async def ask(self, grade: Grade, engine: str) -> Decision:
        """Asks for an action; blocked at once while guard is busy, so that no request is carried out an hour later."""
        at_work = [name for name, one in self._conductor.runs.items() if one.step not in QUIET_STEPS]
        others = [name for name in at_work if name not in self._drains.engines]
        if others:
            return BlockedAction(engine, grade, ASKED, "Busy", f"guard is working on {others[0]}")
        return await self._conductor.ask(grade, engine)

    async def undrain(self, engine: str) -> Decision:
        """Puts an engine back in rotation that was drained by hand or that guard gave up on."""
        if self._back is not None and engine not in self._drains.engines and self._back.is_held(engine):
            return await self._back.put_back(engine)
        return await self._drains.undrain(engine)

    async def quarantine(self, engine: str, who: str) -> Outcome:
        """Takes a pod away from its Service and its owner, for a time."""
        if self.quarantines is None:
            return failed("no label is configured that could be removed: [discover.kubernetes] quarantine_label")
        return await self.quarantines(engine, who)

    async def set_knobs(self, engine: str, values: Mapping[str, float], for_s: float, who: str = _WHO) -> Outcome:
        """Sets an engine's knobs for a time; without values, ends what was set."""
        return failed("this guard has no knobs") if self._knobs is None else await self._knobs.set(engine, values, for_s, who)


class ActionRoutes:
    """The paths under /v1/. `actions` returns None for a guard that only observes."""

    def __init__(
        self, actions: Callable[[], ActionDesk | None], is_watched: Callable[[str], bool], name_of: Callable[[str], str] = str
    ) -> None:
        """`name_of`: the engine's name for an id in a request."""
        self._actions, self._is_watched, self._name_of = actions, is_watched, name_of
        self._reading = asyncio.Lock()

    def get(self, path: str, query: Mapping[str, str]) -> HttpAnswer | Awaitable[HttpAnswer]:
        actions = self._actions()
        if path not in ("/v1/actions", "/v1/journal"):
            return error(405, "POST it") if _is_action_path(path) else error(404, "no such path (see /openapi.json)")
        if actions is None:
            return json_answer(503, {"says": NOT_ACTING})
        return self._journal(actions, query) if path == "/v1/journal" else _actions(actions)

    async def post(self, path: str, body: bytes, who: str = _WHO) -> HttpAnswer:
        """Carries out a request in the name of `who`."""
        if not _is_action_path(path):
            paths = f"/v1/pause, /v1/resume, /v1/approvals/ID/{{approve,deny}}, /v1/engines/NAME/{{{','.join(VERBS)}}}"
            return error(404, f"no such path; paths: {paths}")
        is_switch, is_set = path in ("/v1/pause", "/v1/resume"), path.endswith(f"/{SET}")
        asked = _object(body, ("engine", "rung") if is_switch else (*KNOBS, "for") if is_set else ())
        if isinstance(asked, str):
            return error(400, asked)
        actions = self._actions()
        if actions is None:
            return json_answer(503, {"says": NOT_ACTING})
        try:
            if is_switch:
                return self._switch(actions, path.removeprefix("/v1/"), asked, who)
            if path.startswith(APPROVALS):
                return _approve(actions, path, who)
            name, _, verb = path.removeprefix("/v1/engines/").rpartition("/")
            engine = self._name_of(name)
            if not self._is_watched(engine):
                return error(404, f"no engine named {clean(engine)[:200]!r}")
            if actions.trouble and verb not in ("undrain", "quarantine"):  # an engine must be able to return, whatever fails
                return _refused("Stopped", f"guard stopped acting: {actions.trouble}")
            if verb in (SET, "quarantine"):
                return await _change(actions, verb, engine, asked, who)
            return await _act(actions, verb, engine)
        except PlimsollError as problem:
            return _refused("NotWritten", f"not done: {problem}")

    def _switch(self, actions: ActionDesk, verb: str, asked: Mapping[str, str], who: str) -> HttpAnswer:
        engine, rung = self._name_of(asked.get("engine", "")), asked.get("rung", "")
        if engine and rung:
            return error(400, "give an engine or a rung, not both: a rung is switched for all engines")
        if rung and rung not in ACTS:
            return error(400, f"rung is one of: {', '.join(ACTS)}")
        is_left = engine in actions.switches.paused or engine in actions.needs()
        is_known = self._is_watched(engine) or (verb == "resume" and is_left)
        if engine and not is_known:
            return error(404, f"no engine named {clean(engine)[:200]!r}")
        actions.switch(engine, rung, is_paused=verb == "pause", who=who)
        what = clean(engine) or (f"{rung} on all engines" if rung else "all actions")
        return _accepted(f"{what}: {'paused until resumed' if verb == 'pause' else 'resumed'}")

    async def _journal(self, actions: ActionDesk, query: Mapping[str, str]) -> HttpAnswer:
        last = query.get("last", "100")
        if not last.isascii() or not last.isdecimal() or len(last) > 6 or not 0 < int(last) <= MOST_ENTRIES:
            return error(400, f"last is a whole number from 1 to {MOST_ENTRIES}")
        async with self._reading:  # one at a time: reading a long journal takes seconds
            found = await asyncio.to_thread(read_journal, actions.journal, int(last))
        rows = [entry_json(one) for one in found.entries]
        return json_answer(200, {"entries": rows, "wrong": [clean(one.message) for one in found.wrong]})


async def _change(actions: ActionDesk, verb: str, engine: str, asked: Mapping[str, str], who: str) -> HttpAnswer:
    """Sets knobs or quarantines a pod: changes that are made at once, and end by themselves."""
    did = ""
    if verb == SET:
        try:
            values, for_s = knob_values(asked), amount("for", asked.get("for", "1h"), "s")
        except BadInput as problem:
            return error(400, str(problem))
        if not 0 < for_s <= LONGEST_LEASE_S:
            return error(400, "for: up to 7 days")
        did = "set, " if values else "let go, "
        outcome = await actions.set_knobs(engine, values, for_s, who)
    else:
        outcome = await actions.quarantine(engine, who)
    if not outcome.is_done:
        return _refused("NotDone" if outcome.is_done is False else "NotKnown", outcome.message)
    return _accepted(f"{clean(engine)}: {did}{clean(outcome.message)}")


async def _act(actions: ActionDesk, verb: str, engine: str) -> HttpAnswer:
    start = {"drain": actions.drain, "undrain": actions.undrain}.get(verb)
    decision_soon = actions.ask(ACTS[verb], engine) if start is None else start(engine)
    try:
        # Cancelled after that, so that it is not done later, unexpectedly.
        decision = await asyncio.wait_for(decision_soon, ASK_S)
    except TimeoutError:
        return _refused("Busy", "guard is busy and has not decided yet: ask again")
    if isinstance(decision, ActionPlan):
        return _accepted(f"{clean(engine)}: {verb} accepted", [clean(line) for line in decision.lines()])
    return _refused(decision.reason, decision.message)


def _approve(actions: ActionDesk, path: str, who: str) -> HttpAnswer:
    id_, _, verb = path.removeprefix(APPROVALS).partition("/")
    found, why_not = actions.answer(id_, is_approved=verb == "approve", who=who)
    if found is None:
        return _refused("NotPending", why_not)
    done = "approved: guard judges once more, and acts if it is still called for" if verb == "approve" else "denied: not done"
    return _accepted(f"{clean(found.engine)}: {found.grade} {done}")


def _is_action_path(path: str) -> bool:
    if path in ("/v1/pause", "/v1/resume") or re.fullmatch(rf"{APPROVALS}[0-9a-f]{{1,64}}/(approve|deny)", path):
        return True
    engine, _, verb = path.removeprefix("/v1/engines/").rpartition("/")
    return path.startswith("/v1/engines/") and bool(engine) and verb in VERBS


def _object(body: bytes, known: Sequence[str]) -> dict[str, str] | str:
    """Returns the posted object, or a text that says what is wrong with it; an empty body is an empty object."""
    try:
        found = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError):
        return "not JSON"
    if not isinstance(found, dict):
        return "send a JSON object: {}"
    for name, value in found.items():
        if name not in known:
            return f"unknown key {clean(name)[:40]!r}; known: {', '.join(known) or 'nothing'}"
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            return f"{name} must be a string"
    return {name: str(value) for name, value in found.items()}


def _actions(actions: ActionDesk) -> HttpAnswer:
    switches = actions.switches
    rows = [
        {
            "engine": clean(one.engine), "action": one.action, "grade": str(one.grade), "kind": one.kind,
            "step": None if one.step is None else str(one.step), "undoing": one.is_undoing, "since": since,
        }
        for one, since in actions.under_way()
    ]  # fmt: skip
    off = {
        "all": switches.is_paused, "why": clean(switches.why), "engines": sorted(clean(name) for name in switches.paused),
        "rungs": sorted(str(rung) for rung in switches.rungs_off),
    }  # fmt: skip
    needs = [{"engine": clean(name), "says": clean(says)} for name, says in sorted(actions.needs().items())]
    waiting = [
        {
            "id": one.id, "engine": clean(one.engine), "grade": str(one.grade), "why": clean(one.why), "asked": one.asked_at,
            "until": one.until,
        }
        for one in actions.pending()
    ]  # fmt: skip
    return json_answer(
        200, {"approvals": waiting, "actions": rows, "paused": off, "needs": needs, "trouble": clean(actions.trouble)}
    )


def _accepted(says: str, plan: Sequence[str] = ()) -> HttpAnswer:
    return json_answer(200, {"accepted": True, "plan": plan, "says": says})


def _refused(reason: str, says: str) -> HttpAnswer:
    return json_answer(409, {"accepted": False, "reason": reason, "says": clean(says)})


def json_answer(status: int, body: Mapping[str, Any]) -> HttpAnswer:
    """Returns an answer of guard's API, with its schema."""
    return HttpAnswer(status, json.dumps({"schema": SCHEMA, **body}, ensure_ascii=False).encode())
