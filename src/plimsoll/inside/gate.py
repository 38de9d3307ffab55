"""The gate: an ASGI middleware around vLLM's API server, which counts, drains, sheds and answers under /plimsoll/.

    vllm serve MODEL --middleware plimsoll.inside.Gate

It stands outermost. Whatever goes wrong in it is counted and logged once, and the request passes as if it were not there.
"""

from __future__ import annotations

from plimsoll.inside.answers import App, Message, Receive, Scope, Send, refuse_websocket, send_answer, with_headers
from plimsoll.inside.asked import LARGEST_BODY
from plimsoll.inside.canary import canary_fails
from plimsoll.inside.core import Alone, Core
from plimsoll.inside.endpoints import Ask, answer
from plimsoll.inside.engine_view import EngineView
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.layer import insert_beneath
from plimsoll.inside.routes import OWN, path_of, route_of
from plimsoll.inside.settings import Settings
from plimsoll.inside.shared import ASLEEP, PAUSED
from plimsoll.inside.tick import Test, Tick

# What a request to one of these does to readiness once vLLM has answered it with success.
SLEEP_CHANGES = {"/pause": PAUSED, "/sleep": ASLEEP, "/resume": 0, "/wake_up": 0}
MARK = "plimsoll.gate"
CLOSE = ((b"connection", b"close"),)


class Gate:
    """vLLM makes one for each API server and hands it the app it stands around."""

    def __init__(
        self, app: App, settings: Settings | None = None, alone: Alone | None = None, test: Test = canary_fails
    ) -> None:
        """Around vLLM's own server it takes what it needs of its process; `alone` and `test` are for engines without one."""
        self.app = app
        self._core: Core | None = None
        self._tick: Tick | None = None
        try:
            self._core = Core(settings or Settings(), alone=alone)
            insert_beneath(self, self._core)
            self._tick = Tick(self._core, test)
            if self._core.tokens.is_short:
                FAULTS.say("the token", "PLIMSOLL_TOKEN is shorter than 16 characters; take a longer one")
        except Exception as error:
            FAULTS.note("setting up the gate", error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, websocket or lifespan."""
        core = self._core
        kind = scope["type"]
        if core is None or MARK in scope:  # a gate stands around this one already
            return await self.app(scope, receive, send)
        scope[MARK] = True
        self._look_at(scope, core)
        if kind == "lifespan":
            return await self._live(scope, receive, send)
        if kind not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        path = path_of(scope["path"], scope.get("root_path", ""))
        if path.startswith("/metrics") and self._tick is not None:
            self._tick.measure()  # so that a page is as fresh as its scrape
        if kind == "http" and path.startswith(OWN):
            return await self._own(core, scope, receive, send, path)
        return await self._pass(core, scope, receive, send, path)

    def _look_at(self, scope: Scope, core: Core) -> None:
        """Remember vLLM's state at the first request, and see to it that the tick runs."""
        try:
            if core.engine.client is None:
                core.engine = EngineView(getattr(scope.get("app"), "state", None))
        except Exception as error:
            FAULTS.note("looking at the server", error)
        try:
            if self._tick is not None:
                self._tick.ensure()
        except Exception as error:
            FAULTS.note("starting the tick", error)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The life of the server: our page goes when it ends. An app that knows no lifespan raises here and lives on."""
        is_over = False

        async def noticing() -> Message:
            nonlocal is_over
            message = await receive()
            is_over = is_over or message["type"] == "lifespan.shutdown"
            return message

        try:
            return await self.app(scope, noticing, send)
        finally:
            if is_over and self._tick is not None:
                try:
                    await self._tick.stop()
                except Exception as error:
                    FAULTS.note("ending", error)

    async def _own(self, core: Core, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        body = b""
        while len(body) <= LARGEST_BODY:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        ask = Ask(scope["method"], path, scope["headers"], body)
        found = await answer(core, ask, only_ready=bool(core.settings.listen))
        await send_answer(send, found, is_head=scope["method"] == "HEAD")

    async def _pass(self, core: Core, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        refusal, is_counted = None, False
        try:
            method = scope.get("method", "GET")
            route = route_of(scope["type"], method, path)
            if route.is_counted:
                core.enter()
                is_counted = True
            if route.is_refusable:
                refusal = core.refusal(core.phase())
            if path in SLEEP_CHANGES and method == "POST":
                send = _watching_sleep(core, SLEEP_CHANGES[path], scope, send)
            if route.is_counted and refusal is None:
                core.begin(is_new=route.is_refusable)
        except Exception as error:
            FAULTS.note("admitting", error)
        if refusal is not None and is_counted:
            _finish(core)
        if refusal is not None:
            if scope["type"] == "websocket":
                return await refuse_websocket(scope, receive, send, refusal)
            return await send_answer(send, refusal, is_head=scope.get("method") == "HEAD")
        try:
            return await self.app(scope, receive, _closing(core, send))
        finally:
            if is_counted:
                _finish(core)


def _finish(core: Core) -> None:
    try:
        core.finish()
    except Exception as error:  # our page may be gone: a server that ends cuts off what still runs
        FAULTS.note("counting the end of a request", error)


def _closing(core: Core, send: Send) -> Send:
    """The same, but while a drain runs every answer asks for a new connection."""

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            try:
                if core.closes_connections():
                    message = with_headers(message, CLOSE)
            except Exception as error:
                FAULTS.note("closing connections", error)
        await send(message)

    return closing


def _watching_sleep(core: Core, how: int, scope: Scope, send: Send) -> Send:
    """The same, but takes note of a server that was sent to sleep or woken."""
    query = scope.get("query_string", b"")
    is_partial = how == 0 and b"tags=" in query  # weights or cache alone: not awake yet
    if how == ASLEEP and b"level=0" in query:
        how = PAUSED

    async def watching(message: Message) -> None:
        if message["type"] == "http.response.start" and 200 <= message["status"] < 300 and not is_partial:
            try:
                core.note_sleep(how)
            except Exception as error:
                FAULTS.note("noting sleep", error)
        await send(message)

    return watching
