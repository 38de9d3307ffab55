"""The gate: an ASGI middleware around vLLM's API server, which counts, drains, sheds and answers under /plimsoll/.

    vllm serve MODEL --middleware plimsoll.inside.Gate

It is the outermost middleware. Each of its errors is counted and logged once, and the request passes as if there were no gate.
"""

from __future__ import annotations

import asyncio
import time

from plimsoll.inside.admission import PRIORITY_HEADER, SERVING
from plimsoll.inside.answers import (
    ASIDE,
    LARGEST_BODY,
    OWN,
    WORK,
    App,
    GateAnswer,
    Message,
    Receive,
    Scope,
    Send,
    error,
    path_of,
    refuse,
    retry_headers,
    route_of,
    send_answer,
    with_headers,
)
from plimsoll.inside.door import DOOR, PASSAGE, Passage
from plimsoll.inside.endpoints import GateRequest, answer
from plimsoll.inside.engine_view import EngineClientView, canary_fails
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.gate_control import Alone, GateControl
from plimsoll.inside.settings import InsideSettings
from plimsoll.inside.shared import ASLEEP, PAUSED
from plimsoll.inside.tick import PATIENCE_S, Test, Tick

# The sleep state after a successful request to one of these paths.
SLEEP_CHANGES = {"/pause": PAUSED, "/sleep": ASLEEP, "/resume": 0, "/wake_up": 0}
MARK = "plimsoll.gate"
DEEPEST = 50  # middlewares around the app
CLOSE = ((b"connection", b"close"),)


