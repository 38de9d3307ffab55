"""`guardctl set`: journal, the engine's own word, guard's death and the engine's restart, over a stand-in with the gate."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from plimsoll.cli.main import main
from plimsoll.guard.act.ports import Outcome, done, failed
from plimsoll.guard.adapters.file_lock import FileLock
from plimsoll.guard.adapters.gate import GateHttpClient, knob_words
from plimsoll.guard.api.actions import ActionDesk, ActionRoutes
from plimsoll.guard.daemon.conductor import ActionPorts, Conductor
from plimsoll.guard.daemon.journal import Journal
from plimsoll.guard.daemon.knob_settings import KnobSettings
from plimsoll.guard.daemon.manual_drain import ManualDrains
from plimsoll.guard.daemon.steps import EngineAdapters, SharedLock
from plimsoll.net.server import GuardServer
from tests.fakes import TOKEN
from tests.guard.daemon.drain_world import POLICY, Sight, World
from tests.standin.servers import Server, with_gate

Capsys = pytest.CaptureFixture[str]


class Guard:
    """One guard's knobs and its API, in a loop of its own; it looks at the engine when it is told to."""

    def __init__(self, folder: Path, url: str) -> None:
        self.remarks: dict[str, str] = {}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.port = self.do(lambda: self._open(folder, url))

    def do(self, make: Callable[[], object]) -> int:
        """Run a coroutine in guard's own loop."""
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result(30)  # type: ignore[arg-type]

    async def _open(self, folder: Path, url: str) -> int:
        self.book = Journal(folder / "guard.journal")
        gate = GateHttpClient(url, TOKEN)
        parts = {"a": EngineAdapters("a", gate), "bare": EngineAdapters("bare")}
        self.lock = SharedLock(FileLock(folder / "fleet.lock"))
        ports = ActionPorts(self.book, self.lock, Sight(), World().view, lambda _: None, time.time)
        self.conductor = Conductor(parts, POLICY, ports, pause_s=0.05)
        drains = ManualDrains(parts, POLICY, ports._replace(lock=self.lock.other()), self.conductor.runs, pause_s=0.05)
        gates = {"a": gate, "bare": None}
        self.knobs = KnobSettings(gates, self.book, self.lock.other(), self.remarks.__setitem__)
        desk = ActionDesk(self.conductor, drains, self.book, self.book.path, None, self.knobs)
        asks = ActionRoutes(lambda: desk, lambda name: name in parts)
        self.server = GuardServer(asks.get, TOKEN, (), asks.post)
        await self.server.open("127.0.0.1", 0)
        return self.server.port

    def look(self, at_s: float) -> None:
        """One look at every engine that has something set."""
        self.do(lambda: self.knobs.look(at_s))

    def dies(self) -> None:
        """At once: nothing is undone."""

        async def at_once() -> int:
            await self.server.close()
            await self.conductor.close()
            self.book.close()
            return 0

        self.do(at_once)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


def in_force(server: Server) -> float:
    """Sequences that the engine admits now, by its own word."""
    found = server.ask("GET", "/plimsoll/knobs", authorization=f"Bearer {TOKEN}")
    assert found.status == 200, found.body
    return float(found.json()["knobs"]["max-num-seqs"]["in_force"])


