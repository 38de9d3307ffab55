"""Client of the gate's endpoints: begin and end a drain, begin and end shedding, compact, set knobs, read its state.

The gate's own answer decides the outcome of a call, never the status alone: a proxy in between answers too. A lost answer
means unknown; every call but compact may simply be repeated, since twice does the same as once.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

from plimsoll.doctor.read.redact_text import shown_line
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.net.client import HttpClient, Loss, Lost, Reply, bearer, number, table
from plimsoll.redaction import printable

DEADLINE_S = 5.0
KNOBS_S = 20.0  # the engine sets them between two steps, and a step may be long
COMPACT_S = 30.0  # the gate itself answers after 20 s at the latest
OUT = ("leaving", "refusing")
_OLDER = re.compile(r"epoch \d{1,20} is older than (\d{1,20})")
_WHY = {
    401: "the gate does not take this token",
    403: "the gate was started without PLIMSOLL_TOKEN: its endpoints are off",
    404: "there is no gate there, or its endpoints have a place of their own (PLIMSOLL_LISTEN)",
}
_COUNTS = ("in_flight", "background", "engine_requests", "begun", "pid", "api_servers")
_STEPS = ("steps", "running", "waiting")


def quoted_words(text: str, most: int = 300) -> str:
    """Returns somebody else's text in one line, without secrets and control characters, at most `most` letters."""
    return printable(shown_line(text[: 10 * most])).strip()[:most]


