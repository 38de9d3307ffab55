"""Test requests to engines over real sockets: when one is made, what became of it, and what its answer is worth."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

import pytest

from plimsoll.guard.daemon.engine_look import CanaryPlan, EngineWatcher, LookLimits, is_garbage
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.inside.settings import InsideSettings
from tests.each import each
from tests.fakes import TOKEN
from tests.guard.daemon.looking import CAPTURED, GATED, at, fault, looks, remembering
from tests.net.raw_server import Talk, Visitor, raw_server
from tests.standin.servers import standin

TEXT = b'{"choices": [{"text": " world", "finish_reason": "length"}]}'


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
    """One token now and then, by the name on the page, with the engine's seconds; never more often than its plan says."""
    asks: list[float] = []

    async def answer(visitor: Visitor) -> None:
        await asyncio.sleep(0.2)
        await visitor.answer(TEXT)

    found, _ = looks(canary_server(answer, asks), 14, canary=CanaryPlan(every_s=30))
    assert len(asks) == 3
    last = found[-1].canary
    assert last is not None
    assert (last.is_answered, last.is_garbage, last.at_s) == (True, False, 160.0)
    assert last.seconds is not None
    assert 0.19 < last.seconds < 20


def test_garbage_is_told_from_text() -> None:
    """No text, half a letter, letters that nobody prints, a token that stands for none. One that ends the answer is well."""
    for text in ("", "\ufffd", "\ufffd\ufffd", "\x00\x01", "<unk>", " <unk>"):
        assert is_garbage(json.dumps({"choices": [{"text": text, "finish_reason": "length"}]}).encode()) is True
    for text in (" 6", "!", "\n\t", " ", "6\ufffd", "\u4f60", "\U0001f600", "<|channel|>"):
        assert is_garbage(json.dumps({"choices": [{"text": text, "finish_reason": "length"}]}).encode()) is False
    assert is_garbage(b'{"choices": [{"text": "", "finish_reason": "stop"}]}') is False


def http(status: str, body: bytes = b"") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


NO_COMPLETIONS = (
    b"<html>",
    b"[]",
    b"{}",
    b'{"choices": []}',
    b'{"choices": "x"}',
    b'{"choices": [{"text": 5}]}',
    b"[" * 100_000,
)
NO_MODEL = b'{"error": {"message": "The model `x` does not exist."}}'


