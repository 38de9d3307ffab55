"""usage: plimsoll guardctl status [ENGINE]
       plimsoll guardctl history [ENGINE] [-n N] [--journal FILE]
       plimsoll guardctl actions
       plimsoll guardctl pause|resume [ENGINE] [--rung RUNG]
       plimsoll guardctl drain|undrain|shed|compact|restart|quarantine ENGINE [--yes]
       plimsoll guardctl approve|deny ID
       plimsoll guardctl set ENGINE KNOB=VALUE... [--for 2h]
       plimsoll guardctl set ENGINE --clear

Asks a running guard which conditions are true and what to do about them, what changed, what was done and what is under way.
Tells one that acts (plimsoll guard --act) to pause, or to do something now; what blocks an action still blocks it.
set turns knobs of a running engine for a time: max-num-seqs, max-num-batched-tokens, kv-headroom,
long-prefill-token-threshold, max-num-queued-reqs, max-num-queued-tokens (docs/knobs.md).

{options}

Exit codes: 0 all engines answer and no condition that matters is true, or the request is accepted; 1 a condition is true, an
engine is unreachable or needs attention (status), the request is blocked, or the journal is damaged; 2 an option or the token
is wrong; 3 guard is unreachable, or it is not known whether it received the request.
Read on: docs/guardctl.md
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode, urlsplit

from plimsoll.cli.main import OptionsCommand
from plimsoll.doctor.rules.trend_growth import duration
from plimsoll.errors import BadInput, WorldFailed
from plimsoll.guard.api.token import token_path
from plimsoll.guard.config_reader import knob_values, read_token
from plimsoll.guard.daemon.journal import ABSENT, UNREADABLE, read_journal
from plimsoll.guard.judge.policy import amount
from plimsoll.inside.knobs import KNOBS
from plimsoll.launch.options import Words, count, first_given, option, switch
from plimsoll.net.address import address
from plimsoll.net.client import HttpClient, Lost, bearer
from plimsoll.redaction import printable
from plimsoll.render.journal import ACTING, SCHEMA, entry_json, entry_sentence
from plimsoll.render.terminal import BAD, BOLD, FAINT, GOOD, SEVERITY, WARN, Line, Report, Whole, show

ON_ENGINES = ("drain", "undrain", "compact", "restart", "shed", "quarantine")
SWITCHES = ("pause", "resume")
ANSWERS = ("approve", "deny")
RUNGS = ("shed", "compact", "restart")
USUAL = "http://127.0.0.1:9790"
VERBS = ("status", "history", "actions", *SWITCHES, *ON_ENGINES, *ANSWERS, "set")
MOST_BYTES = 64 << 20
MOST_ENTRIES = 1_000
REFUSALS_PAGE = "docs/guard-acts.md#when-it-refuses"
# What helps against a reason that does not say so itself; the page says more.
WHAT_TO_DO: Mapping[str, str] = json.loads(Path(__file__).with_name("what_to_do.json").read_text(encoding="utf-8"))
_GOES_WITH = {
    "rung": SWITCHES, "yes": ON_ENGINES, "limit": ("history",), "journal": ("history",), "for_": ("set",), "clear": ("set",),
}  # fmt: skip
_UNREACHABLE = {
    "refused": "unreachable (connection refused)", "silent": "unreachable (timed out)", "nonsense": "answers something else"
}  # fmt: skip
_FORECASTS = {"queue": "requests wait too long", "kv": "the KV cache is full"}
_lines = partial(count, most=MOST_ENTRIES)


@dataclass(frozen=True, kw_only=True)
class GuardctlOptions(Words):
    rung: str | None = option("RUNG", "pause, resume: only shed, compact or restart, for every engine", choices=RUNGS)
    yes: bool = switch("do it without asking for confirmation")
    for_: str | None = option("TIME", "set: how long, such as 30m or 2h; default: 1h", name="--for")
    clear: bool = switch("set: let go of every knob that was set")
    limit: int = option("N", "history: only the newest N lines; default: 50", short="-n", read=_lines, default=0)
    journal: str | None = option("FILE", "history: from guard's journal itself, also where no guard runs")
    at: str = option("URL", f"guard's API; default: {USUAL}", default=USUAL)
    token_file: str | None = option("FILE", "its token; default: $PLIMSOLL_GUARD_TOKEN, else what a guard of this user left")
    timeout: int = option("S", "how long it may take; default: 10", read=partial(count, most=600), default=10)
    json: bool = switch("what the API answered")


def run(options: GuardctlOptions) -> int:
    """Send one request to guard and print its answer."""
    verb, *names = [*options.rest, *(options.verbatim or ())] or [""]
    if not verb:
        raise BadInput("a verb is missing: plimsoll guardctl status, or plimsoll guardctl history")
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"it has: {', '.join(VERBS)}"
        raise BadInput(f"guardctl has no {verb[:40]!r}; {meant}")
    if (len(names) > 1 and verb != "set") or (verb == "actions" and names):
        raise BadInput("one engine at most" if verb != "actions" else "actions shows those of all engines")
    for field, verbs in _GOES_WITH.items():
        if verb not in verbs and (name := first_given(options, field)) is not None:
            raise BadInput(f"{name} does not go with {verb}")
    engine = names[0] if names else None
    if verb in (*ON_ENGINES, "set") and not engine:
        raise BadInput(f"{verb} which engine? plimsoll guardctl {verb} ENGINE")
    if verb in ANSWERS and not re.fullmatch(r"[0-9a-f]{1,64}", engine or ""):
        raise BadInput(f"{verb} what? plimsoll guardctl {verb} ID, as guardctl actions shows it")
    try:
        return _set(str(engine), names[1:], options) if verb == "set" else _answer(verb, engine, options)
    except (KeyError, TypeError, AttributeError):
        raise WorldFailed("what answers there does not answer as this release's guard does") from None


def _answer(verb: str, engine: str | None, options: GuardctlOptions) -> int:
    limit, is_json = options.limit or 50, options.json
    if options.journal is not None:
        return _journal(options.journal, limit, engine, is_json=is_json)
    guard = GuardClient(options, os.environ)
    if verb == "status":
        return _status(guard, engine, is_json=is_json)
    if verb == "history":
        return _history(guard, engine, limit, is_json=is_json)
    if verb == "actions":
        return _actions(guard, is_json=is_json)
    if verb in SWITCHES:
        if options.rung is not None and engine is not None:
            raise BadInput("an engine or a rung, not both: a rung is switched for all engines")
        fields = {"engine": engine, "rung": options.rung}
        answer = guard.post(f"/v1/{verb}", {name: value for name, value in fields.items() if value is not None})
        return _show_answer(*answer, is_json=is_json)
    assert engine is not None, "looked at before"
    if verb in ANSWERS:
        return _show_answer(*guard.post(f"/v1/approvals/{engine}/{verb}", {}), is_json=is_json)
    if not options.yes and verb != "undrain":
        what = f"{verb} {engine}"
        if not sys.stdin.isatty():
            raise BadInput(f"{what}: not a terminal: pass --yes to confirm")
        print(f"{printable(what, '?')}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return 1
    return _show_answer(*guard.post(f"/v1/engines/{quote(engine, safe='')}/{verb}", {}), is_json=is_json)


def _set(engine: str, words: Sequence[str], options: GuardctlOptions) -> int:
    """Turn knobs of one engine, or let go of them."""
    body = {}
    for word in words:
        name, sign, value = word.partition("=")
        if name not in KNOBS or not sign or not value:
            near = difflib.get_close_matches(name, KNOBS, n=1)
            raise BadInput(f"{word[:60]!r}: KNOB=VALUE with {near[0] if near else ', '.join(KNOBS)}")
        body[name] = value
    if bool(body) == options.clear:
        raise BadInput("set which knob? max-num-seqs=24, or --clear" if not body else "a knob or --clear, not both")
    knob_values(body)
    if options.for_ is not None:
        amount("--for", options.for_, "s")
        body["for"] = options.for_
    answer = GuardClient(options, os.environ).post(f"/v1/engines/{quote(engine, safe='')}/set", body)
    return _show_answer(*answer, is_json=options.json)


def _show_answer(status: int, body: Mapping[str, Any], *, is_json: bool) -> int:
    """Accepted is 0, blocked is 1: also by a guard that only observes."""
    if is_json:
        _show_json(body)
    elif status == 200:
        show(Report([Line(str(body["says"]), 2, GOOD), *(f"  {line}" for line in body["plan"])]))
    else:
        reason = f" ({body['reason']})" if "reason" in body else ""
        remedy = WHAT_TO_DO.get(str(body.get("reason")))
        more = [f"  what to do: {remedy}", f"  read on: {REFUSALS_PAGE}"] if remedy else []
        show(Report([Line(f"blocked{reason}: {body['says']}", 2, WARN), *more]))
    return 0 if status == 200 else 1


def _actions(guard: GuardClient, *, is_json: bool) -> int:
    """What is under way, and what is paused."""
    status, body = guard.get("/v1/actions")
    if is_json:
        _show_json(body)
        return 0
    if status != 200:
        show(Report([f"nothing is under way: {body['says']}"]))
        return 0
    paused = body["paused"]
    report = Report([] if body["actions"] else ["nothing is under way"])
    for action in body["actions"]:
        what = "drain by hand" if action["kind"] == "drain" else f"{action['grade']} ({action['kind']})"
        since = "" if action["since"] is None else f", since {duration(max(0.0, time.time() - action['since']))}"
        back = ", on its way back" if action["undoing"] else ""
        report.append(f"  {action['engine']:30} {what}: {action['step'] or 'over'}{back}{since}")
    report += [Line(f"  {need['engine']:30} {need['says']}", 33, BAD) for need in body["needs"]]
    report += [
        Line(f"  {one['id']:10} {one['engine']}: {one['grade']} waits for approval: {one['why']}", 13, WARN)
        for one in body["approvals"]
    ]
    off = [f"everything is paused: {paused['why']}" if paused["why"] else "everything is paused (guardctl resume)"]
    off = off if paused["all"] else []
    off += [f"{name} is paused (guardctl resume {name})" for name in paused["engines"]]
    off += [f"{rung} is switched off (guardctl resume --rung {rung})" for rung in paused["rungs"]]
    off += [f"guard does not act any more: {body['trouble']}"] if body["trouble"] else []
    show(Report([*report, *(Line(line, 2, WARN) for line in off)]))
    return 0


class GuardClient:
    """Asks guard's API."""

    def __init__(self, options: GuardctlOptions, environ: Mapping[str, str]) -> None:
        """BadInput without a token, WorldFailed where no guard runs."""
        self._where = address(options.at)
        self._timeout_s = options.timeout
        token = _token(options.token_file, environ, self._where.url)
        if token is None:
            self._need_guard()
            raise BadInput(
                f"{self._where.shown} asks for a token; give --token-file FILE or $PLIMSOLL_GUARD_TOKEN "
                "(no guard of this user left one)"
            )
        self._where = replace(self._where, login=bearer(token)["Authorization"])

    def _need_guard(self) -> None:
        """WorldFailed where nobody listens; this request needs no token."""
        try:
            self._where.at("/healthz").get(most_bytes=MOST_BYTES, timeout_s=self._timeout_s)
        except WorldFailed as error:
            raise WorldFailed(f"{error}: no guard runs there; plimsoll guard --engine http://HOST:PORT starts one") from None

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """One answer: 200, or 503 of a guard that only observes."""
        base = urlsplit(self._where.url).path.rstrip("/")
        bare, _, query = path.partition("?")
        where = self._where.at(base + bare, query)
        try:
            reply = where.get(most_bytes=MOST_BYTES, timeout_s=self._timeout_s)
        except WorldFailed:
            self._need_guard()
            raise
        return _checked(where.shown, reply.status, reply.body, (200, 503))

    def download(self, path: str, file: BinaryIO, most_bytes: int) -> None:
        """An answer that is no JSON object, into a file."""
        call = HttpClient(self._where, idle_s=self._timeout_s).call(
            "GET", path, deadline_s=3600.0, most_bytes=most_bytes, sink=lambda piece: file.writelines([piece])
        )
        reply = asyncio.run(call)
        if isinstance(reply, Lost):
            raise reply.error(self._where.shown)
        if reply.status != 200:
            _checked(self._where.shown, reply.status, reply.body, ())

    def post(self, path: str, body: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
        """One request: 200, 409 where it is blocked, or 503 of a guard that only observes."""
        reply = asyncio.run(HttpClient(self._where).call("POST", path, json.dumps(body).encode(), deadline_s=self._timeout_s))
        if isinstance(reply, Lost):
            heard = "; it may have been heard all the same (guardctl actions)" if reply.was_sent else ""
            raise WorldFailed(f"{self._where.shown}: {reply.why}{heard}")
        return _checked(self._where.shown, reply.status, reply.body, (200, 409, 503))


def _checked(shown: str, status: int, data: bytes, known: Sequence[int]) -> tuple[int, dict[str, Any]]:
    """Guard's answer; BadInput for what it calls a mistake of ours, WorldFailed where something else answers."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    error = str(body.get("error", ""))[:300] if isinstance(body, dict) else ""
    if status in (400, 401, 403, 404, 405, 421) and error:
        raise BadInput(f"{shown}: {printable(error, '?')}")
    if status not in known or not isinstance(body, dict) or body.get("schema") != SCHEMA:
        raise WorldFailed(f"{shown}: answers {status}, and not as guard does")
    return status, body


def _token(file: str | None, environ: Mapping[str, str], url: str) -> str | None:
    """The token that was given, or that a guard of this user left; None where there is none."""
    if file is not None:
        return read_token(file)
    if environ.get("PLIMSOLL_GUARD_TOKEN"):
        return environ["PLIMSOLL_GUARD_TOKEN"]
    parts = urlsplit(url)
    path = token_path(parts.port or 80, environ)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1") or path is None or not path.exists():
        return None
    return read_token(str(path))


def _status(guard: GuardClient, name: str | None, *, is_json: bool) -> int:
    """Exit code 1 also for an engine that is unreachable, since nothing is known of it, or that needs attention."""
    if name is not None:
        body = guard.get(f"/engines/{quote(name)}")[1]
        engines, findings = [body["engine"]], body["engine"]["findings"]
        report = Report([*_engines(engines), *_detail(engines[0])])
    else:
        body, findings = guard.get("/engines")[1], guard.get("/findings")[1]["findings"]
        engines = body["engines"]
        report = Report([Line(str(body["status"]), 2, BOLD), *_engines(engines)])
        report += [Line(f"  guard itself: {trouble['what']}: {trouble['text']}", 4, WARN) for trouble in body["troubles"]]
        for finding in findings:
            report += ["", *_finding(finding, f"{finding['engine']}: ")]
        body = {**body, "findings": findings}
    if is_json:
        _show_json(body)
    else:
        show(report)
    return int(
        any(engine["unreachable"] or engine["needs"] for engine in engines)
        or any(finding["severity"] != "info" for finding in findings)
        or any(str(trouble["what"]).startswith(ACTING) for trouble in body.get("troubles", ()))
    )


def _engines(engines: Sequence[Mapping[str, Any]]) -> list[Line]:
    """One line for each engine, in columns as wide as the widest, and its notes under it."""
    rows = [_engine(engine) for engine in engines]
    width = max(30, *(len(str(engine["name"])) for engine in engines)) if engines else 30
    states = max(20, *(len(row[0]) for row in rows)) if rows else 20
    lines = []
    for engine, (state, style, rest, notes) in zip(engines, rows, strict=True):
        lines.append(Line(f"  {engine['name']:{width}} {state:{states}} {rest}", 3 + width, style, 3 + width + len(state)))
        lines += [Line(f"{'':{3 + width}}{note}", 3 + width, FAINT) for note in notes]
    return lines


def _engine(engine: Mapping[str, Any]) -> tuple[str, str, str, list[str]]:
    """Its state, the style of that, what stands behind it, and notes."""
    version = f"vLLM {engine['vllm']}" if engine["vllm"] else "version not known"
    age = "not looked at yet" if engine["look_age_s"] is None else f"looked at {engine['look_age_s']:.0f} s ago"
    mark = _UNREACHABLE.get(str(engine["reach"]), "")
    state = ", ".join(engine["holds"]) or mark
    state = state or ("needs attention" if engine["needs"] else "healthy" if engine["reach"] else "")
    style = GOOD if state == "healthy" else BAD if state else ""
    if mark and not engine["has_answered"] and not engine["holds"]:
        state += ", and has never answered since guard began"
    notes = [str(engine[name]) for name in ("needs", "note") if engine[name]]
    if mark and engine["unreachable"] and not engine["holds"]:
        notes.append("if nobody is starting it, its log says why: plimsoll doctor LOG")
    return state, style, f"{version}, {age}", notes


def _detail(engine: Mapping[str, Any]) -> Report:
    report = Report()
    for finding in engine["findings"]:
        report += ["", *_finding(finding, "")]
    for status, style in (("true", BAD), ("unknown", WARN), ("false", FAINT)):
        rows = [row for row in engine["conditions"] if row["status"] == status]
        report += ["", Line(f"{status}:", 2, style)] if rows else []
        report += [Line(f"  {row['kind']:12} {row['message']}", 15, style, 14) for row in rows]
    report += ["", _canary(engine["canary"])] if engine["canary"] is not None else []
    report += [""] if engine["forecasts"] else []
    for name, forecast in engine["forecasts"].items():
        likely, soonest, latest = (duration(forecast[key] or 0.0) for key in ("likely_s", "soonest_s", "latest_s"))
        unknown = forecast["unknown"]
        when = f"no forecast, {unknown}" if unknown else f"in {likely} ({soonest} to {latest})"
        report.append(f"{_FORECASTS.get(name, f'runs out of {name} memory')}: {when}")
    return report


def _canary(canary: Mapping[str, Any]) -> str:
    if canary["is_answered"] is None:
        result = f"proved nothing: {canary['why'] or 'not known why'}"
    elif not canary["is_answered"]:
        result = "got no answer"
    else:
        result = "was answered" + ("" if canary["seconds"] is None else f" within {canary['seconds']:.3g} s")
        result += ", with garbage" if canary["is_garbage"] else ""
    return f"the last canary request, {duration(canary['age_s'])} ago, {result}"


def _finding(finding: Mapping[str, Any], before: str) -> Iterator[Line]:
    head = f"{before}{finding['code']} ({finding['severity']})"
    yield Line(f"{head}: {finding['title']}", 2, SEVERITY.get(str(finding["severity"]), ""), len(head))
    remedies = [f"{row['do']}: {row['why']}" for row in finding["remedy"]]
    for word, texts in (("why", [finding["because"]]), ("do", remedies), ("no use", finding["not_a_remedy"])):
        for place, text in enumerate(texts):
            yield Line(f"  {word if place == 0 else '':7} {text}", 10, GOOD if word == "do" else "", 10)
    yield Line(f"  read on plimsoll doctor --explain {finding['code']}", 10, FAINT)


def _history(guard: GuardClient, engine: str | None, limit: int, *, is_json: bool) -> int:
    """What changed and, of a guard that acts, what it did; in the order of time."""
    query = {"limit": str(limit)} | ({"engine": engine} if engine is not None else {})
    body = guard.get(f"/history?{urlencode(query)}")[1]
    status, journal = guard.get(f"/v1/journal?last={MOST_ENTRIES}")
    entries = _of_engine(journal["entries"] if status == 200 else [], engine, limit)
    if is_json:
        _show_json({**body, "entries": entries})
        return 0
    # What guard did is told from its journal, which is whole; from the changes only where there is none.
    changes = [row for row in body["changes"] if not entries or row["what"] != "acted"]
    lines = [(float(row["at"]), _line(row["at"], row["sentence"])) for row in changes]
    lines = sorted([*lines, *_entry_lines(entries)], key=lambda line: line[0])[-limit:]
    show(Report(line for _, line in lines) or "nothing has changed since guard began")
    return 0


def _journal(path: str, limit: int, engine: str | None, *, is_json: bool) -> int:
    """The history in the file itself, also where no guard runs."""
    journal = read_journal(Path(path))
    for problem in journal.wrong:
        if problem.kind in (ABSENT, UNREADABLE) and not journal.entries:
            raise BadInput(problem.message)
    rows = _of_engine([entry_json(entry) for entry in journal.entries], engine, limit)
    wrong = [printable(problem.message, "?") for problem in journal.wrong]
    if is_json:
        _show_json({"schema": SCHEMA, "entries": rows, "wrong": wrong})
    else:
        report = Report(line for _, line in _entry_lines(rows))
        report += [Line(text, 2, WARN) for text in wrong]
        show(report or "nothing was done")
    return 1 if wrong else 0


def _of_engine(rows: Sequence[dict[str, Any]], engine: str | None, limit: int) -> list[dict[str, Any]]:
    return [row for row in rows if engine is None or row["engine"] == engine][-limit:]


def _entry_lines(rows: Sequence[dict[str, Any]]) -> list[tuple[float, Whole]]:
    return [(row["at"], _line(row["at"], text)) for row in rows if (text := entry_sentence(row))]


def _line(unix_s: float, text: object) -> Whole:
    return Whole(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(unix_s))} {text}")


def _show_json(body: Mapping[str, Any]) -> None:
    show(json.dumps(body, indent=2, ensure_ascii=False))


COMMAND = OptionsCommand("guardctl", GuardctlOptions, run, __doc__, offers=VERBS)
