"""The Starlette app of one server, with vLLM's routes and the layers that vLLM has around them."""

from __future__ import annotations

import asyncio
import functools
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plimsoll.errors import BadInput
from plimsoll.inside.answers import ALLOWED, OFF, Tokens, path_of
from plimsoll.standin.faults import FOREVER, NS, ONLY_AT_START, make_fault
from plimsoll.standin.serve import admin, protocol
from plimsoll.standin.serve.completions import create_chat_completion, create_completion
from plimsoll.standin.serve.generation import until_gone
from plimsoll.standin.serve.metrics import Counting, Metrics
from plimsoll.standin.serve.protocol import Json
from plimsoll.standin.serve.service import Service

Endpoint = Callable[[Service, Request], Awaitable[Response]]

# The endpoints that only read.

PERMISSION = {
    "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True, "allow_search_indices": False,
    "allow_view": True, "allow_fine_tuning": False, "organization": "*", "group": None, "is_blocking": False,
}  # fmt: skip


async def models(service: Service, _request: Request) -> Response:
    config, created = service.engine.config, int(time.time())
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
    return Json({"object": "list", "data": cards})


async def version(service: Service, _request: Request) -> Response:
    return Json({"version": service.engine.config.release})


async def health(service: Service, _request: Request) -> Response:
    return Response(status_code=503 if service.engine.is_dead else 200)


# POST, DELETE and GET under /standin/: faults while a stand-in runs, and its state; they need the token.

KNOWN = ("kind", "at_s", "for_s", "value")


def _check_token(service: Service, request: Request) -> None:
    verdict = Tokens(service.options.token).judge(request.scope["headers"])
    if verdict == OFF:
        raise protocol.HttpRefusal(403, "this endpoint is off: it was started without PLIMSOLL_TOKEN", "PermissionDeniedError")
    if verdict != ALLOWED:
        raise protocol.HttpRefusal(401, "the token is missing or wrong: Authorization: Bearer TOKEN", "AuthenticationError")


async def faults(service: Service, request: Request) -> Response:
    """Adds a fault (POST) or removes some (DELETE), and answers the faults that there are."""
    _check_token(service, request)
    if request.method != "GET":
        try:
            wanted = json.loads(await request.body() or b"{}")
        except (ValueError, RecursionError):
            raise protocol.HttpRefusal(400, "the body is not JSON") from None
        if not isinstance(wanted, dict) or not all(name in KNOWN for name in wanted):
            raise protocol.HttpRefusal(400, f"the body is not an object of {', '.join(KNOWN)}")
        kind, engine = wanted.get("kind"), service.engine
        if request.method == "DELETE":
            engine.faults.take_back(None if kind is None else str(kind))
        elif kind in ONLY_AT_START:
            raise protocol.HttpRefusal(400, f"fault {kind}: it has started; name it with --fault at the next start")
        else:
            try:
                fault = make_fault(str(kind), wanted.get("at_s") or 0, wanted.get("for_s"), wanted.get("value"))
            except BadInput as error:
                raise protocol.HttpRefusal(400, str(error)) from None
            engine.faults.append(replace(fault, at_s=fault.at_s + service.driver.now_ns() / NS))
        service.driver.turn()
    return Json({"faults": _faults(service)})


def _faults(service: Service) -> list[dict[str, Any]]:
    now_ns = service.driver.now_ns()
    found = [asdict(fault) | {"at_s": round(fault.at_s, 3), "is_on": fault.is_on(now_ns)} for fault in service.engine.faults]
    return [row | {"for_s": None if row["for_s"] == FOREVER else row["for_s"]} for row in found]


async def state(service: Service, request: Request) -> Response:
    _check_token(service, request)
    engine, driver = service.engine, service.driver
    now_ns, figures = driver.now_ns(), engine.figures
    return Json(
        {
            "schema": "plimsoll.standin/1",
            "now_s": round(now_ns / NS, 3),
            "speed": driver.speed,
            "release": engine.config.release,
            "model": engine.config.model,
            "is_dead": engine.is_dead,
            "death": engine.death,
            "is_paused": engine.is_paused,
            "sleep_level": engine.sleep_level,
            "is_stopping": service.is_stopping,
            "in_flight": len(service.states),
            "running": figures.running,
            "waiting": figures.waiting,
            "kv_usage": figures.kv_usage,
            "steps": figures.steps,
            "preemptions": figures.preemptions,
            "workers": engine.worker_figures(now_ns),
            "faults": _faults(service),
        }
    )


