"""The loop around the judge, with watchers made for the purpose: nobody waits for another, nothing breaks it, it is quiet."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from lab.guard.acting_lives import QuickLoop
from plimsoll.guard.daemon import observer
from plimsoll.guard.daemon.observer import DiscoveredFacts, Fleet, ObserverPorts, WatchedEngine
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.guard.judge.policy import Policy
from plimsoll.render.guard import Event, EventKind, sentence, status_line
from plimsoll.unknown import Condition, Status

if TYPE_CHECKING:
    import pytest

    from lab.guard.acting import World

POLICY = Policy(every_s=0.05)


class Scripted:
    """Looks as it is told, and counts."""

    def __init__(self, act: Callable[[float, float], Awaitable[Look]]) -> None:
        self._act = act
        self.looks = 0
        self.is_closed = False

    async def look(self, now_s: float, unix_s: float) -> Look:
        self.looks += 1
        return await self._act(now_s, unix_s)

    async def close(self) -> None:
        self.is_closed = True


async def well(now_s: float, unix_s: float) -> Look:
    return Look(now_s, unix_s, Reach.ANSWERS, health=200, vllm="0.32.0", figures={"running": 1.0, "waiting": 0.0})


async def stuck(now_s: float, unix_s: float) -> Look:
    await asyncio.sleep(3600)
    return Look(now_s, unix_s, Reach.SILENT)


async def broken(now_s: float, unix_s: float) -> Look:
    """A look that raises: a mistake of ours."""
    raise ZeroDivisionError(f"{now_s} {unix_s}")


def watched(
    acts: dict[str, Callable[[float, float], Awaitable[Look]] | None],
    seconds: float,
    tell: Callable[[Event], None] = lambda _: None,
) -> tuple[Fleet, dict[str, Scripted], list[Event]]:
    """A fleet that was watched for so long; of an engine that does nothing no watcher can be made."""
    watchers = {name: Scripted(act) for name, act in acts.items() if act is not None}
    said: list[Event] = []

    def hear(event: Event) -> None:
        said.append(event)
        tell(event)

    async def run() -> Fleet:
        fleet = Fleet(POLICY, ObserverPorts(lambda target: watchers[target.name], hear))
        for _ in range(3):
            fleet.watch([EngineConfig(name, f"http://{number}.example:1") for number, name in enumerate(acts)])
        await asyncio.sleep(seconds)
        await fleet.close()
        return fleet

    return asyncio.run(run()), watchers, said


def test_a_slow_engine_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more engines that never answer than may be looked at in one go, a healthy one is looked at every time."""
    monkeypatch.setattr(observer, "MOST_AT_ONCE", 4)
    monkeypatch.setattr(observer, "LONGEST_LOOK_S", 0.1)
    monkeypatch.setattr(observer, "SLOW_S", 0.05)
    acts = {f"stuck-{number}": stuck for number in range(20)}
    fleet, watchers, _ = watched({**acts, "well": well}, 3.0)
    assert watchers["well"].looks > 0.6 * 3.0 / POLICY.every_s
    assert all(watchers[name].looks >= 2 for name in acts), "the slow ones are looked at as well, in their own time"
    assert fleet.is_looking(1.0)


def test_looks_that_somebody_asks_for_put_off_no_other() -> None:
    """A restart asks for hundreds while an engine starts; the next one is due an interval later, not hundreds of intervals."""
    watcher = Scripted(well)

    async def run() -> int:
        fleet = Fleet(POLICY, ObserverPorts(lambda _: watcher, lambda _: None))
        fleet.watch([EngineConfig("a", "http://0.example:1")])
        for _ in range(200):
            await fleet.look_now("a")
        before = watcher.looks
        await asyncio.sleep(20 * POLICY.every_s)
        after = watcher.looks
        await fleet.close()
        return after - before

    assert asyncio.run(run()) >= 8


