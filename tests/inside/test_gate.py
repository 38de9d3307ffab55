"""The gate around an app: exact counts whatever happens, two phases of a drain, and no fault of ours is the client's."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.admission import Wish
from plimsoll.inside.answers import App, Message, Receive, Scope, Send
from plimsoll.inside.gate import Gate
from plimsoll.inside.gate_control import GateControl
from tests.fakes import BEARER, EngineClient, State, ask, hello, http_scope, settings
from tests.inside.test_answers import STEERED, WORKING
from tests.inside.test_gate_control import drain

KINDS = ("answer", "stream", "raise before", "raise after", "cancelled", "disconnect", "websocket", "look", "follow")


def gated(app: App, folder: object, **more: str) -> tuple[Gate, GateControl]:
    """A gate with a folder of its own, and its core."""
    gate = Gate(app, settings(folder, **more))
    assert gate._control is not None
    return gate, gate._control


def with_engine(core: GateControl) -> EngineClient:
    """An engine that is there."""
    client = EngineClient()
    core.engine._state = State(engine_client=client)
    return client


async def fitful(scope: Scope, receive: Receive, send: Send) -> None:
    """Does what the request's kind says, with so many turns of the loop in between."""
    kind, turns = scope["kind"], scope["turns"]
    for _ in range(turns):
        await asyncio.sleep(0)
    if kind == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        return
    if kind == "raise before":
        raise RuntimeError("before")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if kind == "raise after":
        raise RuntimeError("after")
    if kind == "cancelled":
        await asyncio.sleep(60)
    if kind == "disconnect":
        while (await receive())["type"] != "http.disconnect":
            await asyncio.sleep(0)
    for _ in range(turns if kind == "stream" else 0):
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


async def one(gate: App, kind: str, turns: int, check: Callable[[], None]) -> None:
    method, path = {"look": ("GET", "/v1/models"), "follow": ("GET", "/v1/responses/resp_1")}.get(
        kind, ("POST", "/v1/completions")
    )
    scope = http_scope(method, path, kind=kind, turns=turns)
    scope["type"] = "websocket" if kind == "websocket" else "http"
    calls = 0

    async def receive() -> Message:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)
        check()
        return {"type": "http.request" if calls < turns else "http.disconnect", "body": b""}

    async def send(message: Message) -> None:
        del message
        check()

    with contextlib.suppress(RuntimeError, asyncio.CancelledError):
        await gate(scope, receive, send)


@given(plan=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 6), st.integers(0, 6)), max_size=25))
def test_the_count_is_exact_in_any_interleaving(plan: list[tuple[str, int, int]]) -> None:
    """Answers, streams, exceptions, cancellations, disconnects, websockets: at every moment those inside, 0 at the end."""
    inside = 0

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal inside
        inside += scope["kind"] != "look"
        try:
            await fitful(scope, receive, send)
        finally:
            inside -= scope["kind"] != "look"

    async def go(folder: str) -> None:
        gate, core = gated(counting, folder)

        def check() -> None:
            assert core.shared.total("in_flight") == inside >= 0

        tasks = []
        for kind, turns, pause in plan:
            tasks.append(asyncio.create_task(one(gate, kind, turns, check)))
            for _ in range(pause):
                await asyncio.sleep(0)
            check()
        for _ in range(40):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        check()
        assert core.shared.total("in_flight") == core.in_layer == inside == 0
        assert core.shared.total("begun") <= len(plan)
        core.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(go(folder))


async def test_phase_one_admits_with_close_and_phase_two_refuses_work_alone(tmp_path: Path) -> None:
    """Looks, steering and follow-ups pass in both; the refusal says when to come again."""
    gate, core = gated(hello, tmp_path)
    assert "connection" not in (await ask(gate, "POST", "/v1/completions")).headers
    drain(core, Wish(quiet_s=100, bound_s=100))
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models")):
        found = await ask(gate, method, path)
        assert (found.status, found.headers["connection"]) == (200, "close")
    drain(core, Wish(refuse=True, retry_after_s=11))
    for path in WORKING:
        found = await ask(gate, "POST", path)
        assert (found.status, found.headers["retry-after"], found.headers["connection"]) == (503, "11", "close")
        assert set(found.json()["error"]) == {"message", "type", "param", "code"}
        assert (await ask(gate, "POST", f"/api{path}", root_path="/api")).status == 503
    for path in STEERED:
        assert (await ask(gate, "POST", path)).status == 200
    for path in ("/health", "/metrics", "/v1/models", "/version", "/v1/responses/resp_1", "/load", "/"):
        assert (await ask(gate, "GET", path)).status == 200
    assert (await ask(gate, "POST", "/v1/responses/resp_1/cancel")).status == 200
    assert core.shared.total("refused_drain") == 2 * len(WORKING)
    assert core.shared.total("in_flight") == 0
    core.shared.common["until_ns"] = 0
    assert (await ask(gate, "POST", "/v1/completions")).status == 200


async def test_a_request_that_was_begun_before_ends_in_phase_two(tmp_path: Path) -> None:
    """A drain loses nothing that was started, and a websocket is not opened any more."""
    may_end = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await may_end.wait()
        await hello(scope, receive, send)

    gate, core = gated(slow, tmp_path)
    task = asyncio.create_task(ask(gate, "POST", "/v1/completions"))
    await asyncio.sleep(0.01)
    drain(core, Wish(refuse=True))
    assert (await ask(gate, "POST", "/v1/completions")).status == 503
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await gate({**http_scope("GET", "/v1/realtime"), "type": "websocket"}, receive, send)
    assert sent[0]["type"] == "websocket.close"
    assert core.shared.total("in_flight") == 1
    may_end.set()
    assert (await task).body == b"hello"
    assert core.shared.total("in_flight") == 0