# The layers.

GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # the paths that need --api-key
LOOK_S = 0.1  # how soon a slow answer notices that the fault is over or the client gone


class Authentication:
    """The layer that requires the API key where vLLM does; it compares in constant time."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app = app
        self._keys = [Tokens(key) for key in keys if key]  # vLLM ignores an empty key, too

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_guarded = self._keys and scope["type"] in ("http", "websocket") and scope.get("method") != "OPTIONS"
        if is_guarded and path_of(scope["path"], scope.get("root_path", "")).startswith(GUARDED):
            verdicts = [key.judge(scope["headers"]) for key in self._keys]
            if ALLOWED not in verdicts:
                return await Json({"error": "Unauthorized"}, 401)(scope, receive, send)
        return await self.app(scope, receive, send)


class SlowLoris:
    """The layer that sends bodies one byte at a time while the fault is on and the client is there."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._pause_s() is None:
            return await self.app(scope, receive, send)
        leaving: asyncio.Task[None] | None = None

        async def slowly(message: Message) -> None:
            nonlocal leaving
            body: bytes = message.get("body", b"")
            while len(body) > 1 and (leaving is None or not leaving.done()) and (pause_s := self._pause_s()) is not None:
                await send({"type": "http.response.body", "body": body[:1], "more_body": True})
                body = body[1:]
                # By now the app has read the client's body, or does not want it.
                leaving = leaving or asyncio.create_task(until_gone(receive))
                end = time.monotonic() + pause_s
                while (left := end - time.monotonic()) > 0 and not leaving.done() and self._pause_s() is not None:
                    await asyncio.wait({leaving}, timeout=min(LOOK_S, left))
            await send({**message, "body": body} if body else message)

        try:
            await self.app(scope, receive, slowly)
        finally:
            if leaving is not None:
                leaving.cancel()
        return None

    def _pause_s(self) -> float | None:
        """Returns the seconds to wait after each byte; None while answers are not slow."""
        driver = self._service.driver
        slow = self._service.engine.faults.active("slow-loris", driver.now_ns())
        return None if slow is None else slow.value / driver.speed


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # the client left before its request was complete


def make_app(service: Service, metrics: Metrics, middleware: Sequence[Middleware]) -> Starlette:
    """Returns the app; `middleware` are those of --middleware, the outermost first."""
    endpoints: dict[str, tuple[str, Endpoint]] = {
        "/v1/completions": ("POST", create_completion),
        "/v1/chat/completions": ("POST", create_chat_completion),
        "/metrics": ("GET HEAD", metrics.answer),
        "/health": ("GET", health),
        "/ping": ("GET POST", health),
        "/v1/models": ("GET", models),
        "/version": ("GET", version),
        "/standin/faults": ("POST DELETE GET", faults),
        "/standin/state": ("GET", state),
        **(admin.ROUTES if service.options.is_dev_mode else {}),
    }
    routes: list[Route] = []
    for path, (methods, endpoint) in endpoints.items():
        route = Route(path, functools.partial(endpoint, service))
        route.methods = set(methods.split())  # FastAPI's routes do not answer HEAD where they answer GET
        routes.append(route)
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(SlowLoris, service),
            *middleware,
            Middleware(Authentication, service.options.api_keys),
            Middleware(CORSMiddleware, allow_methods=["*"], allow_headers=["*"]),  # no origin is allowed
            Middleware(Counting, metrics.http, frozenset(endpoints)),
        ],
        exception_handlers={
            protocol.HttpRefusal: protocol.answer_refusal,
            HTTPException: protocol.answer_framework,
            ClientDisconnect: _answer_nobody,
            Exception: protocol.answer_mistake,
        },
    )
    app.state.service = service
    return app
