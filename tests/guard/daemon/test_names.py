"""Names of engines: a resolver that is slow, wrong or dead for some does not delay the others."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from plimsoll.guard.daemon import engine_http as names_file
from plimsoll.guard.daemon.engine_http import EngineClient, NameCache, look_up
from plimsoll.guard.daemon.engine_look import EngineWatcher, LookLimits
from plimsoll.guard.judge.look import Look, Reach
from tests.net.raw_server import by_path, raw_server

PAGE = b'vllm:num_requests_running{engine="0"} 1.0\n'


class Resolver:
    """A resolver whose answers a test sets: addresses, an error, or an event that it waits for first."""

    def __init__(self, **answers: list[str] | Exception | threading.Event) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, host: str) -> list[str]:
        """The addresses of a name."""
        self.asked.append(host)
        answer = self.answers[host.rstrip("0123456789")]
        if isinstance(answer, threading.Event):
            answer.wait(10)
            return ["127.0.0.1"]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_an_answer_is_kept_for_a_while_and_doubted_when_nobody_is_there() -> None:
    """Asked once within its time, by however many; again as soon as nobody answers at the address."""
    resolver = Resolver(good=["127.0.0.1"])
    names = NameCache(resolver)

    async def run() -> None:
        found = await asyncio.gather(*(names.addresses("good") for _ in range(20)))
        assert {tuple(one) for one in found} == {("127.0.0.1",)}
        await names.addresses("good")
        assert resolver.asked == ["good"]
        names.doubt("good")
        names.doubt("never-heard-of")
        await names.addresses("good")
        assert resolver.asked == ["good", "good"]

    asyncio.run(run())


def test_a_refused_connection_has_the_name_looked_up_anew() -> None:
    """The server may have moved: the address that was kept is not asked for another minute."""
    resolver = Resolver(moved=["127.0.0.1"])
    names = NameCache(resolver)

    async def run() -> list[Look]:
        async with raw_server(by_path({"/metrics": PAGE})) as server:
            watcher = EngineWatcher("http://127.0.0.1:1")
            watcher._client = EngineClient(f"http://moved:{server.port}", names)
            found = [await watcher.look(1.0, 1.0)]
            watcher._client.close()
            await names.addresses("moved")
            names._known["moved"].addresses = ["127.0.0.2"]  # as it was before
            watcher._client._port, port = 1, watcher._client._port
            found.append(await watcher.look(6.0, 6.0))
            watcher._client._port = port
            found.append(await watcher.look(11.0, 11.0))
            await watcher.close()
            return found

    found = asyncio.run(run())
    assert [look.reach for look in found] == [Reach.ANSWERS, Reach.REFUSED, Reach.ANSWERS]
    assert resolver.asked == ["moved", "moved"]


def test_the_last_good_answer_serves_while_a_new_one_is_slow() -> None:
    """Nobody waits longer than a moment for a name that was known; the new answer is taken when it comes."""
    go = threading.Event()
    resolver = Resolver(good=["127.0.0.9"])
    names = NameCache(resolver)

    async def run() -> None:
        assert await names.addresses("good") == ["127.0.0.9"]
        resolver.answers["good"] = go
        names.doubt("good")
        for _ in range(3):
            began = time.monotonic()
            assert await names.addresses("good") == ["127.0.0.9"]
            assert time.monotonic() - began < names_file.PATIENCE_S + 0.3
        assert len(resolver.asked) == 2
        go.set()
        await asyncio.sleep(0.1)
        assert await names.addresses("good") == ["127.0.0.1"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [(socket.gaierror(socket.EAI_AGAIN, "try again"), True), (socket.gaierror(socket.EAI_NONAME, "unknown"), False),
     (OSError("broken"), True), (ValueError("a mistake"), True)],
)  # fmt: skip
def test_a_resolver_that_fails_for_now_takes_nothing_back(error: Exception, is_kept: bool) -> None:
    """One that knows of no such name does."""
    resolver = Resolver(good=["127.0.0.9"], bad=error)
    names = NameCache(resolver)

    async def run() -> None:
        await names.addresses("good")
        resolver.answers["good"] = error
        names.doubt("good")
        if is_kept:
            assert await names.addresses("good") == ["127.0.0.9"]
        else:
            with pytest.raises(OSError, match="unknown"):
                await names.addresses("good")
        with pytest.raises(OSError, match=r"."):
            await names.addresses("bad")

    asyncio.run(run())


def test_slow_names_delay_nobody_else() -> None:
    """A hundred engines whose names do not come back, asked at every look: a healthy one beside them answers in its time."""
    go = threading.Event()
    names = NameCache(Resolver(slow=go, good=["127.0.0.1"], late=["127.0.0.1"]))
    quick = LookLimits(look_s=3.0, page_s=2.0, small_s=0.3)

    def watcher(url: str) -> EngineWatcher:
        one = EngineWatcher("http://127.0.0.1:1", limits=quick)
        one._client = EngineClient(url, names)
        return one

    async def run() -> tuple[list[Look], Look, float]:
        async with raw_server(by_path({"/metrics": PAGE})) as server:
            healthy = watcher(f"http://good:{server.port}")
            found = [await healthy.look(0.0, 0.0)]
            slow = [watcher(f"http://slow{number}:1") for number in range(100)]
            waiting = [asyncio.create_task(one.look(1.0, 1.0)) for one in slow]
            await asyncio.sleep(1.2)
            for number in range(3):
                names.doubt("good")
                found.append(await healthy.look(5.0 + number, 5.0))
            began = time.monotonic()
            late = await watcher(f"http://late:{server.port}").look(1.0, 1.0)
            took = time.monotonic() - began
            await asyncio.gather(*waiting)
            go.set()
            return found, late, took

    found, late, took = asyncio.run(run())
    assert {look.reach for look in found} == {Reach.ANSWERS}
    assert late.reach is Reach.ANSWERS
    assert took < 1.0


def test_names_that_were_slow_have_a_share_of_their_own() -> None:
    """However many there are, so many threads and no more."""
    go = threading.Event()
    names = NameCache(Resolver(slow=go))
    before = set(threading.enumerate())

    async def run() -> int:
        for number in range(60):
            names._known[f"slow{number}"] = name = names_file._Name()
            name.is_slow = True
        asked = [asyncio.create_task(names.addresses(f"slow{number}")) for number in range(60)]
        await asyncio.sleep(0.3)
        begun = set(threading.enumerate()) - before
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return len(begun)

    count = asyncio.run(run())
    go.set()
    assert count == names_file.SLOW_MAX


def test_this_machine_s_own_resolver() -> None:
    """localhost has an address here, and a name that cannot be has none."""
    assert {"127.0.0.1", "::1"} & set(look_up("localhost"))

    async def ask(name: str) -> list[str]:
        return await NameCache().addresses(name)

    failures: tuple[type[Exception], ...] = (OSError, UnicodeError)
    with pytest.raises(failures):
        asyncio.run(ask("a" * 70 + ".invalid"))
