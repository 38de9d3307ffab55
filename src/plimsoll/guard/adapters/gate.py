"""The gate's endpoints, as guard uses them: drain and end it, shed and end it, compact, and what the gate says of itself.

Each deed is judged by the gate's own answer to it, never by the status alone: a proxy in between answers too. A lost answer is
"not known"; all but compact may simply be asked again, since asking twice does the same as asking once.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

from plimsoll.doctor.read.redact_text import shown_line
from plimsoll.errors import printable
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.net.cluster import bearer
from plimsoll.net.http_call import Lost, Reply, Server, number, table

# What others say, as it may stand in a sentence of ours.

LONGEST = 300


def quoted_words(text: str, most: int = LONGEST) -> str:
    """One line without secrets and without anything that a terminal would obey."""
    shown = shown_line(text[: 10 * most])
    return printable(shown).strip()[:most]


DEADLINE_S = 5.0
COMPACT_S = 30.0  # the gate itself keeps the one who asks waiting for 20 s
OUT = ("leaving", "refusing")
_OLDER = re.compile(r"epoch \d{1,20} is older than (\d{1,20})")
_WHY = {
    401: "the gate does not take this token",
    403: "the gate was started without PLIMSOLL_TOKEN: its endpoints are off",
    404: "there is no gate there, or its endpoints have a place of their own (PLIMSOLL_LISTEN)",
}
_COUNTS = ("in_flight", "background", "engine_requests", "begun", "pid", "api_servers")
_STEPS = ("steps", "running", "waiting")


class GateHttpClient:
    """The gate of one engine. Its token goes into one header, and only to what asks for one as the gate does."""

    def __init__(self, url: str, token: str, *, deadline_s: float = DEADLINE_S, compact_s: float = COMPACT_S) -> None:
        """`url`: http://HOST:PORT or unix:/PATH. BadInput if it or the token cannot be one."""
        self._server = Server(url)
        self._headers = bearer(token)
        self._is_gate = False  # something there has asked for a token
        self._deadline_s, self._compact_s = deadline_s, compact_s
        self.label = f"the gate at {self._server.shown}"

    async def drain(
        self,
        epoch: int,
        lease_s: float,
        *,
        refuse: bool = False,
        quiet_s: float | None = None,
        bound_s: float | None = None,
        retry_after_s: int | None = None,
    ) -> Outcome:
        """Begin a drain or renew its lease; `refuse` asks for phase two, which no later renewal takes back.

        Phase one ends by itself when nothing has come for `quiet_s` or after `bound_s`; left out, the gate's own bounds hold.
        """
        wish = {"epoch": epoch, "lease_s": lease_s, "refuse": refuse}
        more = {"quiet_s": quiet_s, "bound_s": bound_s, "retry_after_s": retry_after_s}
        told = await self._post("drain", {**wish, **{name: value for name, value in more.items() if value is not None}})
        if isinstance(told, Outcome):
            return told
        facts = _drain_facts(told)
        phase, left_s = facts.get("phase"), facts.get("lease_left_s", 0.0)
        if phase not in OUT or facts.get("epoch") != epoch or not left_s:
            return unsure("the gate answers, but not that it drains for us", **facts)
        if refuse and phase != "refusing":
            return unsure("the gate drains, but does not say that it refuses new work", **facts)
        return done(f"it is {phase}, epoch {epoch}, for {left_s:.0f} s unless renewed", **facts)

    async def undrain(self, epoch: int) -> Outcome:
        """End the drain; the same as done when there was none."""
        told = await self._post("undrain", {"epoch": epoch})
        if isinstance(told, Outcome):
            return told
        facts = _drain_facts(told)
        if facts.get("phase") != "serving":
            return unsure("the gate answers, but not that it serves", **facts)
        return done("it serves again", **facts)

    async def shed(self, max_wait_s: float, lease_s: float) -> Outcome:
        """Refuse new work that would wait longer, until the lease ends; asked again, it is renewed.

        `facts["is_overruled"]`: vLLM's own admission control is set; then that decides, and the gate refuses nobody.
        """
        told = await self._post("shed", {"max_wait_s": max_wait_s, "lease_s": lease_s})
        if isinstance(told, Outcome):
            return told
        facts = _shed_facts(told)
        bound_s = facts.get("max_wait_s")
        if not isinstance(bound_s, float | int) or abs(bound_s - max_wait_s) > 0.001 or not facts.get("lease_left_s"):
            return unsure("the gate answers, but not that it sheds by this bound", **facts)
        if facts["is_overruled"]:
            return done("the bound is set, but vLLM's own admission control decides alone", **facts)
        return done(f"new work that would wait longer than {max_wait_s:g} s is refused, for {lease_s:.0f} s", **facts)

    async def unshed(self) -> Outcome:
        """Back to what was set when the server was started."""
        told = await self._post("unshed", {})
        if isinstance(told, Outcome):
            return told
        facts = _shed_facts(told)
        if "max_wait_s" not in told or facts.get("lease_left_s") != 0:
            return unsure("the gate answers, but not that it sheds no more", **facts)
        return done("it sheds no more than it was started with", **facts)

    async def compact(self) -> Outcome:
        """Give back what torch keeps and nobody uses, in every worker.

        It is never asked a second time here: a call that still runs is "not known", and /plimsoll/state has its end.
        """
        told = await self._post("compact", {}, self._compact_s)
        if isinstance(told, Outcome):
            return told
        if told.get("is_running") is True:
            return unsure("the workers are at it still", is_running=True)
        workers = told.get("workers")
        if told.get("is_running") is not False or not isinstance(workers, list) or not workers:
            return unsure("the gate answers, but not that the workers did it")
        returned = [number(worker.get("returned"), 2.0**50) for worker in workers if isinstance(worker, dict)]
        facts = {"workers": len(workers), "returned_bytes": sum(value for value in returned if value is not None)}
        took_s = number(told.get("seconds"), 1e6)
        return done(f"{len(workers)} worker(s) gave back {facts['returned_bytes'] / 2**20:.0f} MiB",
                    **facts, **({} if took_s is None else {"seconds": took_s}))  # fmt: skip

    async def state(self) -> Outcome:
        """What the gate says of itself, as facts; what it does not say is not there. Not known without a whole answer."""
        told = await self._ask("GET", "state", b"", self._deadline_s)
        if isinstance(told, Lost):
            return unsure(f"the gate's state is not known: {told.why}")
        found = told.table()
        if told.status != 200 or found.get("schema") != "plimsoll.state/1":
            return unsure(f"the gate's state is not known: {_reason(told)}", status=told.status)
        facts: dict[str, str | float | bool] = _some_numbers(found, _COUNTS)
        facts |= {name: found[name] for name in ("ready", "idle") if isinstance(found.get(name), bool)}
        facts |= {"reason": quoted_words(found["reason"], 100)} if isinstance(found.get("reason"), str) else {}
        drain, engine, shed = (table(found.get(name)) for name in ("drain", "engine", "shed"))
        facts |= _drain_facts({**drain, "in_flight": found.get("in_flight"), "idle": found.get("idle")})
        facts |= _some_numbers(engine, (*_STEPS, "last_step_age_s"))
        facts |= {name: engine[name] for name in ("is_dead", "is_wedged") if isinstance(engine.get(name), bool)}
        facts |= {f"shed_{name}": value for name, value in _some_numbers(shed, ("max_wait_s", "lease_left_s")).items()}
        facts |= _some_numbers(shed, ("expected_wait_s",))
        return done(
            f"{facts.get('phase', 'an unknown phase')}, {facts.get('in_flight', 'an unknown number')} in flight", **facts
        )

    async def _post(self, name: str, fields: Mapping[str, Any], deadline_s: float | None = None) -> Mapping[str, Any] | Outcome:
        """The gate's answer to a deed that it took; else what became of it."""
        told = await self._ask("POST", name, json.dumps(fields).encode(), deadline_s or self._deadline_s)
        if isinstance(told, Lost):
            return unsure(f"{name}: {told.why}") if told.was_sent else failed(f"{name}: {told.why}", unreachable=True)
        if told.status in (200, 202):
            found = told.table()
            return found if found else unsure(f"{name}: the answer is not the gate's", status=told.status)
        if told.status == 409 and name in ("drain", "undrain"):
            current = _OLDER.search(_message(told))
            newer = {"current": int(current[1])} if current else {}
            return failed(f"{name}: {_reason(told)}", status=409, stale=True, **newer)
        if told.status == 500 or (told.status > 501 and not _is_the_gates(told)):
            # The gate stumbled over it, or somebody in between answers, who may have passed it on.
            return unsure(f"{name}: {_reason(told)}", status=told.status)
        return failed(f"{name}: {_reason(told)}", status=told.status)

    async def _ask(self, method: str, name: str, body: bytes, deadline_s: float) -> Reply | Lost:
        """The first time it is asked without the token: an address may lead to somebody who would keep it."""
        end_s = asyncio.get_running_loop().time() + deadline_s
        if not self._is_gate:
            met = await self._server.call("GET", "/plimsoll/state", b"", {}, deadline_s)
            if isinstance(met, Lost):
                return met._replace(was_sent=False)  # of the deed itself nothing was
            if met.status in (403, 404):
                return met
            if met.status != 401 or not met.headers.get("www-authenticate", "").lower().startswith("bearer"):
                return Lost(f"what answers there ({met.status}) is not the gate: it asks for no token", was_sent=False)
            self._is_gate = True
        left_s = max(0.05, end_s - asyncio.get_running_loop().time())
        return await self._server.call(method, f"/plimsoll/{name}", body, self._headers, left_s)


