"""The door: against the gate itself under a real server, and against servers that say anything else."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.guard.act.ports import Outcome
from plimsoll.guard.adapters.gate import GateHttpClient
from plimsoll.inside.gate_control import GateControl
from plimsoll.inside.tick import OwnPort
from tests.each import cases, each, in_loop, trees
from tests.fakes import TOKEN, hello, served
from tests.inside.test_endpoints import put_figures
from tests.inside.test_gate import gated
from tests.inside.test_gate_control import made
from tests.net.raw_server import Visitor, free_port, raw_server

Deed = Callable[[GateHttpClient], Awaitable[Outcome]]
DEEDS: dict[str, Deed] = {
    "drain": lambda door: door.drain(7, 30.0),
    "undrain": lambda door: door.undrain(7),
    "shed": lambda door: door.shed(5.0, 30.0),
    "unshed": lambda door: door.unshed(),
    "compact": lambda door: door.compact(),
    "state": lambda door: door.state(),
}
HUNG_UP = b""


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[tuple[str, GateControl]]:
    """The gate around an app, under a real server; its address and what it knows."""
    app, core = gated(hello, tmp_path)
    with served(app) as port:
        yield f"http://127.0.0.1:{port}", core


@in_loop
async def test_what_the_gate_is_asked_it_does_and_says(gate: tuple[str, GateControl]) -> None:
    """A renewal does not take phase two back, an older epoch changes nothing, shedding ends; the state has every figure."""
    url, core = gate
    door = GateHttpClient(url, TOKEN)
    begun = await door.drain(7, 30.0, quiet_s=60.0, bound_s=60.0)
    assert (begun.is_done, begun.facts["phase"], begun.facts["epoch"]) == (True, "leaving", 7)
    assert 29 < core.shared.drain().until - time.monotonic() <= 30
    refusing = await door.drain(7, 40.0, refuse=True)
    assert (refusing.is_done, refusing.facts["phase"]) == (True, "refusing")
    renewed = await door.drain(7, 50.0)
    assert (renewed.is_done, renewed.facts["phase"]) == (True, "refusing")
    assert 49 < core.shared.drain().until - time.monotonic() <= 50
    for _ in range(2):  # to end what has ended is done, too
        ended = await door.undrain(7)
        assert (ended.is_done, ended.facts["phase"]) == (True, "serving")
    assert (await door.shed(5.0, 30.0)).is_done is True
    assert core.shed_bound_s() == 5.0
    assert (await door.unshed()).is_done is True
    assert core.shed_bound_s() is None
    told = await door.state()
    assert told.is_done is True
    assert {"in_flight", "background", "engine_requests", "begun", "idle", "phase", "epoch", "lease_left_s", "steps",
            "ready", "is_dead", "is_wedged", "api_servers"} <= set(told.facts)  # fmt: skip
    assert told.facts["phase"] == "serving"
    await door.drain(9, 30.0)
    for told in (await door.drain(8, 30.0), await door.undrain(8)):
        assert told.is_done is False
        assert (told.facts["stale"], told.facts["current"]) == (True, 9)
    assert core.shared.drain().is_on(time.monotonic())


@in_loop
async def test_compaction_without_a_probe_is_refused_and_with_one_is_done(tmp_path: Path) -> None:
    """A call into the workers is done only when they have answered; one that runs on is not known."""
    path = str(tmp_path / "own.sock")
    core, client = made(tmp_path, PLIMSOLL_LISTEN=f"unix:{path}")
    core.calls._patience_s = 0.2
    port = OwnPort(core)
    await port.open()
    try:
        door = GateHttpClient(f"unix:{path}", TOKEN)
        assert (await door.compact()).is_done is False
        put_figures(tmp_path)
        at_it = await door.compact()
        assert (at_it.is_done, at_it.facts["is_running"]) == (None, True)
        second = await door.compact()
        assert (second.is_done, "stale" in second.facts) == (False, False)
        assert "one at a time" in second.message
        client.may_answer.set()
        await asyncio.sleep(0.1)
        told = await door.compact()
        assert (told.is_done, told.facts["workers"]) == (True, 1)
        assert [method for method, _ in client.calls] == ["plimsoll_compact"] * 2
    finally:
        await port.close()


@each("name", DEEDS)
@in_loop
async def test_a_wrong_token_a_missing_gate_and_one_that_is_off_are_said_clearly(tmp_path: Path, name: str) -> None:
    """401, 403 and 404: not done, why in words, and the token is not among them."""
    for more, token, words in (({}, "another-token-of-some-length", "does not take this token"),
                               ({"PLIMSOLL_TOKEN": ""}, TOKEN, "without PLIMSOLL_TOKEN")):  # fmt: skip
        app, _ = gated(hello, tmp_path, **more)
        with served(app) as port:
            told = await DEEDS[name](GateHttpClient(f"http://127.0.0.1:{port}", token))
        assert told.is_done is (None if name == "state" else False)
        assert words in told.message
        assert token not in f"{told}{dict(told.facts)}"
    async with raw_server(saying(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")) as server:
        told = await DEEDS[name](GateHttpClient(server.url, TOKEN))
        assert told.is_done is (None if name == "state" else False)
        assert "no gate" in told.message
        assert server.connections == 1


def saying(answer: bytes, *, first: bytes | None = None) -> Callable[[Visitor], Awaitable[None]]:
    """A server that says these bytes to whatever it is asked, and to a question without a token `first`."""

    async def talk(visitor: Visitor) -> None:
        head = await visitor.asked()
        await visitor.say(first if first is not None and "authorization" not in head.lower() else answer)

    return talk


ASKS = b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Bearer\r\nContent-Length: 0\r\n\r\n"


def reply(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@each("name", DEEDS)
@each(
    "answer",
    [HUNG_UP, b"HTTP/1.1 200", reply(b""), reply(b"[]"), reply(b"{}"), reply(b'{"phase": "sailing"}'), reply(b"[" * 100_000),
     reply(b'{"a": ' + b"9" * 9_000 + b"}"), reply(b"<html>", "502 Bad Gateway"), reply(b"<html>", "503 Service Unavailable")],
)  # fmt: skip
@in_loop
async def test_an_answer_that_is_not_the_gates_leaves_it_unknown(name: str, answer: bytes) -> None:
    """The deed may have been done: neither done nor failed, in one clean sentence."""
    async with raw_server(saying(answer, first=ASKS)) as server:
        told = await DEEDS[name](GateHttpClient(server.url, TOKEN, deadline_s=2, compact_s=2))
    assert told.is_done is None
    assert told.message.isprintable()


@each("name", DEEDS)
@in_loop
async def test_a_server_that_never_ends_is_left_in_time_and_nobody_there_did_nothing(name: str, tmp_path: Path) -> None:
    """One deadline over all of it, however slowly the bytes come; where no connection stood nothing can have happened."""

    async def drip(visitor: Visitor) -> None:
        if "authorization" not in (await visitor.asked()).lower():
            return await visitor.say(ASKS)
        while True:
            await visitor.say(b"H")
            await asyncio.sleep(0.05)

    async with raw_server(drip) as server:
        began = time.monotonic()
        told = await DEEDS[name](GateHttpClient(server.url, TOKEN, deadline_s=0.3, compact_s=0.3))
    assert told.is_done is None
    assert time.monotonic() - began < 30
    for url in (f"http://127.0.0.1:{free_port()}", f"unix:{tmp_path}/none.sock"):
        told = await DEEDS[name](GateHttpClient(url, TOKEN, deadline_s=5))
        assert (told.is_done, told.facts.get("unreachable")) == ((None, None) if name == "state" else (False, True))


@each("first", [reply(b"{}"), reply(b"", "503 No"), reply(b"", "301 Moved\r\nLocation: /x"), HUNG_UP])
@in_loop
async def test_the_token_is_shown_to_nobody_who_does_not_ask_for_one(first: bytes) -> None:
    """An address that leads elsewhere gets no token, and no redirect is followed."""
    heads = []

    async def talk(visitor: Visitor) -> None:
        heads.append(await visitor.asked())
        await visitor.say(first)

    async with raw_server(talk) as server:
        told = await GateHttpClient(server.url, TOKEN, deadline_s=2).drain(7, 30.0)
    assert told.is_done is False
    assert len(heads) == 1
    assert TOKEN not in heads[0]


@in_loop
async def test_the_bytes_are_those_that_the_gate_wants() -> None:
    """A strict gate takes no field that it does not know: what was not asked for is not sent."""
    asked: list[tuple[str, Any]] = []

    async def talk(visitor: Visitor) -> None:
        head = await visitor.asked()
        if "authorization" not in head.lower():
            return await visitor.say(ASKS)
        length = int(head.lower().partition("content-length:")[2].split()[0]) if head.startswith("POST") else 0
        asked.append((head.split("\r\n")[0], json.loads(await visitor.reader.readexactly(length) or b"null")))
        assert f"Authorization: Bearer {TOKEN}" in head
        return await visitor.say(reply(b"{}"))

    async with raw_server(talk) as server:
        door = GateHttpClient(server.url + "/", TOKEN)
        for deed in DEEDS.values():
            await deed(door)
        await door.drain(8, 5.0, refuse=True, quiet_s=1.0, bound_s=2.0, retry_after_s=3)
    assert asked == cases("guard", "what a gate is asked")


FIELDS = (
    *("schema", "phase", "epoch", "lease_left_s", "in_flight", "idle", "max_wait_s", "note", "workers", "is_running"),
    *("error", "ready", "reason", "drain", "engine", "shed", "seconds"),
)
WORDS = st.dictionaries(st.sampled_from(FIELDS), trees(most=6))


@given(words=WORDS, status=st.sampled_from([200, 202, 400, 409, 500, 502]), name=st.sampled_from(sorted(DEEDS)))
@in_loop
async def test_no_answer_makes_it_raise(words: dict[str, Any], status: int, name: str) -> None:
    """Whatever the fields hold, there is an outcome with one printable sentence and plain facts."""
    answer = reply(json.dumps(words).encode(), f"{status} Any")
    async with raw_server(saying(answer, first=ASKS)) as server:
        told = await DEEDS[name](GateHttpClient(server.url, TOKEN, deadline_s=5))
    assert told.message.isprintable()
    assert all(isinstance(value, str | int | float | bool) for value in told.facts.values())


@each(("url", "token"), cases("guard", "what is no address or token"))
def test_what_cannot_be_an_address_or_a_token_is_refused(url: str, token: str) -> None:
    """At once, and without showing it."""
    with pytest.raises(BadInput) as problem:
        GateHttpClient(url, token)
    assert "p@" not in str(problem.value)
