"""Replays the journal: switches, restarts, how actions ended, and the actions that are still open."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

from plimsoll.guard.act.decide import FailedRestarts, Restart, Switches, reason_of
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, OPENED, OUTCOME, RESTART, SEEN, SWITCH, Entry
from plimsoll.guard.act.steps import COURSES, ActionRun, End, Step
from plimsoll.guard.judge.history import SAME_S
from plimsoll.guard.judge.tracker import Grade


class EngineProcess(NamedTuple):
    """Identity of the engine process that answers; a field is None where it is unknown."""

    started: float | None = None  # as its page says
    restarts: int | None = None  # how often its supervisor has started it again


class KnownProcess(NamedTuple):
    """The last process of an engine in the journal, and guard's restarts after it."""

    seen: EngineProcess | None = None  # None: it was never seen
    own: int = 0  # restarts of our own since
    is_awaited: bool = False  # one was counted whose process has not answered yet


class ProcessChange(NamedTuple):
    """Difference between the process in the journal and the one that answers now."""

    times: int  # restarts that guard did not make
    seen: EngineProcess
    is_awaited: bool
    is_new: bool  # whether there is anything to write down


def foreign_restarts(known: KnownProcess, now: EngineProcess, lives: int) -> ProcessChange:
    """Counts restarts that guard did not make. `lives`: how many new processes have answered since then.

    Neither source tells all: the page misses a process that ended before it answered, and the count of systemd or a cluster
    knows only what that restarted itself.
    """
    before = known.seen or EngineProcess()
    is_another = before.started is not None and now.started is not None and abs(now.started - before.started) > SAME_S
    answered = max(lives, int(is_another))
    # One of them may be the process that we started, or that was counted before it answered.
    theirs = max(0, answered - max(known.own, int(known.is_awaited)))
    # A count that fell was reset: it says nothing about the time before.
    counted = 0 if before.restarts is None or now.restarts is None else max(0, now.restarts - before.restarts)
    started = before.started if now.started is None else now.started
    seen = EngineProcess(started, before.restarts if now.restarts is None else now.restarts)
    is_awaited = not answered and (known.is_awaited or counted > 0)
    is_first = seen.started is not None and before.started is None
    is_new = bool(theirs or counted or is_another or is_first or lives or seen.restarts != before.restarts)
    return ProcessChange(max(theirs, counted), seen, is_awaited, is_new)


PAUSE, RUNGS = "pause", "rung-"
DRAIN, UNDRAIN = "drain", "undrain"
"""In place of a condition: an engine that a person takes out, and one that was held and is put back."""
MOST_TIMES = 1_000  # restarts that one entry may stand for
FUTURE_S = 60.0  # how far two clocks may differ


def read_switches(entries: Iterable[Entry]) -> Switches:
    """Returns the switches that people have turned off and not on again."""
    last = {(one.engine, one.step): bool(one.fields.get("on")) for one in entries if one.kind == SWITCH}
    off = [key for key, is_on in last.items() if is_on]
    rungs = frozenset(grade for grade in Grade for _, name in off if name == f"{RUNGS}{grade}")
    return Switches(("", PAUSE) in off, frozenset(engine for engine, name in off if engine and name == PAUSE), rungs)


def read_restarts(entries: Iterable[Entry], now: float = math.inf) -> list[Restart]:
    """Returns all restarts, guard's and others'. Guard's own action counts once, and not at all if it stopped nothing.

    A time in the future comes from a wrong clock: such a restart is dated by the entry before it.
    """
    restarts: dict[str, list[Restart]] = {}
    before = -math.inf
    heirs: dict[str, str] = {}  # a pod that took another's place has its past
    for number, entry in enumerate(entries):
        if (heir := _heir(entry)) and heir != entry.engine:
            heirs[entry.engine] = heir
        key = entry.action or f"#{number}"
        at = entry.at if entry.at <= now + FUTURE_S else before
        before = max(before, at)
        if entry.kind == RESTART:
            is_own, failure = bool(entry.fields.get("own", True)), str(entry.fields.get("failure", ""))
            times = entry.fields.get("times", 1)  # several restarts by somebody else may be found at once
            times = min(MOST_TIMES, max(1, times)) if isinstance(times, int) else 1
            restarts[key] = [Restart(at, entry.engine, is_own, failure, str(entry.fields.get("requests", "")))] * times
        elif entry.kind == CLOSED and entry.fields.get("end") == End.UNDONE:
            restarts.pop(key, None)
    found = []
    for restart in itertools.chain.from_iterable(restarts.values()):
        engine = restart.engine
        for _ in heirs:  # a circle leads nowhere
            engine = heirs.get(engine, engine)
        found.append(restart._replace(engine=engine))
    return found


def _heir(entry: Entry) -> str:
    """Returns the engine that took the place of this entry's, by the end of an action or a step."""
    facts = entry.fields.get("facts")
    if entry.kind == CLOSED:
        found = entry.fields.get("replaced_by")
    else:
        found = facts.get("replacement") if entry.kind == OUTCOME and isinstance(facts, dict) else ""
    return found if isinstance(found, str) else ""