def _some_numbers(found: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, str | float | bool]:
    read = ((name, number(found.get(name))) for name in names)
    return {name: value for name, value in read if value is not None}


def _drain_facts(found: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = _some_numbers(found, ("epoch", "lease_left_s", "since_s", "in_flight"))
    if found.get("phase") in ("serving", *OUT):
        facts["phase"] = found["phase"]
    if isinstance(found.get("idle"), bool):
        facts["idle"] = found["idle"]
    return facts


def _shed_facts(found: Mapping[str, Any]) -> dict[str, Any]:
    note = found.get("note")
    is_overruled = isinstance(note, str) and note.startswith("vLLM's own admission control is set")
    return {**_some_numbers(found, ("max_wait_s", "lease_left_s", "expected_wait_s")), "is_overruled": is_overruled}


def _is_the_gates(told: Reply) -> bool:
    """Whether an error is in the gate's own words: OpenAI's shape with this status in it, or a call's outcome."""
    found = told.table()
    return table(found.get("error")).get("code") == told.status or (found.get("is_running") is False and "error" in found)


def _message(told: Reply) -> str:
    error = told.table().get("error")
    found = error.get("message") if isinstance(error, dict) else error
    return found if isinstance(found, str) else ""


def _reason(told: Reply) -> str:
    """Why not, in words: ours for what has one cause, else the gate's."""
    if told.status in _WHY:
        return _WHY[told.status]
    return f"it answers {told.status}" + (f": {quoted_words(words, 200)}" if (words := _message(told)) else "")