def test_a_knob_is_set_verified_kept_over_guards_death_and_let_go(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says it, its steps show it, the next guard knows it, and the journal tells it all."""
    monkeypatch.setenv("PLIMSOLL_GUARD_TOKEN", TOKEN)
    monkeypatch.setenv("PLIMSOLL_TOKEN", TOKEN)
    with with_gate() as server:
        url, usual = f"http://127.0.0.1:{server.port}", in_force(server)
        guard = Guard(tmp_path, url)
        at = ("--at", f"http://127.0.0.1:{guard.port}")
        assert main(["guardctl", "set", "a", "max-num-seqs=3", "--for", "10m", *at]) == 0, capsys.readouterr()
        assert "set, in force: max-num-seqs=3" in capsys.readouterr().out
        assert in_force(server) == 3
        assert "max-num-seqs=3 until " in guard.remarks["a"]
        assert "not seen in its steps yet" in guard.remarks["a"]
        assert server.ask("POST", "/v1/completions", {"model": "m", "prompt": "hello", "max_tokens": 4}).status in (200, 404)
        assert main(["guardctl", "set", "a", "max-num-seqs=100000", *at]) == 1
        assert "max-num-seqs: from 1 to 64, which is what" in capsys.readouterr().out
        assert in_force(server) == 3, "an order that is refused changes nothing"
        assert server.ask("POST", "/plimsoll/knobs", {}, authorization=f"Bearer {TOKEN}").status == 200  # as a restart does
        assert in_force(server) == usual
        guard.look(100.0)
        assert in_force(server) == 3, "a restarted engine is set again, for the time that is left"
        guard.dies()
        assert in_force(server) == 3, "the lease lives in the engine"
        second = Guard(tmp_path, url)
        at = ("--at", f"http://127.0.0.1:{second.port}")
        assert "max-num-seqs=3 until " in second.remarks["a"]
        assert main(["guardctl", "set", "a", "--clear", *at]) == 0, capsys.readouterr()
        assert in_force(server) == usual
        assert second.remarks["a"] == ""
        assert main(["guardctl", "set", "bare", "max-num-seqs=3", *at]) == 1
        assert "no gate" in capsys.readouterr().out
        second.dies()
    assert main(["guardctl", "history", "--journal", str(tmp_path / "guard.journal")]) == 0
    told = capsys.readouterr().out
    assert "a: knobs set: max-num-seqs=3 for 600 s, by the API" in told
    assert "a: knobs let go: asked for, by the API" in told
    assert "a: knobs: in force: max-num-seqs=3" in told
    assert "set again, the engine had lost it (restarted?): in force: max-num-seqs=3" in told


class Engine:
    """A gate whose answers are given."""

    def __init__(self) -> None:
        self.leased, self.calls = "", 0
        self.answer: Outcome | None = None
        self.facts: dict[str, float] = {"running": 30, "steps": 0, "largest_step": 0, "most_needed": 30}

    async def set_knobs(self, values: Mapping[str, float], lease_s: float, epoch: int) -> Outcome:
        del lease_s, epoch
        self.calls += 1
        if self.answer is not None:
            return self.answer
        self.leased = knob_words(values)
        return done(f"in force: {self.leased}")

    async def knobs(self) -> Outcome:
        return done("read", leased=self.leased, **self.facts)


def test_it_is_verified_when_steps_show_it_and_over_when_its_time_is(tmp_path: Path) -> None:
    """Not by the answer alone: requests that ran beyond the bound must have ended first."""
    clock, remarks, engine = [1000.0], dict[str, str](), Engine()
    book = Journal(tmp_path / "guard.journal")
    lock = SharedLock(FileLock(tmp_path / "fleet.lock"))
    knobs = KnobSettings({"a": engine}, book, lock, remarks.__setitem__, lambda: clock[0])

    async def story() -> None:
        assert (await knobs.set("a", {"max-num-seqs": 24}, 60.0, "me")).is_done
        await knobs.look(100.0)
        assert "not seen" in remarks["a"]
        engine.facts |= {"steps": 50, "running": 26, "largest_step": 900}
        await knobs.look(111.0)
        assert "not seen" in remarks["a"]
        engine.facts |= {"running": 24}
        await knobs.look(115.0)
        assert "not seen" in remarks["a"], "it is not asked all the time"
        await knobs.look(122.0)
        assert "verified by its steps" in remarks["a"]
        clock[0] += 61
        await knobs.look(133.0)
        assert (remarks["a"], knobs.settings, engine.calls) == ("", {}, 1)
        engine.answer = failed("the gate does not take this token")
        assert (await knobs.set("a", {"max-num-seqs": 2}, 60.0, "me")).is_done is False
        assert knobs.settings == {}

    asyncio.run(story())
    book.close()
