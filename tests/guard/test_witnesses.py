"""What guard believes of whom: never a stop of an engine that may serve somebody, and no silence about one that does not.

Each test is one thing that was tried on a real fleet, by its name.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from lab.guard.acting import State, World
from lab.guard.acting_lives import CASES, MemoryBook, unsafe
from lab.guard.acting_parts import ENGINE, FakeRestarter, FakeSight, parts_of
from lab.guard.acting_play import ends, play, says, until, view_of
from plimsoll.errors import WorldFailed
from plimsoll.guard.act.decide import ASKED, decide, serves_nobody
from plimsoll.guard.act.journal_entry import Entry
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import Outcome, ServerHealth, failed
from plimsoll.guard.act.steps import BROKEN, SERVING
from plimsoll.guard.daemon.acting import BalancerTraffic
from plimsoll.guard.daemon.conductor import Conductor
from plimsoll.guard.judge.look import BalancerHealth, Canary, GateState, Look, Reach
from plimsoll.guard.judge.policy import read_policy
from plimsoll.unknown import Condition, Status
from tests.each import each
from tests.guard.acting import LookedAt, reason

START = 1e9 - 500.0
GATE = GateState(ready=True, reason="", in_flight=0, engine_requests=0, started=START)
WEDGED, DEAD = CASES[2], CASES[3]
IDLE = {"running": 0.0, "waiting": 0.0, "steps": 500.0, "success": 50.0, "asleep": 0.0}


def answers(at: float, figures: dict[str, float] | None = None, **more: Any) -> Look:
    shown = {**IDLE, "cpu_seconds": at / 10, **(figures or {})}
    return Look(at, 1e9 + at, Reach.ANSWERS, health=200, figures=shown, started_unix_s=START, model="m")._replace(**more)


def refused(at: float, **more: Any) -> Look:
    return Look(at, 1e9 + at, Reach.REFUSED, "connection refused")._replace(**more)


def series(seconds: int, look: Callable[[float], Look], start: int = 0) -> list[Look]:
    return [look(float(at)) for at in range(start, start + seconds, 5)]


HEALTHY = series(300, answers)


class Watched(LookedAt):
    """And what guard would do about them."""

    def condition(self, name: str, kind: str) -> Condition:
        return self.observer.conditions(name)[kind]

    def outcome(self, name: str = "a") -> str:
        """Empty for nothing, "restart", or why that is blocked."""
        view = self.observer.view(frozenset())._replace(now=1e9 + self.now_s)
        decisions = [decision for decision in decide(view, ActPolicy()) if decision.engine == name]
        return "".join(reason(decision) or str(decision.grade) for decision in decisions)


def test_whatever_was_tried_has_its_test() -> None:
    """tried.yaml names the tests of everything that went wrong on a real fleet, and each of them is there."""
    root = Path(__file__).parents[2]
    tables = yaml.safe_load((root / "tests" / "guard" / "tried.yaml").read_text(encoding="utf-8"))
    named = [name for rows in tables.values() for names in rows.values() for name in names if not name.startswith("python -m")]
    parts = [name.partition("::") for name in named]
    missing = [file for file, _, test in parts if f"def {test}" not in (root / file).read_text(encoding="utf-8")]
    assert (missing, sum(map(len, tables.values()))) == ([], 23)


# What it would do
def busy(at: float, stands_from: float, stands_for: float = 1e9) -> dict[str, float]:
    """Four requests, and steps but for a while."""
    steps = at if at < stands_from else stands_from if at < stands_from + stands_for else at - stands_for
    return {"running": 2.0, "waiting": 2.0, "steps": 10.0 * steps}


def failing(at: float, from_s: float, until_s: float = 1e9) -> Canary:
    asked = at // 30 * 30.0
    return Canary(asked, not from_s <= asked < until_s)


def then(seconds: int, look: Callable[[float], Look], start: int = 300) -> list[Look]:
    """Five healthy minutes, and then this."""
    return [*HEALTHY, *series(seconds, look, start)]


def lost(balancer: BalancerHealth | None = None, *, is_open: bool | None = None) -> list[Look]:
    return then(200, lambda at: refused(at, balancer=balancer, is_port_open=is_open))


def wedged(started: float | None) -> list[Look]:
    """By its gate, which states that start."""
    gate = GATE._replace(ready=False, reason="wedged", is_wedged=True, engine_requests=4, started=started)
    return then(60, lambda at: answers(at, busy(at, 300), gate=gate))


def resting(start: float | None) -> list[Look]:
    """No steps and no answers, of a process that began then by this machine's word; None: it is elsewhere."""
    return then(600, lambda at: answers(at, busy(300, 300), canary=failing(at, 300), local_start=start))


