"""The gate around an app: exact counts whatever happens, two phases of a drain, and no fault of ours is the client's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside import gate as gate_module
from plimsoll.inside.admission import SERVING
from plimsoll.inside.answers import App, Message, Receive, Scope, Send
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.gate import Gate
from plimsoll.inside.gate_control import GateControl
from plimsoll.inside.shared import ASLEEP, PAUSED
from tests.each import sure
from tests.fakes import BEARER, EngineClient, State, Wire, ask, hello, http_scope, settings
from tests.inside.test_answers import STEERED, WORKING
from tests.inside.test_gate_control import Around, drain, feed, made

KINDS = ("answer", "stream", "raise before", "raise after", "cancelled", "disconnect", "websocket", "look", "follow")


def gated(app: App, folder: object, **more: str) -> tuple[Gate, GateControl]:
    gate = Gate(app, settings(folder, **more))
    assert gate._control is not None
    return gate, gate._control


def with_engine(core: GateControl) -> EngineClient:
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
        assert core.shared.total("in_flight") == core.in_layer == core.answering == inside == 0
        assert core.shared.total("begun") <= len(plan)
        core.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(go(folder))


async def test_phase_one_admits_with_close_and_phase_two_refuses_work_alone(tmp_path: Path) -> None:
    """Looks, steering and follow-ups pass in both; the refusal says when to come again."""
    gate, core = gated(hello, tmp_path)
    assert "connection" not in (await ask(gate, "POST", "/v1/completions")).headers
    drain(core, quiet_s=100, bound_s=100)
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models")):
        found = await ask(gate, method, path)
        assert (found.status, found.headers["connection"]) == (200, "close")
    drain(core, refuse=True, retry_after_s=11)
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
    drain(core, refuse=True)
    assert (await ask(gate, "POST", "/v1/completions")).status == 503
    wire = Wire({"type": "websocket.connect"})
    await gate({**http_scope("GET", "/v1/realtime"), "type": "websocket"}, wire.receive, wire.send)
    assert wire.sent[0]["type"] == "websocket.close"
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
    parts, wire = asyncio.Queue[Message](), Wire()
    parts.put_nowait({"type": "http.request", "body": b'{"prompt": "', "more_body": True})
    task = asyncio.create_task(gate(http_scope("POST", "/v1/completions"), parts.get, wire.send))
    await asyncio.sleep(0.05)
    core.keep_drain(0.02)
    await asyncio.sleep(0.01)
    assert core.shared.total("in_flight") == len(core.bodies) == 1, "there is no drain yet"
    drain(core, refuse=True)
    core.keep_drain(0.02)
    await asyncio.sleep(0.01)
    assert not task.done(), "from the drain on it has its time"
    await asyncio.sleep(0.03)
    core.keep_drain(0.02)
    await task
    assert [message["status"] for message in wire.sent if message["type"] == "http.response.start"] == [408]
    assert (b"connection", b"close") in wire.sent[0]["headers"]
    assert core.shared.total("in_flight") == len(core.bodies) == 0


async def test_the_endpoints_are_served_here_under_any_root_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They never reach the app, and are not counted; a body that does not come is waited for only so long."""

    async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError(scope["path"], receive, send)

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
    monkeypatch.setattr(gate_module, "PATIENCE_S", 0.02)
    parts, wire = asyncio.Queue[Message](), Wire()
    parts.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    await gate(http_scope("POST", "/plimsoll/knobs"), parts.get, wire.send)
    assert (wire.sent[0]["status"], len(wire.sent)) == (408, 2)
    gate, core = gated(hello, tmp_path / "own", PLIMSOLL_LISTEN=f"unix:{tmp_path}/own.sock")
    with_engine(core)
    assert (await ask(gate, "GET", "/plimsoll/ready")).status == 200
    assert (await ask(gate, "GET", "/plimsoll/state", headers=[BEARER])).status == 404, "it is served at its own place"


@pytest.mark.parametrize(
    ("path", "query", "status", "how"),
    [
        ("/sleep", b"level=1", 200, ASLEEP),
        ("/sleep", b"", 200, ASLEEP),
        ("/sleep", b"level=0", 200, PAUSED),  # its memory was not given back
        ("/pause", b"", 200, PAUSED),
        ("/sleep", b"level=1", 500, 0),
    ],
)
async def test_a_server_sent_to_sleep_is_not_ready(tmp_path: Path, path: str, query: bytes, status: int, how: int) -> None:
    """Once vLLM has answered with success; waking a part of it is not enough."""
    gate, core = gated(_answering(status), tmp_path)
    with_engine(core)
    for wakes in (b"", b"tags=weights"):
        await ask(gate, "POST", "/wake_up" if wakes else path, query_string=wakes or query)
        assert (core.shared.common["asleep"], core.readiness().is_ready) == (how, how == 0)
    await ask(gate, "POST", "/wake_up")
    assert core.readiness().reason == "ready"


