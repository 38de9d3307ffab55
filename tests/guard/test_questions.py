"""Single questions of the judge where a busy, starting, sleeping or half-seen engine could be taken for a sick one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.judge.judge import Judge
from plimsoll.guard.judge.look import Canary, CoreFigures, GateState, Look, Reach, WorkerMemory
from plimsoll.guard.judge.policy import Policy
from tests.each import each

MIB = float(1 << 20)
GATE = GateState(ready=True, reason="", in_flight=4, engine_requests=4, expected_wait_s=0.0)
Figures = dict[str, float]


def says(kind: str, looks: Iterable[Look]) -> list[tuple[float, str, str]]:
    """Every answer to one question that is another one than before: when, what and why."""
    judge = Judge("engine", Policy())
    found: list[tuple[float, str, str]] = []
    for look in looks:
        judge.see(look)
        now = next(one for one in judge.conditions if one.kind == kind)
        if not found or found[-1][1:] != (str(now.status), now.reason):
            found.append((look.at_s, str(now.status), now.reason))
    return found


def looks(seconds: int, figures: Callable[[float], Figures], **others: Any) -> list[Look]:
    return [Look(at, 1e9 + at, Reach.ANSWERS, health=200, figures=figures(at), **others) for at in range(0, seconds, 5)]


def refused(begin: int, end: int, **more: Any) -> list[Look]:
    return [Look(at, 1e9 + at, Reach.REFUSED, **more) for at in range(begin, end, 5)]


def later(seen: Iterable[Look], by_s: float, **more: Any) -> list[Look]:
    return [look._replace(at_s=look.at_s + by_s, unix_s=look.unix_s + by_s, **more) for look in seen]


def failing(every: Iterable[Look], from_s: float) -> list[Look]:
    """The same with a test request every half minute, answered until then."""
    return [look._replace(canary=Canary(look.at_s // 30 * 30.0, look.at_s // 30 * 30.0 < from_s)) for look in every]


def busy(at: float) -> Figures:
    return {"running": 4.0, "waiting": 0.0, "steps": 10.0 * at, "success": at, "asleep": 0.0}


def without(name: str, figures: Figures) -> Figures:
    return {known: value for known, value in figures.items() if known != name}


def stuck(at: float) -> Figures:
    """It makes no step from 100 s on."""
    return {**busy(at), "steps": 10.0 * min(at, 100.0)}


def ranks(at: float, stuck: int, work: float = 2.0) -> tuple[CoreFigures, ...]:
    """Eight cores, one of which makes no step from 300 s on."""
    return tuple(CoreFigures(str(core), 10.0 * (min(at, 300.0) if core == stuck else at), work, 0.0) for core in range(8))


def probe(**others: float) -> tuple[WorkerMemory, ...]:
    plain = {"allocated": 18e9, "unreleasable": 0.0, "releasable": 2e9, "device_free": 2e8, "by_others": 1e9, "retries": 0.0}
    return (WorkerMemory("0", 1.0, **{**plain, **others}),)


def probed(seconds: int, workers: Callable[[float], tuple[WorkerMemory, ...]]) -> list[Look]:
    return [look._replace(workers=workers(look.at_s)) for look in looks(seconds, busy)]


def paused(at: float) -> Figures:
    """Paused for an hour from 300 s on, and stuck from 4,200 s on."""
    return {**busy(at), "steps": 10.0 * (at if at < 300 else 300.0 if at < 3_900 else min(at - 3_600.0, 600.0))}


def half_lost(at: float) -> Figures:
    """Whether it has work is not on the page for a while before it has some."""
    seen = {**busy(100.0), "running": 1.0 if at >= 500 else 0.0}
    return seen if at < 300 or at >= 500 else without("running", seen)


def sleeps(at: float) -> Figures:
    idle = {"running": 0.0, "waiting": 0.0, "steps": min(at, 300.0), "asleep": 0.0}
    return idle if at < 300 else without("asleep", idle)


def ours(at: float) -> GateState:
    """One request, which most of the time cannot be told from guard's own."""
    return GATE._replace(engine_requests=1, ours=int(at % 30 < 25), last_step_age_s=max(0.0, at - 100.0))