def frozen(cpu: dict[str, float]) -> list[Look]:
    """A proxy that serves an old page and lets posts hang."""
    old = {**IDLE, **busy(300, 300), **cpu}
    return then(600, lambda at: answers(at, canary=failing(at, 300))._replace(figures=old))


WORKED_503 = then(60, lambda at: answers(at, busy(at, 1e9), health=503))
STAYS_503 = series(120, lambda at: answers(at, busy(355.0, 1e9), health=503, local_start=START), 360)
NOT_RUNNING = "its restarter says that it does not run"
BEGUN_DOWN = series(200, lambda at: refused(at, gone=NOT_RUNNING, has_served=True))
FAILED_UNIT = "its unit has failed"


@each(
    ("what", "seen", "wanted", "reason"),
    [
        ("the way to one engine is cut, and nobody else says that it is down", lost(), "Unproved", "NobodyListens"),
        ("a balancer's own check, and a minute of silence", lost(BalancerHealth(True, 90.0)), "restart", ""),
        ("half a minute", lost(BalancerHealth(True, 30.0)), "Unproved", ""),
        ("streams flow while guard and balancer time out", lost(BalancerHealth(True, 2.0)), "Unproved", ""),
        ("its check passes", lost(BalancerHealth(False, 90.0)), "Unproved", ""),
        ("it has no check", lost(BalancerHealth(None, 90.0)), "Unproved", ""),
        ("it counts nothing", lost(BalancerHealth(True)), "Unproved", ""),
        ("it counts streams at their end, and has two", lost(BalancerHealth(True, None, 2)), "Unproved", ""),
        ("nobody listens at its port, as the kernel says", lost(is_open=False), "restart", ""),
        ("somebody does", lost(is_open=True), "Unproved", ""),
        ("bytes flow, and its supervisor names another process",
         then(60, lambda at: refused(at, ended=FAILED_UNIT, balancer=BalancerHealth(None, 1.0))), "Unproved", ""),
        ("an old page", frozen({"cpu_seconds": 30.0}), "", ""),
        ("an old page without processor time", frozen({}), "", ""),
        ("a sidecar's empty 503 while the gate is ready", then(300, lambda at: answers(at, health=503, gate=GATE)), "",
         "Contradicted"),
        ("the same without a gate is told, and not stopped", then(300, lambda at: answers(at, health=503)), "Unproved",
         "HealthSaysSo"),
        ("an operator's pause behind a proxy that refuses /is_paused", resting(None), "Unproved", ""),
        ("the process on this machine itself", resting(START), "restart", ""),
        ("a proxy listens on this machine", resting(START + 90), "Unproved", ""),
        ("the gate of the page's own process", wedged(START), "restart", ""),
        ("a gate of 0.1 states no start, and is believed", wedged(None), "restart", ""),
        ("a gate of another process than the page", wedged(START + 60), "", ""),
        ("a crash, after ten seconds", then(15, lambda at: refused(at, ended="its process ended with exit code 1")), "restart",
         "ProcessEnded"),
        ("a plain no of its command is told at once", then(100, lambda at: refused(at, gone=NOT_RUNNING)), "", "NotRunning"),
        ("and restarted after two minutes", then(200, lambda at: refused(at, gone=NOT_RUNNING)), "restart", ""),
        ("its command looks for a lost pid file, and the balancer's check passes",
         then(200, lambda at: refused(at, gone=NOT_RUNNING, balancer=BalancerHealth(False, 90.0))), "Unproved", ""),
        ("a crash that the balancer's slow check has not seen",
         then(15, lambda at: refused(at, ended=FAILED_UNIT, balancer=BalancerHealth(False, 90.0))), "restart", ""),
        ("guard begins while an engine is down that served", BEGUN_DOWN, "restart", ""),
        ("one that never served", [look._replace(has_served=False) for look in BEGUN_DOWN], "", ""),
        ("503 for a moment while it worked", WORKED_503, "", "Contradicted"),
        ("and later for good", [*WORKED_503, *STAYS_503], "restart", ""),
    ],
)  # fmt: skip
def test_what_proves_that_it_serves_nobody(what: str, seen: list[Look], wanted: str, reason: str) -> None:
    """Guard's own connection alone is no proof; a witness is, unless somebody sees it serve."""
    fleet = Watched(read_policy({"dead": {"refused": "60s"}}), a=seen, b=series(int(seen[-1].at_s), answers))
    assert fleet.outcome() == wanted, what
    assert reason in ("", fleet.condition("a", "dead").reason), what