def test_a_mistake_of_ours_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that raises or cannot be made, a judge that stumbles, a teller that fails: counted, and the rest goes on."""

    def fail(told: Event) -> None:
        raise OSError(str(told))

    def stumble(self: WatchedEngine, look: Look) -> list[Event]:
        raise RuntimeError(f"{self} {look}")

    fleet, watchers, said = watched({"broken": broken, "well": well, "odd": None}, 0.5, fail)
    assert min(watchers["well"].looks, watchers["broken"].looks) >= 5
    assert fleet.mistakes["look ZeroDivisionError"] == watchers["broken"].looks
    assert fleet.mistakes["tell OSError"] == fleet.told == len(fleet.changes) == len(said)
    assert [told.what for told in said if told.engine == "broken"] == [EventKind.UNREACHABLE]
    assert [told.message for told in said if told.engine == "odd"] == ["cannot be watched: internal error: KeyError"]
    assert [view.name for view in fleet.views()] == ["broken", "well"]
    assert all(not condition.is_true for view in fleet.views() for condition in view.conditions)
    assert all(watcher.is_closed for watcher in watchers.values())
    monkeypatch.setattr(WatchedEngine, "take", stumble)
    fleet, watchers, said = watched({"well": well}, 0.4)
    assert watchers["well"].looks >= 4
    assert fleet.mistakes["judge RuntimeError"] == watchers["well"].looks
    assert said == []


def test_whoever_waits_for_a_look_is_answered_also_when_the_engine_leaves_the_list() -> None:
    """An engine may be taken out of a list while it is looked at: whoever asked for that look hears that there is none."""

    async def run() -> list[Look | None]:
        fleet = Fleet(Policy(every_s=0.01), ObserverPorts(lambda _: Scripted(stuck), lambda _: None))
        fleet.watch([EngineConfig("a", "http://a.example:1")])
        first = asyncio.ensure_future(fleet.look_now("a"))
        await asyncio.sleep(0.1)  # its look has begun, and does not end
        later = asyncio.ensure_future(fleet.look_now("a"))
        await asyncio.sleep(0)
        fleet.watch([])
        async with asyncio.timeout(2.0):
            return [await first, await later]

    assert asyncio.run(run()) == [None, None]


def test_many_engines_are_spread_over_the_interval() -> None:
    """They are not all looked at in the same moment."""
    times: list[float] = []

    async def noted(now_s: float, unix_s: float) -> Look:
        times.append(now_s)
        return await well(now_s, unix_s)

    loop = QuickLoop(cast("World", SimpleNamespace(state=SimpleNamespace(now=0.0))))

    async def run() -> None:
        ports = ObserverPorts(lambda _: Scripted(noted), lambda _: None, clock=loop.time)
        fleet = Fleet(Policy(every_s=1.0), ports, looks=1)
        fleet.watch([EngineConfig(str(number), f"http://{number}.example:1") for number in range(200)])
        await fleet.wait()
        await fleet.close()

    loop.run_until_complete(run())
    loop.close()
    begun = min(times)
    shares = [sum(1 for at in times if begun + part / 4 <= at < begun + (part + 1) / 4) for part in range(4)]
    assert all(share > 20 for share in shares), shares


def look(number: int, reach: Reach = Reach.ANSWERS, **more: object) -> Look:
    return Look(float(number), 1e9 + number, reach, **more)  # type: ignore[arg-type]


def condition(status: Status, message: str = "it is so", kind: str = "dead") -> Condition:
    return Condition(kind, status, "Reason", message, 0.0)


def test_what_is_known_of_its_process_is_there_when_it_is_judged() -> None:
    """An engine whose pod has ended for good is dead at once, and does not have to be refused for half an hour."""

    async def refused(now_s: float, unix_s: float) -> Look:
        return Look(now_s, unix_s, Reach.REFUSED, why="nobody listens there")

    async def run() -> None:
        policy = POLICY._replace(numbers={("dead", "for"): 0.0})
        facts = {"ended": DiscoveredFacts(2, "its pod has failed")}
        ports = ObserverPorts(lambda _: Scripted(refused), said.append, facts=lambda name: facts.get(name, DiscoveredFacts()))
        fleet = Fleet(policy, ports)
        fleet.watch([EngineConfig("ended", "http://x:1"), EngineConfig("other", "http://y:1")])
        await asyncio.sleep(0.3)
        await fleet.close()

    said: list[Event] = []
    asyncio.run(run())
    assert [told.message for told in said if told.what is EventKind.BEGINS] == ["its pod has failed"]


def test_a_start_is_held_against_its_plan() -> None:
    """An engine with a plan is asked one question more, and what differs is said under its own code."""
    one = WatchedEngine(EngineConfig("e", "http://x:1", plan=(16_000.0, 15_000.0, 17_000.0)), POLICY, Scripted(well), 0.0)
    same = {"num_gpu_blocks": "1000", "block_size": "16"}
    assert [told.what for told in one.take(look(1, config=same))] == [EventKind.REACHED]
    (told,) = one.take(look(2, config={**same, "num_gpu_blocks": "800"}))
    assert "startup.differs-from-plan" in sentence(told)
    assert "12,800 tokens of KV cache; planned were 16,000" in told.message
    assert len(one.conditions) == len(one.judge.conditions) + 1


def test_a_line_of_status() -> None:
    """How many, how many are not seen, and what holds; unseen is not well."""
    one = WatchedEngine(EngineConfig("e", "http://x:1"), POLICY, Scripted(well), 0.0)
    assert status_line([one.view(0.0)]) == "1 engine, 1 unreachable (1 never reached); no other problem known"
    one.take(look(1, figures={"running": math.nan}))
    assert status_line([one.view(2.0)]) == "1 engine; no problem known, but unknown whether it is stuck"
    one.take(look(3, figures={"running": 0.0, "waiting": 0.0, "steps": 1.0}))
    assert status_line([one.view(4.0)]) == "1 engine; all healthy"
    assert status_line([]) == "0 engines; nothing is watched"


def test_only_so_many_changes_are_kept() -> None:
    """A thousand; the count goes on."""

    async def run() -> Fleet:
        fleet = Fleet(POLICY, ObserverPorts(lambda _: Scripted(stuck), lambda _: None))
        fleet.watch([EngineConfig("a", "http://x:1")])
        for number in range(800):
            fleet.watch([EngineConfig(str(number), "http://x:1")])
        await fleet.close()
        return fleet

    fleet = asyncio.run(run())
    assert len(fleet.changes) == observer.CHANGES_KEPT
    assert fleet.told > 1_500


def test_what_holds_or_is_in_doubt_is_sent_again() -> None:
    """A receiver that forgot hears of it again; what is not known any more is not left out, since it is not over."""
    health = [503]

    async def act(now_s: float, unix_s: float) -> Look:
        if health[0] == 0:
            return Look(now_s, unix_s, Reach.SILENT)
        return Look(now_s, unix_s, Reach.ANSWERS, health=health[0])

    async def run() -> list[list[EventKind]]:
        fleet = Fleet(
            POLICY._replace(numbers={("dead", "for"): 0.0, ("dead", "clear"): 0.0}),
            ObserverPorts(lambda _: Scripted(act), lambda _: None),
        )
        fleet.watch([EngineConfig("e", "http://x:1")])
        seen = []
        for status in (503, 0, 200):
            health[0] = status
            await asyncio.sleep(0.4)
            seen.append([told.what for told in fleet.firing()])
        await fleet.close()
        return seen

    assert asyncio.run(run()) == [[EventKind.BEGINS], [EventKind.UNKNOWN, EventKind.UNREACHABLE], []]