class GateHttpClient:
    """The gate of one engine. Its token goes into one header, and only to a server that asks for one as the gate does."""

    def __init__(self, url: str, token: str, *, deadline_s: float = DEADLINE_S, compact_s: float = COMPACT_S) -> None:
        """`url`: http://HOST:PORT or unix:/PATH. Raises BadInput for any other, and for a token that no header can carry."""
        self._server = HttpClient(url)
        self._headers = bearer(token)
        self._is_gate = False  # something there has asked for a token
        self._deadline_s, self._compact_s = deadline_s, compact_s
        self.label = f"the gate at {self._server.shown}"

    async def drain(self, epoch: int, lease_s: float, *, refuse: bool = False, **bounds: float) -> Outcome:
        """Begins a drain or renews its lease; `refuse` asks for phase two, which no later renewal takes back.

        `bounds`: phase one ends by itself when no request came for `quiet_s`, or after `bound_s`; default: the gate's own.
        """
        answer = await self._post("drain", {"epoch": epoch, "lease_s": lease_s, "refuse": refuse, **bounds})
        if isinstance(answer, Outcome):
            return answer
        facts = _drain_facts(answer)
        phase, left_s = facts.get("phase"), facts.get("lease_left_s", 0.0)
        if phase not in OUT or facts.get("epoch") != epoch or not left_s:
            return unsure("the gate answers, but not that it drains for us", **facts)
        if refuse and phase != "refusing":
            return unsure("the gate drains, but does not say that it refuses new work", **facts)
        return done(f"it is {phase}, epoch {epoch}, for {left_s:.0f} s unless renewed", **facts)

    async def undrain(self, epoch: int) -> Outcome:
        """Ends the drain; done also when there was none."""
        answer = await self._post("undrain", {"epoch": epoch})
        if isinstance(answer, Outcome):
            return answer
        facts = _drain_facts(answer)
        if facts.get("phase") != "serving":
            return unsure("the gate answers, but not that it serves", **facts)
        return done("it serves again", **facts)

    async def shed(self, max_wait_s: float, lease_s: float) -> Outcome:
        """Refuses new work that would wait longer, until the lease ends; a repeated call renews it.

        `facts["is_overruled"]`: vLLM's own admission control is set; it decides then, and the gate refuses nobody.
        """
        answer = await self._post("shed", {"max_wait_s": max_wait_s, "lease_s": lease_s})
        if isinstance(answer, Outcome):
            return answer
        facts = _shed_facts(answer)
        bound_s = facts.get("max_wait_s")
        if not isinstance(bound_s, float | int) or abs(bound_s - max_wait_s) > 0.001 or not facts.get("lease_left_s"):
            return unsure("the gate answers, but not that it sheds by this bound", **facts)
        if facts["is_overruled"]:
            return done("the bound is set, but vLLM's own admission control decides alone", **facts)
        return done(f"new work that would wait longer than {max_wait_s:g} s is refused, for {lease_s:.0f} s", **facts)

    async def unshed(self) -> Outcome:
        """Ends shedding: back to the settings of the server's start."""
        answer = await self._post("unshed", {})
        if isinstance(answer, Outcome):
            return answer
        facts = _shed_facts(answer)
        if "max_wait_s" not in answer or facts.get("lease_left_s") != 0:
            return unsure("the gate answers, but not that it sheds no more", **facts)
        return done("it sheds no more than it was started with", **facts)

    async def compact(self) -> Outcome:
        """Makes every worker release the memory that torch has reserved and does not use.

        It is never repeated here: a call that still runs is unknown, and /plimsoll/state shows its end.
        """
        answer = await self._post("compact", {}, self._compact_s)
        if isinstance(answer, Outcome):
            return answer
        if answer.get("is_running") is True:
            return unsure("the workers are at it still", is_running=True)
        workers = answer.get("workers")
        if answer.get("is_running") is not False or not isinstance(workers, list) or not workers:
            return unsure("the gate answers, but not that the workers did it")
        returned = [number(worker.get("returned"), 2.0**50) for worker in workers if isinstance(worker, dict)]
        returned_bytes = sum(value for value in returned if value is not None)
        return done(f"{len(workers)} worker(s) gave back {returned_bytes / 2**20:.0f} MiB", workers=len(workers))

    async def set_knobs(self, values: Mapping[str, float], lease_s: float, epoch: int) -> Outcome:
        """Sets the scheduler's knobs for a time, in place of those set before; without values the lease ends."""
        answer = await self._post("knobs", {"epoch": epoch, "lease_s": lease_s, **values}, KNOBS_S)
        if isinstance(answer, Outcome):
            return answer
        facts, leased = _knob_facts(answer)
        if leased != dict(values):
            return unsure("the gate answers, but not that the engine took these values", **facts)
        return done(f"in force: {facts['in_force']}", **facts)

    async def knobs(self) -> Outcome:
        """Returns the knobs now, as the engine itself reports them between two steps."""
        data = await self._get("knobs", "the knobs are not known", KNOBS_S)
        return data if isinstance(data, Outcome) else done("read", **_knob_facts(data)[0])

    async def state(self) -> Outcome:
        """Returns the gate's report of itself, as facts; leaves out what it does not report. Unknown without a whole answer."""
        data = await self._get("state", "the gate's state is not known", self._deadline_s)
        if isinstance(data, Outcome):
            return data
        facts: dict[str, str | float | bool] = _some_numbers(data, _COUNTS)
        facts |= {name: data[name] for name in ("ready", "idle") if isinstance(data.get(name), bool)}
        facts |= {"reason": quoted_words(data["reason"], 100)} if isinstance(data.get("reason"), str) else {}
        drain, engine, shed = (table(data.get(name)) for name in ("drain", "engine", "shed"))
        facts |= _drain_facts({**drain, "in_flight": data.get("in_flight"), "idle": data.get("idle")})
        facts |= _some_numbers(engine, (*_STEPS, "last_step_age_s"))
        facts |= {name: engine[name] for name in ("is_dead", "is_wedged") if isinstance(engine.get(name), bool)}
        facts |= {f"shed_{name}": value for name, value in _some_numbers(shed, ("max_wait_s", "lease_left_s")).items()}
        facts |= _some_numbers(shed, ("expected_wait_s",))
        return done(
            f"{facts.get('phase', 'an unknown phase')}, {facts.get('in_flight', 'an unknown number')} in flight", **facts
        )

    async def _get(self, name: str, unknown: str, deadline_s: float) -> Mapping[str, Any] | Outcome:
        """Returns a whole answer of the gate; else an outcome that says why there is none."""
        answer = await self._ask("GET", name, b"", deadline_s)
        if isinstance(answer, Lost):
            return unsure(f"{unknown}: {answer.why}")
        data = answer.table()
        if answer.status == 200 and data.get("schema") == f"plimsoll.{name}/1":
            return data
        return unsure(f"{unknown}: {_reason(answer)}", status=answer.status)

    async def _post(self, name: str, fields: Mapping[str, Any], deadline_s: float | None = None) -> Mapping[str, Any] | Outcome:
        """Returns the gate's answer to a call that it accepted; else the call's outcome."""
        answer = await self._ask("POST", name, json.dumps(fields).encode(), deadline_s or self._deadline_s)
        if isinstance(answer, Lost):
            return unsure(f"{name}: {answer.why}") if answer.was_sent else failed(f"{name}: {answer.why}", unreachable=True)
        if answer.status in (200, 202):
            data = answer.table()
            return data if data else unsure(f"{name}: the answer is not the gate's", status=answer.status)
        if answer.status == 409 and name in ("drain", "undrain"):
            current = _OLDER.search(_message(answer))
            newer = {"current": int(current[1])} if current else {}
            return failed(f"{name}: {_reason(answer)}", status=409, stale=True, **newer)
        data = answer.table()
        # The gate's own answer: OpenAI's shape with this status in it, or a call's outcome.
        is_own = table(data.get("error")).get("code") == answer.status or (data.get("is_running") is False and "error" in data)
        if answer.status == 500 or (answer.status > 501 and not is_own):
            # The gate failed on it, or a proxy answers that may have passed it on.
            return unsure(f"{name}: {_reason(answer)}", status=answer.status)
        return failed(f"{name}: {_reason(answer)}", status=answer.status)

    async def _ask(self, method: str, name: str, body: bytes, deadline_s: float) -> Reply | Lost:
        """Sends one request; first asks once without the token, since the address may lead to a server that would keep it."""
        end_s = asyncio.get_running_loop().time() + deadline_s
        if not self._is_gate:
            met = await self._server.call("GET", "/plimsoll/state", deadline_s=deadline_s)
            if isinstance(met, Lost):
                return met._replace(was_sent=False)  # the call itself was not sent
            if met.status in (403, 404):
                return met
            if not met.asks_for_token:
                return Lost(Loss.NONSENSE, f"what answers there ({met.status}) is not the gate: it asks for no token")
            self._is_gate = True
        left_s = max(0.05, end_s - asyncio.get_running_loop().time())
        return await self._server.call(method, f"/plimsoll/{name}", body, self._headers, deadline_s=left_s)