def test_guard_that_is_cut_off_restarts_only_what_a_local_witness_calls_dead() -> None:
    """Its way to all engines is cut: none is restarted, and it says so; but a crash that a supervisor knows of is one."""
    policy = read_policy({"dead": {"refused": "60s"}})
    fleet = Watched(policy, **{name: lost() for name in "abc"})
    assert {fleet.outcome(name) for name in "abc"} == {"CutOff"}
    assert fleet.observer.cut_off().startswith("guard is cut off: 3 of 3 engines became unreachable within")
    assert Watched(policy, **{name: then(10, refused) for name in "ab"}).observer.cut_off()
    crashed, gone = then(100, lambda at: refused(at, ended=FAILED_UNIT)), then(100, refused)
    fleet = Watched(a=crashed, b=gone, c=gone)
    assert fleet.observer.cut_off()
    assert fleet.outcome("a") == "restart"


def test_health_says_503_for_12_s_and_is_well_again_before_the_stop() -> None:
    """The present is judged: an engine that answers and is ready is not stopped, though the condition has not cleared."""
    world, book = World(State("serving")), MemoryBook()
    world.state.in_flight = []

    class Recovered(FakeSight):
        def conditions(self, engine: str) -> dict[str, Condition]:
            return {"dead": Condition("dead", Status.TRUE, "HealthSaysSo", f"{engine} reports a dead engine", 0.0)}

    play(world, book, lambda conductor: conductor.carry_out(DEAD.plan), sight=Recovered(world))
    assert (world.state.stops, ends(world)) == (0, ["undone"])


def test_a_worker_call_of_100_s_with_requests_waiting() -> None:
    """An update of weights keeps the loop busy for less than the bound: neither stalled nor wedged."""
    seen = series(600, lambda at: answers(at, busy(at, 300, 100), canary=failing(at, 300, 400), local_start=START))
    for end in range(60, len(seen)):
        fleet = Watched(a=seen[:end])
        assert not fleet.condition("a", "wedged").is_true
        assert fleet.outcome() == ""


# It waits or is silent when it must act
@each("has_gate", [False, True])
def test_the_same_engine_hangs_three_times(has_gate: bool) -> None:
    """Each hang is found as soon as the first: none is learnt as a normal pause."""
    seen: list[Look] = list(HEALTHY)
    found = []
    for hang in range(3):
        begin, length = 300.0 + hang * 600.0, 300.0
        for at in range(int(begin), int(begin) + 600, 5):
            steps = 10.0 * (begin if at < begin + length else at - length)
            gate = GATE._replace(engine_requests=4, last_step_age_s=min(at - begin, length) if at < begin + length else 0.1)
            look = answers(float(at), {"running": 2.0, "waiting": 2.0, "steps": steps}, local_start=START)
            seen.append(look._replace(canary=failing(at, begin, begin + length), gate=gate if has_gate else None))
        at_s = next(
            look.at_s for place, look in enumerate(seen, 1)
            if look.at_s >= begin and Watched(a=seen[:place]).condition("a", "wedged").is_true
        )  # fmt: skip
        found.append(at_s - begin)
    assert max(found) <= 130, found