async def test_a_body_that_does_not_come_has_a_deadline_while_draining(tmp_path: Path) -> None:
    """A client that stops sending gets 408 and no longer counts; before the drain, and once its body is here, it has time."""

    async def reading(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive()).get("more_body"):
            pass
        assert message["type"] in ("http.request", "http.disconnect")
        await hello(scope, receive, send)

    gate, core = gated(reading, tmp_path)
    parts, sent = asyncio.Queue[Message](), list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    parts.put_nowait({"type": "http.request", "body": b'{"prompt": "', "more_body": True})
    task = asyncio.create_task(gate(http_scope("POST", "/v1/completions"), parts.get, send))
    await asyncio.sleep(0.05)
    core.end_late_bodies(0.02)
    await asyncio.sleep(0.01)
    assert core.shared.total("in_flight") == len(core.bodies) == 1, "there is no drain yet"
    drain(core, Wish(refuse=True))
    core.end_late_bodies(0.02)
    await asyncio.sleep(0.01)
    assert not task.done(), "from the drain on it has its time"
    await asyncio.sleep(0.03)
    core.end_late_bodies(0.02)
    await task
    assert [message["status"] for message in sent if message["type"] == "http.response.start"] == [408]
    assert (b"connection", b"close") in sent[0]["headers"]
    assert core.shared.total("in_flight") == len(core.bodies) == 0


def test_the_endpoints_are_served_here_under_any_root_path(tmp_path: Path) -> None:
    """They never reach the app, and are not counted."""

    async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError(scope["path"], receive, send)

    async def go() -> None:
        gate, core = gated(nobody, tmp_path)
        with_engine(core)
        assert (await ask(gate, "GET", "/plimsoll/ready")).json()["ready"]
        assert (await ask(gate, "GET", "/plimsoll/state")).status == 401
        assert (await ask(gate, "GET", "/a/plimsoll/state", headers=[BEARER], root_path="/a")).json()["begun"] == 0
        assert (await ask(gate, "HEAD", "/plimsoll/ready")).body == b""
        body = [b'{"epo', b'ch": 3', b"}"]
        assert (await ask(gate, "POST", "/plimsoll/drain", body, headers=[BEARER])).json()["epoch"] == 3
        assert (await ask(gate, "POST", "/plimsoll/drain", [b"x" * 40_000] * 50, headers=[BEARER])).status == 413
        assert (await ask(gate, "GET", "/plimsoll/")).status == 404

    asyncio.run(go())


async def test_where_they_have_a_place_of_their_own_only_ready_is_on_vllm_s_port(tmp_path: Path) -> None:
    """The token does not open the rest here."""
    gate, core = gated(hello, tmp_path, PLIMSOLL_LISTEN=f"unix:{tmp_path}/own.sock")
    with_engine(core)
    assert (await ask(gate, "GET", "/plimsoll/ready")).status == 200
    assert (await ask(gate, "GET", "/plimsoll/state", headers=[BEARER])).status == 404


def _answering(status: int) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return app


@pytest.mark.parametrize(
    ("path", "query", "status", "reason"),
    [
        ("/sleep", b"level=1", 200, "asleep"),
        ("/pause", b"", 200, "asleep"),
        ("/sleep", b"level=1", 500, "ready"),
        ("/sleep", b"level=1", 404, "ready"),
    ],
)
async def test_a_server_sent_to_sleep_is_not_ready(tmp_path: Path, path: str, query: bytes, status: int, reason: str) -> None:
    """Once vLLM has answered with success; waking a part of it is not enough."""
    gate, core = gated(_answering(status), tmp_path)
    with_engine(core)
    await ask(gate, "POST", path, query_string=query)
    assert core.readiness().reason == reason
    await ask(gate, "POST", "/wake_up", query_string=b"tags=weights")
    assert core.readiness().reason == reason
    await ask(gate, "POST", "/wake_up")
    assert core.readiness().reason == "ready"


async def _lifespan(gate: Gate, between: Awaitable[None]) -> list[str]:
    """A life from start to end; what was sent."""
    line: asyncio.Queue[Message] = asyncio.Queue()
    sent: list[str] = []

    async def send(message: Message) -> None:
        sent.append(message["type"])

    task = asyncio.create_task(gate({"type": "lifespan", "app": SimpleNamespace(state=State())}, line.get, send))
    line.put_nowait({"type": "lifespan.startup"})
    await between
    line.put_nowait({"type": "lifespan.shutdown"})
    await task
    return sent


async def test_the_page_comes_with_the_server_and_goes_with_it(tmp_path: Path) -> None:
    """The tick runs from the start, before any request."""
    gate, core = gated(hello, tmp_path)

    async def between() -> None:
        await asyncio.sleep(0.05)
        assert core.shared.own["beat_ns"] > 0
        assert list(tmp_path.glob("api-*.page"))

    assert await _lifespan(gate, between()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert not list(tmp_path.glob("api-*.page"))


def test_an_app_without_a_lifespan_is_counted_all_the_same(tmp_path: Path) -> None:
    """It raises, as such apps do, and the gate stays."""

    async def only_http(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        await hello(scope, receive, send)

    async def go() -> None:
        gate, core = gated(only_http, tmp_path)
        with pytest.raises(AssertionError):
            await gate({"type": "lifespan"}, asyncio.Queue[Message]().get, lambda _: asyncio.sleep(0))
        assert (await ask(gate, "POST", "/v1/completions")).status == 200
        assert core.shared.total("begun") == 1

    asyncio.run(go())
