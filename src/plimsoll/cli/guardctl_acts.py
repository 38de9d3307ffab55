"""What `plimsoll guardctl` asks of a guard that acts: to pause, to resume, to do something now; and what its journal says."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from plimsoll.cli.output import show
from plimsoll.doctor.trend_words import duration
from plimsoll.domain.printable import printable
from plimsoll.errors import BadInput

ON_ENGINES = ("drain", "undrain", "compact", "restart", "shed")
SWITCHES = ("pause", "resume")
RUNGS = ("shed", "compact", "restart")
HARMLESS = ("undrain",)
ALL = 1_000_000
REFUSALS_PAGE = "docs/guard-acts.md#when-it-refuses"
# What helps against a refusal that does not say so itself; the page says more.
WHAT_TO_DO = {
    "RungOff": "add it to [act] rungs, if you want it",
    "OnlyObserved": "restart it yourself, or name it under [[engine]]",
    "Unknown": "give each server its own address; look at the network between",
    "NoGate": "start it with the gate (plimsoll inside check says how) and give guard its token_file",
    "NoRestarter": "say how: restart = {...} in its [[engine]]",
    "SickCard": "take the card out of service",
    "CrashLoop": "read the evidence (plimsoll doctor FOLDER), mend it, then guardctl resume ENGINE",
    "BudgetSpent": "find out why it needs restarts; the budgets are in [act]",
    "Hours": "wait, or broken_any_time = true in [act] for engines that serve nobody",
    "Rollout": "wait until it is over",
    "TooManyAway": "bring those back first (guardctl actions)",
    "OthersCannotCarry": "bring up another engine, wait for a calmer hour, or may_be_last = true in [act] for a single one",
}


class Asks(Protocol):
    """Who talks to guard's API."""

    def asked(self, path: str) -> tuple[int, dict[str, Any]]:
        """One answer: 200, or 503 of a guard that only observes."""

    def post(self, path: str, body: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
        """One wish: the status, and what is said to it."""


def switch(ask: Asks, verb: str, engine: str | None, rung: str | None, *, is_json: bool) -> int:
    """Pause or resume."""
    if rung is not None and rung not in RUNGS:
        raise BadInput(f"--rung {rung[:40]!r} is none of: {', '.join(RUNGS)}")
    if rung is not None and engine is not None:
        raise BadInput("an engine or a rung, not both: a rung is switched for all engines")
    body = ({"engine": engine} if engine is not None else {}) | ({"rung": rung} if rung is not None else {})
    return _told(*ask.post(f"/v1/{verb}", body), is_json=is_json)


def act(ask: Asks, verb: str, engine: str, *, is_sure: bool, is_json: bool) -> int:
    """One action on one engine."""
    if not is_sure and verb not in HARMLESS and not _is_sure(f"{verb} {engine}"):
        return 1
    return _told(*ask.post(f"/v1/engines/{quote(engine, safe='')}/{verb}", {}), is_json=is_json)


def _is_sure(what: str) -> bool:
    if not sys.stdin.isatty():
        raise BadInput(f"{what}: nobody is there to be asked; say --yes")
    print(f"{plain(what)}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _told(status: int, body: Mapping[str, Any], *, is_json: bool) -> int:
    """Done is 0, refused is 1: also by a guard that only observes."""
    if is_json:
        show(json.dumps(body, indent=2, ensure_ascii=False))
    elif status == 200:
        show("\n".join([plain(body["says"]), *(f"  {plain(line)}" for line in body["plan"])]))
    else:
        reason = f" ({plain(body['reason'])})" if "reason" in body else ""
        helps = WHAT_TO_DO.get(str(body.get("reason")))
        do = f"\n  what to do: {helps}\n  read on: {REFUSALS_PAGE}" if helps else ""
        show(f"refused{reason}: {plain(body['says'])}{do}")
    return 0 if status == 200 else 1


def actions(ask: Asks, *, is_json: bool) -> int:
    """What is under way, and what is paused."""
    status, body = ask.asked("/v1/actions")
    if is_json or status != 200:
        show(json.dumps(body, indent=2, ensure_ascii=False) if is_json else f"nothing is under way: {plain(body['says'])}")
        return 0
    off = body["paused"]
    lines = [f"  {plain(one['engine']):30} {_under_way(one)}" for one in body["actions"]]
    lines = lines or ["nothing is under way"]
    lines += [f"  {plain(one['engine']):30} {plain(one['says'])}" for one in body["needs"]]
    lines += ["everything is paused (guardctl resume)"] if off["all"] else []
    lines += [f"{plain(name)} is paused (guardctl resume {plain(name)})" for name in off["engines"]]
    lines += [f"{plain(rung)} is switched off (guardctl resume --rung {plain(rung)})" for rung in off["rungs"]]
    lines += [f"guard does not act any more: {plain(body['trouble'])}"] if body["trouble"] else []
    show("\n".join(lines))
    return 0


def _under_way(one: Mapping[str, Any]) -> str:
    what = "drain by hand" if one["kind"] == "drain" else f"{one['grade']} ({one['kind']})"
    since = "" if one["since"] is None else f", since {duration(max(0.0, time.time() - one['since']))}"
    back = ", on its way back" if one["undoing"] else ""
    return plain(f"{what}: {one['step'] or 'over'}{back}{since}")


def journal_of(path: str, last: int, engine: str | None, *, is_json: bool) -> int:
    """From the file itself, also where no guard runs."""
    from plimsoll.actuators.journal_read import ABSENT, UNREADABLE, read_history
    from plimsoll.report.guard import SCHEMA
    from plimsoll.report.guard_journal import entry_json

    found = read_history(Path(path), ALL)
    for one in found.wrong:
        if one.kind in (ABSENT, UNREADABLE) and not found.entries:
            raise BadInput(one.says)
    rows = [entry_json(one) for one in found.entries]
    rows = [row for row in rows if engine is None or row["engine"] == engine][-last:]
    wrong = [plain(one.says) for one in found.wrong]
    if is_json:
        show(json.dumps({"schema": SCHEMA, "entries": rows, "wrong": wrong}, indent=2, ensure_ascii=False))
    else:
        show("\n".join([*deeds(rows), *wrong]) or "nothing was done")
    return 1 if wrong else 0


def deeds(rows: list[dict[str, Any]]) -> list[str]:
    """Entries as lines."""
    return [line for _, line in told(rows)]


def told(rows: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """Entries as lines, each with its time."""
    from plimsoll.report.guard_journal import entry_sentence

    return [(row["at"], f"{stamp(row['at'])} {plain(text)}") for row in rows if (text := entry_sentence(row))]


def entries_of(ask: Callable[[str], tuple[int, dict[str, Any]]], last: int) -> list[dict[str, Any]] | None:
    """What a running guard did; None where it only observes."""
    status, body = ask(f"/v1/journal?last={last}")
    return list(body["entries"]) if status == 200 else None


def stamp(unix_s: float) -> str:
    """A time as a person reads it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def plain(text: object) -> str:
    """What may go to a terminal."""
    return printable(str(text), "?")
