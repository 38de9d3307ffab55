"""What guard believes of whom: never a stop of an engine that may serve somebody, and no silence about one that does not.

Each test is one thing that was tried on a real fleet, by its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

from lab.guard.acting import Fault, State, World
from lab.guard.acting_lives import CASES, MemoryBook, live, unsafe
from lab.guard.acting_parts import ENGINE, FakeRestarter, FakeSight, parts_of
from lab.guard.acting_play import ends, play, says, until, view_of
from plimsoll.errors import WorldFailed
from plimsoll.guard.act.decide import ASKED, BlockedAction, Decision, Restart, decide, serves_nobody, spent
from plimsoll.guard.act.journal_entry import RESTART, Entry
from plimsoll.guard.act.journal_replay import read_restarts
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import Outcome, failed
from plimsoll.guard.act.steps import BROKEN, SERVING
from plimsoll.guard.daemon.acting import BalancerTraffic
from plimsoll.guard.daemon.conductor import Conductor
from plimsoll.guard.daemon.observer import EngineCapabilities, Fleet, FleetObserver, WatchedEngine
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.guard.judge.look import BalancerHealth, Canary, GateState, Look, Reach
from plimsoll.guard.judge.policy import Policy, read_policy
from plimsoll.unknown import Condition, Status
from tests.each import each

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


class Watched:
    """A fleet of engines that were looked at, as the action runner sees it."""

    def __init__(self, policy: Policy = Policy(), **looks: Iterable[Look]) -> None:  # noqa: B008
        self._engines: dict[str, WatchedEngine] = {}
        self.events: dict[str, list[tuple[float, str]]] = {}
        for name, seen in looks.items():
            engine = WatchedEngine(EngineConfig(name, "http://x:1"), policy, cast("Any", SimpleNamespace()), 0.0)
            self._engines[name] = engine
            for look in seen:
                self.now_s = look.at_s
                self.events.setdefault(name, []).extend((look.at_s, str(event.message)) for event in engine.take(look))
        capable = EngineCapabilities(has_gate=True, has_restarter=True)
        self.observer = FleetObserver(cast("Fleet", self), lambda _: capable, 5.0, lambda: self.now_s, lambda: 0)

    def names(self) -> list[str]:
        return sorted(self._engines)

    def engine(self, name: str) -> WatchedEngine | None:
        return self._engines.get(name)

    def condition(self, name: str, kind: str) -> Condition:
        return self.observer.conditions(name)[kind]

    def decisions(self) -> dict[str, Decision]:
        view = self.observer.view(frozenset())._replace(now=1e9 + self.now_s)
        return {decision.engine: decision for decision in decide(view, ActPolicy())}

    def outcome(self, name: str = "a") -> str:
        """What guard would do: "" for nothing, "restart", or why that is blocked."""
        decision = self.decisions().get(name)
        return "" if decision is None else decision.reason if isinstance(decision, BlockedAction) else str(decision.grade)


# It acts when it must not


def test_guards_way_to_all_engines_is_cut() -> None:
    """Though refusals are called a death after a minute, no engine is restarted, and guard says that it is cut off."""
    policy = read_policy({"dead": {"refused": "60s"}})
    fleet = Watched(policy, **{name: [*HEALTHY, *series(200, refused, 300)] for name in "abc"})
    assert {fleet.outcome(name) for name in "abc"} == {"CutOff"}
    assert fleet.observer.cut_off().startswith("guard is cut off: 3 of 3 engines became unreachable within")
    at_once = Watched(policy, **{name: [*HEALTHY, *series(10, refused, 300)] for name in "ab"})
    assert at_once.observer.cut_off()


def test_guard_that_is_cut_off_still_restarts_what_a_local_witness_calls_dead() -> None:
    """A process that its supervisor knows to have crashed is dead, whatever became of guard's own network."""
    lost = series(100, refused, 300)
    crashed = series(100, lambda at: refused(at, ended="its unit has failed"), 300)
    fleet = Watched(a=[*HEALTHY, *crashed], b=[*HEALTHY, *lost], c=[*HEALTHY, *lost])
    assert fleet.observer.cut_off()
    assert fleet.outcome("a") == "restart"


