"""Looks at engines over real sockets: at stand-ins with their faults, and at servers that lie about everything."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.domain.look import Look, Reach
from plimsoll.guard.judge import Judge, acting
from plimsoll.guard.policy import read_policy
from plimsoll.inside.settings import Settings
from plimsoll.sources.engine_canary import CanaryPlan, is_garbage
from plimsoll.sources.engine_look import Limits, Watcher, read_gate, read_workers
from plimsoll.standin.serve.options import Options
from tests.sources.raw_server import RawServer, Talk, Visitor, by_path, free_port, raw_server
from tests.standin.servers import TOKEN, Server, standin

CAPTURES = Path(__file__).parents[1] / "captures"
CAPTURED = (CAPTURES / "vllm-0.32.0-cpu" / "metrics.txt").read_bytes()
INSIDE = CAPTURES / "vllm-0.25.1-h200-inside"
GATED = Options(is_dev_mode=True, token=TOKEN, middleware=("plimsoll.inside.Gate",))
FAST = Limits(look_s=2.0, page_s=1.5, small_s=0.5, page_bytes=1 << 20)
TEXT = b'{"choices": [{"text": " world", "finish_reason": "length"}]}'


def looks(
    talk: Talk, count: int = 1, *, every_s: float = 5.0, pause_s: float = 0.0, token: str | None = None,
    canary: CanaryPlan | None = None,
) -> tuple[list[Look], RawServer]:  # fmt: skip
    """So many looks at such a server."""

    async def run() -> tuple[list[Look], RawServer]:
        async with raw_server(talk) as server:
            watcher = Watcher(server.url, token, canary, limits=FAST)
            found = []
            for number in range(count):
                found.append(await watcher.look(100.0 + number * every_s, 1e9 + number * every_s))
                await asyncio.sleep(pause_s)
            await watcher.close()
            return found, server

    return asyncio.run(run())


def remembering(talk_of: dict[str, bytes | str], paths: list[str]) -> Talk:
    """The same as `by_path`, and what was asked for."""

    async def talk(visitor: Visitor) -> None:
        while head := await visitor.asked():
            paths.append(head.split()[1])
            reply = talk_of.get(head.split()[1], "404 Not Found")
            await (visitor.answer(b"", reply) if isinstance(reply, str) else visitor.answer(reply))

    return talk


def at(server: Server, watcher_of: Callable[[str], Watcher], count: int = 1, pause_s: float = 0.0) -> list[Look]:
    """Looks at a stand-in."""

    async def run() -> list[Look]:
        watcher = watcher_of(f"http://127.0.0.1:{server.port}")
        found = []
        for number in range(count):
            found.append(await watcher.look(100.0 + 5 * number, time.time()))
            await asyncio.sleep(pause_s)
        await watcher.close()
        return found

    return asyncio.run(run())


def plain(url: str) -> Watcher:
    """One without token and canary."""
    return Watcher(url, limits=FAST)


def fault(server: Server, kind: str, **more: object) -> None:
    """Set a fault while it runs."""
    got = server.ask("POST", "/standin/faults", {"kind": kind, **more}, Authorization=f"Bearer {TOKEN}")
    assert got.status == 200, got.body


def test_a_captured_page_becomes_a_look() -> None:
    """Figures, version, settings, start and health of a real server's page."""
    answers: dict[str, bytes | str] = {"/metrics": CAPTURED, "/health": "200 OK", "/version": b'{"version":"0.32.0"}'}
    (look,), _ = looks(by_path(answers))
    assert (look.reach, look.why, look.health, look.vllm) == (Reach.ANSWERS, "", 200, "0.32.0")
    assert look.figures["prompt_tokens"] == 183
    assert look.config["block_size"] == "128"
    assert look.started_unix_s == pytest.approx(1794704708.86)
    assert (look.gate, look.workers, look.is_paused, look.canary) == (None, (), None, None)


def test_a_stand_in_with_its_gate() -> None:
    """What the gate knows, the memory of its workers, and whether it is paused, from one look."""
    with standin(GATED, settings=Settings({"PLIMSOLL_TOKEN": TOKEN})) as server:
        first, second = at(server, lambda url: Watcher(url, TOKEN), 2)
        assert first.gate is not None
        assert (first.gate.ready, first.gate.in_flight, first.gate.drain) == (True, 0, "serving")
        (worker,) = first.workers
        assert worker.rank == "0/0"
        assert worker.device_total == 24 << 30
        assert worker.allocated is not None
        assert worker.host_resident is not None
        assert (second.is_paused, second.vllm, second.health) == (False, "0.32.0", 200)
        server.ask("POST", "/pause")
        assert at(server, lambda url: Watcher(url, TOKEN))[0].is_paused is True
        (open_look,) = at(server, plain)
        assert open_look.gate is None
        assert open_look.workers[0].allocated == worker.allocated


