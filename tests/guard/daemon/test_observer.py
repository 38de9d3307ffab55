"""The loop around the judge: nobody waits for another, nothing breaks it; and what it says of one engine: each change once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from lab.guard.acting_lives import QuickLoop
from plimsoll.guard.api.api import metrics_page
from plimsoll.guard.daemon import observer
from plimsoll.guard.daemon.observer import DiscoveredFacts, EventReporter, Fleet, ObserverPorts, WatchedEngine
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.guard.judge.look import Canary, Look, Reach
from plimsoll.guard.judge.policy import Policy
from plimsoll.render.guard import Event, EventKind, alert, line_json, sentence, status_line
from plimsoll.unknown import Condition, Status
from tests.each import sure

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


async def test_looks_put_off_no_other() -> None:
    """A restart asks for hundreds, and the next is due an interval later; who left the list meanwhile is answered, too."""
    watcher = Scripted(well)
    fleet = Fleet(POLICY, ObserverPorts(lambda _: watcher, lambda _: None))
    fleet.watch([EngineConfig("a", "http://0.example:1")])
    for _ in range(200):
        await fleet.look_now("a")
    before = watcher.looks
    await asyncio.sleep(20 * POLICY.every_s)
    after = watcher.looks
    await fleet.close()
    assert after - before >= 8
    fleet = Fleet(Policy(every_s=0.01), ObserverPorts(lambda _: Scripted(stuck), lambda _: None))
    fleet.watch([EngineConfig("a", "http://a.example:1")])
    first = asyncio.ensure_future(fleet.look_now("a"))
    await asyncio.sleep(0.1)  # its look has begun, and does not end
    later = asyncio.ensure_future(fleet.look_now("a"))
    await asyncio.sleep(0)
    fleet.watch([])
    async with asyncio.timeout(2.0):
        assert [await first, await later] == [None, None]


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


def look(number: int, reach: Reach = Reach.ANSWERS, **more: Any) -> Look:
    return Look(float(number), 1e9 + number, reach, **more)


def condition(status: Status, message: str = "it is so", kind: str = "dead") -> Condition:
    return Condition(kind, status, "Reason", message, 0.0)


async def test_what_is_known_of_its_process_is_there_when_it_is_judged() -> None:
    """An engine whose pod has ended for good is dead at once, and does not have to be refused for half an hour."""

    async def refused(now_s: float, unix_s: float) -> Look:
        return Look(now_s, unix_s, Reach.REFUSED, why="nobody listens there")

    said: list[Event] = []
    policy = POLICY._replace(numbers={("dead", "for"): 0.0})
    facts = {"ended": DiscoveredFacts(2, "its pod has failed")}
    ports = ObserverPorts(lambda _: Scripted(refused), said.append, facts=lambda name: facts.get(name, DiscoveredFacts()))
    fleet = Fleet(policy, ports)
    fleet.watch([EngineConfig("ended", "http://x:1"), EngineConfig("other", "http://y:1")])
    await asyncio.sleep(0.3)
    await fleet.close()
    assert [told.message for told in said if told.what is EventKind.BEGINS] == ["its pod has failed"]


def test_a_start_is_held_against_its_plan_and_a_line_of_status() -> None:
    """What differs is said under its own code; how many, how many are not seen, and what holds; unseen is not well."""
    one = WatchedEngine(EngineConfig("e", "http://x:1", plan=(16_000.0, 15_000.0, 17_000.0)), POLICY, Scripted(well), 0.0)
    same = {"num_gpu_blocks": "1000", "block_size": "16"}
    assert [told.what for told in one.take(look(1, config=same))] == [EventKind.REACHED]
    (told,) = one.take(look(2, config={**same, "num_gpu_blocks": "800"}))
    assert "startup.differs-from-plan" in sentence(told)
    assert "12,800 tokens of KV cache; planned were 16,000" in told.message
    assert len(one.conditions) == len(one.judge.conditions) + 1
    other = WatchedEngine(EngineConfig("e", "http://x:1"), POLICY, Scripted(well), 0.0)
    assert status_line([other.view(0.0)]) == "1 engine, 1 unreachable (1 never reached); no other problem known"
    other.take(look(1, figures={"running": math.nan}))
    assert status_line([other.view(2.0)]) == "1 engine; no problem known, but unknown whether it is stuck"
    other.take(look(3, figures={"running": 0.0, "waiting": 0.0, "steps": 1.0}))
    assert status_line([other.view(4.0)]) == "1 engine; all healthy"
    assert status_line([]) == "0 engines; nothing is watched"


async def test_what_holds_is_sent_again_and_only_so_many_changes_are_kept() -> None:
    """A receiver that forgot hears of it again, also of what is in doubt; a thousand changes are kept, the count goes on."""
    health = [503]

    async def act(now_s: float, unix_s: float) -> Look:
        if health[0] == 0:
            return Look(now_s, unix_s, Reach.SILENT)
        return Look(now_s, unix_s, Reach.ANSWERS, health=health[0])

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
    assert seen == [[EventKind.BEGINS], [EventKind.UNKNOWN, EventKind.UNREACHABLE], []]
    fleet = Fleet(POLICY, ObserverPorts(lambda _: Scripted(stuck), lambda _: None))
    fleet.watch([EngineConfig("a", "http://x:1")])
    for number in range(800):
        fleet.watch([EngineConfig(str(number), "http://x:1")])
    await fleet.close()
    assert len(fleet.changes) == observer.CHANGES_KEPT
    assert fleet.told > 1_500


def test_an_engine_that_does_not_answer_is_one_sentence_and_one_that_never_does_another() -> None:
    """After three looks, however many conditions become unknown; never at all: once more after a minute, and then no more."""
    teller = EventReporter("e")

    def messages(number: int, reach: Reach = Reach.ANSWERS, status: Status = Status.FALSE, **more: object) -> list[str]:
        return [told.message for told in teller.report(look(number, reach, **more), [condition(status)], None)]

    assert messages(0, vllm="0.32.0") == ["answers, vLLM 0.32.0"]
    assert [messages(n, Reach.SILENT, Status.UNKNOWN) for n in (1, 2)] == [[], []]
    assert messages(3) == []
    said = [(n, text) for n in range(4, 13) for text in messages(n, Reach.SILENT, Status.UNKNOWN, why="slow")]
    assert said == [(6, "unreachable (slow); no metrics")]
    assert messages(14) == ["answers again after 10 s"]
    teller = EventReporter("e")
    said = [(n, text) for n in range(5) for text in messages(n, Reach.REFUSED, why="nobody")]
    assert said == [(0, "unreachable: connection refused; no metrics")]
    assert messages(9) == ["answers"], "for the first time"
    one = WatchedEngine(EngineConfig("e", "http://x:1"), POLICY, Scripted(well), 0.0)
    events = [told for n in range(200) for told in one.take(look(n, Reach.REFUSED, why="nobody listens there"))]
    assert [(told.unix_s - 1e9, told.what) for told in events] == [(0, EventKind.UNREACHABLE), (60, EventKind.UNREACHABLE)]
    assert events[1].message.startswith("no answer since guard started: still starting, never started")
    view = one.view(200.0)
    assert (view.unreachable_since_s, view.has_answered) == (0.0, False)
    assert status_line([view]) == "1 engine, 1 unreachable (1 never reached); no other problem known"
    page = metrics_page([view], version="x", started_unix_s=0.0, notifications={}, told=0, mistakes={})
    assert 'plimsoll_guard_unreachable{engine="e"} 1.0' in page
    assert [told.message for told in one.take(look(201))] == ["answers"]
    assert (one.view(202.0).unreachable_since_s, one.view(202.0).has_answered) == (None, True)
    assert [told for n in range(300, 500) for told in one.take(look(n, Reach.REFUSED))][1:] == []


def test_what_the_gate_does_not_tell_and_a_canary_that_is_not_taken_are_said() -> None:
    """After three looks, and when it is mended, as no alert; a busy server is no news, a model that is not served is."""
    teller = EventReporter("e")
    notes = ["", "late", "", "late", "late", "no token", "no token", "late", "", ""]
    said = [told for number, note in enumerate(notes) for told in teller.report(look(number), [], None, {"gate": note})]
    assert [(told.unix_s - 1e9, told.what) for told in said[1:]] == [(5, EventKind.TROUBLE), (8, EventKind.MENDED)]
    assert sentence(said[1]) == "e: no token; no gate figures"
    assert alert(said[1], starts_unix_s=1e9, lasts_s=60.0) is None
    assert teller.notes == {}

    def troubles(status: int, why: str) -> list[str]:
        one = WatchedEngine(EngineConfig("e", "http://x:1"), POLICY, Scripted(well), 0.0)
        looks = [look(number)._replace(canary=Canary(float(number), None, why=why, status=status)) for number in range(5)]
        return [told.message for each in looks for told in one.take(each) if told.what is EventKind.TROUBLE]

    assert troubles(429, "the engine is too busy for it (429)") == []
    (text,) = troubles(404, "the engine does not serve a model named 'm'")
    assert text.startswith("canary requests prove nothing: the engine does not serve a model named 'm'; without")


def test_a_condition_begins_is_in_doubt_and_is_over_once_or_becomes_a_graver_one() -> None:
    """True, unknown and back is one trouble; an end names the graver one, which resolves no alert, or how long it was."""
    teller = EventReporter("e")
    teller.report(look(0), [], None)
    steps = [Status.TRUE, Status.UNKNOWN, Status.TRUE, Status.UNKNOWN, Status.FALSE, Status.UNKNOWN, Status.TRUE]
    said = [told for number, status in enumerate(steps) for told in teller.report(look(number), [condition(status)], None)]
    assert [told.what for told in said] == [
        EventKind.BEGINS, EventKind.UNKNOWN, EventKind.UNKNOWN, EventKind.OVER, EventKind.BEGINS,
    ]  # fmt: skip
    assert sentence(said[0]) == "e: the engine is dead (engine.dead): it is so"
    assert sentence(said[1]) == "e: engine.dead was active and is now unknown: it is so"
    assert sentence(said[3]) == "e: recovered: engine.dead cleared after 4 s: it is so"
    teller = EventReporter("e")
    begun = teller.report(look(0), [condition(Status.TRUE, kind="stalled")], None)
    assert [event.what for event in begun][-1] is EventKind.BEGINS
    worse = teller.report(look(5), [condition(Status.TRUE, kind="wedged")], None)
    over = teller.report(look(40), [condition(Status.FALSE, kind="stalled")], None)
    assert [(event.what, event.became) for event in over] == [(EventKind.OVER, "wedged")]
    assert sentence(over[0]) == "e: engine.stalled became engine.wedged"
    assert worse
    plain = teller.report(look(60), [condition(Status.FALSE, kind="wedged")], None)
    assert [event.became for event in plain] == [""]


def test_what_an_engine_sends_does_not_reach_the_terminal_and_one_that_leaves_closes_what_held() -> None:
    """Control characters, secrets and endless texts are cleaned; whoever heard that it began hears that nobody watches it."""
    nasty = "\x1b[2J token=hf_abcdefghijklmnopqrstuvwxyz " + "x" * 10_000
    told = Event(1.0, "e\x1b[2J", EventKind.BEGINS, nasty, condition(Status.TRUE, nasty), None)
    for text in (sentence(told), line_json(told)):
        assert "\x1b" not in text
        assert "hf_abcdef" not in text
        assert len(text) < 1_500
    teller = EventReporter("e")
    teller.report(look(0), [condition(Status.TRUE)], None)
    said = teller.leave(2e9, 60.0, [condition(Status.TRUE), condition(Status.FALSE, kind="storm")])
    assert [told.what for told in said] == [EventKind.OVER, EventKind.UNLISTED]
    assert sure(alert(said[0], starts_unix_s=1e9, lasts_s=60.0))["endsAt"] == "2033-05-18T03:33:20.000Z"
    assert alert(said[1], starts_unix_s=1e9, lasts_s=60.0) is None