def test_the_way_to_one_engine_is_cut_behind_a_balancer_that_asks_for_readiness() -> None:
    """Nobody but guard says that it is down: it is told, and not stopped."""
    fleet = Watched(read_policy({"dead": {"refused": "60s"}}), a=[*HEALTHY, *series(200, refused, 300)], b=series(500, answers))
    assert fleet.condition("a", "dead").is_true
    assert fleet.outcome() == "Unproved"


@each(
    ("health", "wanted"),
    [
        (BalancerHealth(True, 90.0), "restart"),
        (BalancerHealth(True, 30.0), "Unproved"),
        (BalancerHealth(True, 2.0), "Unproved"),
        (BalancerHealth(False, 90.0), "Unproved"),
        (BalancerHealth(None, 90.0), "Unproved"),
        (BalancerHealth(True), "Unproved"),
    ],
)
def test_a_balancer_proves_a_death_by_its_own_check_and_a_minute_of_silence(health: BalancerHealth, wanted: str) -> None:
    """An overloaded server times out guard and the balancer alike while its streams flow."""
    down = series(200, lambda at: refused(at, balancer=health), 300)
    fleet = Watched(read_policy({"dead": {"refused": "60s"}}), a=[*HEALTHY, *down], b=series(500, answers))
    assert fleet.outcome() == wanted


def test_a_start_that_hangs_on_guards_own_machine_is_dead_after_the_bound() -> None:
    """Nobody listens at its port, as the kernel says: nothing can be served there."""
    for is_open, wanted in ((False, "restart"), (True, "Unproved"), (None, "Unproved")):
        down = series(200, lambda at, is_open=is_open: refused(at, is_port_open=is_open), 300)  # type: ignore[misc]
        fleet = Watched(read_policy({"dead": {"refused": "60s"}}), a=[*HEALTHY, *down], b=series(500, answers))
        assert fleet.outcome() == wanted


def test_bytes_that_flow_outweigh_a_supervisor_that_names_another_process() -> None:
    """A unit that is down is not the server that answers the balancer."""
    flows = series(60, lambda at: refused(at, ended="its unit has failed", balancer=BalancerHealth(None, 1.0)), 300)
    fleet = Watched(a=[*HEALTHY, *flows], b=series(360, answers))
    assert fleet.outcome() == "Unproved"


def test_health_says_503_for_12_s_and_is_well_again_before_the_stop() -> None:
    """The present is judged: an engine that answers and is ready is not stopped, though the condition has not cleared."""
    world, book = World(State("serving")), MemoryBook()
    world.state.in_flight = []

    class Recovered(FakeSight):
        def conditions(self, engine: str) -> dict[str, Condition]:
            return {"dead": Condition("dead", Status.TRUE, "HealthSaysSo", f"{engine} reports a dead engine", 0.0)}

    async def script(conductor: Conductor) -> None:
        await conductor.carry_out(DEAD.plan)

    play(world, book, script, sight=Recovered(world))
    assert (world.state.stops, ends(world)) == (0, ["undone"])


def busy(at: float, stands_from: float, stands_for: float = 1e9) -> dict[str, float]:
    """Four requests, and steps but for a while."""
    steps = at if at < stands_from else stands_from if at < stands_from + stands_for else at - stands_for
    return {"running": 2.0, "waiting": 2.0, "steps": 10.0 * steps}


def failing(at: float, from_s: float, until_s: float = 1e9) -> Canary:
    asked = at // 30 * 30.0
    return Canary(asked, not from_s <= asked < until_s)


def test_a_worker_call_of_100_s_with_requests_waiting() -> None:
    """An update of weights keeps the loop busy for less than the bound: neither stalled nor wedged."""
    seen = series(600, lambda at: answers(at, busy(at, 300, 100), canary=failing(at, 300, 400), local_start=START))
    for end in range(60, len(seen)):
        fleet = Watched(a=seen[:end])
        assert not fleet.condition("a", "wedged").is_true
        assert fleet.outcome() == ""