@pytest.mark.parametrize(
    ("kind", "reach"),
    [("huge-page", Reach.NONSENSE), ("cut-page", Reach.NONSENSE), ("slow-loris", Reach.SILENT),
     ("lying-page", Reach.ANSWERS), ("frozen-gauges", Reach.ANSWERS)],
)  # fmt: skip
def test_a_stand_in_that_misbehaves(kind: str, reach: Reach) -> None:
    """Each fault of a page has its word, ends in time and in little memory, and leads to nothing that would act."""
    with standin() as server:
        fault(server, kind)
        tracemalloc.start()
        began = time.monotonic()
        found = at(server, plain, 3)
        took, (_, peak) = time.monotonic() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert {look.reach for look in found} == {reach}
    assert took < 3 * FAST.look_s + 1
    assert peak < 24 << 20
    assert all(0 <= value <= 1e18 for look in found for value in look.figures.values())
    judge = Judge("e", read_policy({}))
    for look in found:
        judge.see(look)
    assert acting(judge) == ()


def test_nobody_listens_and_then_somebody_does() -> None:
    """Refused while nothing is there; what was known of the last process is forgotten with it."""

    async def run() -> list[Look]:
        port, found = free_port(), []
        watcher = Watcher(f"http://127.0.0.1:{port}/metrics", limits=FAST)
        found.append(await watcher.look(1.0, 1.0))
        server = RawServer(by_path({"/metrics": CAPTURED, "/version": b'{"version":"0.32.0"}'}))
        listening = await asyncio.start_server(server.visited, "127.0.0.1", port)
        found.append(await watcher.look(6.0, 6.0))
        watcher._client.close()
        listening.close()
        found.append(await watcher.look(11.0, 11.0))
        await watcher.close()
        return found

    first, second, third = asyncio.run(run())
    assert (first.reach, first.why) == (Reach.REFUSED, "refuses connections: nobody listens there")
    assert (second.reach, second.vllm) == (Reach.ANSWERS, "0.32.0")
    assert (third.reach, third.vllm) == (Reach.REFUSED, None)


def test_a_dead_engine_and_a_proxy_without_one() -> None:
    """503 of /health counts when it is vLLM's: without a body, or beside its page. A proxy's error page is nobody's word."""
    (look,), _ = looks(by_path({"/metrics": CAPTURED, "/health": "503 Service Unavailable"}))
    assert (look.reach, look.health) == (Reach.ANSWERS, 503)
    (look,), _ = looks(by_path({"/metrics": "500 Oops", "/health": "503 Service Unavailable"}))
    assert (look.reach, look.health) == (Reach.NONSENSE, 503)

    async def proxy(visitor: Visitor) -> None:
        while await visitor.asked():
            await visitor.answer(b"no healthy upstream", "503 Service Unavailable")

    (look,), _ = looks(proxy)
    assert (look.reach, look.health) == (Reach.NONSENSE, None)
    assert look.why == "answers /metrics with 503, not with a page"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(b"<html>\n<body>hello</body>\n</html>\n", id="a web page"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff\xfe\x00" * 1000 + b"\n", id="no text"),
        pytest.param(b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % n for n in range(20_000)), id="label bomb"),
        pytest.param(CAPTURED[:3000] + b"\nvllm:num_req", id="cut, with the length of what is there"),
    ],
)
def test_pages_that_are_none(page: bytes) -> None:
    """Whatever is not a whole page of metrics is nonsense, with its reason, and shows no figures."""
    (look,), _ = looks(by_path({"/metrics": page, "/health": "200 OK"}))
    assert (look.reach, look.health) == (Reach.NONSENSE, 200)
    assert look.why
    assert look.figures == {}


