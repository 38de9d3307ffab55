"""Guard's API as an OpenAPI document; the tests hold every answer against it."""

from __future__ import annotations

from typing import Any

from plimsoll.findings import Code, Severity
from plimsoll.guard.act.steps import Step
from plimsoll.guard.judge.look import Reach
from plimsoll.guard.judge.tracker import Grade
from plimsoll.inside.knobs import KNOBS
from plimsoll.render.guard import EventKind
from plimsoll.render.journal import SCHEMA

RUNGS = [str(grade) for grade in Grade if grade.is_action]
VERBS = {
    "drain": "take it out of service until it is asked back, an hour at most", "undrain": "put it back",
    "compact": "give back what torch does not use", "restart": "drain it, stop it, start it",
    "shed": "refuse new work that would wait too long, while the queue grows",
    "quarantine": "take its pod away from its Service and its owner, for inspection, until it is evicted",
    "set": "turn knobs of its scheduler for a time (`for`: 2h); without a knob, let them go",
}  # fmt: skip
_TEXT = {"type": "string"}
_MAYBE_TEXT = {"type": ["string", "null"]}
_MAYBE_NUMBER = {"type": ["number", "null"]}
_COUNT = {"type": "integer", "minimum": 0}
_TEXTS = {"type": "array", "items": _TEXT}


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties, "additionalProperties": False, **more}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(name: str) -> dict[str, Any]:
    return {"type": "array", "items": _ref(name)}


def _whole(properties: dict[str, Any]) -> dict[str, Any]:
    return _object({"schema": {"const": SCHEMA}, **properties})


