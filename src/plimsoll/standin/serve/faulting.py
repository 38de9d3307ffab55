"""POST, DELETE and GET under /standin/: faults while a stand-in runs, and what it is like; only for who has the token."""

from __future__ import annotations

import json
from typing import Any

from plimsoll.errors import BadInput
from plimsoll.inside.answers import Scope
from plimsoll.inside.tokens import ALLOWED, OFF, Tokens
from plimsoll.standin.faults import NS, make_fault
from plimsoll.standin.serve.errors import Detail, Refused
from plimsoll.standin.serve.sending import JsonAnswer
from plimsoll.standin.serve.service import Service

OWN = "/standin/"
ONLY_AT_START = ("slow-start", "start-failure")
KNOWN = ("kind", "at_s", "for_s", "value")


class Faulting:
    """The endpoints of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokens = Tokens(service.options.token)

    def answer(self, scope: Scope, path: str, body: bytes) -> JsonAnswer:
        """The answer to one request."""
        methods = {f"{OWN}faults": ("POST", "DELETE", "GET"), f"{OWN}state": ("GET",)}.get(path)
        if methods is None:
            raise Detail(404)
        verdict = self._tokens.judge(scope["headers"])
        if verdict == OFF:
            raise Refused(403, "this endpoint is off: it was started without PLIMSOLL_TOKEN", "PermissionDeniedError")
        if verdict != ALLOWED:
            raise Refused(401, "the token is missing or wrong: Authorization: Bearer TOKEN", "AuthenticationError")
        if scope["method"] not in methods:
            raise Detail(405, ((b"allow", ", ".join(methods).encode()),))
        if scope["method"] == "GET":
            return JsonAnswer(200, self._faults() if path.endswith("faults") else self._state())
        fields = _fields(body)
        try:
            return self._clear(fields) if scope["method"] == "DELETE" else self._add(fields)
        except BadInput as error:
            raise Refused(400, str(error), "BadRequestError") from None

    def _add(self, fields: dict[str, Any]) -> JsonAnswer:
        kind = fields.get("kind")
        if kind in ONLY_AT_START:
            raise BadInput(f"fault {kind}: it has started; name it with --fault at the next start")
        service = self._service
        found = make_fault(str(kind), fields.get("at_s") or 0, fields.get("for_s"), fields.get("value"))
        service.engine.faults.add(found._replace(at_s=found.at_s + service.driver.now_ns() / NS))
        service.driver.turn()
        return JsonAnswer(200, self._faults())

    def _clear(self, fields: dict[str, Any]) -> JsonAnswer:
        kind = fields.get("kind")
        self._service.engine.faults.clear(None if kind is None else str(kind))
        self._service.driver.turn()
        return JsonAnswer(200, self._faults())

    def _faults(self) -> dict[str, Any]:
        now_ns = self._service.driver.now_ns()
        return {
            "faults": [
                {
                    "kind": fault.kind,
                    "at_s": round(fault.at_s, 3),
                    "for_s": None if fault.for_s == float("inf") else fault.for_s,
                    "value": fault.value,
                    "is_on": fault.is_on(now_ns),
                }
                for fault in self._service.engine.faults.all
            ]
        }

    def _state(self) -> dict[str, Any]:
        engine, driver = self._service.engine, self._service.driver
        now_ns, figures = driver.now_ns(), engine.figures
        return {
            "schema": "plimsoll.standin/1",
            "now_s": round(now_ns / NS, 3),
            "speed": driver.speed,
            "release": engine.config.release,
            "model": engine.config.model,
            "is_dead": engine.is_dead,
            "death": engine.death,
            "is_paused": engine.is_paused,
            "sleep_level": engine.sleep_level,
            "is_stopping": self._service.is_stopping,
            "in_flight": len(self._service.states),
            "running": figures.running,
            "waiting": figures.waiting,
            "kv_usage": figures.kv_usage,
            "steps": figures.steps,
            "preemptions": figures.preemptions,
            "workers": engine.worker_figures(now_ns),
            **self._faults(),
        }


def _fields(body: bytes) -> dict[str, Any]:
    if not body.strip():
        return {}
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON", "BadRequestError") from None
    if not isinstance(found, dict) or not all(name in KNOWN for name in found):
        raise Refused(400, f"the body is not an object of {', '.join(KNOWN)}", "BadRequestError")
    return found
