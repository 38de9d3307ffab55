"""Guard's API as an OpenAPI document, from the tables in openapi.yaml; the tests hold every answer against it."""

from __future__ import annotations

import functools
import re
from importlib.resources import files
from typing import Any

import yaml

from plimsoll.findings import Code, Severity
from plimsoll.guard.act.steps import Step
from plimsoll.guard.judge.look import Reach
from plimsoll.guard.judge.tracker import Grade
from plimsoll.inside.knobs import KNOBS
from plimsoll.render.guard import EventKind
from plimsoll.render.journal import SCHEMA
from plimsoll.unknown import Status

RUNGS = [str(grade) for grade in Grade if grade.is_action]
_TEXT = {"type": "string"}
_TYPES: dict[str, dict[str, Any]] = {
    "text": _TEXT, "number": {"type": "number"}, "integer": {"type": "integer"}, "boolean": {"type": "boolean"},
    "object": {"type": "object"}, "count": {"type": "integer", "minimum": 0}, "age": {"type": "number", "minimum": 0},
    "share": {"type": "number", "minimum": 0, "maximum": 1}, "version": {"const": SCHEMA}, "true": {"const": True},
    "false": {"const": False}, "Rung": {"enum": RUNGS},
    **{enum.__name__: {"enum": [str(one) for one in enum]} for enum in (Code, EventKind, Grade, Reach, Severity, Status, Step)},
}  # fmt: skip


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _type(word: Any) -> dict[str, Any]:
    """Returns a type of openapi.yaml as JSON schema."""
    if isinstance(word, list):
        return {"type": "array", "items": _type(word[0])}
    if isinstance(word, dict) and "*" in word:
        return {"type": "object", "additionalProperties": _type(word["*"])}
    if isinstance(word, dict):
        properties = {name: _type(inner) for name, inner in word.items()}
        return {"type": "object", "required": list(word), "properties": properties, "additionalProperties": False}
    if not word.endswith(" or null"):
        return _TYPES.get(word) or _ref(word)
    plain = _type(word.removesuffix(" or null"))
    if "enum" in plain:
        return {"enum": [*plain["enum"], None]}
    return {"oneOf": [plain, {"type": "null"}]} if "$ref" in plain else {**plain, "type": [plain["type"], "null"]}


def _answer(says: str, schema: dict[str, Any], content: str = "application/json") -> dict[str, Any]:
    return {"description": says, "content": {content: {"schema": schema}}}


def _operation(path: str, row: dict[str, Any], errors: dict[str, str]) -> dict[str, Any]:
    """Returns the OpenAPI operation of a path: its parameters and every answer."""
    content = row.get("content", "application/json")
    whole = _TYPES["object" if content == "application/json" else "text"]
    answers = {"200": _answer(row["says"], _ref(row["answers"]) if "answers" in row else whole, content)}
    answers |= {status: _answer(says, _ref("Error")) for status, says in errors.items()}
    if path == "/healthz":
        answers["503"] = _answer("it does not", _ref("Health"))
    elif path.startswith("/v1/"):
        answers["503"] = _answer("this guard only observes", _ref("Observes"))
    found: dict[str, Any] = {"summary": row["says"], "responses": answers}
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in re.findall(r"\{(\w+)\}", path)]
    parameters += [
        {"name": name, "in": "query", "required": False, "description": says, "schema": _TEXT}
        for name, says in row.get("query", {}).items()
    ]
    return found | ({"parameters": parameters} if parameters else {}) | ({"security": []} if path == "/healthz" else {})


@functools.cache
def document(version: str) -> dict[str, Any]:
    """Returns the whole document, OpenAPI 3.1."""
    tables = yaml.safe_load((files("plimsoll.guard.api") / "openapi.yaml").read_text(encoding="utf-8"))
    errors = tables["errors"]["any"]
    paths = {path: {"get": _operation(path, row, errors)} for path, row in tables["get"].items()}
    for path, row in tables["post"].items():
        post = _operation(path, {"answers": "Accepted", **row}, errors | tables["errors"]["post"])
        post["responses"]["409"] = _answer("refused, with a reason", _ref("Refused"))
        taken = {"schema": _ref(row.get("takes", "Nothing"))}
        paths[path] = {"post": {**post, "requestBody": {"required": False, "content": {"application/json": taken}}}}
    optional: dict[str, dict[str, Any]] = {
        "Switch": {"engine": _TEXT, "rung": {"enum": ["", *RUNGS]}},
        "Nothing": {},
        "Knobs": dict.fromkeys((*KNOBS, "for"), _TEXT),
    }
    schemas = {name: _type(properties) for name, properties in tables["schemas"].items()}
    for name, properties in optional.items():
        schemas[name] = {"type": "object", "additionalProperties": False} | ({"properties": properties} if properties else {})
    return {
        "openapi": "3.1.0", "info": {"version": version, **tables["info"]}, "security": [{"token": []}], "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}, "schemas": schemas},
    }  # fmt: skip