def test_letters_that_are_none_hide_nothing_else() -> None:
    """Bytes that are not UTF-8, a label of half a megabyte and two thousand labels cost only the lines they stand on."""
    labels = b",".join(b'a%d="b"' % number for number in range(2_000))
    noise = (
        b'vllm:num_requests_waiting{model_name="\xff\xfe"} 2\nvllm:kv_cache_usage_perc{' + labels + b"} 0.5\n"
        b'vllm:prompt_tokens_total{m="' + b"x" * (1 << 19) + b'"} 5\nvllm:num_requests_running{engine="0"} 3\n'
    )
    (look,), _ = looks(by_path({"/metrics": noise}))
    assert look.reach is Reach.ANSWERS
    assert look.figures == {"waiting": 2, "running": 3}


def test_a_redirect_to_another_host_is_nonsense_and_the_token_stays_here() -> None:
    """Neither the page nor the gate leads anywhere else."""
    stolen: list[str] = []

    async def thief(visitor: Visitor) -> None:
        stolen.append(await visitor.asked())

    async def run() -> Look:
        async with raw_server(thief) as elsewhere:

            async def talk(visitor: Visitor) -> None:
                while head := await visitor.asked():
                    if head.split()[1] == "/metrics" and not is_page:
                        await visitor.answer(b"", "302 Found", f"Location: {elsewhere.url}/metrics")
                    elif head.split()[1] == "/metrics":
                        await visitor.answer(CAPTURED)
                    else:
                        await visitor.answer(b"", "307 Temporary Redirect", f"Location: {elsewhere.url}/plimsoll/state")

            async with raw_server(talk) as server:
                is_page = False
                watcher = Watcher(server.url, TOKEN, limits=FAST)
                look = await watcher.look(1, 1)
                is_page = True
                assert (await watcher.look(6, 6)).gate is None
                await watcher.close()
                return look

    look = asyncio.run(run())
    assert look.reach is Reach.NONSENSE
    assert "redirects to another server" in look.why
    assert stolen == []


def test_what_a_server_does_not_have_is_asked_every_five_minutes() -> None:
    """No gate, no dev mode, no version: asked once, then left alone for five minutes; a restart asks again at once."""
    paths: list[str] = []
    page = {"/metrics": CAPTURED}
    looks(remembering({**page}, paths), 120, token=TOKEN)
    counts = {path: paths.count(path) for path in paths}
    assert counts == {"/metrics": 120, "/health": 120, "/plimsoll/state": 2, "/is_paused": 2, "/version": 2}
    paths.clear()
    looks(remembering({**page, "/is_paused": b'{"is_paused": false}', "/version": b'{"version": "0.32.0"}'}, paths), 30)
    counts = {path: paths.count(path) for path in paths}
    assert counts == {"/metrics": 30, "/health": 30, "/is_paused": 30, "/version": 1}


def test_a_wrong_token_is_said() -> None:
    """The gate that does not take the token is named, and the rest of the look is there."""

    async def run() -> tuple[Look, str]:
        async with raw_server(by_path({"/metrics": CAPTURED, "/plimsoll/state": "401 Unauthorized"})) as server:
            watcher = Watcher(server.url, TOKEN, limits=FAST)
            look = await watcher.look(1, 1)
            await watcher.close()
            return look, watcher.gate_note

    look, note = asyncio.run(run())
    assert (look.reach, look.gate, note) == (Reach.ANSWERS, None, "the gate does not take this token")


def test_recorded_words_of_the_gate() -> None:
    """/plimsoll/state and /plimsoll/memory as an H200 answered them; anything else is nobody's word."""
    gate = read_gate(json.loads((INSIDE / "state.json").read_text(encoding="utf-8")))
    assert gate is not None
    assert (gate.ready, gate.engine_requests, gate.expected_wait_s, gate.last_step_age_s) == (True, 0, 0.0, 19.311)
    (worker,) = read_workers(json.loads((INSIDE / "memory.json").read_text(encoding="utf-8")))
    assert (worker.allocated, worker.by_others, worker.host_limit) == (67825706496, 9240576, 137438953472)
    for bad in ({}, {"ready": 1}, {"ready": True, "reason": "x", "in_flight": float("nan"), "engine_requests": 1}):
        assert read_gate(bad) is None
    for odd in ({"workers": 5}, {"workers": [5, {}, {"age_s": "x"}, {"age_s": float("inf")}]}):
        assert read_workers(odd) == ()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.sampled_from([b"HTTP/1.1 200 OK\r\n", b"\r\n", b"Transfer-Encoding: chunked\r\n\r\n", b"40\r\n", CAPTURED[:5000],
                             b"vllm:num_requests_running 1e309\n", b"vllm:kv_cache_usage_perc -1\n", b'{"ready": true}']),
        ),
        max_size=8,
    )
)  # fmt: skip
def test_a_look_never_raises(pieces: list[bytes]) -> None:
    """Whatever bytes a server says to every question, a look comes back, and the judge does not act on it."""

    async def talk(visitor: Visitor) -> None:
        if await visitor.asked():
            await visitor.say(*pieces)

    found, _ = looks(talk, 2, token=TOKEN, canary=CanaryPlan(every_s=5))
    judge = Judge("e", read_policy({}))
    for look in found:
        judge.see(look)
    assert acting(judge) == ()


