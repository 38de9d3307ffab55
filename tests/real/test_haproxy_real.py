"""A real HAProxy before two small servers, twenty clients: one is taken out and put back, and no request fails."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lab.engine.server import free_port
from plimsoll.guard.adapters.haproxy import HAProxy, ServerLine
from tests.real.small_farm import CONFIGS, Backend, Load, backends, drained_and_put_back, need, running, served_in, until

pytestmark = pytest.mark.once


class Proxy:
    """HAProxy in its master mode, so that it can be reloaded."""

    def __init__(self, folder: Path, servers: list[Backend], level: str = "admin", backend: str = "farm") -> None:
        self.port, self.socket = free_port(), str(folder / "admin.sock")
        lines = "\n".join(f"    server {one.name} 127.0.0.1:{one.port}" for one in servers)
        self._master = str(folder / "master.sock")
        text = CONFIGS["haproxy before two"].format(
            socket=self.socket, port=self.port, servers=lines, level=level, backend=backend
        )
        config = folder / "haproxy.cfg"
        config.write_text(text, encoding="utf-8")
        self.words = (need("haproxy", "haproxy"), "-W", "-S", self._master, "-f", str(config))

    async def up(self) -> None:
        """Until it answers, and the master does: one that has just forked loses what it is told."""
        await until(lambda: answered(self._master, "show proc"))
        await until(lambda: answered(self.socket, "show info"))

    async def reload(self) -> None:
        """Another worker takes over; the old one ends when its connections have."""
        before = after = await self._worker()
        await answered(self._master, "reload")
        async with asyncio.timeout(20.0):
            while after in ("", before):
                after = await self._worker()

    async def _worker(self) -> str:
        told = await answered(self.socket, "show info")
        return next((line for line in told.splitlines() if line.startswith("Pid:")), "")


async def answered(path: str, words: str) -> str:
    """What a socket of HAProxy's says to one command; empty while nobody does."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(words.encode() + b"\n")
        writer.write_eof()  # the master's waits for more otherwise
        told = await reader.read()
        writer.close()
        return told.decode()
    return ""


@contextlib.asynccontextmanager
async def farm(level: str = "admin", backend: str = "farm") -> AsyncIterator[tuple[Proxy, Backend, Backend]]:
    with tempfile.TemporaryDirectory(prefix="plimsoll-haproxy-") as folder:  # a socket's path must be short
        async with backends("a", "b") as (one, two):
            proxy = Proxy(Path(folder), [one, two], level, backend)
            async with running(*proxy.words):
                await proxy.up()
                yield proxy, one, two


async def test_a_server_is_drained_under_load_and_put_back() -> None:
    """No request fails; HAProxy counts its connections; a reload forgets, which is read back, and done again it stays out."""
    async with farm() as (proxy, one, two):
        balancer = HAProxy(proxy.socket, (ServerLine("farm", "a"),))
        await drained_and_put_back(balancer, proxy.port, one, two)
        load = Load(proxy.port)
        await until(lambda: one.now > 0)
        assert (await balancer.connections() or 0) > 0
        assert (await balancer.take_out()).facts["already"] is False
        assert (await balancer.take_out()).facts["already"] is True
        await proxy.reload()
        assert await balancer.is_out() is False
        assert (await balancer.take_out()).is_done is True
        assert await balancer.is_out() is True
        await until(lambda: one.now == 0)
        assert await balancer.connections() == 0
        assert await served_in(one, 1.0) == 0
        assert await served_in(two, 0.5) > 0
        assert (await balancer.put_back()).is_done is True
        assert await load.end() == []


@pytest.mark.parametrize("words", ["set server farm/a state maint", "disable server farm/a"])
async def test_what_an_operator_keeps_in_maintenance_stays_there_and_the_last_one_stays_in(words: str) -> None:
    """Taking it out is refused, and putting back does not end it, also when the maintenance came while we drained.

    Refused, too, where nobody else is up, also in the second backend of two; done where that was allowed.
    """
    async with farm() as (proxy, one, _):
        balancer = HAProxy(proxy.socket, (ServerLine("farm", "a"),))
        for is_ours_first in (False, True):
            if is_ours_first:
                assert (await balancer.take_out()).is_done is True
            assert (await answered(proxy.socket, words)).strip() == ""
            taken = await balancer.take_out()
            assert (taken.is_done, taken.facts["maint"]) == (False, True)
            back = await balancer.put_back()
            assert (back.is_done, back.facts["maint"]) == (True, True)
            assert await balancer.is_out() is True
            assert (await answered(proxy.socket, "set server farm/a state ready")).strip() == ""
            assert await balancer.is_out() is False
        assert one.now == 0
        first = HAProxy(proxy.socket, (ServerLine("farm", "a"), ServerLine("other", "a")))
        assert (await HAProxy(proxy.socket, (ServerLine("other", "b"),)).take_out()).is_done is True
        refused = await first.take_out()
        assert (refused.is_done, refused.facts["last"]) == (False, True)
        assert await HAProxy(proxy.socket, (ServerLine("farm", "a"),)).is_out() is False, "nothing was begun"
        allowed = HAProxy(proxy.socket, (ServerLine("farm", "a"), ServerLine("other", "a")), may_be_last=True)
        assert (await allowed.take_out()).is_done is True
        assert await allowed.is_out() is True


async def test_what_haproxy_refuses_is_said_in_its_words_and_what_a_draining_engine_refuses_is_tried_elsewhere() -> None:
    """A socket that may not change anything, no such server, nobody; with redispatch no client sees a drain's 503."""
    async with farm(level="operator") as (proxy, _, _):
        told = await HAProxy(proxy.socket, (ServerLine("farm", "a"),)).take_out()
        assert told.is_done is False
        assert "ermission" in told.message
        for place in (ServerLine("farm", "z"), ServerLine("nowhere", "a")):
            missing = HAProxy(proxy.socket, (place,))
            assert (await missing.take_out()).is_done is False
            assert await missing.is_out() is None
            assert await missing.connections() is None
        Path(proxy.socket).unlink()
        gone = HAProxy(proxy.socket, (ServerLine("farm", "a"),))
        assert (await gone.take_out()).is_done is False
        assert await gone.is_out() is None
    async with farm(backend="other") as (proxy, one, two):
        one.is_refusing = True
        load = Load(proxy.port)
        await until(lambda: one.served > 50 and two.served > 50)
        assert await load.end() == []