_FINDING = {
    "code": {"enum": [str(code) for code in Code]}, "severity": {"enum": [str(one) for one in Severity]},
    "confidence": {"type": "number", "minimum": 0, "maximum": 1}, "title": _TEXT, "because": _TEXT,
    "evidence": {"type": "array", "items": _object({"source": _TEXT, "line": {"type": ["integer", "null"]}, "text": _TEXT})},
    "remedy": {"type": "array", "items": _object({"do": _TEXT, "why": _TEXT, "flag": _MAYBE_TEXT, "value": _MAYBE_TEXT})},
    "not_a_remedy": _TEXTS,
}  # fmt: skip
_ENGINE = {
    "name": _TEXT, "url": _TEXT, "reach": {"enum": [*(str(one) for one in Reach), None]}, "why": _TEXT, "vllm": _MAYBE_TEXT,
    "look_age_s": _MAYBE_NUMBER, "looks": _COUNT, "failures": _COUNT, "unreachable": {"type": "boolean"},
    "has_answered": {"type": "boolean"}, "note": _TEXT, "needs": _TEXT, "holds": _TEXTS, "unknown": _TEXTS,
}  # fmt: skip
_CONDITION = {
    "engine": _TEXT, "kind": _TEXT, "code": {"enum": [*(str(code) for code in Code), None]},
    "severity": {"enum": [str(one) for one in Severity]}, "grade": {"enum": [str(one) for one in Grade]},
    "status": {"enum": ["true", "false", "unknown"]}, "reason": _TEXT, "message": _TEXT, "since": _MAYBE_NUMBER,
    "for_s": _MAYBE_NUMBER, "evidence": {"type": "array", "items": _object({"source": _TEXT, "text": _TEXT})},
}  # fmt: skip
_CHANGE = {
    "at": {"type": "number"}, "engine": _TEXT, "what": {"enum": [str(one) for one in EventKind]}, "kind": _MAYBE_TEXT,
    "code": {"enum": [*(str(code) for code in Code), None]}, "grade": {"enum": [*(str(one) for one in Grade), None]},
    "reason": _MAYBE_TEXT, "sentence": _TEXT, "incident": _MAYBE_TEXT,
    "finding": {"oneOf": [_ref("Finding"), {"type": "null"}]},
}  # fmt: skip
_FORECAST = {"unknown": _MAYBE_TEXT, "soonest_s": _MAYBE_NUMBER, "likely_s": _MAYBE_NUMBER, "latest_s": _MAYBE_NUMBER}
_CANARY = {
    "at": {"type": "number"}, "age_s": {"type": "number", "minimum": 0}, "is_answered": {"type": ["boolean", "null"]},
    "seconds": _MAYBE_NUMBER, "is_garbage": {"type": "boolean"}, "why": _TEXT,
}  # fmt: skip
_DETAIL = {
    **_ENGINE, "unreachable_since": _MAYBE_NUMBER, "figures": {"type": "object", "additionalProperties": _MAYBE_NUMBER},
    "gate": {"type": ["object", "null"]}, "workers": {"type": "array", "items": {"type": "object"}},
    "cards": {"type": "array", "items": {"type": "object"}}, "canary": {"oneOf": [_ref("Canary"), {"type": "null"}]},
    "conditions": _list("Condition"), "findings": _list("Finding"),
    "forecasts": {"type": "object", "additionalProperties": _ref("Forecast")},
}  # fmt: skip
_ENTRY = {
    "number": _COUNT, "at": {"type": "number"}, "kind": _TEXT, "engine": _TEXT, "action": _TEXT, "step": _TEXT,
    "fields": {"type": "object"},
}  # fmt: skip
_SCHEMAS = {
    "Health": _object({"status": _TEXT}),
    "Error": _object({"error": _TEXT}),
    "Finding": _object(_FINDING),
    "EngineFinding": _object({"engine": _TEXT, **_FINDING}),
    "Engine": _object(_ENGINE),
    "EngineDetail": _object(_DETAIL),
    "Condition": _object(_CONDITION),
    "Change": _object(_CHANGE),
    "Forecast": _object(_FORECAST),
    "Canary": _object(_CANARY),
    "Trouble": _object({"what": _TEXT, "text": _TEXT, "since": {"type": "number"}}),
    "Engines": _whole({"status": _TEXT, "engines": _list("Engine"), "troubles": _list("Trouble")}),
    "OneEngine": _whole({"engine": _ref("EngineDetail")}),
    "Conditions": _whole({"conditions": _list("Condition")}),
    "Findings": _whole({"findings": _list("EngineFinding")}),
    "History": _whole({"told": _COUNT, "changes": _list("Change")}),
    "Action": _object({
        "engine": _TEXT, "action": _TEXT, "grade": {"enum": [str(one) for one in Grade]}, "kind": _TEXT,
        "step": {"enum": [*(str(one) for one in Step), None]}, "undoing": {"type": "boolean"}, "since": _MAYBE_NUMBER,
    }),
    "Approval": _object({
        "id": _TEXT, "engine": _TEXT, "grade": {"enum": RUNGS}, "why": _TEXT, "asked": {"type": "number"},
        "until": {"type": "number"},
    }),
    "Actions": _whole({
        "approvals": _list("Approval"),
        "actions": _list("Action"),
        "paused": _object({"all": {"type": "boolean"}, "why": _TEXT, "engines": _TEXTS, "rungs": _TEXTS}),
        "needs": {"type": "array", "items": _object({"engine": _TEXT, "says": _TEXT})},
        "trouble": _TEXT,
    }),
    "Entry": _object(_ENTRY),
    "Journal": _whole({"entries": _list("Entry"), "wrong": _TEXTS}),
    "Sentences": _whole({"entries": _list("Sentence"), "wrong": _TEXTS, "says": _TEXT}),
    "Sentence": _object({**_ENTRY, "sentence": _TEXT}),
    "Switch": {
        "type": "object", "additionalProperties": False, "properties": {"engine": _TEXT, "rung": {"enum": ["", *RUNGS]}},
    },
    "Nothing": {"type": "object", "additionalProperties": False},
    "Knobs": {"type": "object", "additionalProperties": False, "properties": dict.fromkeys((*KNOBS, "for"), _TEXT)},
    "Accepted": _whole({"accepted": {"const": True}, "plan": _TEXTS, "says": _TEXT}),
    "Refused": _whole({"accepted": {"const": False}, "reason": _TEXT, "says": _TEXT}),
    "Observes": _whole({"says": _TEXT}),
}  # fmt: skip


