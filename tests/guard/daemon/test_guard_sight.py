"""The fleet as whoever acts sees it: who is away, who carries, and which process answers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from plimsoll.guard.act.decide import EngineStatus, FailedRestarts
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.daemon.observer import EngineCapabilities, Fleet, FleetObserver, ProcessLife, WatchedEngine
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.guard.judge.look import GateState, Look, Reach
from plimsoll.guard.judge.policy import Policy

FIGURES = {"kv_cache_usage": 0.1, "running": 1.0, "waiting": 0.0}
HELD = FailedRestarts("dead", "held", is_out=True)


def look(at_s: float = 0.0, **more: Any) -> Look:
    return Look(at_s, at_s, Reach.ANSWERS, health=200, figures=FIGURES, started_unix_s=5.0, model="m")._replace(**more)


class Few:
    """A fleet of those that were looked at."""

    def __init__(self, **looks: list[Look]) -> None:
        self._engines: dict[str, WatchedEngine] = {}
        for name, seen in looks.items():
            one = WatchedEngine(EngineConfig(name, "http://x:1"), Policy(), cast("Any", SimpleNamespace()), 0.0)
            for found in seen:
                one.take(found)
            self._engines[name] = one

    def names(self) -> list[str]:
        return sorted(self._engines)

    def engine(self, name: str) -> WatchedEngine | None:
        return self._engines.get(name)


def sight(fleet: Few, ends: Mapping[str, FailedRestarts] | None = None) -> FleetObserver:
    """Of a guard that was told of all of them."""
    told = EngineCapabilities(has_gate=True, has_restarter=True)
    return FleetObserver(cast("Fleet", fleet), lambda _: told, 5.0, lambda: 1.0, lambda: 0, lambda: ends or {})


def seen(found: FleetObserver) -> dict[str, EngineStatus]:
    return {one.name: one for one in found.view(frozenset()).engines}


def test_one_that_was_held_is_away_until_it_is_put_back() -> None:
    """Though it answers, idle and well: no request reaches it, so it carries nothing, and nobody else may leave."""
    fleet = Few(a=[look()], b=[look()])
    assert not seen(sight(fleet))["a"].is_away
    found = sight(fleet, {"a": HELD})
    assert seen(found)["a"].is_away
    assert found.suffering("b", ActPolicy()) == "a is out of rotation"
    back = sight(fleet, {"a": HELD._replace(is_out=False), "b": FailedRestarts("dead", "failed")})
    assert not any(one.is_away for one in seen(back).values())
    assert back.suffering("b", ActPolicy()) == ""


def test_whoever_does_not_answer_starts_or_drains_is_away() -> None:
    """And before the first look nothing is known of it."""
    drains = GateState(True, "", 0, 0, drain="draining")
    starts = GateState(False, "starting", 0, 0)
    gone = Look(1.0, 1.0, Reach.SILENT)
    fleet = Few(a=[look(gate=drains)], b=[look(gate=starts)], c=[look(), gone], d=[], e=[look(gate=GateState(True, "", 0, 0))])
    assert [name for name, one in seen(sight(fleet)).items() if one.is_away] == ["a", "b", "c", "d"]


def test_the_model_is_known_for_as_long_as_it_last_answered() -> None:
    """An engine that is gone is still one of its group; one of another model is none, and none that suffers."""
    fleet = Few(a=[look()], b=[look(), Look(1.0, 1.0, Reach.REFUSED)], c=[look(model="embedder")], d=[look(model=None)])
    assert [one.load.model for one in seen(sight(fleet)).values()] == ["m", "m", "embedder", None]
    assert sight(fleet).suffering("a", ActPolicy()) == "b is out of rotation"
    assert sight(Few(a=[look()], c=[Look(1.0, 1.0, Reach.REFUSED)])).suffering("a", ActPolicy()) == "c is out of rotation"
    others = Few(a=[look()], c=[look(model="embedder"), Look(1.0, 1.0, Reach.REFUSED)])
    assert sight(others).suffering("a", ActPolicy()) == "", "it serves something else, and a is alone as it was before"


def test_what_held_and_is_not_known_any_more_is_not_well() -> None:
    """Nobody may leave on the strength of an engine that was stuck when it was last known."""
    fleet = Few(a=[look()], b=[look()])
    assert sight(fleet).suffering("a", ActPolicy()) == ""
    for kind, says in (("saturated", "b is not well"), ("creep", "")):
        one = fleet.engine("b")
        assert one is not None
        one.reporter.doubted = {kind}
        assert sight(fleet).suffering("a", ActPolicy()) == says


def test_which_process_answers() -> None:
    """Its start as the page says, how often another one came, and what its cluster counts."""
    fleet = Few(a=[look(0.0), look(5.0, started_unix_s=9.0), look(10.0, started_unix_s=14.0, container_restarts=2)], b=[])
    found = sight(fleet)
    assert (found.life("a"), found.life("b"), found.life("none")) == (ProcessLife(14.0, 2, 2), ProcessLife(), ProcessLife())
