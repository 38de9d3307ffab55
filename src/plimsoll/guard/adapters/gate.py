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
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.net.client import HttpClient, Loss, Lost, Reply, bearer, number, table
from plimsoll.redaction import printable

DEADLINE_S = 5.0
KNOBS_S = 20.0  # an order is carried out between two steps: a long one is waited for
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


def quoted_words(text: str, most: int = 300) -> str:
    """What others say, in one line without secrets and without anything that a terminal would obey."""
    return printable(shown_line(text[: 10 * most])).strip()[:most]


class GateHttpClient:
    """The gate of one engine. Its token goes into one header, and only to what asks for one as the gate does."""

    def __init__(self, url: str, token: str, *, deadline_s: float = DEADLINE_S, compact_s: float = COMPACT_S) -> None:
        """`url`: http://HOST:PORT or unix:/PATH. BadInput if it or the token cannot be one."""
        self._server = HttpClient(url)
        self._headers = bearer(token)
        self._is_gate = False  # something there has asked for a token
        self._deadline_s, self._compact_s = deadline_s, compact_s
        self.label = f"the gate at {self._server.shown}"

    async def drain(self, epoch: int, lease_s: float, *, refuse: bool = False, **bounds: float) -> Outcome:
        """Begin a drain or renew its lease; `refuse` asks for phase two, which no later renewal takes back.

        `bounds`: phase one ends by itself when nothing has come for `quiet_s` or after `bound_s`, else by the gate's own.
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
        """End the drain; the same as done when there was none."""
        answer = await self._post("undrain", {"epoch": epoch})
        if isinstance(answer, Outcome):
            return answer
        facts = _drain_facts(answer)
        if facts.get("phase") != "serving":
            return unsure("the gate answers, but not that it serves", **facts)
        return done("it serves again", **facts)

    async def shed(self, max_wait_s: float, lease_s: float) -> Outcome:
        """Refuse new work that would wait longer, until the lease ends; asked again, it is renewed.

        `facts["is_overruled"]`: vLLM's own admission control is set; then that decides, and the gate refuses nobody.
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
        """Back to what was set when the server was started."""
        answer = await self._post("unshed", {})
        if isinstance(answer, Outcome):
            return answer
        facts = _shed_facts(answer)
        if "max_wait_s" not in answer or facts.get("lease_left_s") != 0:
            return unsure("the gate answers, but not that it sheds no more", **facts)
        return done("it sheds no more than it was started with", **facts)

    async def compact(self) -> Outcome:
        """Give back what torch keeps and nobody uses, in every worker.

        It is never asked a second time here: a call that still runs is "not known", and /plimsoll/state has its end.
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
        """Set the scheduler's knobs for a time, in place of those set before; without values the lease ends."""
        answer = await self._post("knobs", {"epoch": epoch, "lease_s": lease_s, **values}, KNOBS_S)
        if isinstance(answer, Outcome):
            return answer
        facts, leased = _knob_facts(answer)
        if leased != dict(values):
            return unsure("the gate answers, but not that the engine took these values", **facts)
        return done(f"in force: {facts['in_force']}", **facts)

    async def knobs(self) -> Outcome:
        """The knobs now, as the engine itself tells them between two steps."""
        data = await self._get("knobs", "the knobs are not known", KNOBS_S)
        return data if isinstance(data, Outcome) else done("read", **_knob_facts(data)[0])

    async def state(self) -> Outcome:
        """What the gate says of itself, as facts; what it does not say is not there. Not known without a whole answer."""
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
        """A whole answer of the gate's; else why there is none."""
        answer = await self._ask("GET", name, b"", deadline_s)
        if isinstance(answer, Lost):
            return unsure(f"{unknown}: {answer.why}")
        data = answer.table()
        if answer.status == 200 and data.get("schema") == f"plimsoll.{name}/1":
            return data
        return unsure(f"{unknown}: {_reason(answer)}", status=answer.status)

    async def _post(self, name: str, fields: Mapping[str, Any], deadline_s: float | None = None) -> Mapping[str, Any] | Outcome:
        """The gate's answer to a deed that it took; else what became of it."""
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
        # The gate's own words: OpenAI's shape with this status in it, or a call's outcome.
        is_own = table(data.get("error")).get("code") == answer.status or (data.get("is_running") is False and "error" in data)
        if answer.status == 500 or (answer.status > 501 and not is_own):
            # The gate stumbled over it, or somebody in between answers, who may have passed it on.
            return unsure(f"{name}: {_reason(answer)}", status=answer.status)
        return failed(f"{name}: {_reason(answer)}", status=answer.status)

    async def _ask(self, method: str, name: str, body: bytes, deadline_s: float) -> Reply | Lost:
        """The first time it is asked without the token: an address may lead to somebody who would keep it."""
        end_s = asyncio.get_running_loop().time() + deadline_s
        if not self._is_gate:
            met = await self._server.call("GET", "/plimsoll/state", deadline_s=deadline_s)
            if isinstance(met, Lost):
                return met._replace(was_sent=False)  # of the deed itself nothing was
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
    """What the gate says of the knobs, the leased values as one text; and these values. `fixed`: those that do not turn."""
    rows = {name: table(row) for name, row in table(data.get("knobs")).items()}
    leased = {name: value for name, row in rows.items() if (value := number(row.get("lease"))) is not None}
    in_force = {name: number(row.get("in_force")) for name, row in rows.items() if name in leased or not leased}
    facts: dict[str, Any] = _some_numbers(data, ("epoch", "lease_left_s"))
    facts["fixed"] = " ".join(sorted(name for name, row in rows.items() if row.get("why_not")))
    facts |= _some_numbers(table(data.get("since_order")), ("running", "steps", "largest_step", "most_needed"))
    facts |= {"leased": knob_words(leased), "in_force": knob_words({n: v for n, v in in_force.items() if v is not None})}
    return facts, leased


def knob_words(values: Mapping[str, float]) -> str:
    """Knobs and their values as an operator types them."""
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
    """Why not, in words: ours for what has one cause, else the gate's."""
    if answer.status in _WHY:
        return _WHY[answer.status]
    return f"it answers {answer.status}" + (f": {quoted_words(words, 200)}" if (words := _message(answer)) else "")
