"""The gate: an ASGI middleware around vLLM's API server, which counts, drains, sheds and answers under /plimsoll/.

    vllm serve MODEL --middleware plimsoll.inside.Gate

It is the outermost middleware. Each of its errors is counted and logged once, and the request passes as if there were no gate.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from plimsoll.inside.admission import PRIORITY_HEADER, SERVING
from plimsoll.inside.answers import (
    ASIDE,
    LARGEST_BODY,
    OWN,
    WORK,
    App,
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

# Shedding belongs innermost of all, so that a client without vLLM's own key is refused for the key, not for load; vLLM puts
# our middleware around all others. A body is never held back: each part is searched for images and handed on.

# The names of OpenAI's API and vLLM's for the parts of a message that are not text.
ITEM_MARKS = (b'"image_url"', b'"input_image"', b'"input_audio"', b'"audio_url"', b'"video_url"')
TYPE_KEY = b'"type"'
LONGEST_MARK = max(len(mark) for mark in ITEM_MARKS) + 16
DEEPEST = 50


def insert_beneath(outer: Any, gate: GateControl) -> bool:
    """Puts a ShedLayer around the innermost app of the chain of middlewares; False where there is no such chain."""
    node = outer
    for _ in range(DEEPEST):
        inner = getattr(node, "app", None)
        if inner is None or not callable(inner):
            return False
        # The chain ends in the router, or in the layer just around it that turns an app's exceptions into answers.
        if type(inner).__name__ in ("ExceptionMiddleware", "AsyncExitStackMiddleware", "Router", "APIRouter") or not hasattr(
            inner, "app"
        ):
            node.app = ShedLayer(inner, gate)
            return True
        node = inner
    return False


class ShedLayer:
    """The layer that refuses work that would wait too long, and counts admitted requests until they end."""

    def __init__(self, app: App, gate: GateControl) -> None:
        self.app = app
        self._control = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        gate = self._control
        refusal, is_work = None, False
        with FAULTS.noting("shedding"):
            path = path_of(scope["path"], scope.get("root_path", ""))
            is_work = route_of(scope["type"], scope.get("method", "GET"), path) == WORK
            if is_work:
                priorities = (bytes(value) for name, value in scope["headers"] if bytes(name).lower() == PRIORITY_HEADER)
                refusal = gate.shed(next(priorities, b""))
        if refusal is not None:
            return await refuse(scope, receive, send, refusal)
        if not is_work:
            return await self.app(scope, receive, send)
        passing = _Passing(gate, receive, send)
        PASSAGE.set(passing.passage)
        try:
            return await self.app(scope, passing.receive, passing.send)
        finally:
            with FAULTS.noting("following a request"):
                gate.forget(passing.passage)
            gate.in_layer -= passing.is_in
            gate.answering -= passing.is_answering
            gate.items -= passing.items


class _Passing:
    """One request between client and vLLM: counts its items on the way in, adds Retry-After to a 503 of vLLM's own."""

    def __init__(self, gate: GateControl, receive: Receive, send: Send) -> None:
        self._control = gate
        self._receive = receive
        self._send = send
        self._tail = b""
        self.items = 0
        self.is_in = False  # its body is complete; a request that is still being sent takes nobody's place
        self.is_answering = False
        self.passage, self._holds_streams = Passage(), False
        with FAULTS.noting("following a request"):
            self.passage, self._holds_streams = gate.passage(), gate.can_fail_over
        self._start: Message | None = None  # of a stream, held back until its first part: the door may refuse it before
        self._is_refused = False

    def _is_here(self) -> None:
        if not self.is_in:
            self.is_in = True
            self._control.in_layer += 1

    async def receive(self) -> Message:
        """Returns the next part of the body, its images and sounds counted."""
        message = await self._receive()
        if message["type"] == "http.request":
            with FAULTS.noting("looking for images"):
                # A mark may lie across two chunks: search the end of the last one again, without its whole marks.
                seen = self._tail + message.get("body", b"")
                items = items_in(seen) - items_in(self._tail)
                self._tail = seen[-LONGEST_MARK:]
                self.items += items
                self._control.items += items
                if not message.get("more_body"):
                    self._is_here()
        return message

    async def send(self, message: Message) -> None:
        """Passes the answer on, with Retry-After where vLLM refuses without it."""
        if not self.is_answering and message["type"] in ("http.response.start", "websocket.accept"):
            self._is_here()
            self.is_answering = True
            self._control.answering += 1
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = [(bytes(name).lower(), bytes(value)) for name, value in message.get("headers", ())]
            if status == 503 and not any(name == b"retry-after" for name, _ in headers):
                with FAULTS.noting("adding Retry-After"):
                    message = with_headers(message, retry_headers(self._control.retry_after_own_valve())[:1])
            if status == 500 and await self._send_elsewhere():
                return
            is_stream = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
            if status == 200 and is_stream and (DOOR.refuses or self._holds_streams):
                self._start = message
                return
        if self._is_refused or (self._start is not None and await self._send_start()):
            return
        await self._send(message)

    async def _send_start(self) -> bool:
        """Sends the start of a stream that was held back; True if another answer went out in its place.

        vLLM begins to answer a stream before it adds the request, and reports a refusal or its engine's death as an event
        with status 200: too late for a balancer to try elsewhere.
        """
        start, self._start = self._start, None
        assert start is not None
        refusal = self.passage.refusal
        if refusal is None and await self._send_elsewhere():
            return True
        if refusal is None:
            await self._send(start)
            return False
        self._is_refused, retry_s = True, 1
        with FAULTS.noting("adding Retry-After"):
            retry_s = self._control.retry_after_own_valve()
        await send_answer(self._send, refusal.answer(retry_s))
        return True

    async def _send_elsewhere(self) -> bool:
        """Answers "try another server" if the engine died without beginning this request; True if it did so."""
        answer = None
        with FAULTS.noting("letting a request go elsewhere"):
            answer = self._control.failover(self.passage)
        if answer is None:
            return False
        self._is_refused = True
        await send_answer(self._send, answer)
        return True


