"""Looks at servers over real sockets, for the tests of what guard sees."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from plimsoll.guard.daemon.engine_look import CanaryPlan, EngineWatcher, LookLimits
from plimsoll.guard.judge.look import Look
from plimsoll.standin.config import ServerFlags
from tests.fakes import TOKEN
from tests.net.raw_server import RawServer, Talk, Visitor, raw_server
from tests.standin.servers import Server

CAPTURES = Path(__file__).parents[2] / "captures"
CAPTURED = (CAPTURES / "vllm-0.32.0-cpu" / "metrics.txt").read_bytes()
INSIDE = CAPTURES / "vllm-0.25.1-h200-inside"
GATED = ServerFlags(is_dev_mode=True, token=TOKEN, middleware=("plimsoll.inside.Gate",))
FAST = LookLimits(look_s=2.0, page_s=1.5, small_s=0.5, page_bytes=1 << 20)


def looks(
    talk: Talk, count: int = 1, *, every_s: float = 5.0, token: str | None = None, canary: CanaryPlan | None = None,
) -> tuple[list[Look], RawServer]:  # fmt: skip
    """So many looks at such a server; each waits until the test request of the one before has come to its end."""

    async def run() -> tuple[list[Look], RawServer]:
        async with raw_server(talk) as server:
            watcher = EngineWatcher(server.url, token, canary, limits=FAST)
            found = []
            for number in range(count):
                found.append(await watcher.look(100.0 + number * every_s, 1e9 + number * every_s))
                while watcher._canary is not None and watcher._canary.is_asking:
                    await asyncio.sleep(0.01)
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


def at(server: Server, watcher_of: Callable[[str], EngineWatcher], count: int = 1, pause_s: float = 0.0) -> list[Look]:
    async def run() -> list[Look]:
        watcher = watcher_of(f"http://127.0.0.1:{server.port}")
        found = []
        for number in range(count):
            found.append(await watcher.look(100.0 + 5 * number, time.time()))
            await asyncio.sleep(pause_s)
        await watcher.close()
        return found

    return asyncio.run(run())


def plain(url: str) -> EngineWatcher:
    return EngineWatcher(url, limits=FAST)


def fault(server: Server, kind: str, **more: object) -> None:
    got = server.ask("POST", "/standin/faults", {"kind": kind, **more}, Authorization=f"Bearer {TOKEN}")
    assert got.status == 200, got.body