def failed_restarts(entries: Iterable[Entry]) -> dict[str, FailedRestarts]:
    """Returns the engines that restarts did not mend.

    Only a completed restart or a resume of that engine clears one: neither an undone action, nor a manual drain, nor the end
    of a fleet-wide pause shows that it is mended.
    """
    found: dict[str, FailedRestarts] = {}
    for entry in entries:
        if entry.kind == SWITCH and entry.step == PAUSE and not entry.fields.get("on"):
            found.pop(entry.engine, None)
        if entry.kind != CLOSED or entry.fields.get("grade") != Grade.RESTART:
            continue
        engine = _heir(entry) or entry.engine
        kind, end, before = str(entry.fields.get("kind", "")), entry.fields.get("end"), found.pop(entry.engine, None)
        if before is not None:
            found[engine] = before
        if kind == UNDRAIN:
            if end == End.DONE and before is not None:
                found[engine] = before._replace(is_out=False)
        elif end == End.DONE and kind != DRAIN:
            found.pop(engine, None)
        elif end in (End.FAILED, End.HELD):
            unmended = frozenset() if before is None else before.unmended
            is_held = end == End.HELD or (before is not None and before.end == End.HELD)
            found[engine] = FailedRestarts(
                kind, str(End.HELD if is_held else End.FAILED), unmended | {reason_of(kind)},
                is_out=end == End.HELD or (before is not None and before.is_out),
            )  # fmt: skip
    return found


def last_starts(entries: Iterable[Entry]) -> dict[str, float]:
    """Returns how long guard's last start of each engine took, in seconds."""
    found = ((entry.engine, _number(entry.fields.get("start_s"))) for entry in entries if entry.kind == CLOSED)
    return {engine: start_s for engine, start_s in found if start_s is not None}


def known_processes(entries: Iterable[Entry]) -> dict[str, KnownProcess]:
    """Returns the last known process of each engine, with the number of guard's own restarts after it."""
    found: dict[str, KnownProcess] = {}
    own: dict[str, set[str]] = {}
    for entry in entries:
        fields = entry.fields
        if entry.kind == SEEN or (entry.kind == RESTART and "started" in fields):
            seen = EngineProcess(_number(fields.get("started")), _count(fields.get("count")))
            found[entry.engine] = KnownProcess(seen, is_awaited=bool(fields.get("awaited")))
            own[entry.engine] = set()
        elif entry.kind == RESTART and entry.action:
            own.setdefault(entry.engine, set()).add(entry.action)
        elif entry.kind == CLOSED and fields.get("end") == End.UNDONE:
            own.get(entry.engine, set()).discard(entry.action)
    return {name: found.get(name, KnownProcess())._replace(own=len(own.get(name, ()))) for name in {*found, *own}}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def open_actions(entries: Iterable[Entry]) -> list[ActionRun]:
    """Returns every action in the journal that was begun and is not over; leaves out those it cannot read."""
    found: dict[str, ActionRun] = {}
    for entry in entries:
        if entry.kind == OPENED:
            fields, facts = entry.fields, entry.fields.get("facts")
            try:
                grade, steps = Grade(fields["grade"]), tuple(Step(name) for name in fields["steps"])
            except (KeyError, ValueError, TypeError):
                continue
            if steps in COURSES.get(grade, ()):  # another version of guard may have had other steps
                run = ActionRun(entry.action, entry.engine, grade, str(fields.get("kind", "")), steps, steps[0])
                found[entry.action] = run._replace(facts=facts) if isinstance(facts, dict) else run
        elif entry.action in found:
            if entry.kind == CLOSED:
                del found[entry.action]
            else:
                found[entry.action] = _moved(found[entry.action], entry)
    return list(found.values())


def unknown_actions(entries: Iterable[Entry]) -> list[Entry]:
    """Returns the opening entries of unfinished actions that this version of guard cannot read: nobody goes on with them."""
    rows = list(entries)
    over = {entry.action for entry in rows if entry.kind == CLOSED} | {run.action for run in open_actions(rows)}
    return [entry for entry in rows if entry.kind == OPENED and entry.action not in over]


def _moved(course: ActionRun, entry: Entry) -> ActionRun:
    if course.step is None or entry.step != course.step:
        # A later guard may have begun to undo it: then its entries are those of the undoing.
        turned = course.taken_over() if entry.kind == INTENT else None
        return course if turned is None or turned.step is None or entry.step != turned.step else turned.begun()
    if entry.kind == INTENT:
        return course.begun()
    if entry.kind == OUTCOME:
        facts = entry.fields.get("facts")
        done = entry.fields.get("done")
        return course.after(is_done=done if isinstance(done, bool) else None, facts=facts if isinstance(facts, dict) else {})
    return course
