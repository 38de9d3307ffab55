"""The routes of one server, as an ASGI app, and the two layers around them that vLLM has, too: its own state and its key."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace

from plimsoll.inside.answers import App, Headers, Message, Receive, Scope, Send
from plimsoll.inside.routes import path_of
from plimsoll.standin.serve import admin, chat, completions, errors, fields, tokens
from plimsoll.standin.serve.faulting import OWN, Faulting
from plimsoll.standin.serve.leaving import byte_by_byte, listening
from plimsoll.standin.serve.metrics import Metrics
from plimsoll.standin.serve.sending import NO_VARY, JsonAnswer, send_bytes, send_json
from plimsoll.standin.serve.service import Service

LOG = logging.getLogger("vllm.standin")
GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # what --api-key is asked for
UNAUTHORIZED = JsonAnswer(401, {"error": "Unauthorized"}, (NO_VARY,))
# What SageMaker calls goes by what is in it.
GENERATING = {"/v1/completions": completions.create, "/v1/chat/completions": chat.create, "/invocations": None}
LOOKING: dict[str, Callable[[Service], JsonAnswer]] = {
    "/v1/models": tokens.models,
    "/version": lambda service: JsonAnswer(200, {"version": service.engine.config.release}),
    "/load": lambda service: JsonAnswer(200, {"server_load": service.load}),
}
TOKENISING = {"/tokenize": tokens.tokenize, "/detokenize": tokens.detokenize}
HEALTH = ("/health", "/ping")
# vLLM lets in no browser from elsewhere unless it is told to.
PREFLIGHT = (
    (b"access-control-allow-methods", b"DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, QUERY"),
    (b"access-control-max-age", b"600"),
    (b"vary", b"Origin, Access-Control-Request-Method, Access-Control-Request-Headers, Access-Control-Request-Private-Network"),
)


class Gone(Exception):
    """The client left before it had said what it wants."""


class Api:
    """All routes."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics
        self._faulting = Faulting(service)
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
        except Gone:
            return None
        except errors.Detail as detail:
            is_route = detail.status not in (404, 405)
            status, size = await _send(send, JsonAnswer(detail.status, {"detail": str(detail)}, detail.headers))
        except errors.Refused as refused:
            status, size = await _send(send, JsonAnswer(refused.status, refused.body(), _headers(refused)))
            if refused.message == errors.DEAD:
                self._service.tell_death()
        except Exception as error:
            LOG.exception("plimsoll: a mistake of the stand-in's own")
            mistake = errors.Refused(500, str(error), "InternalServerError")
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
        """The status and the length of what was sent."""
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
                raise errors.stopped()
            return await _send(send, await TOKENISING[path](service, fields.object_of(body, _content_type(scope))))
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
        if path.endswith("/") and self._has(path.rstrip("/")):
            await send_bytes(send, 307, b"", headers=((b"location", _without_slash(scope, path)),))
            return 307, 0
        raise errors.Detail(404)

    def _has(self, path: str) -> bool:
        return path in GENERATING or path in HEALTH or path in LOOKING or path in TOKENISING or path in self._admin

    async def _generate(self, scope: Scope, path: str, receive: Receive, send: Send) -> tuple[int, int]:
        service = self._service
        body = fields.object_of(await _read(receive), _content_type(scope))
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


def _headers(refused: errors.Refused) -> Headers:
    """One kind of answer comes from outside the layer that names the origin."""
    return (NO_VARY,) if refused.message == errors.STOPPED else ()


async def _send(send: Send, answer: JsonAnswer) -> tuple[int, int]:
    sizes: list[int] = []

    async def sizing(message: Message) -> None:
        sizes.append(len(message.get("body", b"")))
        await send(message)

    await send_json(sizing, answer)
    return answer.status, sum(sizes)


def _only(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise errors.Detail(405, ((b"allow", ", ".join(allowed).encode()),))


def _header(scope: Scope, name: bytes) -> str:
    return next((bytes(value).decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _content_type(scope: Scope) -> str:
    return _header(scope, b"content-type")


def _length(scope: Scope) -> int:
    said = _header(scope, b"content-length")
    return int(said) if said.isdecimal() else 0


async def _read(receive: Receive) -> bytes:
    """The whole body; a client that goes before it is sent is nobody's to answer."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Gone
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
