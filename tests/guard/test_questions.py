"""Single questions of the judge where a busy, starting, sleeping or half-seen engine could be taken for a sick one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from plimsoll.domain.look import Canary, Gate, Look, Reach, Worker
from plimsoll.guard.judge import Judge
from plimsoll.guard.policy import Policy

MIB = float(1 << 20)
GATE = Gate(ready=True, reason="", in_flight=4, engine_requests=4, expected_wait_s=0.0)


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


def looks(seconds: int, figures: Callable[[float], dict[str, float]], **others: Any) -> list[Look]:
    """One every five seconds."""
    return [Look(at, 1e9 + at, Reach.ANSWERS, health=200, figures=figures(at), **others) for at in range(0, seconds, 5)]


def failing(every: Iterable[Look], from_s: float) -> list[Look]:
    """The same with a test request every half minute, answered until then."""
    return [look._replace(canary=Canary(look.at_s // 30 * 30.0, look.at_s // 30 * 30.0 < from_s)) for look in every]


def busy(at: float) -> dict[str, float]:
    """An engine that works."""
    return {"running": 4.0, "waiting": 0.0, "steps": 10.0 * at, "success": at, "asleep": 0.0}


def test_a_start_that_takes_nine_minutes_is_no_death() -> None:
    """Nobody listens while a large model loads; only after ten minutes, or three times the longest start seen, it is dead."""
    before = looks(300, busy)
    down = [Look(at, 1e9 + at, Reach.REFUSED) for at in range(300, 1_500, 5)]
    assert [status for _, status, _ in says("dead", [*before, *down[:108]])] == ["false", "false"]
    assert says("dead", [*before, *down])[-1] == (910.0, "true", "NobodyListens")
    again = [look._replace(at_s=look.at_s + 840.0) for look in before]
    once_more = [look._replace(at_s=look.at_s + 840.0) for look in down]
    assert says("dead", [*before, *down[:107], *again, *once_more])[-1][1:] == ("false", "Starting")


def test_an_engine_without_a_step_counter_is_not_hung_because_its_test_requests_wait() -> None:
    """Where nobody knows whether steps are made, failing test requests prove nothing."""
    seen = failing(looks(600, lambda at: {name: value for name, value in busy(at).items() if name != "steps"}), 100.0)
    assert says("hung", seen)[-1][1] == "unknown"


def test_a_busy_engine_whose_test_requests_wait_is_neither_hung_nor_wedged() -> None:
    """An overloaded engine answers no test request in time, and makes steps."""
    seen = failing(looks(600, busy), 100.0)
    assert {status for _, status, _ in [*says("hung", seen), *says("wedged", seen)][1:]} <= {"false", "unknown"}
    assert says("hung", seen)[-1][2] == "Steps"


def test_work_that_has_just_come_to_an_idle_engine_is_not_stuck() -> None:
    """Two minutes without a step count from when there was work."""

    def late(at: float) -> dict[str, float]:
        return {**busy(1.0), "running": 0.0 if at < 590 else 1.0}

    assert says("wedged", failing(looks(600, late), 570.0))[-1][1:] == ("false", "JustCame")


def test_a_sleeping_engine_whose_page_is_half_lost_is_not_hung() -> None:
    """Who told before that it is awake and does not now may have told that it sleeps."""

    def sleeps(at: float) -> dict[str, float]:
        idle = {"running": 0.0, "waiting": 0.0, "steps": min(at, 300.0), "asleep": 0.0}
        return idle if at < 300 else {name: value for name, value in idle.items() if name != "asleep"}

    assert says("hung", failing(looks(700, sleeps), 300.0))[-1][1] == "unknown"
    asleep = looks(700, lambda at: {**sleeps(at), "asleep": float(at >= 300)})
    assert says("hung", failing(asleep, 300.0))[-1][1] == "false"


def test_a_queue_that_jumps_and_stays_is_not_growing() -> None:
    """A burst makes a long queue at once; saturated is one that grows from third to third of the window."""

    def jumps(at: float) -> dict[str, float]:
        return {**busy(at), "waiting": 200.0 if at > 300 else 0.0}

    def grows(at: float) -> dict[str, float]:
        return {**busy(at), "waiting": max(0.0, at - 300.0)}

    assert "true" not in [status for _, status, _ in says("saturated", looks(1_500, jumps))]
    found = says("saturated", looks(600, grows))[-1]
    assert found[1:] == ("true", "WaitGrows")
    assert found[0] < 300 + 30 + 120 + 60


def test_a_small_overload_is_seen_over_a_longer_time() -> None:
    """A queue that grows by a twentieth of what is done looks level over two minutes, and does not over eight."""
    found = says("saturated", looks(1_800, lambda at: {**busy(at), "waiting": 0.05 * max(0.0, at - 300.0)}))
    assert found[-1][1:] == ("true", "WaitGrows")
    assert found[-1][0] < 300 + 600 + 100


def test_without_its_gate_the_wait_is_unknown() -> None:
    """What the gate said and the page's own reckoning are two things: one is not taken for the other."""
    seen = looks(600, lambda at: {**busy(at), "waiting": at}, gate=GATE)
    lost = [look._replace(gate=None) if look.at_s > 300 else look for look in seen]
    assert says("saturated", lost)[-1][1:] == ("unknown", "NoRate")