def test_a_proxy_serves_an_old_page_and_lets_posts_hang() -> None:
    """Nothing on the page moves, so it proves nothing; with a page of no processor time, too."""
    for figures in ({"cpu_seconds": 30.0}, {"cpu_seconds": None}):
        old = {name: value for name, value in {**IDLE, **busy(300, 300), **figures}.items() if value is not None}
        frozen = series(600, lambda at, old=old: answers(at, canary=failing(at, 300))._replace(figures=old), 300)  # type: ignore[misc]
        fleet = Watched(a=[*HEALTHY, *frozen], b=series(900, answers))
        assert not fleet.condition("a", "wedged").is_true
        assert fleet.outcome() == ""


def test_a_sidecar_answers_health_with_an_empty_503_while_the_gate_is_ready() -> None:
    """The gate is the engine's own: a 503 of somebody else is not believed."""
    odd = series(300, lambda at: answers(at, health=503, gate=GATE), 300)
    fleet = Watched(a=[*HEALTHY, *odd], b=series(600, answers))
    assert (fleet.condition("a", "dead").reason, fleet.outcome()) == ("Contradicted", "")
    bare = Watched(a=[*HEALTHY, *series(300, lambda at: answers(at, health=503), 300)], b=series(600, answers))
    assert (bare.condition("a", "dead").is_true, bare.outcome()) == (True, "Unproved"), "told, and not stopped"


def test_an_operators_pause_behind_a_proxy_that_lets_only_some_paths_pass() -> None:
    """Its /is_paused is refused by the proxy: it looks wedged to guard alone, which stops nothing."""
    paused = series(600, lambda at: answers(at, busy(300, 300), canary=failing(at, 300)), 300)
    fleet = Watched(a=[*HEALTHY, *paused], b=series(900, answers))
    assert fleet.outcome() in ("", "Unproved")
    local = series(600, lambda at: answers(at, busy(300, 300), canary=failing(at, 300), local_start=START), 300)
    assert Watched(a=[*HEALTHY, *local], b=series(900, answers)).outcome() == "restart", "the process on this machine itself"
    other = series(600, lambda at: answers(at, busy(300, 300), canary=failing(at, 300), local_start=START + 90), 300)
    assert Watched(a=[*HEALTHY, *other], b=series(900, answers)).outcome() == "Unproved", "a proxy listens on this machine"


def test_a_gate_of_another_process_than_the_page_proves_nothing() -> None:
    """The gate states its start, and the page carries the same; a gate of 0.1 states none and is believed."""
    for started, wanted in ((START, "restart"), (None, "restart"), (START + 60, "")):
        gate = GATE._replace(ready=False, reason="wedged", is_wedged=True, engine_requests=4, started=started)
        seen = series(60, lambda at, gate=gate: answers(at, busy(at, 300), gate=gate), 300)  # type: ignore[misc]
        assert Watched(a=[*HEALTHY, *seen], b=series(360, answers)).outcome() == wanted


# It waits or is silent when it must act


def test_a_server_that_exits_and_whose_command_says_no_is_restarted() -> None:
    """With evidence of a crash after ten seconds; with a plain no it is told at once and restarted after two minutes."""
    crashed = series(60, lambda at: refused(at, ended="its process ended with exit code 1"), 300)
    first = next(end for end in range(1, len(crashed)) if Watched(a=[*HEALTHY, *crashed[:end]]).outcome() == "restart")
    assert crashed[first - 1].at_s - 300 <= 10
    plain = series(200, lambda at: refused(at, gone="its restarter says that it does not run"), 300)
    assert Watched(a=[*HEALTHY, *plain[:20]]).outcome() == ""
    assert Watched(a=[*HEALTHY, *plain[:3]]).condition("a", "dead").reason == "NotRunning"
    assert Watched(a=[*HEALTHY, *plain]).outcome() == "restart"
    told = [at for at, text in Watched(a=[*HEALTHY, *plain[:5]]).events["a"] if "unreachable" in text]
    assert told, "a person hears of it at once"
    assert told[0] - 300 <= 15