def _get(summary: str, schema: str | None, *parameters: dict[str, Any], content: str = "application/json") -> dict[str, Any]:
    body: dict[str, Any] = {"type": "string"} if content.startswith("text/") else {"type": "object"}
    answers: dict[str, Any] = {
        "200": {"description": summary, "content": {content: {"schema": body if schema is None else _ref(schema)}}}
    }
    for status, says in (("400", "not a question"), ("401", "no token"), ("404", "not there"), ("421", "a foreign Host")):
        answers[status] = {"description": says, "content": {"application/json": {"schema": _ref("Error")}}}
    found: dict[str, Any] = {"summary": summary, "responses": answers}
    return {"get": {**found, "parameters": list(parameters)} if parameters else found}


def _post(summary: str, schema: str, *parameters: dict[str, Any]) -> dict[str, Any]:
    """A wish: what is posted, and what may become of it."""
    found = _get(summary, "Accepted", *parameters)["get"]
    answers = (
        ("403", "a token that only reads", "Error"), ("409", "refused, with a reason", "Refused"),
        ("503", "this guard only observes", "Observes"),
        ("411", "no length", "Error"), ("413", "too long", "Error"), ("415", "not JSON", "Error"),
    )  # fmt: skip
    for status, says, name in answers:
        found["responses"][status] = {"description": says, "content": {"application/json": {"schema": _ref(name)}}}
    found["requestBody"] = {"required": False, "content": {"application/json": {"schema": _ref(schema)}}}
    return {"post": found}


def _acting(question: dict[str, Any]) -> dict[str, Any]:
    says = {"description": "this guard only observes", "content": {"application/json": {"schema": _ref("Observes")}}}
    question["get"]["responses"]["503"] = says
    return question


def _query(name: str, says: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": says, "schema": {"type": "string"}}


_BY_ENGINE = _query("engine", "only this one")


def document(version: str) -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    health = _get("whether guard itself looks", "Health")
    health["get"]["security"] = []
    health["get"]["responses"]["503"] = {
        "description": "it does not", "content": {"application/json": {"schema": _ref("Health")}}
    }  # fmt: skip
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "plimsoll guard", "version": version, "description": "What guard sees, how it judges it, and what it does."
        },
        "security": [{"token": []}],
        "paths": {
            "/healthz": health,
            "/engines": _get("every engine, in short", "Engines"),
            "/engines/{name}": _get("one engine, with all that is known of it", "OneEngine", name),
            "/conditions": _get(
                "every condition", "Conditions", _BY_ENGINE, _query("kind", "only these"), _query("status", "by status")
            ),
            "/findings": _get("what holds, with evidence and remedy", "Findings", _BY_ENGINE),
            "/history": _get("the last 1,000 changes", "History", _BY_ENGINE, _query("limit", "only so many, the newest")),
            "/metrics": _get("guard's own metrics", None, content="text/plain"),
            "/events": _get("what changes, as it does, for the page", None, _BY_ENGINE, content="text/event-stream"),
            "/journal": _get("what was done, in sentences with their evidence", "Sentences", _BY_ENGINE),
            "/openapi.json": _get("this document", None),
            "/v1/actions": _acting(_get("what is under way, and what is paused", "Actions")),
            "/v1/journal": _acting(_get("what was done, the newest last", "Journal", _query("last", "so many, 1 to 1000"))),
            "/v1/pause": _post("do nothing any more: at all, to one engine, or of one rung", "Switch"),
            "/v1/resume": _post("the reverse", "Switch"),
            "/v1/approvals/{id}/approve": _post("approve an action that waits for it", "Nothing", {**name, "name": "id"}),
            "/v1/approvals/{id}/deny": _post("deny it: it is not done", "Nothing", {**name, "name": "id"}),
            **{
                f"/v1/engines/{{name}}/{verb}": _post(says, "Knobs" if verb == "set" else "Nothing", name)
                for verb, says in VERBS.items()
            },
        },
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": _SCHEMAS,
        },
    }  # fmt: skip