def test_the_first_stop_fails_and_is_tried_again() -> None:
    """Guard's own SIGTERM makes the engine unaskable: by the process table's word it runs, so it is stopped once more."""
    world, book = World(State("wedged")), MemoryBook()

    class Stubborn(FakeRestarter):
        """Closes its socket at the first signal, and does not end."""

        tries = 0

        async def stop(self, deadline_s: float) -> Outcome:
            self.tries += 1
            if self.tries == 1:
                sight.is_unaskable = True
                return failed("it did not end in time")
            return await super().stop(deadline_s)

    class Unaskable(FakeSight):
        is_unaskable = False

        def conditions(self, engine: str) -> dict[str, Condition]:
            return {} if self.is_unaskable else dict(super().conditions(engine))

        def unproved(self, engine: str, *, is_asked: bool = False) -> str:
            return "only guard's own connection says so" if self.is_unaskable else super().unproved(engine, is_asked=is_asked)

    sight = Unaskable(world)

    async def script(conductor: Conductor) -> None:
        await conductor.carry_out(WEDGED.plan)
        await until(lambda: not conductor.runs)

    play(world, book, script, sight=sight, parts=parts_of(world)._replace(restarter=Stubborn(world)))
    assert (world.state.starts, ends(world)) == (1, ["done"])
    assert unsafe(world, book) == []


def test_an_engine_dies_three_seconds_after_it_was_put_back() -> None:
    """Death in probation is the same trouble again: the restart has failed, and a person is told."""
    world, book = World(State("down")), MemoryBook()

    class Blind(FakeSight):
        """A judge that needs longer than the engine lives."""

        def conditions(self, engine: str) -> dict[str, Condition]:
            kept = super().conditions(engine)
            return dict(kept) if world.intent != "probation" else {}

    async def script(conductor: Conductor) -> None:
        await conductor.carry_out(DEAD.plan)
        await asyncio.sleep(3.0)
        world.state.mode = "down"
        await until(lambda: not conductor.runs)

    play(world, book, script, sight=Blind(world))
    assert ends(world) == ["failed"]
    assert "it stopped answering" in says(world)


def test_both_replicas_die_and_the_second_does_not_wait_for_the_first() -> None:
    """Engines that serve nobody are started side by side, under one lock."""
    world, book = World(State("down")), MemoryBook()
    other = World(State("down"))
    other.needs_entries = False
    world.needs_entries = False

    def view(_: frozenset[str]) -> Any:
        both = [view_of("dead").engines[0], view_of("dead", name="b").engines[0]]
        return view_of("dead")._replace(engines=[one for one in both if one.name not in _])

    began: list[str] = []

    class Slow(FakeRestarter):
        async def start(self) -> Outcome:
            began.append(f"{self._world is other} {world.state.now:.0f}")
            await asyncio.sleep(300.0)
            return await super().start()

    async def script(conductor: Conductor) -> None:
        adapters = parts_of(other)._replace(name="b", restarter=Slow(other))
        conductor._adapters = {ENGINE: parts_of(world)._replace(restarter=Slow(world)), "b": adapters}
        conductor.help_broken()
        await until(lambda: len(began) == 2)
        assert world.state.now < 1_100, "neither start was waited for"

    play(world, book, script, view=view)
    assert world.state.epoch == 1, "one lock for both"


