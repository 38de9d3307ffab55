"""What the history of one engine holds on to, what grows and when it is full, windows, and what is not known in between."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.judge.history import History
from plimsoll.guard.judge.load import NO_LENGTH, kv_forecast, queue_forecast, recompute_share
from plimsoll.guard.judge.look import CoreFigures, GateState, Look, Reach, WorkerMemory, describe_changes
from plimsoll.guard.judge.policy import Policy
from plimsoll.guard.judge.tracker import Tracker, no, unknown, yes
from plimsoll.unknown import Status, Unknown
from tests.each import cases, each

IDLE = {"running": 0.0, "waiting": 0.0}


def look(at_s: float, figures: Mapping[str, float] = IDLE, **others: Any) -> Look:
    return Look(at_s, 1e9 + at_s, Reach.ANSWERS, figures=figures, **others)


def seen(*looks: Look) -> History:
    history = History()
    for one in looks:
        history.add(one)
    return history


def counted(*left_out: int, until: int = 200) -> History:
    """A counter that rises by one a second, a look every five, but for those that are left out."""
    return seen(*(look(at, {"steps": at}) for at in range(0, until, 5) if at not in left_out))


def test_a_rise_is_known_for_all_of_its_window_or_not_at_all_and_idle_time_is_no_long_step() -> None:
    """With a look lost it counts over more, never less; not over a hole, over more than is kept, or without the last look."""
    assert [counted(75).rise("steps", seconds) for seconds in (120.0, 119.0, 115.0)] == [195 - 70, 195 - 70, 195 - 80]
    holed = counted(*range(200, 220), until=300)
    assert isinstance(holed.rise("steps", 120.0), Unknown)
    assert holed.rise("steps", 60.0) == 60.0
    long = counted(until=4_000)
    assert long.rise("steps", 1_500.0) == 1_500.0
    assert isinstance(long.rise("steps", 3_900.0), Unknown)
    without_last = counted()
    without_last.add(look(200, {}))
    assert isinstance(without_last.rise("steps", 60.0), Unknown)
    history = seen(*(look(at, {"success": at, "waiting": 0.0}) for at in range(0, 20, 5)))
    assert history.rise("success", 60.0) == Unknown("requests that ended: seen for 15 of 60 s")
    assert history.over("waiting", 120.0) == Unknown("the queue: not seen for 120 s yet")
    assert history.now("prefix_hits") == Unknown("tokens found in the prefix cache: not on the page")
    busy = {"running": 1.0, "waiting": 0.0}
    looks = [look(0, {**busy, "steps": 1.0}), look(5, {**busy, "steps": 2.0}), look(10, {**IDLE, "steps": 3.0})]
    looks += [look(at, {**IDLE, "steps": 3.0}) for at in range(15, 200, 5)]
    looks += [look(200, {**busy, "steps": 3.0}), look(205, {**busy, "steps": 9.0})]
    assert seen(*looks).cores[0][1].longest_gap_s == 10.0


def test_a_worker_that_is_missing_leaves_no_sum_and_one_more_is_no_growth() -> None:
    """Without one of them it is unknown, also if it comes back; what was added up before one was first seen is forgotten."""
    both = tuple(WorkerMemory(rank, 1.0, by_others=3e9, allocated=1e9, unreleasable=0.0) for rank in "01")
    history = seen(look(0, workers=both), look(5, workers=both[:1]))
    assert isinstance(history.now("held"), Unknown)
    history.add(look(10, workers=both))
    assert list(history.since("held", 60.0).values) == [2e9, 2e9]
    late = both[1]._replace(age_s=60.0)
    history.add(look(15, workers=(both[0], late)))
    assert isinstance(history.now("held"), Unknown)
    assert isinstance(seen(look(0, workers=(late,))).now("held"), Unknown)
    both = tuple(WorkerMemory(rank, 1.0, retries=3.0) for rank in "01")
    history = seen(look(0, workers=both[:1]), look(5, workers=both))
    assert list(history.since("retries", 60.0).values) == [6.0]
    alone = [look(at, workers=both[:1]) for at in range(10, 700, 5)]
    assert isinstance(seen(*alone[:100], look(0)).now("retries"), float)
    for one in alone:
        history.add(one)
    assert history.now("retries") == 3.0, "a worker that has not been heard of for ten minutes is not one of them any more"


def test_silence_between_two_refusals_is_forgiven_and_time_spent_dead_is_no_part_of_a_start() -> None:
    """Nobody has listened since the first refusal, unless somebody answered; what nobody tells apart teaches nothing."""
    refused = [Look(at, 1e9 + at, Reach.REFUSED) for at in (0.0, 5.0, 15.0)]
    silent = Look(10.0, 1e9, Reach.SILENT)
    assert seen(refused[0], refused[1], silent, refused[2]).refused_since_s == 0.0
    assert seen(refused[0], refused[1], silent._replace(reach=Reach.NONSENSE), refused[2]).refused_since_s == 15.0
    assert seen(refused[0], refused[1], look(10.0), refused[2]).refused_since_s == 15.0
    assert seen(refused[0], Look(60.0, 1e9, Reach.REFUSED)).refused_since_s == 60.0
    down = [Look(at, 1e9 + at, Reach.REFUSED) for at in range(0, 600, 5)]
    assert seen(*down, look(600.0, started_unix_s=1e9 + 580)).longest_start_s == 20.0
    assert seen(*down, look(600.0)).longest_start_s == 0.0
    assert seen(*down, look(600.0, started_unix_s=1e9 + 9_999)).longest_start_s == 0.0, "its clock is not ours"


def test_a_restart_begins_anew_and_starts_are_counted_by_guards_own_clock_and_by_the_cluster() -> None:
    """Seen once, also where its start time comes late or is hours off; one that comes back is two servers in turn."""
    looks = [look(at, {"steps": float(at), "running": 1.0, "waiting": 0.0}, started_unix_s=1e9) for at in range(0, 300, 5)]
    history = seen(*looks, look(300, {"steps": 900.0, "running": 1.0, "waiting": 0.0}, started_unix_s=1e9 + 290))
    assert list(history.since("steps", 1e6).values) == [900.0]
    assert len(history.long("running").times) <= 1
    ((_, pulse),) = history.cores
    assert (pulse.step_at_s, pulse.longest_gap_s) == (None, 0.0)
    many, few = {"steps": 100.0, "success": 10.0}, {"steps": 1.0, "success": 0.0}
    history = seen(look(0, many, started_unix_s=1e9), look(5, few), look(10, few, started_unix_s=1e9 + 4))
    assert history.lives.since(0.0) == 1
    off = seen(*(look(at, started_unix_s=5e8 - at) for at in (0, 60, 120, 180)))
    assert (off.lives.since(0.0), off.lives.since(100.0)) == (3, 2)
    refused = [Look(60.0 * number, 1e9, Reach.REFUSED, container_restarts=7 + number) for number in range(4)]
    assert seen(*refused).lives.since(0.0) == 3
    assert not seen(look(0, started_unix_s=1e9), look(5, started_unix_s=1e9 + 50)).lives.is_shared(5.0)
    turns = [look(5 * number, started_unix_s=1e9 + 50 * (number % 2)) for number in range(3)]
    assert seen(*turns).lives.is_shared(10.0)
    assert not seen(*turns).lives.is_shared(700.0), "a rollout that is over"


def test_who_told_and_does_not_is_missed_and_names_without_end_are_not_kept() -> None:
    """A gate that told before may have told that it sleeps; NaN, infinity and less than nothing are no figures."""
    full = History()
    for number in range(60):
        workers = tuple(WorkerMemory(f"{number}/{rank}", 1.0, retries=0.0, by_others=1.0) for rank in range(100))
        cores = tuple(CoreFigures(f"{number}/{rank}", 1.0, 0.0, 0.0) for rank in range(100))
        full.add(look(5.0 * number, workers=workers, ranks=cores))
    assert all(len(kept) <= 1_024 for kept in (full._ranks, full._least_others, full._pulses))
    gate = GateState(ready=True, reason="", in_flight=0, engine_requests=0)
    history = seen(look(0, gate=gate), look(5))
    assert (history.lost, history.has_lost_gate) == ("gate", True)
    history.add(look(10, gate=gate))
    assert history.lost == ""
    assert seen(look(0, {"asleep": 0.0}), look(5, {"asleep": math.nan})).lost == "page"
    gate = GateState(ready=True, reason="", in_flight=7, engine_requests=3)
    history = seen(look(0, {"running": math.nan, "waiting": math.inf, "steps": -1.0}, gate=gate))
    assert all(isinstance(history.now(name), Unknown) for name in ("running", "waiting", "steps"))
    assert history.now("in_flight") == 7.0
    assert isinstance(seen(look(0)).now("in_flight"), Unknown)


def started(vllm: str = "0.32.0", **config: str) -> Look:
    return Look(0.0, 0.0, Reach.ANSWERS, vllm=vllm, config=config)


@each(("before", "after", "said"), cases("guard", "caches before and after a start"))
def test_a_cache_that_is_measured_is_never_quite_the_same(before: str, after: str, said: str) -> None:
    """A few blocks more or less are no change: vLLM measures them anew at each start. More than a hundredth is one."""
    assert describe_changes(started(num_gpu_blocks=before), started(num_gpu_blocks=after)) == said


def test_a_setting_is_the_same_or_it_is_not() -> None:
    """Of what somebody sets, and of the version, any difference is told."""
    before, after = started(gpu_memory_utilization="0.92", block_size="16"), started("0.32.1", gpu_memory_utilization="0.921")
    assert describe_changes(before, after) == "vLLM 0.32.0 became 0.32.1; gpu_memory_utilization 0.92 became 0.921"


def history_of(rows: Sequence[Mapping[str, float]]) -> History:
    """A history of looks five seconds apart that show these figures."""
    history = History(5.0)
    for number, figures in enumerate(rows):
        more = {"steps": 100.0 * number, **figures}
        history.add(Look(5.0 * number, 1e9 + 5.0 * number, Reach.ANSWERS, figures=more, started_unix_s=1e9 - 100))
    return history


def queued(queue: Sequence[float]) -> History:
    """A queue before 64 that run, of whom two end each second."""
    return history_of([{"running": 64.0, "waiting": waiting, "success": 10.0 * number} for number, waiting in enumerate(queue)])


def test_a_queue_that_grows_steadily_is_foretold_and_another_is_not() -> None:
    """60 may wait at 2 a second for 30 s; noise, none, one that shrinks, a young one, one past the bound: why there is none."""
    found = queue_forecast(queued([5.0 + 2.5 * number / 5 for number in range(60)]), Policy())
    assert not isinstance(found, Unknown)
    left = (60 - (5.0 + 0.5 * 59)) / 0.1
    assert abs(found.likely_s - left) < 0.1 * left
    assert found.soonest_s <= found.likely_s <= found.latest_s
    dice = random.Random(7)
    cases = {
        "the queue does not grow": ([dice.uniform(0, 20) for _ in range(60)], [40.0 - 0.5 * number for number in range(60)]),
        "not enough samples of the queue": (range(15),),
        "already past the bound": ([200.0 + number for number in range(60)],),
    }  # fmt: skip
    for reason, queues in cases.items():
        for queue in queues:
            assert queue_forecast(queued(queue), Policy()) == Unknown(reason)
    assert isinstance(queue_forecast(queued([0.0] * 60), Policy()), Unknown)


def filling(usage: Sequence[float]) -> History:
    return history_of([{"kv_cache_usage": share} for share in usage])


def test_a_cache_that_fills_steadily_is_foretold_and_the_share_of_work_done_twice() -> None:
    """Full, emptying or hardly seen: no forecast, with the reason; before an end and five minutes no share is known."""
    found = kv_forecast(filling([0.01 * number for number in range(50)]))
    assert not isinstance(found, Unknown)
    assert abs(found.likely_s - 5.0 * 51) < 10.0
    assert found.soonest_s <= found.likely_s <= found.latest_s
    cases = {
        "already full": [0.99] * 50, "the cache does not fill": [0.9 - 0.01 * number for number in range(50)],
        "not enough samples of the cache": [0.01 * number for number in range(10)],
    }  # fmt: skip
    for reason, usage in cases.items():
        assert kv_forecast(filling(usage)) == Unknown(reason)

    def worked(preempted: float, ended: float, looks: int = 80) -> History:
        done = {"preemptions": preempted, "prompt_tokens": 1_000.0, "generation_tokens": 1_000.0, "success": ended}
        return history_of([{name: each * number for name, each in done.items()} for number in range(looks)])

    assert recompute_share(worked(0.0, 1.0), 300.0) == 0.0
    share = recompute_share(worked(1.0, 4.0), 300.0)
    assert not isinstance(share, Unknown)
    assert abs(share - 0.2) < 1e-9, "one of four requests lost its 500 tokens for each 2,000 that were computed"
    assert recompute_share(worked(1.0, 0.0), 300.0) is NO_LENGTH
    assert isinstance(recompute_share(worked(1.0, 4.0, looks=10), 300.0), Unknown)


SAYS = {"y": yes("Is", "it is"), "n": no("IsNot", "it is not"), "?": unknown("Lost", "not known")}


def after(says: str, *, is_strict: bool, for_s: float = 20.0) -> Status:
    """The status after looks that say so, one every five seconds; a dot: nobody looked."""
    tracker = Tracker("kind", for_s, 20.0, 5.0, is_strict=is_strict)
    for number, word in enumerate(says):
        if word != ".":
            tracker.note(SAYS[word], 5.0 * number)
    return tracker.status


@each(("says", "strict", "lenient"), cases("guard", "windows"))
def test_a_window_must_be_seen_whole(says: str, strict: str, lenient: str) -> None:
    """Before an action four of five looks said yes, a lost one is a no; advice forgives a look or two that said nothing."""
    assert after(says, is_strict=True) == strict
    assert after(says, is_strict=False) == lenient


def test_a_watched_condition_says_for_how_long_and_slow_looks_are_enough() -> None:
    """Before its window is over it is false, being watched; who wants a look a second and needs two is told all the same."""
    tracker = Tracker("kind", 20.0, 20.0, 5.0)
    tracker.note(SAYS["n"], 0.0)
    condition = tracker.see(SAYS["y"], 5.0)
    assert (condition.status, condition.reason, condition.message) == ("false", "Watching", "it is; for 0 of 20 s")
    assert condition.since_s == 0.0
    assert tracker.see(SAYS["y"], 10.0).message == "it is; for 5 of 20 s"
    slow = Tracker("kind", 10.0, 10.0, 1.0, is_strict=True)
    for number in range(8):
        slow.note(SAYS["y"], 2.0 * number)
    assert slow.status is Status.TRUE


@given(
    says=st.text("yyyn?", min_size=1, max_size=60),
    lost=st.sets(st.integers(0, 59)),
    for_s=st.sampled_from([0.0, 10.0, 20.0, 60.0]),
)
def test_to_lose_looks_never_makes_it_hold_sooner(says: str, lost: set[int], for_s: float) -> None:
    """What could lead to an action holds first with all looks, whichever of them are lost or say nothing."""

    def first(words: str) -> int:
        found = [end for end in range(1, len(words) + 1) if after(words[:end], is_strict=True, for_s=for_s) is Status.TRUE]
        return found[0] if found else len(words) + 1

    for gap in ".?":
        assert first("".join(gap if place in lost else word for place, word in enumerate(says))) >= first(says)


def test_what_held_before_is_not_denied_by_one_look_and_what_is_about_to_be_over_says_so() -> None:
    """After looks that told nothing one yes is in doubt, not over; looks in between are told apart from those that show it."""
    assert after("yyyyy???????y", is_strict=True) is Status.UNKNOWN
    assert after("yyyyy???????n", is_strict=True) is Status.TRUE
    assert after("yyyyy???????nnnnn", is_strict=True) is Status.FALSE
    tracker = Tracker("kind", 0.0, 20.0, 5.0, is_strict=True)
    told = [(found.is_true, found.is_ending) for number, word in enumerate("ynynnnnn")
            if (found := tracker.see(SAYS[word], 5.0 * number))]  # fmt: skip
    assert told == [(True, False), (True, True), (True, False), *[(True, True)] * 4, (False, False)]