class Gate:
    """The middleware; vLLM makes one for each API server and passes it the app to wrap."""

    def __init__(
        self, app: App, settings: InsideSettings | None = None, alone: Alone | None = None, test: Test = canary_fails
    ) -> None:
        """In vLLM's own server it uses its process's objects; `alone` and `test` replace them for engines without a process."""
        self.app = app
        self._control: GateControl | None = None
        self._tick: Tick | None = None
        with FAULTS.noting("setting up the gate"):
            self._control = GateControl(settings or InsideSettings(), alone=alone)
            self._tick = Tick(self._control, test)
            if self._control.tokens.is_short:
                FAULTS.say("the token", "PLIMSOLL_TOKEN is shorter than 16 characters; take a longer one")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gate = self._control
        kind = scope["type"]
        if gate is None or MARK in scope:  # another gate is around this one already
            return await self.app(scope, receive, send)
        scope[MARK] = True
        with FAULTS.noting("looking at the server"):
            if gate.engine.client is None:
                gate.engine = EngineClientView(getattr(scope.get("app"), "state", None))
                gate.follow()
        with FAULTS.noting("starting the tick"):
            if self._tick is not None:
                self._tick.ensure()
        if kind == "lifespan":
            return await self._live(scope, receive, send)
        if kind not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        path = path_of(scope["path"], scope.get("root_path", ""))
        if path.startswith("/metrics") and self._tick is not None:
            self._tick.measure()  # so that a page is as fresh as its scrape
        if kind == "http" and path.startswith(OWN):
            return await self._own(gate, scope, receive, send, path)
        return await self._pass(gate, scope, receive, send, path)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Follows the server's lifespan and removes our page at its end. An app without lifespan raises here and serves on."""
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
                with FAULTS.noting("ending"):
                    await self._tick.stop()

    async def _own(self, gate: GateControl, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        body = b""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while len(body) <= LARGEST_BODY:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    body += message.get("body", b"")
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            late = error(408, f"the body did not come within {PATIENCE_S:g} s", retry_headers(1)[1:])
            return await send_answer(send, late)
        ask = GateRequest(scope["method"], path, scope["headers"], body)
        reply = await answer(gate, ask, only_ready=bool(gate.settings.listen))
        return await send_answer(send, reply, is_head=scope["method"] == "HEAD")

    async def _pass(self, gate: GateControl, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        refusal, exchange = None, Exchange(gate, receive, send)
        with FAULTS.noting("admitting"):
            refusal = exchange.admit(scope, path)
        with FAULTS.noting("shedding"):
            if refusal is None and exchange.passage is not None and not lacks_key(self.app, scope, path):
                priorities = (bytes(value) for name, value in scope["headers"] if bytes(name).lower() == PRIORITY_HEADER)
                refusal = gate.shed(next(priorities, b""))
        try:
            if refusal is None:
                return await self.app(scope, exchange.receive, exchange.send)
        finally:
            exchange.end()
        return await refuse(scope, receive, send, refusal)


def lacks_key(app: App, scope: Scope, path: str) -> bool:
    """True if vLLM's own middleware will refuse the request: whoever lacks the key is told so, not that the server is full."""
    node: object = app
    for _ in range(DEEPEST if path.startswith("/v1") else 0):  # vLLM asks for its key below that path alone
        if type(node).__name__ == "AuthenticationMiddleware":
            headers = {bytes(name).lower(): bytes(value).decode("latin-1") for name, value in scope["headers"]}
            key = headers.get(b"authorization", "")
            verify = getattr(node, "verify_token", None)  # older releases have none
            return not key or (verify is not None and not verify({"Authorization": key}))
        node = getattr(node, "app", None)
    return False


class Exchange:
    """One request between client and vLLM: its body on the way in, its answer on the way out.

    While a drain runs the body has a deadline, because a client that stops sending must not hold up the drain, and every
    answer asks for a new connection. The start of a stream is held back until its first part where the door or the engine's
    death may still want another answer in its place.
    """

    def __init__(self, gate: GateControl, receive: Receive, send: Send) -> None:
        self._control, self._receive, self._send = gate, receive, send
        self.passage: Passage | None = None  # of work alone
        self._sleep: int | None = None
        self._began_s = time.monotonic()
        self._is_counted = self._is_in = self._is_answering = self._holds_streams = False
        self._is_whole = True  # its body is complete, or has no deadline; one that is still being sent takes nobody's place
        self._is_answered = False  # by us: vLLM's own answer goes nowhere
        self._start: Message | None = None  # of a stream, held back

    def admit(self, scope: Scope, path: str) -> GateAnswer | None:
        """Counts the request and returns a refusal while this server drains or ends."""
        gate, method = self._control, scope.get("method", "GET")
        route = route_of(scope["type"], method, path)
        if route != ASIDE:
            gate.enter()
            self._is_counted = True
        if route == WORK and (refusal := gate.refusal(gate.phase())) is not None:
            return refusal
        if method == "POST":
            self._sleep, query = SLEEP_CHANGES.get(path), scope.get("query_string", b"")
            if self._sleep == 0 and b"tags=" in query:  # weights or cache alone: not awake yet
                self._sleep = None
            elif self._sleep == ASLEEP and b"level=0" in query:
                self._sleep = PAUSED
        if route != ASIDE:
            gate.begin(is_new=route == WORK)
            self._is_whole = scope["type"] != "http"
        if route == WORK:
            self.passage = Passage()
            self.passage, self._holds_streams = gate.passage(), gate.can_fail_over
            PASSAGE.set(self.passage)
        return None

    def end(self) -> None:
        """Notes the end of the request, whatever its end."""
        gate = self._control
        with FAULTS.noting("following a request"):
            if self.passage is not None:
                gate.forget(self.passage)
        gate.in_layer -= self._is_in
        gate.answering -= self._is_answering
        # Our page may be gone: a server that ends cuts off running requests.
        with FAULTS.noting("counting the end of a request"):
            if self._is_counted:
                gate.finish()

    def _is_here(self) -> None:
        if self.passage is not None and not self._is_in:
            self._is_in = True
            self._control.in_layer += 1

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()
        bodies = self._control.bodies
        try:
            async with asyncio.timeout(None) as limit:
                bodies[limit] = self._began_s
                try:
                    part = await self._receive()
                finally:
                    del bodies[limit]
        except TimeoutError:
            self._is_whole = self._is_answered = True
            message = "this server is draining, and the body of this request did not come in time; send it again"
            await send_answer(self._send, error(408, message, retry_headers(1)))
            return {"type": "http.disconnect"}
        self._is_whole = part["type"] != "http.request" or not part.get("more_body")
        if self._is_whole and part["type"] == "http.request":
            self._is_here()
        return part

    async def send(self, message: Message) -> None:
        """Passes the answer on, with Retry-After where vLLM refuses work without it."""
        if self._is_answered:
            return
        if self.passage is not None and message["type"] in ("http.response.start", "websocket.accept"):
            self._is_here()
            self._control.answering += not self._is_answering
            self._is_answering = True
        if self.passage is not None and message["type"] == "http.response.start":
            status = message["status"]
            headers = [(bytes(name).lower(), bytes(value)) for name, value in message.get("headers", ())]
            if status == 503 and not any(name == b"retry-after" for name, _ in headers):
                with FAULTS.noting("adding Retry-After"):
                    message = with_headers(message, retry_headers(self._control.retry_after_own_valve())[:1])
            if status == 500 and await self._send_elsewhere(self.passage):
                return
            is_stream = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
            if status == 200 and is_stream and (DOOR.refuses or self._holds_streams):
                self._start = message
                return
        if self.passage is not None and self._start is not None and await self._send_start(self._start, self.passage):
            return
        await self._pass_on(message)

    async def _send_start(self, start: Message, passage: Passage) -> bool:
        """Sends the start of a stream that was held back; True if another answer went out in its place.

        vLLM begins to answer a stream before it adds the request, and reports a refusal or its engine's death as an event
        with status 200: too late for a balancer to try elsewhere.
        """
        self._start, retry_s = None, 1
        if passage.refusal is None:
            if await self._send_elsewhere(passage):
                return True
            await self._pass_on(start)
            return False
        with FAULTS.noting("adding Retry-After"):
            retry_s = self._control.retry_after_own_valve()
        await self._answer(passage.refusal.answer(retry_s))
        return True

    async def _send_elsewhere(self, passage: Passage) -> bool:
        """Answers "try another server" if the engine died without beginning this request; True if it did so."""
        answer = None
        with FAULTS.noting("letting a request go elsewhere"):
            answer = self._control.failover(passage)
        if answer is not None:
            await self._answer(answer)
        return answer is not None

    async def _answer(self, answer: GateAnswer) -> None:
        self._is_answered = True
        await send_answer(self._pass_on, answer)

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            with FAULTS.noting("noting sleep"):
                if self._sleep is not None and 200 <= message["status"] < 300:
                    self._control.note_sleep(self._sleep)
            with FAULTS.noting("closing connections"):
                # The client connects anew, so that the balancer sends it elsewhere.
                if self._control.is_stopping or self._control.phase() != SERVING:
                    message = with_headers(message, CLOSE)
        await self._send(message)