@each(
    ("raw", "is_answered", "why"),
    [
        (None, False, ""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", None, "the answer began and did not finish within 1 s"),
        (b"", None, "it "),
        (http("503 Busy"), None, "the engine answers /v1/completions with 503"),
        (http("500 Oops"), None, "the engine answers /v1/completions with 500"),
        (http("401 Unauthorized", b'{"error": "Unauthorized"}'), None, "the engine requires an API key"),
        (http("404 Not Found", b'{"detail": "Not Found"}'), None, "the engine does not serve /v1/completions"),
        (http("404 Not Found", NO_MODEL), None, "the engine does not serve a model named"),
        (http("429 Too Many Requests"), None, "the engine is too busy for it (429)"),
        *((http("200 OK", body), None, "it answers /v1/completions with something that is not") for body in NO_COMPLETIONS),
    ],
)
def test_only_silence_after_asking_fails_a_canary(raw: bytes | None, is_answered: bool | None, why: str) -> None:
    """An engine that refused, hung up, began to answer or sent no completion has not failed; whoever wonders is told why."""
    asks: list[float] = []

    async def answer(visitor: Visitor) -> None:
        await visitor.say(raw or b"")
        if raw is None or raw.endswith(b"{"):
            await asyncio.sleep(5)
        visitor.writer.close()

    plan = CanaryPlan(every_s=30, deadline_s=1.0)  # long enough to be asked on a busy machine
    last = looks(canary_server(answer, asks), 3, canary=plan)[0][-1].canary
    assert len(asks) == 1
    assert last is not None
    assert (last.is_answered, last.is_garbage) == (is_answered, False)
    assert last.why.startswith(why)


@pytest.mark.parametrize(("kind", "is_answered"), [("open", True), ("wants it", True), ("wants another", None)])
def test_the_key_is_shown_only_to_what_asks_for_one(kind: str, is_answered: bool | None) -> None:
    """A server that takes the request without a key never sees it."""
    posts: list[str] = []

    async def talk(visitor: Visitor) -> None:
        while head := await visitor.asked():
            if head.startswith("POST"):
                posts.append(head)
                is_taken = kind == "open" or (kind == "wants it" and "Bearer s3cret" in head)
                await visitor.answer(TEXT if is_taken else b"", "200 OK" if is_taken else "401 Unauthorized")
            else:
                await visitor.answer(CAPTURED if "/metrics" in head else b"", "200 OK" if "/metrics" in head else "404 No")

    plan = CanaryPlan(every_s=5, api_key="s3cret")
    last = looks(talk, 3, canary=plan)[0][-1].canary
    assert last is not None
    assert last.is_answered is is_answered
    assert last.why == ("" if is_answered else "the engine rejects this API key")
    shown = ["s3cret" in head for head in posts]
    assert shown == {"open": [False] * 3, "wants it": [False, True, True, True], "wants another": [False, True]}[kind]


def test_no_name_no_test_request() -> None:
    """A page that does not name its model: that is said, and nothing is sent."""
    paths: list[str] = []
    talk = remembering({"/metrics": b"vllm:num_requests_running 1\n"}, paths)
    (_, look), _ = looks(talk, 2, canary=CanaryPlan(every_s=5))
    assert look.canary is not None
    assert (look.canary.is_answered, look.canary.why) == (None, "unknown which model it serves")
    assert "/v1/completions" not in paths


def test_a_server_that_takes_connections_and_says_nothing_gets_its_test_request() -> None:
    """Silence of the page alone is no proof; the test request that nobody answers is."""
    asks: list[str] = []
    is_mute = False

    async def talk(visitor: Visitor) -> None:
        while head := await visitor.asked():
            if head.startswith("POST"):
                asks.append(head)
            if is_mute:
                await asyncio.sleep(10)
            await visitor.answer(CAPTURED if "/metrics" in head else TEXT, "404 No" if "/is_paused" in head else "200 OK")

    async def run() -> list[Look]:
        nonlocal is_mute
        async with raw_server(talk) as server:
            quick = LookLimits(look_s=2.0, page_s=1.0, small_s=0.7)
            watcher = EngineWatcher(server.url, None, CanaryPlan(every_s=5, deadline_s=1.0), limits=quick)
            found = [await watcher.look(0.0, 1e9)]
            await asyncio.sleep(0.5)
            is_mute = True
            for number in range(1, 3):
                found.append(await watcher.look(5.0 * number, 1e9 + 5 * number))
                await asyncio.sleep(1.5)
            await watcher.close()
            return found

    *_, last = asyncio.run(run())
    assert last.reach is Reach.SILENT
    assert last.canary is not None
    assert (last.canary.is_answered, last.canary.at_s) == (False, 5.0)
    assert len(asks) == 3


@pytest.mark.parametrize("is_paused", [True, False])
def test_what_was_last_said_of_a_pause_holds_while_no_answer_comes(is_paused: bool) -> None:
    """Where the question or the whole page is lost: none is sent to one that was paused; a stuck one does get its own."""
    posts: list[str] = []
    mute: list[str] = []

    async def talk(visitor: Visitor) -> None:
        while head := await visitor.asked():
            path = head.split()[1]
            if path in mute:
                await asyncio.sleep(10)
            posts.extend([head] if head.startswith("POST") else [])
            said = {"/metrics": CAPTURED, "/is_paused": json.dumps({"is_paused": is_paused}).encode()}.get(path, TEXT)
            await visitor.answer(said)

    async def run() -> list[Look]:
        async with raw_server(talk) as server:
            quick = LookLimits(look_s=2.0, page_s=1.0, small_s=0.7)
            watcher = EngineWatcher(server.url, None, CanaryPlan(every_s=5, deadline_s=1.0), limits=quick)
            found = []
            for number, silent in enumerate(([], ["/is_paused"], ["/is_paused", "/metrics"], ["/is_paused", "/metrics"])):
                mute[:] = silent
                found.append(await watcher.look(5.0 * number, 1e9))
                await asyncio.sleep(0.5)
            await watcher.close()
            return found

    found = asyncio.run(run())
    assert [look.reach for look in found] == [Reach.ANSWERS, Reach.ANSWERS, Reach.SILENT, Reach.SILENT]
    assert [look.is_rest_unknown for look in found] == [False] * 4
    assert len(posts) == (0 if is_paused else 4)


def test_a_stand_in_s_canary_and_its_wedge() -> None:
    """Answered while it steps, failed when it is stuck; it does not count as work; none is sent to one that rests."""
    plan = CanaryPlan(every_s=5, deadline_s=0.6)
    with standin(GATED, settings=InsideSettings({"PLIMSOLL_TOKEN": TOKEN})) as server:
        server.ask("POST", "/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 1})  # the first one loads code
        *_, last = at(server, lambda url: EngineWatcher(url, TOKEN, plan), 2, 0.5)
        assert last.canary is not None
        assert (last.canary.is_answered, last.canary.is_garbage) == (True, False)
        fault(server, "wedge")
        found = at(server, lambda url: EngineWatcher(url, TOKEN, plan), 6, 0.2)
        assert found[-1].canary is not None
        assert found[-1].canary.is_answered is False
        assert all(look.gate is not None and look.gate.engine_requests - look.gate.ours <= 0 for look in found)
        server.ask("DELETE", "/standin/faults", Authorization=f"Bearer {TOKEN}")
        server.ask("POST", "/pause")
        assert at(server, lambda url: EngineWatcher(url, TOKEN, plan), 3, 0.1)[-1].canary is None
