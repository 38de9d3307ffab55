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
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from plimsoll.cli import guardctl_acts as acts
from plimsoll.cli.guardctl_acts import plain as _plain
from plimsoll.cli.options import Split, split_options
from plimsoll.cli.output import show
from plimsoll.doctor.trend_words import duration
from plimsoll.errors import BadInput, WorldFailed

USUAL = "http://127.0.0.1:9790"
MOST_BYTES = 64 << 20
MOST_ENTRIES = 1_000
VERBS = ("status", "history", "actions", *acts.SWITCHES, *acts.ON_ENGINES)
_OPTIONS = {"--rung": acts.SWITCHES, "--yes": acts.ON_ENGINES, "--limit": ("history",), "--journal": ("history",)}
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
    if rest[0] in acts.ON_ENGINES and not engine:
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
        return acts.journal_of(values["--journal"], limit, engine, is_json=is_json)
    ask = Asker(values, os.environ)
    if verb == "status":
        return _status(ask, engine, is_json=is_json)
    if verb == "history":
        return _history(ask, engine, limit, is_json=is_json)
    if verb == "actions":
        return acts.actions(ask, is_json=is_json)
    if verb in acts.SWITCHES:
        return acts.switch(ask, verb, engine, values.get("--rung"), is_json=is_json)
    assert engine is not None, "looked at before"
    return acts.act(ask, verb, engine, is_sure=is_sure, is_json=is_json)


class Asker:
    """Asks guard's API."""

    def __init__(self, values: Mapping[str, str], environ: Mapping[str, str]) -> None:
        from plimsoll.sources.http_get import address

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
        from plimsoll.sources import http_get

        try:
            http_get.get(self._where.at("/healthz"), most_bytes=MOST_BYTES, timeout_s=self._timeout_s)
        except WorldFailed as error:
            raise WorldFailed(f"{error}: no guard runs there; plimsoll guard --engine http://HOST:PORT starts one") from None

    def get(self, path: str) -> dict[str, Any]:
        """One answer."""
        return self.asked(path)[1]

    def asked(self, path: str) -> tuple[int, dict[str, Any]]:
        """The same, with its status: 200, or 503 of a guard that only observes."""
        from plimsoll.sources import http_get

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
        from plimsoll.actuators.http_call import Lost, Server

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
        raise BadInput(f"{shown}: {_plain(said)}")
    if status not in known or not isinstance(body, dict) or body.get("schema") != "plimsoll.guard/1":
        raise WorldFailed(f"{shown}: answers {status}, and not as guard does")
    return status, body


def _token(values: Mapping[str, str], environ: Mapping[str, str], url: str) -> str | None:
    """What was given, or what a guard of this user left; None where there is none."""
    from plimsoll.actuators import guard_token
    from plimsoll.sources.guard_values import read_token

    if "--token-file" in values:
        return read_token(values["--token-file"])
    if environ.get("PLIMSOLL_GUARD_TOKEN"):
        return environ["PLIMSOLL_GUARD_TOKEN"]
    parts = urlsplit(url)
    left = guard_token.place(parts.port or 80, environ)
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
        lines += [f"  guard itself: {_plain(one['what'])}: {_plain(one['text'])}" for one in body["troubles"]]
        lines += [line for one in findings for line in ["", *_finding(one, f"{_plain(one['engine'])}: ")]]
        show("\n".join([_plain(body["status"]), *lines]))
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
    note = [f"  {'':30} {_plain(one[name])}" for name in ("needs", "note") if one[name]]
    if mark and one["unreachable"] and not one["holds"]:
        note.append(f"  {'':30} if nobody is starting it, its log says why: plimsoll doctor LOG")
    return [f"  {_plain(one['name']):30} {_plain(state):20} {_plain(version)}, {age}", *note]


def _detail(one: Mapping[str, Any]) -> list[str]:
    lines = [line for found in one["findings"] for line in ["", *_finding(found, "")]]
    for status, heading in (("true", "holds"), ("unknown", "not known"), ("false", "does not hold")):
        rows = [row for row in one["conditions"] if row["status"] == status]
        lines += ["", f"{heading}:"] if rows else []
        lines += [f"  {_plain(row['kind']):12} {_plain(row['message'])}" for row in rows]
    lines += ["", _canary(one["canary"])] if one["canary"] is not None else []
    lines += [""] if one["forecasts"] else []
    for name, found in one["forecasts"].items():
        why = found["unknown"]
        when = [duration(found[key] or 0.0) for key in ("likely_s", "soonest_s", "latest_s")]
        said = f"no forecast, {_plain(why)}" if why else f"in {when[0]} ({when[1]} to {when[2]})"
        what = _FORECASTS.get(name, f"runs out of {_plain(name)} memory")
        lines.append(f"{what}: {said}")
    return lines


def _canary(one: Mapping[str, Any]) -> str:
    """The last test request in words."""
    if one["is_answered"] is None:
        said = f"could not be made: {_plain(one['why']) or 'not known why'}"
    elif not one["is_answered"]:
        said = "got no answer"
    else:
        said = "was answered" + ("" if one["seconds"] is None else f" within {one['seconds']:.3g} s")
        said += ", with garbage" if one["is_garbage"] else ""
    return f"the last test request, {duration(one['age_s'])} ago, {said}"


def _finding(one: Mapping[str, Any], before: str) -> list[str]:
    lines = [f"{before}{one['code']} ({one['severity']}): {_plain(one['title'])}", f"  why     {_plain(one['because'])}"]
    does = [f"{_plain(row['do'])}: {_plain(row['why'])}" for row in one["remedy"]]
    for word, texts in (("do", does), ("no use", one["not_a_remedy"])):
        lines += [f"  {word if place == 0 else '':7} {_plain(text)}" for place, text in enumerate(texts)]
    return [*lines, f"  read on plimsoll doctor --explain {one['code']}"]


def _history(ask: Asker, engine: str | None, limit: int, *, is_json: bool) -> int:
    """What changed and, of a guard that acts, what it did; in the order of time."""
    query = {"limit": str(limit)} | ({"engine": engine} if engine is not None else {})
    body = ask.get(f"/history?{urlencode(query)}")
    entries = acts.entries_of(ask.asked, MOST_ENTRIES) or []
    entries = [row for row in entries if engine is None or row["engine"] == engine][-limit:]
    if is_json:
        show(json.dumps({**body, "entries": entries}, indent=2, ensure_ascii=False))
        return 0
    # What guard did is told from its journal, which is whole; from what was said only where there is none.
    changes = [row for row in body["changes"] if not entries or row["what"] != "acted"]
    rows = [(float(row["at"]), f"{acts.stamp(row['at'])} {_plain(row['sentence'])}") for row in changes]
    rows = sorted([*rows, *acts.told(entries)], key=lambda row: row[0])[-limit:]
    show("\n".join(line for _, line in rows) or "nothing has changed since guard began")
    return 0