def test_a_journal_that_was_full_for_a_while_is_written_again() -> None:
    """Guard goes on by itself when the cause is gone, with what it had left open."""
    world, book = World(State("down"), faults={}), MemoryBook()
    is_full = True
    append = book.append

    def full(kind: str, **more: Any) -> Entry:
        if is_full:
            raise WorldFailed("no space left on device")
        return append(kind, **more)

    book.append = full  # type: ignore[method-assign]

    async def script(conductor: Conductor) -> None:
        nonlocal is_full
        await conductor.turn()
        assert conductor.stopped_acting
        assert not [point for point in world.points if "stop" in point or "acquire" in point], "no deed without its entry"
        await asyncio.sleep(30.0)
        await conductor.turn()
        assert conductor.stopped_acting, "still full"
        is_full = False
        await asyncio.sleep(30.0)
        await conductor.turn()
        assert not conductor.stopped_acting
        await until(lambda: not conductor.runs)

    play(world, book, script, view=lambda _: view_of("dead"))
    assert (world.state.starts, ends(world)) == (1, ["done"])
    assert says(world).count("guard stopped acting: no space left") == 1
    assert "guard acts again" in says(world)


def test_a_balancers_count_is_silence_only_when_it_was_seen_to_stand_still() -> None:
    """A count that falls is of a balancer that was reloaded; before a minute or a change nothing is known."""

    def counted(total: int, busy: int = 0, ended: int = 7) -> ServerHealth:
        return ServerHealth(True, total, busy=busy, ended=ended)

    def seen(*polls: tuple[float, ServerHealth]) -> BalancerTraffic:
        return functools.reduce(lambda traffic, poll: traffic.seen(*poll, is_down=True), polls, BalancerTraffic())

    first = (0.0, counted(100))
    assert seen(first).health(30.0) == BalancerHealth(True, None)
    assert seen(first, (30.0, counted(100))).health(70.0).silent_s == 70.0
    flows = seen(first, (30.0, counted(101)))
    assert flows.health(31.0).silent_s == 1.0
    assert flows.seen(40.0, counted(7), is_down=True).health(45.0).silent_s is None
    # HAProxy counts the bytes of a request when it ends, unless its `option contstats` is on: a stream is no silence.
    streams = seen(first, (30.0, counted(101, busy=2)), (100.0, counted(101, busy=2)))
    assert streams.health(100.0) == BalancerHealth(True, None, unseen=2)
    assert streams.seen(110.0, counted(101, busy=0, ended=9), is_down=True).health(110.0) == BalancerHealth(True, 80.0)
    live = seen((0.0, counted(100, busy=2)), (30.0, counted(150, busy=2)), (100.0, counted(150, busy=2)))
    assert live.health(100.0) == BalancerHealth(True, 70.0)
    assert not seen((0.0, counted(100, busy=2)), (30.0, counted(150, busy=1, ended=8))).is_live


def test_a_restart_that_is_blocked_for_long_needs_attention() -> None:
    """Not one sentence and silence: it is shown and sent again as long as it lasts."""
    world, book = World(State("down")), MemoryBook()
    blocked = view_of("dead").engines[0]._replace(unproved="only guard's own connection says so")
    needs: list[dict[str, str]] = []

    async def script(conductor: Conductor) -> None:
        await conductor.turn()
        needs.append(conductor.needs())

    play(world, book, script, view=lambda _: view_of("dead")._replace(engines=[blocked]))
    assert "restart blocked: it may still serve" in needs[0][ENGINE]
    assert world.state.starts == 0


def test_an_engine_in_maintenance_is_away_and_an_operator_asks_for_one_that_only_guard_cannot_reach() -> None:
    """It answers guard and gets no requests: nobody else may leave; where the balancer sees it serve it is drained first."""
    fleet = Watched(a=HEALTHY, b=HEALTHY)
    assert fleet.observer.suffering("a", ActPolicy()) == ""
    fleet.observer.maintained = {"b": True}
    assert fleet.observer.suffering("a", ActPolicy()) == "b is out of rotation"
    for health, wanted in ((BalancerHealth(None, 2.0), SERVING), (None, BROKEN)):
        down = series(200, lambda at, health=health: refused(at, balancer=health), 300)  # type: ignore[misc]
        fleet = Watched(read_policy({"dead": {"refused": "60s"}}), a=[*HEALTHY, *down], b=series(500, answers))
        engine = fleet.observer.view(frozenset()).engines[0]
        assert serves_nobody(engine, ASKED) is (wanted is BROKEN)
        assert fleet.observer.unproved("a", is_asked=True) == ("" if wanted is BROKEN else engine.unproved)