def test_guard_begins_while_an_engine_is_down() -> None:
    """The journal knows that it served: it is dead by its restarter's word; one that never served is left alone."""
    down = series(200, lambda at: refused(at, gone="its restarter says that it does not run", has_served=True))
    assert Watched(a=down).outcome() == "restart"
    assert Watched(a=[look._replace(has_served=False) for look in down]).outcome() == ""


def test_503_for_a_moment_while_it_worked_and_later_for_good() -> None:
    """Steps of long ago do not contradict what /health says now."""
    works = series(60, lambda at: answers(at, busy(at, 1e9), health=503), 300)
    fleet = Watched(a=[*HEALTHY, *works])
    assert fleet.condition("a", "dead").reason == "Contradicted"
    dies = series(120, lambda at: answers(at, busy(355.0, 1e9), health=503, local_start=START), 360)
    assert Watched(a=[*HEALTHY, *works, *dies], b=series(480, answers)).outcome() == "restart"


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


def test_a_restart_that_was_written_while_the_clock_was_a_year_ahead() -> None:
    """A time in the future is not believed: the budget is not spent for a year."""
    year_s, now = 365 * 86_400.0, 1_700_000_000.0
    entries = [Entry(1, now - 7_200, "note"), *(Entry(n, now + year_s, RESTART, "a", f"x{n}") for n in (2, 3))]
    assert spent(read_restarts(entries, now), "a", ActPolicy(), now).message == ""
    assert len(read_restarts(entries, now)) == 2, "they are still counted for the day"
    assert spent([Restart(now - 60, "a"), Restart(now - 30, "a")], "a", ActPolicy(), now).message


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
    traffic = BalancerTraffic().seen(0.0, is_down=True, count=100)
    assert traffic.health(30.0) == BalancerHealth(True, None)
    assert traffic.seen(30.0, is_down=True, count=100).health(70.0).silent_s == 70.0
    flows = traffic.seen(30.0, is_down=True, count=101)
    assert flows.health(31.0).silent_s == 1.0
    assert flows.seen(40.0, is_down=True, count=7).health(45.0).silent_s is None


def test_nothing_is_lost_when_a_stop_fails_for_good() -> None:
    """Held, and told; whoever comes later does not stop it twice."""
    world, book = World(State("wedged"), {"stop": Fault("fails")}), MemoryBook()
    live(world, book, WEDGED.plan)
    assert world.state.starts == 0
    assert ends(world)[-1] == "held"


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


def test_an_engine_in_maintenance_at_the_balancer_is_away() -> None:
    """It answers guard and gets no requests: nobody else of its group may leave, and a drain in progress is taken back."""
    fleet = Watched(a=HEALTHY, b=HEALTHY)
    assert fleet.observer.suffering("a", ActPolicy()) == ""
    fleet.observer.maintained = {"b": True}
    assert fleet.observer.suffering("a", ActPolicy()) == "b is out of rotation"


def test_an_operator_asks_for_the_restart_of_one_that_only_guard_cannot_reach() -> None:
    """Where the balancer sees it serve it is drained first; where nobody sees it, the operator answers for it."""
    for health, wanted in ((BalancerHealth(None, 2.0), SERVING), (None, BROKEN)):
        down = series(200, lambda at, health=health: refused(at, balancer=health), 300)  # type: ignore[misc]
        fleet = Watched(read_policy({"dead": {"refused": "60s"}}), a=[*HEALTHY, *down], b=series(500, answers))
        engine = fleet.observer.view(frozenset()).engines[0]
        assert serves_nobody(engine, ASKED) is (wanted is BROKEN)
        assert fleet.observer.unproved("a", is_asked=True) == ("" if wanted is BROKEN else engine.unproved)
