"""usage: plimsoll guardctl status [ENGINE]
       plimsoll guardctl history [ENGINE] [-n N] [--journal FILE]
       plimsoll guardctl actions
       plimsoll guardctl pause|resume [ENGINE] [--rung RUNG]
       plimsoll guardctl drain|undrain|shed|compact|restart ENGINE [--yes]

Asks a running guard: what holds now and what to do about it, what changed and what was done, what is under way. And tells one
that acts (plimsoll guard --act) to do nothing any more, or to do something now; what speaks against it still does.

  --rung RUNG           pause, resume: only shed, compact or restart, for every engine
  --yes                 do it without asking back
  -n, --limit N         history: only the newest N lines; default: 50
  --journal FILE        history: from guard's journal itself, also where no guard runs
  --at URL              guard's API; default: http://127.0.0.1:9790
  --token-file FILE     its token; default: $PLIMSOLL_GUARD_TOKEN, else the one that a guard of this user left
  --timeout S           how long it may take; default: 10
  --json                what the API answered

Exit codes: 0 all engines answer and nothing holds that matters, or what was asked for is accepted; 1 something holds, an engine
does not answer or needs a person (status), it was refused, or the journal is damaged; 2 a word or the token is wrong; 3 guard
does not answer, or it is not known whether it has heard.
Read on: docs/guardctl.md
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlencode, urlsplit

from plimsoll.doctor.rules.trend_growth import duration
from plimsoll.errors import BadInput, WorldFailed, printable
from plimsoll.launch.options import Split, split_options
from plimsoll.render.terminal import show

# What `plimsoll guardctl` asks of a guard that acts: to pause, to resume, to do something now; and what its journal says.

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
    from plimsoll.guard.daemon.journal import ABSENT, UNREADABLE, read_history
    from plimsoll.render.guard import SCHEMA, entry_json

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
    from plimsoll.render.guard import entry_sentence

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


USUAL = "http://127.0.0.1:9790"
MOST_BYTES = 64 << 20
MOST_ENTRIES = 1_000
VERBS = ("status", "history", "actions", *SWITCHES, *ON_ENGINES)
_OPTIONS = {"--rung": SWITCHES, "--yes": ON_ENGINES, "--limit": ("history",), "--journal": ("history",)}
_MARKS = {"answers": "", "refused": "nobody listens there", "silent": "does not answer", "nonsense": "answers nonsense"}
_FORECASTS = {"queue": "requests wait too long", "kv": "the KV cache is full"}


def run(words: list[str]) -> int:
    """One question to guard."""
    if {"--help", "-h"} & set(words):
        show(__doc__.rstrip() if __doc__ else "")
        return 0
    known = ("--at", "--token-file", "--limit", "-n", "--timeout", "--rung", "--journal")
    options = split_options(words, with_value=known, switches=("--json", "--yes"))
    rest = [*options.rest, *(options.verbatim or ())]
    if not rest:
        raise BadInput("say what: plimsoll guardctl status, or plimsoll guardctl history")
    if rest[0] not in VERBS:
        raise BadInput(f"guardctl has no {rest[0][:40]!r}; it has: {', '.join(VERBS)}")
    if len(rest) > 2 or (rest[0] == "actions" and len(rest) > 1):
        raise BadInput("one engine at most" if rest[0] != "actions" else "actions shows those of all engines")
    values = _values(rest[0], options)
    engine = rest[1] if len(rest) == 2 else None
    if rest[0] in ON_ENGINES and not engine:
        raise BadInput(f"{rest[0]} which engine? plimsoll guardctl {rest[0]} ENGINE")
    try:
        return _do(rest[0], engine, values, is_json="--json" in options.switches, is_sure="--yes" in options.switches)
    except (KeyError, TypeError, AttributeError):
        raise WorldFailed("what answers there does not answer as this release's guard does") from None


def _values(verb: str, options: Split) -> dict[str, str]:
    values = dict(options.values)
    if "-n" in values:
        if values.get("--limit", values["-n"]) != values["-n"]:
            raise BadInput("-n and --limit are the same: give one of them")
        values["--limit"] = values.pop("-n")
    for name, verbs in _OPTIONS.items():
        if (name in values or name in options.switches) and verb not in verbs:
            raise BadInput(f"{name} does not go with {verb}")
    return values


def _do(verb: str, engine: str | None, values: Mapping[str, str], *, is_json: bool, is_sure: bool) -> int:
    limit = _number("--limit", values.get("--limit", "50"), 1_000)
    if "--journal" in values:
        return journal_of(values["--journal"], limit, engine, is_json=is_json)
    ask = Asker(values, os.environ)
    if verb == "status":
        return _status(ask, engine, is_json=is_json)
    if verb == "history":
        return _history(ask, engine, limit, is_json=is_json)
    if verb == "actions":
        return actions(ask, is_json=is_json)
    if verb in SWITCHES:
        return switch(ask, verb, engine, values.get("--rung"), is_json=is_json)
    assert engine is not None, "looked at before"
    return act(ask, verb, engine, is_sure=is_sure, is_json=is_json)


class Asker:
    """Asks guard's API."""

    def __init__(self, values: Mapping[str, str], environ: Mapping[str, str]) -> None:
        from plimsoll.net.http_get import address

        self._where = address(values.get("--at", USUAL))
        self._timeout_s = _number("--timeout", values.get("--timeout", "10"), 600)
        token = _token(values, environ, self._where.url)
        if token is None:
            self._need_guard()
            raise BadInput(
                f"{self._where.shown} asks for a token; give --token-file FILE or $PLIMSOLL_GUARD_TOKEN "
                "(no guard of this user left one)"
            )
        self._login = f"Bearer {token}"

    def _need_guard(self) -> None:
        """That somebody listens there; what is asked needs no token."""
        from plimsoll.net import http_get

        try:
            http_get.get(self._where.at("/healthz"), most_bytes=MOST_BYTES, timeout_s=self._timeout_s)
        except WorldFailed as error:
            raise WorldFailed(f"{error}: no guard runs there; plimsoll guard --engine http://HOST:PORT starts one") from None

    def get(self, path: str) -> dict[str, Any]:
        """One answer."""
        return self.asked(path)[1]

    def asked(self, path: str) -> tuple[int, dict[str, Any]]:
        """The same, with its status: 200, or 503 of a guard that only observes."""
        from plimsoll.net import http_get

        base = urlsplit(self._where.url).path.rstrip("/")
        bare, _, query = path.partition("?")
        where = self._where.at(base + bare, query)._replace(login=self._login)
        try:
            reply = http_get.get(where, most_bytes=MOST_BYTES, timeout_s=self._timeout_s)
        except WorldFailed:
            self._need_guard()
            raise
        return _read(where.shown, reply.status, reply.body, (200, 503))

    def post(self, path: str, body: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
        """One wish: 200, 409 for a refusal, or 503 of a guard that only observes."""
        from plimsoll.net.http_call import Lost, Server

        headers, data = {"Authorization": self._login}, json.dumps(body).encode()
        reply = asyncio.run(Server(self._where.url).call("POST", path, data, headers, self._timeout_s))
        if isinstance(reply, Lost):
            heard = "; it may have been heard all the same (guardctl actions)" if reply.was_sent else ""
            raise WorldFailed(f"{self._where.shown}: {reply.why}{heard}")
        return _read(self._where.shown, reply.status, reply.body, (200, 409, 503))


def _read(shown: str, status: int, data: bytes, known: Sequence[int]) -> tuple[int, dict[str, Any]]:
    """What guard said; BadInput for what it calls a mistake of ours, WorldFailed where no guard speaks."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    said = str(body.get("error", ""))[:300] if isinstance(body, dict) else ""
    if status in (400, 401, 403, 404, 405, 421) and said:
        raise BadInput(f"{shown}: {plain(said)}")
    if status not in known or not isinstance(body, dict) or body.get("schema") != "plimsoll.guard/1":
        raise WorldFailed(f"{shown}: answers {status}, and not as guard does")
    return status, body


def _token(values: Mapping[str, str], environ: Mapping[str, str], url: str) -> str | None:
    """What was given, or what a guard of this user left; None where there is none."""
    from plimsoll.guard.api import api as guard_token
    from plimsoll.guard.config_reader import read_token

    if "--token-file" in values:
        return read_token(values["--token-file"])
    if environ.get("PLIMSOLL_GUARD_TOKEN"):
        return environ["PLIMSOLL_GUARD_TOKEN"]
    parts = urlsplit(url)
    left = guard_token.token_path(parts.port or 80, environ)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1") or left is None or not left.exists():
        return None
    return read_token(str(left))


def _number(name: str, text: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 0 < int(text) <= most:
        raise BadInput(f"{name} {text[:40]!r} is not a whole number from 1 to {most}")
    return int(text)


def _status(ask: Asker, engine: str | None, *, is_json: bool) -> int:
    if engine is not None:
        body = ask.get(f"/engines/{quote(engine)}")
        one = body["engine"]
        show(json.dumps(body, indent=2, ensure_ascii=False) if is_json else "\n".join([*_engine(one), *_detail(one)]))
        return int(_matters([one], one["findings"]))
    body, findings = ask.get("/engines"), ask.get("/findings")["findings"]
    if is_json:
        show(json.dumps({**body, "findings": findings}, indent=2, ensure_ascii=False))
    else:
        lines = [line for one in body["engines"] for line in _engine(one)]
        lines += [f"  guard itself: {plain(one['what'])}: {plain(one['text'])}" for one in body["troubles"]]
        lines += [line for one in findings for line in ["", *_finding(one, f"{plain(one['engine'])}: ")]]
        show("\n".join([plain(body["status"]), *lines]))
    return int(_matters(body["engines"], findings))


def _matters(engines: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]]) -> bool:
    """Of an engine that does not answer nothing is known: that is not well. Nor is one that needs a person."""
    return any(one["unreachable"] or one["needs"] for one in engines) or any(one["severity"] != "info" for one in findings)


def _engine(one: Mapping[str, Any]) -> list[str]:
    version = f"vLLM {one['vllm']}" if one["vllm"] else "version not known"
    age = "not looked at yet" if one["look_age_s"] is None else f"looked at {one['look_age_s']:.0f} s ago"
    mark = _MARKS.get(str(one["reach"]), "")
    mark += ", and never did since guard began" if mark and not one["has_answered"] else ""
    state = ", ".join(one["holds"]) or mark or ("needs a person" if one["needs"] else "well" if one["reach"] else "")
    note = [f"  {'':30} {plain(one[name])}" for name in ("needs", "note") if one[name]]
    if mark and one["unreachable"] and not one["holds"]:
        note.append(f"  {'':30} if nobody is starting it, its log says why: plimsoll doctor LOG")
    return [f"  {plain(one['name']):30} {plain(state):20} {plain(version)}, {age}", *note]


def _detail(one: Mapping[str, Any]) -> list[str]:
    lines = [line for found in one["findings"] for line in ["", *_finding(found, "")]]
    for status, heading in (("true", "holds"), ("unknown", "not known"), ("false", "does not hold")):
        rows = [row for row in one["conditions"] if row["status"] == status]
        lines += ["", f"{heading}:"] if rows else []
        lines += [f"  {plain(row['kind']):12} {plain(row['message'])}" for row in rows]
    lines += ["", _canary(one["canary"])] if one["canary"] is not None else []
    lines += [""] if one["forecasts"] else []
    for name, found in one["forecasts"].items():
        why = found["unknown"]
        when = [duration(found[key] or 0.0) for key in ("likely_s", "soonest_s", "latest_s")]
        said = f"no forecast, {plain(why)}" if why else f"in {when[0]} ({when[1]} to {when[2]})"
        what = _FORECASTS.get(name, f"runs out of {plain(name)} memory")
        lines.append(f"{what}: {said}")
    return lines


def _canary(one: Mapping[str, Any]) -> str:
    """The last test request in words."""
    if one["is_answered"] is None:
        said = f"could not be made: {plain(one['why']) or 'not known why'}"
    elif not one["is_answered"]:
        said = "got no answer"
    else:
        said = "was answered" + ("" if one["seconds"] is None else f" within {one['seconds']:.3g} s")
        said += ", with garbage" if one["is_garbage"] else ""
    return f"the last test request, {duration(one['age_s'])} ago, {said}"


def _finding(one: Mapping[str, Any], before: str) -> list[str]:
    lines = [f"{before}{one['code']} ({one['severity']}): {plain(one['title'])}", f"  why     {plain(one['because'])}"]
    does = [f"{plain(row['do'])}: {plain(row['why'])}" for row in one["remedy"]]
    for word, texts in (("do", does), ("no use", one["not_a_remedy"])):
        lines += [f"  {word if place == 0 else '':7} {plain(text)}" for place, text in enumerate(texts)]
    return [*lines, f"  read on plimsoll doctor --explain {one['code']}"]


def _history(ask: Asker, engine: str | None, limit: int, *, is_json: bool) -> int:
    """What changed and, of a guard that acts, what it did; in the order of time."""
    query = {"limit": str(limit)} | ({"engine": engine} if engine is not None else {})
    body = ask.get(f"/history?{urlencode(query)}")
    entries = entries_of(ask.asked, MOST_ENTRIES) or []
    entries = [row for row in entries if engine is None or row["engine"] == engine][-limit:]
    if is_json:
        show(json.dumps({**body, "entries": entries}, indent=2, ensure_ascii=False))
        return 0
    # What guard did is told from its journal, which is whole; from what was said only where there is none.
    changes = [row for row in body["changes"] if not entries or row["what"] != "acted"]
    rows = [(float(row["at"]), f"{stamp(row['at'])} {plain(row['sentence'])}") for row in changes]
    rows = sorted([*rows, *told(entries)], key=lambda row: row[0])[-limit:]
    show("\n".join(line for _, line in rows) or "nothing has changed since guard began")
    return 0