async def _lifespan(gate: Gate, between: Awaitable[None]) -> list[str]:
    """A life from start to end; what was sent."""
    line, wire = asyncio.Queue[Message](), Wire()
    task = asyncio.create_task(gate({"type": "lifespan", "app": SimpleNamespace(state=State())}, line.get, wire.send))
    line.put_nowait({"type": "lifespan.startup"})
    await between
    line.put_nowait({"type": "lifespan.shutdown"})
    await task
    return [message["type"] for message in wire.sent]


async def test_the_page_comes_with_the_server_and_goes_with_it(tmp_path: Path) -> None:
    """The tick runs from the start, before any request; an app without a lifespan raises, and is counted all the same."""
    gate, core = gated(hello, tmp_path)

    async def between() -> None:
        await asyncio.sleep(0.05)
        assert core.shared.own["beat_ns"] > 0
        assert list(tmp_path.glob("api-*.page"))

    assert await _lifespan(gate, between()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert not list(tmp_path.glob("api-*.page"))

    async def only_http(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        await hello(scope, receive, send)

    gate, core = gated(only_http, tmp_path)
    with pytest.raises(AssertionError):
        await gate({"type": "lifespan"}, asyncio.Queue[Message]().get, lambda _: asyncio.sleep(0))
    assert (await ask(gate, "POST", "/v1/completions")).status == 200
    assert core.shared.total("begun") == 1


# Corners of the gate: given twice, a drain long over, a sleep that is only a pause, a port whose holder has gone.
def test_a_gate_given_twice_counts_once(tmp_path: Path) -> None:
    """--middleware twice: the outer one works, the inner one hands on."""
    gate = Gate(Gate(hello, settings(tmp_path)), settings(tmp_path))
    core = sure(gate._control)
    asyncio.run(ask(gate, "POST", "/v1/completions"))
    assert core.shared.own["begun"] == 1


def test_a_drain_that_is_over_is_forgotten(tmp_path: Path) -> None:
    """The quick way for each request comes back; the epoch stays."""
    core, _ = made(tmp_path)
    drain(core, epoch=4, lease_s=0.01, refuse=True)
    time.sleep(0.02)
    assert core.shared.common["until_ns"] != 0
    core.keep_drain()
    assert (core.shared.common["until_ns"], core.shared.drain().epoch, core.phase()) == (0, 4, SERVING)
    drain(core, epoch=5, lease_s=60)
    core.keep_drain()
    assert core.shared.common["until_ns"] != 0


def test_asking_after_earlier_work_does_not_put_phase_two_off(tmp_path: Path) -> None:
    """A client that polls its background response is no balancer that still sends."""
    gate = Gate(hello, settings(tmp_path))
    core = sure(gate._control)
    core.engine._state = State(engine_client=object())
    asyncio.run(ask(gate, "GET", "/v1/responses/resp_1"))
    assert core.shared.own["begun"] == 1
    assert core.shared.own["last_admitted_ns"] == 0
    asyncio.run(ask(gate, "POST", "/v1/responses"))
    assert core.shared.own["last_admitted_ns"] > 0


# Faults of our own under the gate: whatever part of it is broken, requests pass as if it were not there.
class Broken:
    """Raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


SPOILERS: dict[str, Callable[[Gate, GateControl], object]] = {
    "own page": lambda _, core: core.shared.own.close(), "common page": lambda _, core: core.shared.common.close(),
    "pulse": lambda _, core: setattr(core, "pulse", Broken()), "engine": lambda _, core: setattr(core, "engine", Broken()),
    "tick": lambda gate, _: setattr(gate, "_tick", Broken()), "shared": lambda _, core: setattr(core, "shared", Broken()),
    "settings": lambda _, core: setattr(core, "settings", SimpleNamespace(listen="")),
}  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=list(SPOILERS))
def test_a_fault_of_ours_never_fails_a_request(tmp_path: Path, spoil: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever part is broken, work, looks, websockets and /sleep pass; counted each time, logged once a place."""

    async def go() -> None:
        gate, core = gated(hello, tmp_path, PLIMSOLL_SHED_WAIT_S="5")
        with_engine(core)
        spoil(gate, core)
        FAULTS.counts.clear()
        for _ in range(3):
            for method, path in (("POST", "/v1/completions"), ("GET", "/health"), ("POST", "/sleep"), ("POST", "/resume")):
                assert (await ask(gate, method, path)).body == b"hello"
            await one(gate, "websocket", 1, lambda: None)
            assert (await ask(gate, "GET", "/plimsoll/ready")).status in (200, 500, 503)
        if gate._tick is not None and not isinstance(gate._tick, Broken):
            assert gate._tick._task is not None
            gate._tick._task.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(go())
    failed = [record.getMessage() for record in caplog.records if " failed " in record.getMessage()]
    assert len(failed) == len(set(failed))
    assert FAULTS.counts
    assert max(FAULTS.counts.values()) >= 3


async def test_a_server_that_ends_while_a_request_runs_does_not_spoil_it(tmp_path: Path) -> None:
    """Our page is gone by then; the client still has its whole answer."""
    may_end = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await may_end.wait()
        await hello(scope, receive, send)

    gate, core = gated(slow, tmp_path)
    task = asyncio.create_task(ask(gate, "POST", "/v1/completions"))
    await asyncio.sleep(0.01)
    core.close()
    may_end.set()
    assert (await task).body == b"hello"


def test_a_gate_that_cannot_be_set_up_is_not_there(tmp_path: Path) -> None:
    """Everything passes, also what would be ours."""
    before = FAULTS.counts.get("setting up the gate", 0)
    bare = SimpleNamespace(token="x", token_file="", read_token=str, folder=str(tmp_path), listen="", failover=False)
    for broken in (Broken(), bare):
        gate = Gate(hello, broken)  # type: ignore[arg-type]
        assert asyncio.run(ask(gate, "POST", "/v1/completions")).body == b"hello"
    assert FAULTS.counts["setting up the gate"] == before + 1
    assert asyncio.run(ask(Gate(hello, Broken()), "GET", "/plimsoll/ready")).body == b"hello"  # type: ignore[arg-type]


# Work that waits too long, and what vLLM itself refuses
def full(folder: Path) -> GateControl:
    core, client = made(folder, PLIMSOLL_SHED_WAIT_S="0.01")
    for number in range(50):
        client.add(str(number), 10_000)
    feed(core, 4, 46)
    return core


async def test_a_full_server_refuses_work_alone_and_reads_none_of_it(tmp_path: Path) -> None:
    """503 with the seconds until there is room; looking and steering pass; what is let in has each chunk as it comes."""
    gate = Around(hello, full(tmp_path))
    refused = await ask(gate, "POST", "/v1/completions")
    assert (refused.status, 1 <= int(refused.headers["retry-after"]) <= 120) == (503, True)
    assert refused.json()["error"]["type"] == "ServiceUnavailableError"
    assert (await ask(gate, "GET", "/v1/models")).status == (await ask(gate, "POST", "/sleep")).status == 200
    core, _ = made(tmp_path)
    seen: list[bytes] = []
    line: asyncio.Queue[Message] = asyncio.Queue()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            seen.append(message["body"])
            if not message["more_body"]:
                return await hello(scope, receive, send)

    send = Wire().send
    task = asyncio.create_task(Around(app, core)(http_scope("POST", "/v1/completions"), line.get, send))
    for number in range(5):
        line.put_nowait({"type": "http.request", "body": b"%d" % number, "more_body": number < 4})
        await asyncio.sleep(0.005)
        assert len(seen) == number + 1
        assert core.in_layer == 0  # a body that is still being sent takes nobody's place
    await task
    await Around(app, full(tmp_path))(http_scope("POST", "/v1/completions"), line.get, send)  # nothing more is sent


def _answering(status: int, *headers: tuple[bytes, bytes]) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        await send({"type": "http.response.body", "body": b""})

    return app


def test_a_503_of_vllm_s_own_gets_a_retry_after(tmp_path: Path) -> None:
    """One that has it keeps it; other answers get none."""
    core, _ = made(tmp_path)
    for app, expected in (
        (_answering(503), "1"),
        (_answering(503, (b"Retry-After", b"77")), None),
        (_answering(429), None),
        (_answering(200), None),
    ):
        assert asyncio.run(ask(Around(app, core), "POST", "/v1/completions")).headers.get("retry-after") == expected
    core = full(tmp_path)
    core.settings.shed_wait_s = None
    assert asyncio.run(ask(Around(_answering(503), core), "POST", "/v1/completions")).headers["retry-after"] == "120"


def test_a_request_is_answering_from_the_start_of_its_answer_to_its_end(tmp_path: Path) -> None:
    """Whatever it sends after that; a websocket from the moment it is taken."""
    core, _ = made(tmp_path)
    seen: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        seen.append(core.answering)
        kinds = ("http.response.start", "http.response.body", "http.response.body")
        for kind in kinds if scope["type"] == "http" else ("websocket.accept", "websocket.send"):
            await send({"type": kind, "status": 200, "headers": []})
            seen.append(core.answering)

    layer, wire = Around(app, core), Wire({"type": "http.request"})
    asyncio.run(layer(http_scope("POST", "/v1/completions"), wire.receive, wire.send))
    asyncio.run(layer({**http_scope("GET", "/v1/realtime"), "type": "websocket"}, wire.receive, wire.send))
    assert seen == [0, 1, 1, 1, 0, 1, 1]
    assert core.answering == 0
