"""The routes of one server, as an ASGI app, and the two layers around them that vLLM has, too: its own state and its key."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import time
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from plimsoll.errors import BadInput
from plimsoll.inside.answers import ALLOWED, OFF, App, Message, Receive, Scope, Send, Tokens, path_of
from plimsoll.standin.faults import NS, make_fault
from plimsoll.standin.serve import admin, chat, completions, fields
from plimsoll.standin.serve.chat import chat_text
from plimsoll.standin.serve.completions import encoded, words_of
from plimsoll.standin.serve.fields import NO_VARY, Detail, Field, JsonAnswer, Refused, send_bytes, send_json
from plimsoll.standin.serve.metrics import Metrics, byte_by_byte, listening
from plimsoll.standin.serve.service import Service

# POST, DELETE and GET under /standin/: faults while a stand-in runs, and what it is like; only for who has the token.

OWN = "/standin/"
ONLY_AT_START = ("slow-start", "start-failure")
KNOWN = ("kind", "at_s", "for_s", "value")


class FaultEndpoints:
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
        wanted = _fault_fields(body)
        try:
            return self._clear(wanted) if scope["method"] == "DELETE" else self._add(wanted)
        except BadInput as error:
            raise Refused(400, str(error), "BadRequestError") from None

    def _add(self, wanted: dict[str, Any]) -> JsonAnswer:
        kind = wanted.get("kind")
        if kind in ONLY_AT_START:
            raise BadInput(f"fault {kind}: it has started; name it with --fault at the next start")
        service = self._service
        found = make_fault(str(kind), wanted.get("at_s") or 0, wanted.get("for_s"), wanted.get("value"))
        service.engine.faults.add(found._replace(at_s=found.at_s + service.driver.now_ns() / NS))
        service.driver.turn()
        return JsonAnswer(200, self._faults())

    def _clear(self, wanted: dict[str, Any]) -> JsonAnswer:
        kind = wanted.get("kind")
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


def _fault_fields(body: bytes) -> dict[str, Any]:
    if not body.strip():
        return {}
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON", "BadRequestError") from None
    if not isinstance(found, dict) or not all(name in KNOWN for name in found):
        raise Refused(400, f"the body is not an object of {', '.join(KNOWN)}", "BadRequestError")
    return found


# POST /tokenize and /detokenize, and GET /v1/models.

TEXT = {"model": Field("str"), "prompt": Field("str", may_be_null=False), "return_token_strs": Field("bool")}
MESSAGES = {
    "model": Field("str"),
    "messages": Field("list", may_be_null=False),
    "add_generation_prompt": Field("bool", may_be_null=False),
    "return_token_strs": Field("bool"),
}
TOKENS = {"model": Field("str"), "tokens": Field("ids", may_be_null=False)}


PERMISSION = {
    "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True, "allow_search_indices": False,
    "allow_view": True, "allow_fine_tuning": False, "organization": "*", "group": None, "is_blocking": False,
}  # fmt: skip


async def tokenize(service: Service, body: dict[str, Any]) -> JsonAnswer:
    """The tokens of a text or of messages."""
    if "messages" in body:
        good = fields.check(MESSAGES, body)
        service.check_model(good.get("model"))
        text = chat_text(good["messages"], adds_prompt=good.get("add_generation_prompt", True))
    elif "prompt" in body:
        good = fields.check(TEXT, body)
        service.check_model(good.get("model"))
        text = good["prompt"]
    else:
        missing = (("body", name) for name in ("prompt", "messages"))
        raise fields.refusal([fields.problem("missing", loc, "Field required", body) for loc in missing])
    ids = await encoded(text)
    words = await words_of(ids) if good.get("return_token_strs") else None
    limit = service.engine.config.max_model_len
    return JsonAnswer(200, {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": words})


async def detokenize(service: Service, body: dict[str, Any]) -> JsonAnswer:
    """The text of tokens."""
    good = fields.check(TOKENS, body, needed=("tokens",))
    service.check_model(good.get("model"))
    return JsonAnswer(200, {"prompt": "".join(await words_of(good["tokens"]))})


def models(service: Service) -> JsonAnswer:
    """The names it serves one model under."""
    config, created = service.engine.config, service.created()
    cards = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": config.model,
            "parent": None,
            "max_model_len": config.max_model_len,
            "permission": [
                {"id": f"modelperm-{uuid.uuid4().hex[:16]}", "object": "model_permission", "created": created, **PERMISSION}
            ],
        }
        for name in service.names
    ]
    return JsonAnswer(200, {"object": "list", "data": cards})


LOG = logging.getLogger("vllm.standin")
GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # what --api-key is asked for
UNAUTHORIZED = JsonAnswer(401, {"error": "Unauthorized"}, (NO_VARY,))
# What SageMaker calls goes by what is in it.
GENERATING = {"/v1/completions": completions.create, "/v1/chat/completions": chat.create, "/invocations": None}
LOOKING: dict[str, Callable[[Service], JsonAnswer]] = {
    "/v1/models": models,
    "/version": lambda service: JsonAnswer(200, {"version": service.engine.config.release}),
    "/load": lambda service: JsonAnswer(200, {"server_load": service.load}),
}
TOKENISING = {"/tokenize": tokenize, "/detokenize": detokenize}
HEALTH = ("/health", "/ping")
# vLLM lets in no browser from elsewhere unless it is told to.
PREFLIGHT = (
    (b"access-control-allow-methods", b"DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, QUERY"),
    (b"access-control-max-age", b"600"),
    (b"vary", b"Origin, Access-Control-Request-Method, Access-Control-Request-Headers, Access-Control-Request-Private-Network"),
)


class ClientGone(Exception):
    """The client left before it had said what it wants."""


class Api:
    """All routes."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics
        self._faulting = FaultEndpoints(service)
        self._admin = admin.ROUTES if service.options.is_dev_mode else {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the life of the server."""
        if scope["type"] == "lifespan":
            return await _live(receive, send)
        if scope["type"] != "http":
            await receive()
            return await send({"type": "websocket.close", "code": 1000})
        path = path_of(scope["path"], scope.get("root_path", ""))
        began, is_route = time.monotonic(), True
        try:
            status, size = await self._answer(scope, path, receive, send)
        except ClientGone:
            return None
        except fields.Detail as detail:
            is_route = detail.status not in (404, 405)
            status, size = await _send(send, JsonAnswer(detail.status, {"detail": str(detail)}, detail.headers))
        except fields.Refused as refused:
            headers = (NO_VARY,) if refused.message == fields.STOPPED else ()  # it comes from outside the layer for origins
            status, size = await _send(send, JsonAnswer(refused.status, refused.body(), headers))
            if refused.message == fields.DEAD:
                self._service.tell_death()
        except Exception as error:
            LOG.exception("plimsoll: a mistake of the stand-in's own")
            mistake = fields.Refused(500, str(error), "InternalServerError")
            with contextlib.suppress(RuntimeError):  # its answer has begun
                await _send(send, JsonAnswer(500, mistake.body()))
            status, size = 500, 0
        self._metrics.http.observe(
            path,
            scope["method"],
            status,
            seconds=time.monotonic() - began,
            request_bytes=_length(scope),
            answer_bytes=size,
            now=time.time(),
            is_route=is_route and status != 307,
        )
        return None

    async def _answer(self, scope: Scope, path: str, receive: Receive, send: Send) -> tuple[int, int]:
        service, method = self._service, scope["method"]
        if method == "OPTIONS" and _header(scope, b"origin") and _header(scope, b"access-control-request-method"):
            await send_bytes(send, 400, b"Disallowed CORS origin", b"text/plain; charset=utf-8", PREFLIGHT)
            return 400, 0
        if path in GENERATING:
            _only(method, "POST")
            return await self._generate(scope, path, receive, send)
        if path.startswith("/metrics"):
            return 200, await self._metrics.answer(receive, send, method)
        if path in HEALTH:
            _only(method, *(("GET",) if path == "/health" else ("GET", "POST")))
            status = 503 if service.engine.is_dead else 200
            await send_bytes(send, status, b"")
            return status, 0
        if path in LOOKING:
            _only(method, "GET")
            return await _send(send, LOOKING[path](service))
        if path in TOKENISING:
            _only(method, "POST")
            body = await _read(receive)
            if service.is_stopping:
                raise fields.stopped()
            return await _send(send, await TOKENISING[path](service, fields.object_of(body, _header(scope, b"content-type"))))
        if path in self._admin:
            wanted, handler = self._admin[path]
            _only(method, wanted)
            query = admin.query_of(scope.get("query_string", b""))
            found = await handler(service, query, await _read(receive))
            if found.body is None:
                await send_bytes(send, found.status, b"")
                return found.status, 0
            return await _send(send, found)
        if path.startswith(OWN):
            return await _send(send, self._faulting.answer(scope, path, await _read(receive)))
        routes = (GENERATING, HEALTH, LOOKING, TOKENISING, self._admin)
        if path.endswith("/") and any(path.rstrip("/") in paths for paths in routes):
            await send_bytes(send, 307, b"", headers=((b"location", _without_slash(scope, path)),))
            return 307, 0
        raise fields.Detail(404)

    async def _generate(self, scope: Scope, path: str, receive: Receive, send: Send) -> tuple[int, int]:
        service = self._service
        body = fields.object_of(await _read(receive), _header(scope, b"content-type"))
        create = GENERATING[path] or (chat.create if "messages" in body else completions.create)
        service.load += service.options.has_load_tracking
        try:
            found = await create(service, scope, body, receive, send)
        finally:
            service.load -= service.options.has_load_tracking
        return (200, 0) if found is None else await _send(send, found)


def _without_slash(scope: Scope, path: str) -> bytes:
    """Where a path with one slash too many leads: the same place, asked the same."""
    query: bytes = scope.get("query_string", b"")
    where = f"http://{_header(scope, b'host')}{scope.get('root_path', '').rstrip('/')}{path.rstrip('/')}"
    return where.encode("latin-1", "replace") + (b"?" + query if query else b"")


async def _send(send: Send, answer: JsonAnswer) -> tuple[int, int]:
    sizes: list[int] = []

    async def sizing(message: Message) -> None:
        sizes.append(len(message.get("body", b"")))
        await send(message)

    await send_json(sizing, answer)
    return answer.status, sum(sizes)


def _only(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise fields.Detail(405, ((b"allow", ", ".join(allowed).encode()),))


def _header(scope: Scope, name: bytes) -> str:
    return next((bytes(value).decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _length(scope: Scope) -> int:
    said = _header(scope, b"content-length")
    return int(said) if said.isdecimal() else 0


async def _read(receive: Receive) -> bytes:
    """The whole body; a client that goes before it is sent is nobody's to answer."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


class Authentication:
    """Asks for the key where vLLM does; it is compared in constant time."""

    def __init__(self, app: App, keys: tuple[str, ...]) -> None:
        self.app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys if key]  # an empty one is none in vLLM, too

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it pass, or 401."""
        is_guarded = self._digests and scope["type"] in ("http", "websocket") and scope.get("method") != "OPTIONS"
        if is_guarded and path_of(scope["path"], scope.get("root_path", "")).startswith(GUARDED) and not self._knows(scope):
            return await send_json(send, UNAUTHORIZED)
        return await self.app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, shown = _header(scope, b"authorization").partition(" ")
        digest = hashlib.sha256(shown.encode()).digest()
        found = [hmac.compare_digest(digest, one) for one in self._digests]
        return scheme.lower() == "bearer" and any(found)


class Front:
    """Outermost: lends every request the state that middlewares look at, and is as slow as a fault wants it."""

    def __init__(self, app: App, service: Service, state: SimpleNamespace) -> None:
        self.inner = app
        self.state = state
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        scope["app"] = self
        if scope["type"] != "http" or self._pause_s() is None:
            return await self.inner(scope, receive, send)
        async with listening(receive) as client:
            await self.inner(scope, receive, byte_by_byte(send, client, self._pause_s))
        return None

    def _pause_s(self) -> float | None:
        """Behind each byte; None while answers are not slow."""
        faults, driver = self._service.engine.faults, self._service.driver
        slow = faults.active("slow-loris", driver.now_ns()) if faults.all else None
        return None if slow is None else slow.value / driver.speed