def _some_numbers(data: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, str | float | bool]:
    read = ((name, number(data.get(name))) for name in names)
    return {name: value for name, value in read if value is not None}


def _drain_facts(data: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = _some_numbers(data, ("epoch", "lease_left_s", "since_s", "in_flight"))
    if data.get("phase") in ("serving", *OUT):
        facts["phase"] = data["phase"]
    if isinstance(data.get("idle"), bool):
        facts["idle"] = data["idle"]
    return facts


def _knob_facts(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns the gate's report of the knobs as facts, and the leased values. `fixed`: the knobs that cannot be turned."""
    rows = {name: table(row) for name, row in table(data.get("knobs")).items()}
    leased = {name: value for name, row in rows.items() if (value := number(row.get("lease"))) is not None}
    in_force = {name: number(row.get("in_force")) for name, row in rows.items() if name in leased or not leased}
    facts: dict[str, Any] = _some_numbers(data, ("epoch", "lease_left_s"))
    facts["fixed"] = " ".join(sorted(name for name, row in rows.items() if row.get("why_not")))
    facts |= _some_numbers(table(data.get("since_order")), ("running", "steps", "largest_step", "most_needed"))
    facts |= {"leased": knob_words(leased), "in_force": knob_words({n: v for n, v in in_force.items() if v is not None})}
    return facts, leased


def knob_words(values: Mapping[str, float]) -> str:
    """Returns knobs and their values as an operator types them."""
    return " ".join(f"{name}={int(value) if value == int(value) else value}" for name, value in sorted(values.items()))


def _shed_facts(data: Mapping[str, Any]) -> dict[str, Any]:
    note = data.get("note")
    is_overruled = isinstance(note, str) and note.startswith("vLLM's own admission control is set")
    return {**_some_numbers(data, ("max_wait_s", "lease_left_s", "expected_wait_s")), "is_overruled": is_overruled}


def _message(answer: Reply) -> str:
    error = answer.table().get("error")
    data = error.get("message") if isinstance(error, dict) else error
    return data if isinstance(data, str) else ""


def _reason(answer: Reply) -> str:
    """Returns why it refused: guard's own words for a status with one cause, else the gate's."""
    if answer.status in _WHY:
        return _WHY[answer.status]
    return f"it answers {answer.status}" + (f": {quoted_words(words, 200)}" if (words := _message(answer)) else "")
