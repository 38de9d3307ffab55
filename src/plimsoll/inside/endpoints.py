"""The endpoints under /plimsoll/: what each takes and answers. No sockets: requests and answers are plain values."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import plimsoll
from plimsoll.inside import admission, places
from plimsoll.inside.answers import ALLOWED, LARGEST_BODY, OFF, AskRefused, GateAnswer, error, fields_of, number, switch, whole
from plimsoll.inside.door import DOOR
from plimsoll.inside.faults import FAULTS, LOG
from plimsoll.inside.gate_control import GateControl
from plimsoll.inside.knobs import HEADROOM, KNOBS, LONGEST_LEASE_S, MOST_HEADROOM
from plimsoll.inside.memory import HISTORY_MAX_ENTRIES
from plimsoll.inside.recorder import RECORDER
from plimsoll.inside.shared import NS

EPOCHS = 2**62
SHED_LEASE_S = 300.0
VALVE_NOTES = {
    "set": "vLLM's own admission control is set and decides alone; Retry-After is added to its 503",
    "unset": "this vLLM has --max-num-queued-reqs and --max-num-queued-tokens: set those at the next start",
}


class GateRequest(NamedTuple):
    """One request to an endpoint."""

    method: str
    path: str
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


Fields = dict[str, Any]
Handler = Callable[[GateControl, Fields], Awaitable[GateAnswer]]


class Endpoint(NamedTuple):
    """One row of the table in docs/inside.md; data/endpoints.json has its words."""

    method: str
    path: str
    handler: Handler
    fields: tuple[str, ...] = ()
    needs_token: bool = True


async def answer(gate: GateControl, ask: GateRequest, *, only_ready: bool = False) -> GateAnswer:
    """Returns the answer to one request under /plimsoll/; never raises. `only_ready`: the other paths are served elsewhere."""
    endpoints = [endpoint for endpoint in ENDPOINTS if endpoint.path == ask.path]
    if not endpoints or (only_ready and endpoints[0].needs_token):
        where = "it is served where PLIMSOLL_LISTEN says" if endpoints else f"there is {', '.join(e.path for e in ENDPOINTS)}"
        return error(404, f"no {ask.path[:80]} here; {where}")
    is_look = ask.method in ("GET", "HEAD")
    endpoint = next((one for one in endpoints if one.method == ("GET" if is_look else ask.method)), endpoints[0])
    verdict = gate.tokens.judge(ask.headers) if endpoint.needs_token else ALLOWED
    if verdict == OFF:
        return error(403, "this endpoint is off: the server was started without PLIMSOLL_TOKEN")
    if verdict != ALLOWED:
        message = "the token is missing or wrong: Authorization: Bearer TOKEN"
        return error(401, message, ((b"www-authenticate", b"Bearer"),))
    if ask.method != endpoint.method and not (ask.method == "HEAD" and endpoint.method == "GET"):
        takes = ", ".join(one.method for one in endpoints)
        return error(405, f"{endpoint.path} takes {takes}", ((b"allow", takes.encode()),))
    if len(ask.body) > LARGEST_BODY:
        return error(413, f"the body is larger than {LARGEST_BODY} bytes")
    try:
        # A load balancer's probe may send any body.
        fields = fields_of(ask.body, endpoint.fields) if endpoint.needs_token else {}
        return await endpoint.handler(gate, fields)
    except AskRefused as problem:
        return error(problem.status, str(problem))
    except admission.StaleEpoch as problem:
        return error(409, str(problem))
    except Exception as problem:
        FAULTS.note(f"answering {endpoint.path}", problem)
        return error(500, f"a mistake of ours: {type(problem).__name__}")


async def _ready(gate: GateControl, _fields: Fields) -> GateAnswer:
    words = _readiness_words(gate)
    return GateAnswer(200 if words["ready"] else 503, words)


def _readiness_words(gate: GateControl) -> dict[str, Any]:
    readiness = gate.readiness()
    return {"ready": readiness.is_ready, "reason": readiness.reason, "detail": readiness.detail}


async def _state(gate: GateControl, _fields: Fields) -> GateAnswer:
    return GateAnswer(200, state_of(gate))


def state_of(gate: GateControl) -> dict[str, Any]:
    """Returns everything the gate knows, as /plimsoll/state answers it."""
    shared = gate.shared
    pages = shared.pages(look=True)
    gate.publish_queue(at_once=True)
    now, queue = time.monotonic(), gate.queue()
    last_ns = shared.latest("last_step_ns")
    return {
        "schema": "plimsoll.state/1",
        "plimsoll": plimsoll.__version__,
        "at": round(time.time(), 3),
        "pid": os.getpid(),
        "started": places.start_unix(os.getpid()),
        "api_servers": len(pages),
        **_readiness_words(gate),
        "in_flight": shared.total("in_flight"),
        "background": shared.total("background"),
        "engine_requests": shared.total("engine_requests"),
        "begun": shared.total("begun"),
        "refused": {why: shared.total(f"refused_{why}") for why in ("drain", "shed", "dead")},
        "idle": _is_idle(gate),
        "drain": drain_words(gate, now),
        "shed": shed_words(gate),
        "door": DOOR.words(),
        "survive": gate.survive(),
        "knobs": gate.knobs.words(gate.engine.client),
        "engine": {
            "is_dead": gate.engine.is_dead(),
            "is_wedged": gate.is_wedged(),
            "asleep": gate.asleep_words(),
            "steps": shared.total("steps"),
            "last_step_age_s": round(now - last_ns / NS, 3) if last_ns else None,
            "longest_step_s": round(shared.latest("longest_step_ns") / NS, 3),
            "running": queue.running,
            "waiting": queue.waiting,
            "kv_usage": gate.pulse.kv_usage,
        },
        "call": {"is_running": gate.calls.is_running, "last": gate.calls.last},
        "recorder": {"is_on": RECORDER.is_on, "written": RECORDER.written, "dropped": RECORDER.dropped},
        "workers": len(gate.figures()),
        "faults": dict(FAULTS.counts),
    }


def _is_idle(gate: GateControl) -> bool:
    """True if no API server has a request in flight, in the background or with the engine.

    A request may end and leave work in the background, which each server looks for once a second. A server that has not
    looked since its last request ended is not known to be idle.
    """

    def ended() -> list[int]:
        return [page["begun"] - page["in_flight"] for page in gate.shared.pages()]

    before = ended()
    is_looked_at = before == [page["ended_seen"] for page in gate.shared.pages()]
    is_empty = all(gate.shared.total(name) == 0 for name in ("in_flight", "background", "engine_requests"))
    return is_looked_at and is_empty and before == ended()


def drain_words(gate: GateControl, now: float) -> dict[str, Any]:
    drain = gate.shared.drain()
    return {
        "phase": gate.phase(),
        "epoch": drain.epoch,
        "lease_left_s": round(max(0.0, drain.until - now), 3),
        "since_s": round(now - drain.since, 3) if drain.is_on(now) else None,
        "in_flight": gate.shared.total("in_flight"),
        "idle": _is_idle(gate),
    }


def shed_words(gate: GateControl) -> dict[str, Any]:
    queue = gate.queue()
    wait = admission.expected_wait(queue)
    valve = gate.engine.own_valve()
    return {
        "max_wait_s": gate.shed_bound_s(),
        "lease_left_s": round(max(0.0, gate.shared.common["shed_until_ns"] / NS - time.monotonic()), 3),
        "expected_wait_s": None if wait.seconds is None else round(wait.seconds, 3),
        "because": wait.because,
        "queue": queue._asdict(),
        "note": VALVE_NOTES.get(valve, ""),
    }


async def _memory(gate: GateControl, _fields: Fields) -> GateAnswer:
    workers = gate.figures()
    reason = (
        None if workers else "no worker has written figures: is it started with --worker-extension-cls plimsoll.inside.Probe?"
    )
    return GateAnswer(200, {"schema": "plimsoll.memory/1", "at": round(time.time(), 3), "workers": workers, "reason": reason})


async def _drain(gate: GateControl, fields: Fields) -> GateAnswer:
    wish: dict[str, Any] = {
        "epoch": whole(fields, "epoch", 0, EPOCHS),
        "lease_s": number(fields, "lease_s", 0.1, admission.LONGEST_LEASE_S, admission.LEASE_S),
        "quiet_s": number(fields, "quiet_s", 0.0, admission.LONGEST_LEASE_S),
        "bound_s": number(fields, "bound_s", 0.0, admission.LONGEST_LEASE_S),
        "refuse": switch(fields, "refuse"),
        "retry_after_s": whole(fields, "retry_after_s", 0, 3600),
    }
    if not gate.shared.can_drain:
        raise AskRefused("there are several API servers and no folder to share the drain in: set PLIMSOLL_DIR", 501)
    last_admitted = gate.shared.latest("last_admitted_ns") / NS
    return _change_drain(gate, lambda drain: admission.begin(drain, time.monotonic(), last_admitted, **wish))


async def _undrain(gate: GateControl, fields: Fields) -> GateAnswer:
    epoch = whole(fields, "epoch", 0, EPOCHS)
    return _change_drain(gate, lambda drain: admission.end(drain, epoch))


def _change_drain(gate: GateControl, change: Callable[[admission.Drain], admission.Drain]) -> GateAnswer:
    with gate.shared.common.changing():
        gate.shared.set_drain(change(gate.shared.drain()))
    gate.shared.pages(look=True)
    gate.publish_queue(at_once=True)
    words = drain_words(gate, time.monotonic())
    shown = (words[name] for name in ("phase", "epoch", "lease_left_s", "in_flight"))
    LOG.info("plimsoll: drain: %s, epoch %s, lease %.0f s, %s in flight", *shown)
    return GateAnswer(200, words)


async def _shed(gate: GateControl, fields: Fields) -> GateAnswer:
    bound_s = number(fields, "max_wait_s", 0.01, 86_400, gate.settings.shed_wait_s)
    if bound_s is None:
        raise AskRefused("max_wait_s is missing: the seconds a request may be expected to wait")
    lease_s = number(fields, "lease_s", 0.1, 86_400, SHED_LEASE_S)
    assert lease_s is not None
    with gate.shared.common.changing():
        gate.shared.common["shed_bound_ns"] = round(bound_s * NS)
        gate.shared.common["shed_until_ns"] = time.monotonic_ns() + round(lease_s * NS)
    return GateAnswer(200, shed_words(gate))


async def _unshed(gate: GateControl, _fields: Fields) -> GateAnswer:
    with gate.shared.common.changing():
        gate.shared.common["shed_until_ns"] = 0
    return GateAnswer(200, shed_words(gate))


async def _compact(gate: GateControl, _fields: Fields) -> GateAnswer:
    return await _call(gate, "plimsoll_compact", ())


async def _snapshot(gate: GateControl, fields: Fields) -> GateAnswer:
    history = whole(fields, "history", 0, HISTORY_MAX_ENTRIES)
    return await _call(gate, "plimsoll_snapshot", () if history is None else (history,))


def _refuse_while(gate: GateControl, *reasons: str) -> None:
    readiness = gate.readiness()
    if readiness.reason in reasons:
        raise AskRefused(f"the engine is {readiness.reason}: {readiness.detail}", 409)


async def _call(gate: GateControl, method: str, arguments: tuple[Any, ...]) -> GateAnswer:
    _refuse_while(gate, "starting", "dead", "wedged", "asleep")
    workers = gate.figures()
    if not workers or not all(worker["alive"] for worker in workers):
        raise AskRefused("no probe answers for the workers: start with --worker-extension-cls plimsoll.inside.Probe", 501)
    outcome = await gate.calls.call(gate.engine.client, method, arguments)
    if outcome.get("error"):
        return GateAnswer(502, outcome)
    refused = [worker["refused"] for worker in outcome["workers"] or () if isinstance(worker, dict) and "refused" in worker]
    if refused:
        return GateAnswer(409, {**outcome, "error": refused[0]})
    return GateAnswer(202 if outcome["is_running"] else 200, outcome)


KNOB_LEASE_S = 3600.0
KNOB_PATIENCE_S = 15.0


async def _knobs(gate: GateControl, _fields: Fields) -> GateAnswer:
    return await _knob_call(gate, {})


async def _set_knobs(gate: GateControl, fields: Fields) -> GateAnswer:
    values: dict[str, float] = {}
    for knob in KNOBS:
        value = number(fields, knob, 0.0, MOST_HEADROOM) if knob == HEADROOM else whole(fields, knob, 1, 2**31)
        if value is not None:
            values[knob] = value
    lease_s = number(fields, "lease_s", 0.1, LONGEST_LEASE_S, KNOB_LEASE_S)
    epoch = whole(fields, "epoch", 0, EPOCHS)
    gate.knobs.check_queue(gate.engine.client, values)
    return await _knob_call(gate, {"epoch": epoch, "lease_s": lease_s, "values": values})


async def _knob_call(gate: GateControl, order: dict[str, Any]) -> GateAnswer:
    """Sends an order to every engine core, which takes it between two of its steps, and returns the answer."""
    _refuse_while(gate, "starting", "dead")
    told = await gate.knobs.call(gate.engine.client, order, KNOB_PATIENCE_S)
    shown = {name: told[name] for name in ("running", "steps", "largest_step", "most_running", "most_needed")}
    return GateAnswer(200, {"schema": "plimsoll.knobs/1", **gate.knobs.words(gate.engine.client, told), "since_order": shown})


ENDPOINTS = (
    Endpoint("GET", "/plimsoll/ready", _ready, needs_token=False),
    Endpoint("GET", "/plimsoll/state", _state),
    Endpoint("GET", "/plimsoll/memory", _memory),
    Endpoint("POST", "/plimsoll/drain", _drain, ("epoch", "lease_s", "quiet_s", "bound_s", "refuse", "retry_after_s")),
    Endpoint("POST", "/plimsoll/undrain", _undrain, ("epoch",)),
    Endpoint("POST", "/plimsoll/compact", _compact),
    Endpoint("POST", "/plimsoll/snapshot", _snapshot, ("history",)),
    Endpoint("POST", "/plimsoll/shed", _shed, ("max_wait_s", "lease_s")),
    Endpoint("POST", "/plimsoll/unshed", _unshed),
    Endpoint("GET", "/plimsoll/knobs", _knobs),
    Endpoint("POST", "/plimsoll/knobs", _set_knobs, ("epoch", "lease_s", *KNOBS)),
)
