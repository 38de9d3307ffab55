"""Single questions of the judge where a busy, starting, sleeping or half-seen engine could be taken for a sick one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.judge.judge import Judge
from plimsoll.guard.judge.look import Canary, CoreFigures, GateState, Look, Reach, WorkerMemory
from plimsoll.guard.judge.policy import Policy

MIB = float(1 << 20)
GATE = GateState(ready=True, reason="", in_flight=4, engine_requests=4, expected_wait_s=0.0)


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
    return [Look(at, 1e9 + at, Reach.ANSWERS, health=200, figures=figures(at), **others) for at in range(0, seconds, 5)]


def failing(every: Iterable[Look], from_s: float) -> list[Look]:
    """The same with a test request every half minute, answered until then."""
    return [look._replace(canary=Canary(look.at_s // 30 * 30.0, look.at_s // 30 * 30.0 < from_s)) for look in every]


def busy(at: float) -> dict[str, float]:
    return {"running": 4.0, "waiting": 0.0, "steps": 10.0 * at, "success": at, "asleep": 0.0}


def test_a_start_that_takes_half_an_hour_is_no_death() -> None:
    """Nobody listens while a large model loads; only after half an hour, or three times the longest start seen, it is dead."""
    before = looks(300, busy)
    down = [Look(at, 1e9 + at, Reach.REFUSED) for at in range(300, 3_000, 5)]
    assert [status for _, status, _ in says("dead", [*before, *down[:359]])] == ["false", "false"]
    assert says("dead", [*before, *down])[-1] == (2_110.0, "true", "NobodyListens")
    again = [look._replace(at_s=look.at_s + 2_100, unix_s=look.unix_s + 2_100, started_unix_s=1e9 + 400) for look in before]
    once_more = [look._replace(at_s=look.at_s + 2_100.0) for look in down]
    assert says("dead", [*before, *down[:359], *again, *once_more])[-1][1:] == ("false", "Starting")


def test_a_process_that_is_known_to_have_ended_is_dead_without_a_wait() -> None:
    """Who knows that its process ended and that nobody starts it need not wait for as long as a start takes."""
    gone = [Look(at, 1e9 + at, Reach.REFUSED, ended="its unit has failed") for at in range(300, 400, 5)]
    assert says("dead", [*looks(300, busy), *gone])[-1] == (310.0, "true", "ProcessEnded")


def ranks(at: float, stuck: int, work: float = 2.0) -> tuple[CoreFigures, ...]:
    """Eight cores, one of which makes no step from 300 s on."""
    return tuple(CoreFigures(str(core), 10.0 * (min(at, 300.0) if core == stuck else at), work, 0.0) for core in range(8))


def test_one_stuck_core_of_eight_is_stuck() -> None:
    """The steps of the others do not hide it, and an answered test request is another core's."""
    plain = failing(looks(900, lambda at: {**busy(at), "steps": 70.0 * at}), 1e9)
    canary = [
        look._replace(canary=look.canary and look.canary._replace(is_answered=look.canary.at_s % 240 != 0)) for look in plain
    ]
    stuck = [look._replace(ranks=ranks(look.at_s, 3)) for look in canary]
    found = says("wedged", stuck)
    first = next(one for one in found if one[1] == "true")
    assert first[2] == "NoStep"
    assert 720 <= first[0] <= 750, "with the second test request that failed since"
    assert says("wedged", [look._replace(ranks=ranks(look.at_s, 8)) for look in canary])[-1][1:] == ("false", "Steps")
    unproved = [look._replace(ranks=ranks(look.at_s, 3)) for look in plain]
    assert says("wedged", unproved)[-1][1:] == ("unknown", "NotProved")
    assert says("wedged", [look._replace(ranks=ranks(look.at_s, 3, work=0.0)) for look in canary])[-1][1] == "false"


def test_our_own_test_request_is_no_work_and_no_idleness() -> None:
    """A stuck engine whose one request cannot be told from ours is still the one it was before."""

    def gate(at: float) -> GateState:
        ours = int(at % 30 < 25)
        return GATE._replace(engine_requests=1, ours=ours, last_step_age_s=max(0.0, at - 100.0))

    stuck = failing(looks(400, lambda at: {**busy(min(at, 100.0)), "steps": 10.0 * min(at, 100.0)}), 100.0)
    found = says("wedged", [look._replace(gate=gate(look.at_s)) for look in stuck])
    assert found[-1][1:] == ("true", "NoStep")
    assert found[-1][0] <= 240