def items_in(body: bytes) -> int:
    """Returns the number of images, videos and sounds in this part of a body: each names its kind as the value of `type`."""
    count = 0
    for mark in ITEM_MARKS:
        place = body.find(mark)
        while place >= 0:
            before = body[max(0, place - 16) : place].rstrip()
            count += before.endswith(b":") and before[:-1].rstrip().endswith(TYPE_KEY)
            place = body.find(mark, place + 1)
    return count


# The sleep state after a successful request to one of these paths.
SLEEP_CHANGES = {"/pause": PAUSED, "/sleep": ASLEEP, "/resume": 0, "/wake_up": 0}
MARK = "plimsoll.gate"
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
            insert_beneath(self, self._control)
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
            late = error(408, f"the body did not come within {PATIENCE_S:g} s", "RequestTimeoutError", retry_headers(1)[1:])
            return await send_answer(send, late)
        ask = GateRequest(scope["method"], path, scope["headers"], body)
        reply = await answer(gate, ask, only_ready=bool(gate.settings.listen))
        return await send_answer(send, reply, is_head=scope["method"] == "HEAD")

    async def _pass(self, gate: GateControl, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        refusal, is_counted, sleep = None, False, None
        with FAULTS.noting("admitting"):
            method = scope.get("method", "GET")
            route = route_of(scope["type"], method, path)
            if route != ASIDE:
                gate.enter()
                is_counted = True
            if route == WORK:
                refusal = gate.refusal(gate.phase())
            if method == "POST":
                sleep, query = SLEEP_CHANGES.get(path), scope.get("query_string", b"")
                if sleep == 0 and b"tags=" in query:  # weights or cache alone: not awake yet
                    sleep = None
                elif sleep == ASLEEP and b"level=0" in query:
                    sleep = PAUSED
            if is_counted and refusal is None:
                gate.begin(is_new=route == WORK)
        try:
            if refusal is None:
                exchange = _Exchange(gate, receive, send, sleep, has_deadline=is_counted and scope["type"] == "http")
                return await self.app(scope, exchange.receive, exchange.send)
        finally:
            if is_counted:  # our page may be gone: a server that ends cuts off running requests
                with FAULTS.noting("counting the end of a request"):
                    gate.finish()
        return await refuse(scope, receive, send, refusal)


class _Exchange:
    """A request's body on its way in, and its answer on its way out.

    While a drain runs the body has a deadline, because a client that stops sending must not hold up the drain, and every
    answer asks for a new connection.
    """

    def __init__(self, gate: GateControl, receive: Receive, send: Send, sleep: int | None, *, has_deadline: bool) -> None:
        self._control, self._receive, self._send, self._sleep = gate, receive, send, sleep
        self._began_s = time.monotonic()
        self._is_whole, self._is_late = not has_deadline, False

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
            self._is_whole = self._is_late = True
            message = "this server is draining, and the body of this request did not come in time; send it again"
            await send_answer(self._send, error(408, message, "RequestTimeoutError", retry_headers(1)))
            return {"type": "http.disconnect"}
        self._is_whole = part["type"] != "http.request" or not part.get("more_body")
        return part

    async def send(self, message: Message) -> None:
        if self._is_late:  # its client has an answer already
            return
        if message["type"] == "http.response.start":
            with FAULTS.noting("noting sleep"):
                if self._sleep is not None and 200 <= message["status"] < 300:
                    self._control.note_sleep(self._sleep)
            with FAULTS.noting("closing connections"):
                # The client connects anew, so that the balancer sends it elsewhere.
                if self._control.is_stopping or self._control.phase() != SERVING:
                    message = with_headers(message, CLOSE)
        await self._send(message)