BEFORE, HOUR = looks(300, busy), looks(600, busy)
DOWN = refused(300, 3_000)
NIGHT = [*looks(100, busy), *refused(100, 43_300), *later(looks(100, busy), 43_300.0), *refused(43_400, 45_300)]
SOME = failing(looks(900, lambda at: {**busy(at), "steps": 70.0 * at}), 1e9)
ODD = [look._replace(canary=look.canary and look.canary._replace(is_answered=look.canary.at_s % 240 != 0)) for look in SOME]
SICK = [look._replace(health=503) if look.at_s > 100 else look for look in looks(300, busy)]
STILL = [look._replace(figures={**look.figures, "steps": 1.0}) for look in SICK]
GARBAGE = [look._replace(canary=Canary(look.at_s // 30 * 30.0, True, 0.2, True)) for look in looks(300, busy)]
TURNS = [look._replace(started_unix_s=1e9 + 50.0 * (place % 2)) for place, look in enumerate(looks(100, busy))]
FULL = probe(device_free=5 * MIB, releasable=0.0)[0]._replace(rank="1")
LEAK = probed(2_400, lambda at: probe(allocated=18e9 + at * 0.4 * MIB))
STARTED = later(BEFORE, 2_100.0, started_unix_s=1e9 + 400)


def answers() -> list[tuple[str, str, list[Look], tuple[str, str], tuple[float, float]]]:
    """What it is, the question, what was seen, the last answer, and between which seconds it was given first."""
    return [
        ("nobody listens for half an hour", "dead", [*BEFORE, *DOWN], ("true", "NobodyListens"), (2_110, 2_110)),
        ("a start, as long as the longest seen", "dead", [*BEFORE, *DOWN[:359], *STARTED, *later(DOWN, 2_100.0)],
         ("false", "Starting"), (0, 1e9)),
        ("a process that is known to have ended", "dead", [*BEFORE, *refused(300, 400, ended="its unit has failed")],
         ("true", "ProcessEnded"), (310, 310)),
        ("after a night off half an hour is half an hour", "dead", NIGHT, ("true", "NobodyListens"), (0, 1e9)),
        ("a 503 of one that makes steps", "dead", SICK, ("unknown", "Contradicted"), (0, 1e9)),
        ("a 503 of one that stands still", "dead", STILL, ("true", "HealthSaysSo"), (0, 1e9)),
        ("a 503 beside an answered canary", "dead", [look._replace(canary=Canary(look.at_s, True, 0.1)) for look in STILL],
         ("unknown", "Contradicted"), (0, 1e9)),
        ("several servers behind one address", "dead", TURNS, ("unknown", "SeveralServers"), (0, 1e9)),
        ("the same of another question", "storm", TURNS, ("unknown", "SeveralServers"), (0, 1e9)),
        ("and that is told", "changed", TURNS, ("true", "SeveralServers"), (0, 1e9)),
        ("a rollout that is over", "dead", [*TURNS, *later(looks(800, busy), 100.0, started_unix_s=1e9 + 50.0)],
         ("false", "Answers"), (0, 1e9)),
        ("one stuck core of eight, and a second test request that failed", "wedged",
         [look._replace(ranks=ranks(look.at_s, 3)) for look in ODD[:150]], ("true", "NoStep"), (720, 745)),
        ("eight that work", "wedged", [look._replace(ranks=ranks(look.at_s, 8)) for look in ODD], ("false", "Steps"), (0, 1e9)),
        ("a stuck core whose test requests are answered", "wedged", [look._replace(ranks=ranks(look.at_s, 3)) for look in SOME],
         ("unknown", "NotProved"), (0, 1e9)),
        ("our own test request is no work and no idleness", "wedged",
         [look._replace(gate=ours(look.at_s)) for look in failing(looks(400, lambda at: {**stuck(at), "success": 1.0}), 100.0)],
         ("true", "NoStep"), (0, 240)),
        ("an hour's pause teaches nothing about steps", "wedged",
         [look._replace(is_paused=300 <= look.at_s < 3_900) for look in failing(looks(5_000, paused), 4_200.0)],
         ("true", "NoStep"), (4_200, 4_335)),
        ("a page that somebody keeps showing", "wedged",
         failing(looks(600, lambda at: {**busy(min(at, 100.0)), "cpu_seconds": min(at, 100.0)}), 100.0),
         ("unknown", "OldPage"), (0, 1e9)),
        ("the same while it uses processor time", "wedged",
         failing(looks(600, lambda at: {**busy(min(at, 100.0)), "cpu_seconds": at}), 100.0), ("true", "NoStep"), (0, 1e9)),
        ("work that has just come", "wedged",
         failing(looks(600, lambda at: {**busy(1.0), "running": float(at >= 590)}), 570.0), ("false", "JustCame"), (0, 1e9)),
        ("looks stuck, and nothing proves it", "wedged", looks(400, stuck), ("unknown", "NotProved"), (0, 1e9)),
        ("that is advice", "stalled", looks(400, stuck), ("true", "NoStep"), (0, 1e9)),
        ("several idle cores without an answer", "stalled",
         failing(looks(400, lambda _: {**busy(100.0), "running": 0.0}, ranks=ranks(100.0, 8, work=0.0)), 100.0),
         ("true", "NoAnswer"), (0, 1e9)),
        ("what is proved is no advice", "stalled", failing(looks(400, stuck), 100.0), ("false", "Proved"), (0, 1e9)),
        ("a first request may compile for ten minutes", "hung",
         failing(looks(900, lambda at: {"running": 0.0, "waiting": 0.0, "steps": 0.0, "asleep": 0.0, "cpu_seconds": at}), 0.0),
         ("true", "IdleAndSilent"), (600, 900)),
        ("a busy engine whose test requests wait", "hung", failing(HOUR, 100.0), ("false", "Steps"), (0, 1e9)),
        ("a queue that grows", "saturated", looks(600, lambda at: {**busy(at), "waiting": max(0.0, at - 300.0)}),
         ("true", "WaitGrows"), (300, 510)),
        ("a small overload, over a longer time", "saturated",
         looks(1_800, lambda at: {**busy(at), "waiting": 0.05 * max(0.0, at - 300.0)}), ("true", "WaitGrows"), (300, 1_000)),
        ("without its gate the wait is unknown", "saturated",
         [look._replace(gate=GATE if look.at_s <= 300 else None) for look in looks(600, lambda at: busy(at) | {"waiting": at})],
         ("unknown", "NoRate"), (0, 1e9)),
        ("test requests that take long", "slow",
         [look._replace(canary=Canary(look.at_s // 30 * 30.0, True, 14.0)) for look in looks(300, busy)],
         ("true", "TakesLong"), (120, 120)),
        ("test requests that answer no text", "garbage", GARBAGE, ("true", "NoText"), (60, 60)),
        ("a neighbour came", "neighbour", probed(600, lambda at: probe(by_others=1e9 + (at > 300) * 512 * MIB)),
         ("true", "NeighbourInNeed"), (335, 335)),
        ("one card of two is full", "slack", probed(600, lambda _: (*probe(), FULL)), ("true", "Thin"), (0, 1e9)),
        ("a leak after a quiet day", "growth",
         probed(88_200, lambda at: probe(allocated=18e9 + max(0.0, at - 86_400) * 0.4 * MIB)),
         ("true", "Grows"), (86_401, 88_199)),
    ]  # fmt: skip


@each(("what", "kind", "seen", "wanted", "between"), answers, ids=lambda row: str(row[0]))
def test_the_last_answer(what: str, kind: str, seen: list[Look], wanted: tuple[str, str], between: tuple[float, float]) -> None:
    """Each is neither a sick engine that is taken for a busy one, nor a busy one that is taken for a sick one."""
    at_s, *found = says(kind, seen)[-1]
    assert (tuple(found), between[0] <= at_s <= between[1]) == (wanted, True), (what, at_s)


def not_true() -> list[tuple[str, str, list[Look], str]]:
    """What it is, the question, what was seen, and the last answer where it matters."""
    noise = probed(600, lambda at: tuple(
        probe(by_others=1e9 + (at > 300) * 34 * MIB, releasable=1.4e8)[0]._replace(rank=str(rank)) for rank in range(8)
    ))  # fmt: skip
    return [
        ("half an hour without a listener", "dead", [*BEFORE, *DOWN[:359]], "false"),
        ("eight idle cores", "wedged", [look._replace(ranks=ranks(look.at_s, 3, work=0.0)) for look in ODD], "false"),
        ("work must be known all the time", "wedged", failing(looks(560, half_lost), 480.0), ""),
        ("test requests that wait in a busy engine", "wedged", failing(HOUR, 100.0), ""),
        ("nor is it stalled", "stalled", failing(HOUR, 100.0), ""),
        ("nor one whose test requests are answered", "stalled", failing(HOUR, 1e9), ""),
        ("without a step counter", "hung", failing(looks(600, lambda at: without("steps", busy(at))), 100.0), "unknown"),
        ("a sleeping one whose page is half lost", "hung", failing(looks(700, sleeps), 300.0), "unknown"),
        ("a sleeping one", "hung", failing(looks(700, lambda at: {**sleeps(at), "asleep": float(at >= 300)}), 300.0), "false"),
        ("a queue that jumps and stays", "saturated", looks(1_500, lambda at: {**busy(at), "waiting": 200.0 * (at > 300)}), ""),
        ("an answer without text is not slow", "slow", GARBAGE, "false"),
        ("no answer is not slow", "slow", failing(looks(60, busy), 0.0), "unknown"),
        ("nor garbage", "garbage", failing(looks(60, busy), 0.0), "unknown"),
        ("some MiB more of others", "neighbour", probed(600, lambda at: probe(by_others=1e9 + at % 7 * MIB)), "false"),
        ("noise on eight cards", "neighbour", noise, "false"),
        ("no refused allocation", "exhausted", probed(300, lambda _: probe()), "false"),
        ("one, and growth is unknown", "exhausted", probed(300, lambda at: probe(retries=float(at > 100))), "unknown"),
    ]


@each(("what", "kind", "seen", "last"), not_true, ids=lambda row: str(row[0]))
def test_it_is_never_true(what: str, kind: str, seen: list[Look], last: str) -> None:
    """At no look at all."""
    found = [status for _, status, _ in says(kind, seen)]
    assert "true" not in found, what
    assert last in ("", found[-1]), what


@given(lost=st.sets(st.integers(0, 119)), is_asked=st.booleans())
def test_a_paused_engine_is_never_stuck_or_saturated_whatever_is_lost(lost: set[int], is_asked: bool) -> None:
    """Where the answer whether it is paused was lost, it may be paused: nothing is done about it."""
    lost = lost if is_asked else lost | {0}
    seen = [
        look._replace(is_paused=None, is_rest_unknown=True) if place in lost else look._replace(is_paused=True)
        for place, look in enumerate(failing(looks(600, lambda at: {**busy(100.0), "waiting": at}), 0.0))
    ]
    for kind in ("wedged", "hung", "saturated"):
        assert "true" not in [status for _, status, _ in says(kind, seen)]


def test_growth_that_nobody_sees_any_more_is_unknown() -> None:
    """Old figures say nothing about now: without the probe the growth is neither there nor gone."""
    found = says("growth", [*LEAK, *later(looks(300, busy), 2_400.0)])
    assert [status for _, status, _ in found] == ["unknown", "true", "unknown"]