def canary_server(answer: Callable[[Visitor], Awaitable[None]], asks: list[float]) -> Talk:
    """A server with the captured page, and what it does with a completion."""

    async def talk(visitor: Visitor) -> None:
        while head := await visitor.asked():
            if head.startswith("POST"):
                asks.append(time.monotonic())
                await answer(visitor)
            else:
                await visitor.answer(CAPTURED if "/metrics" in head else b"", "200 OK" if "/metrics" in head else "404 No")

    return talk


def test_a_canary_that_is_answered_and_how_often_it_flies() -> None:
    """One token now and then, by the name on the page, with its seconds; never more often than its plan says."""
    asks: list[float] = []

    async def answer(visitor: Visitor) -> None:
        await visitor.answer(TEXT)

    found, _ = looks(canary_server(answer, asks), 14, pause_s=0.01, canary=CanaryPlan(every_s=30))
    assert len(asks) == 3
    last = found[-1].canary
    assert last is not None
    assert (last.is_answered, last.is_garbage, last.at_s) == (True, False, 160.0)
    assert last.seconds is not None
    assert last.seconds < 1


@pytest.mark.parametrize(
    ("raw", "is_answered"),
    [(None, False), (b"HTTP/1.1 2", None), (b"", None), (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", None),
     (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", None), (b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", None)],
)  # fmt: skip
def test_only_silence_after_asking_fails_a_canary(raw: bytes | None, is_answered: bool | None) -> None:
    """An engine that took it and said nothing has failed; one that refused, hung up or began to answer has not."""
    asks: list[float] = []

    async def answer(visitor: Visitor) -> None:
        if raw is None or raw.startswith(b"HTTP/1.1 2"):
            await visitor.say(raw or b"")
            await asyncio.sleep(5)
        else:
            await visitor.say(raw)
            visitor.writer.close()

    plan = CanaryPlan(every_s=30, deadline_s=0.2)
    found, _ = looks(canary_server(answer, asks), 3, pause_s=0.3, canary=plan)
    assert len(asks) == 1
    assert found[-1].canary is not None
    assert found[-1].canary.is_answered is is_answered


def test_garbage_is_told_from_text() -> None:
    """No choices, no text, letters that are none: garbage. A first token that ends the answer is not."""
    for text in ("", "\ufffd", "\x00\x01", None, 5):
        assert is_garbage(json.dumps({"choices": [{"text": text, "finish_reason": "length"}]}).encode())
    for body in (b"", b"<html>", b"[]", b"{}", b'{"choices": []}', b'{"choices": "x"}', b"[" * 100_000, b"\xff"):
        assert is_garbage(body)
    assert not is_garbage(TEXT)
    assert not is_garbage(b'{"choices": [{"text": "\\n\\t", "finish_reason": "length"}]}')
    assert not is_garbage(b'{"choices": [{"text": "", "finish_reason": "stop"}]}')


def test_a_stand_in_s_canary_and_its_wedge() -> None:
    """Answered while it steps, failed when it is stuck; it does not count as work; none is sent to one that rests."""
    plan = CanaryPlan(every_s=5, deadline_s=0.6)
    with standin(GATED, settings=Settings({"PLIMSOLL_TOKEN": TOKEN})) as server:
        *_, last = at(server, lambda url: Watcher(url, TOKEN, plan), 2, 0.5)
        assert last.canary is not None
        assert (last.canary.is_answered, last.canary.is_garbage) == (True, False)
        fault(server, "wedge")
        found = at(server, lambda url: Watcher(url, TOKEN, plan), 6, 0.2)
        assert found[-1].canary is not None
        assert found[-1].canary.is_answered is False
        assert all(look.gate is not None and look.gate.engine_requests == 0 for look in found)
        server.ask("DELETE", "/standin/faults", Authorization=f"Bearer {TOKEN}")
        server.ask("POST", "/pause")
        assert at(server, lambda url: Watcher(url, TOKEN, plan), 3, 0.1)[-1].canary is None
