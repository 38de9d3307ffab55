"""`plimsoll guardctl drain` all the way: API, journal, lock and the gate's own code, with a stand-in behind it."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from plimsoll.cli.main import main
from plimsoll.guard.act.journal_replay import open_actions
from plimsoll.guard.adapters.file_lock import FileLock
from plimsoll.guard.adapters.gate import GateHttpClient
from plimsoll.guard.adapters.hooks import ReadinessBalancer
from plimsoll.guard.api.actions import ActionDesk, ActionRoutes
from plimsoll.guard.daemon.conductor import ActionPorts, Conductor
from plimsoll.guard.daemon.journal import Journal
from plimsoll.guard.daemon.manual_drain import ManualDrains
from plimsoll.guard.daemon.steps import EngineAdapters, SharedLock
from plimsoll.net.server import GuardServer
from tests.fakes import TOKEN
from tests.guard.daemon.drain_world import POLICY, Sight, World
from tests.standin.servers import Server, with_gate

Capsys = pytest.CaptureFixture[str]
LEASE_S = 2.0


class Guard:
    """One guard's hands and its API, in a loop of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._open(), self.loop).result(20)

    async def _open(self) -> int:
        self.book = Journal(self._folder / "guard.journal")
        parts = {"a": EngineAdapters("a", GateHttpClient(self._url, TOKEN), ReadinessBalancer())}
        policy, world = replace(POLICY, lease_s=LEASE_S), World()
        lock = SharedLock(FileLock(self._folder / "fleet.lock"))
        ports = ActionPorts(self.book, lock, Sight(), world.view, lambda _: None, time.time)
        self.conductor = Conductor(parts, policy, ports, pause_s=0.05)
        self.drains = ManualDrains(parts, policy, ports._replace(lock=lock.other()), self.conductor.runs, pause_s=0.05)
        desk = ActionDesk(self.conductor, self.drains, self.book, self.book.path)
        asks = ActionRoutes(lambda: desk, lambda name: name == "a")
        self.server = GuardServer(asks.get, TOKEN, (), asks.post)
        await self.conductor.take_over()
        await self.server.open("127.0.0.1", 0)
        return self.server.port

    def dies(self) -> None:
        """At once: nothing is undone, only what the kernel gives back is."""

        async def at_once() -> None:
            await self.server.close()
            for task in [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]:
                task.cancel()
            await self.conductor.close()
            await self.drains._ports.lock.release()
            self.book.close()

        asyncio.run_coroutine_threadsafe(at_once(), self.loop).result(20)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


def is_ready(server: Server) -> bool:
    """What a balancer would see."""
    return server.ask("GET", "/plimsoll/ready").status == 200


@pytest.mark.real
def test_drained_by_hand_until_asked_back_or_undone_by_the_next_guard(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not ready for longer than a lease, ready after undrain; and after a guard that died the next one puts it back."""
    monkeypatch.setenv("PLIMSOLL_GUARD_TOKEN", TOKEN)
    monkeypatch.setenv("PLIMSOLL_TOKEN", TOKEN)
    with with_gate() as server:
        url = f"http://127.0.0.1:{server.port}"
        guard = Guard(tmp_path, url)
        at = ("--at", f"http://127.0.0.1:{guard.port}")
        assert main(["guardctl", "drain", "a", "--yes", *at]) == 0, capsys.readouterr()
        assert not is_ready(server)
        time.sleep(1.5 * LEASE_S)
        assert not is_ready(server), "nobody renewed it"
        capsys.readouterr()
        assert main(["guardctl", "actions", *at]) == 0
        assert "drain by hand: idle, since " in capsys.readouterr().out
        assert main(["guardctl", "undrain", "a", *at]) == 0
        assert is_ready(server)
        assert main(["guardctl", "undrain", "a", *at]) == 1
        assert main(["guardctl", "drain", "a", "--yes", *at]) == 0
        guard.dies()
        assert not is_ready(server)
        second = Guard(tmp_path, url)
        assert is_ready(server)
        assert open_actions(second.book.kept()) == []
        second.dies()
    assert main(["guardctl", "history", "--journal", str(tmp_path / "guard.journal")]) == 0
    out = capsys.readouterr().out
    assert out.count("drain by hand starts: an operator asked to drain it") == 2
    assert out.count("drain by hand undone") == 2