def probe(**others: float) -> tuple[Worker, ...]:
    """A worker on a tight device."""
    plain = {"allocated": 18e9, "unreleasable": 0.0, "releasable": 2e9, "device_free": 2e8, "by_others": 1e9, "retries": 0.0}
    return (Worker("0", 1.0, **{**plain, **others}),)


def test_some_mib_more_of_others_are_no_neighbour() -> None:
    """What the driver counts for others wavers; only what came is a neighbour, and it must be worth a compaction."""
    wavers = [look._replace(workers=probe(by_others=1e9 + look.at_s % 7 * MIB)) for look in looks(600, busy)]
    assert {status for _, status, _ in says("neighbour", wavers)} == {"false"}
    came = [look._replace(workers=probe(by_others=1e9 + (look.at_s > 300) * 512 * MIB)) for look in looks(600, busy)]
    assert says("neighbour", came)[-1] == (335.0, "true", "NeighbourInNeed")


def test_no_refused_allocation_is_no_exhaustion_whatever_grows() -> None:
    """Where no allocation failed, memory is not exhausted, also while nobody knows yet whether it grows."""
    steady = [look._replace(workers=probe()) for look in looks(300, busy)]
    assert says("exhausted", steady)[-1][1] == "false"
    failed = [look._replace(workers=probe(retries=float(look.at_s > 100))) for look in looks(300, busy)]
    assert says("exhausted", failed)[-1][1] == "unknown"


def test_a_leak_after_a_quiet_day_is_found_within_the_half_hour() -> None:
    """A long time without growth does not hide the growth that begins."""
    day_s, rate = 86_400, 0.4 * MIB
    seen = looks(day_s + 1_800, busy)
    leaking = [look._replace(workers=probe(allocated=18e9 + max(0.0, look.at_s - day_s) * rate)) for look in seen]
    found = says("growth", leaking)[-1]
    assert found[1:] == ("true", "Grows")
    assert day_s < found[0] < day_s + 1_800


def test_growth_that_nobody_sees_any_more_is_unknown() -> None:
    """Old figures say nothing about now: without the probe the growth is neither there nor gone."""
    leaking = [look._replace(workers=probe(allocated=18e9 + look.at_s * 0.4 * MIB)) for look in looks(2_400, busy)]
    lost = [look._replace(at_s=look.at_s + 2_400.0) for look in looks(300, busy)]
    assert [status for _, status, _ in says("growth", [*leaking, *lost])] == ["unknown", "true", "unknown"]