@given(lost=st.sets(st.integers(0, 119)), is_asked=st.booleans())
def test_a_paused_engine_is_never_stuck_or_saturated_whatever_is_lost(lost: set[int], is_asked: bool) -> None:
    """Where the answer whether it is paused was lost, it may be paused: nothing is done about it."""
    plain = failing(looks(600, lambda at: {**busy(100.0), "waiting": at}), 0.0)
    seen = [
        look._replace(is_paused=None, is_rest_unknown=True) if place in lost else look._replace(is_paused=True)
        for place, look in enumerate(plain)
    ]
    seen = (
        seen
        if is_asked
        else [look if place else look._replace(is_rest_unknown=True, is_paused=None) for place, look in enumerate(seen)]
    )
    for kind in ("wedged", "hung", "saturated"):
        assert "true" not in [status for _, status, _ in says(kind, seen)]


def test_test_requests_that_take_long_or_answer_no_text_are_told() -> None:
    """Both are advice: slow after two minutes of it, garbage after one."""
    slow = [look._replace(canary=Canary(look.at_s // 30 * 30.0, True, 14.0)) for look in looks(300, busy)]
    assert says("slow", slow)[-1] == (120.0, "true", "TakesLong")
    odd = [look._replace(canary=Canary(look.at_s // 30 * 30.0, True, 0.2, True)) for look in looks(300, busy)]
    assert says("garbage", odd)[-1] == (60.0, "true", "NoText")
    assert says("slow", odd)[-1][1] == "false"
    assert [says(kind, failing(looks(60, busy), 0.0))[-1][1] for kind in ("slow", "garbage")] == ["unknown", "unknown"]


def test_several_servers_behind_one_address_leave_everything_unknown() -> None:
    """Their figures cannot be told apart: nothing is judged, and that is the reason given."""
    turns = [look._replace(started_unix_s=1e9 + look.at_s % 2) for look in looks(100, busy)]
    turns = [look._replace(started_unix_s=1e9 + 50.0 * (place % 2)) for place, look in enumerate(turns)]
    assert {says(kind, turns)[-1][1:] for kind in ("dead", "storm", "loop")} == {("unknown", "SeveralServers")}
    assert says("changed", turns)[-1][1:] == ("true", "SeveralServers"), "and that is told"
    alone = [look._replace(at_s=look.at_s + 100.0, started_unix_s=1e9 + 50.0) for look in looks(800, busy)]
    assert says("dead", [*turns, *alone])[-1][1:] == ("false", "Answers"), "a rollout that is over"


def test_one_that_looks_stuck_is_told_also_where_nothing_can_prove_it() -> None:
    """Without a canary, with several cores, or behind a dev server that cannot say whether it rests, it is advice."""

    def stuck(at: float) -> dict[str, float]:
        return {**busy(at), "steps": 10.0 * min(at, 100.0)}

    assert says("stalled", looks(400, stuck))[-1][1:] == ("true", "NoStep")
    assert says("wedged", looks(400, stuck))[-1][1:] == ("unknown", "NotProved")
    idle = failing(looks(400, lambda _: {**busy(100.0), "running": 0.0}), 100.0)
    eight = [look._replace(ranks=ranks(100.0, 8, work=0.0)) for look in idle]
    assert says("stalled", eight)[-1][1:] == ("true", "NoAnswer")
    assert says("stalled", failing(looks(400, stuck), 100.0))[-1][1:] == ("false", "Proved")
    assert {status for _, status, _ in says("stalled", failing(looks(600, busy), 1e9))} <= {"unknown", "false"}
    late = failing(looks(600, busy), 100.0)
    assert {status for _, status, _ in says("stalled", late)} <= {"unknown", "false"}, "it is busy, and they wait"


def test_a_503_is_not_believed_of_one_that_works() -> None:
    """Steps or an answered test request since then say that somebody else said 503."""
    sick = [look._replace(health=503) if look.at_s > 100 else look for look in looks(300, busy)]
    assert says("dead", sick)[-1][1:] == ("unknown", "Contradicted")
    still = [look._replace(figures={**look.figures, "steps": 1.0}) for look in sick]
    assert says("dead", still)[-1][1:] == ("true", "HealthSaysSo")
    answered = [look._replace(canary=Canary(look.at_s, True, 0.1)) for look in still]
    assert says("dead", answered)[-1][1:] == ("unknown", "Contradicted")


def test_a_pause_or_a_night_off_teaches_nothing_about_steps_and_starts() -> None:
    """After an hour at rest two minutes are still two minutes, and after a night off half an hour is half an hour."""

    def paused(at: float) -> dict[str, float]:
        return {**busy(at), "steps": 10.0 * (at if at < 300 else 300.0 if at < 3_900 else min(at - 3_600.0, 600.0))}

    seen = failing(looks(5_000, paused), 4_200.0)
    seen = [look._replace(is_paused=300 <= look.at_s < 3_900) for look in seen]
    found = says("wedged", seen)
    assert found[-1][1:] == ("true", "NoStep")
    assert found[-1][0] <= 4_200 + 120 + 15
    night = [Look(at, 1e9 + at, Reach.REFUSED) for at in range(100, 43_300, 5)]
    later = [look._replace(at_s=look.at_s + 43_300.0) for look in looks(100, busy)]
    down = [Look(at, 1e9 + at, Reach.REFUSED) for at in range(43_400, 45_300, 5)]
    assert says("dead", [*looks(100, busy), *night, *later, *down])[-1][1] == "true"


def test_work_must_be_known_all_the_time() -> None:
    """A figure that was missing while it was idle and is back now is no work of two minutes."""

    def idle(at: float) -> dict[str, float]:
        seen = {**busy(100.0), "running": 1.0 if at >= 500 else 0.0}
        return seen if at < 300 or at >= 500 else {name: value for name, value in seen.items() if name != "running"}

    assert "true" not in [status for _, status, _ in says("wedged", failing(looks(560, idle), 480.0))]


def test_a_first_request_that_compiles_is_no_hang() -> None:
    """An engine that has never made a step is given ten minutes for its first."""
    still = {"running": 0.0, "waiting": 0.0, "steps": 0.0, "asleep": 0.0}
    fresh = failing(looks(900, lambda at: {**still, "cpu_seconds": at}), 0.0)
    found = says("hung", fresh)
    assert found[-1][1] == "true"
    assert found[-1][0] >= 600


def test_a_page_that_somebody_keeps_showing_proves_nothing() -> None:
    """A server that answers uses processor time: where that stands still too, the page is an old one."""
    old = failing(looks(600, lambda at: {**busy(min(at, 100.0)), "cpu_seconds": min(at, 100.0)}), 100.0)
    assert says("wedged", old)[-1][1:] == ("unknown", "OldPage")
    live = failing(looks(600, lambda at: {**busy(min(at, 100.0)), "cpu_seconds": at}), 100.0)
    assert says("wedged", live)[-1][1:] == ("true", "NoStep")


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


def probe(**others: float) -> tuple[WorkerMemory, ...]:
    plain = {"allocated": 18e9, "unreleasable": 0.0, "releasable": 2e9, "device_free": 2e8, "by_others": 1e9, "retries": 0.0}
    return (WorkerMemory("0", 1.0, **{**plain, **others}),)


def test_some_mib_more_of_others_are_no_neighbour() -> None:
    """What the driver counts for others wavers; only what came is a neighbour, and it must be worth a compaction."""
    wavers = [look._replace(workers=probe(by_others=1e9 + look.at_s % 7 * MIB)) for look in looks(600, busy)]
    assert {status for _, status, _ in says("neighbour", wavers)} == {"false"}
    came = [look._replace(workers=probe(by_others=1e9 + (look.at_s > 300) * 512 * MIB)) for look in looks(600, busy)]
    assert says("neighbour", came)[-1] == (335.0, "true", "NeighbourInNeed")


def test_a_neighbour_and_thin_slack_are_judged_card_by_card() -> None:
    """What one worker could give back does not help another, and noise on eight cards is no neighbour on one."""
    noise = [
        look._replace(
            workers=tuple(
                probe(by_others=1e9 + (look.at_s > 300) * 34 * MIB, releasable=1.4e8)[0]._replace(rank=str(rank))
                for rank in range(8)
            )
        )
        for look in looks(600, busy)
    ]
    assert {status for _, status, _ in says("neighbour", noise)} == {"false"}
    full = probe(device_free=5 * MIB, releasable=0.0)[0]._replace(rank="1")
    tight = [look._replace(workers=(*probe(), full)) for look in looks(600, busy)]
    assert says("slack", tight)[-1][1:] == ("true", "Thin")


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
