"""What the history of one engine holds on to, what it does not take for knowledge, and what is another after a restart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from plimsoll.guard.judge.history import History
from plimsoll.guard.judge.look import CoreFigures, GateState, Look, Reach, WorkerMemory, describe_changes
from plimsoll.unknown import Unknown
from tests.each import each

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


def test_a_rise_is_known_for_all_of_its_window_or_not_at_all() -> None:
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


def test_what_is_not_known_is_named_in_a_readers_words() -> None:
    """Not by the name that a figure has in here, and with how much of the time is there."""
    history = seen(*(look(at, {"success": at, "waiting": 0.0}) for at in range(0, 20, 5)))
    assert history.rise("success", 60.0) == Unknown("requests that ended: seen for 15 of 60 s")
    assert history.over("waiting", 120.0) == Unknown("the queue: not seen for 120 s yet")
    assert history.now("prefix_hits") == Unknown("tokens found in the prefix cache: not on the page")


def test_idle_time_is_no_step_that_took_long() -> None:
    """The longest step is not made longer by the time in which there was nothing to do."""
    busy = {"running": 1.0, "waiting": 0.0}
    looks = [look(0, {**busy, "steps": 1.0}), look(5, {**busy, "steps": 2.0}), look(10, {**IDLE, "steps": 3.0})]
    looks += [look(at, {**IDLE, "steps": 3.0}) for at in range(15, 200, 5)]
    looks += [look(200, {**busy, "steps": 3.0}), look(205, {**busy, "steps": 9.0})]
    assert seen(*looks).cores[0][1].longest_gap_s == 10.0


def test_a_worker_that_is_missing_leaves_no_sum() -> None:
    """The sum over some of the workers is not the engine's: without one of them it is unknown, also if it comes back."""
    both = tuple(WorkerMemory(rank, 1.0, by_others=3e9, allocated=1e9, unreleasable=0.0) for rank in "01")
    history = seen(look(0, workers=both), look(5, workers=both[:1]))
    assert isinstance(history.now("held"), Unknown)
    history.add(look(10, workers=both))
    assert list(history.since("held", 60.0).values) == [2e9, 2e9]
    late = both[1]._replace(age_s=60.0)
    history.add(look(15, workers=(both[0], late)))
    assert isinstance(history.now("held"), Unknown)
    assert isinstance(seen(look(0, workers=(late,))).now("held"), Unknown)


def test_the_sums_before_a_worker_was_first_seen_are_forgotten() -> None:
    """One more worker than before is no growth: what was added up without it is forgotten."""
    both = tuple(WorkerMemory(rank, 1.0, retries=3.0) for rank in "01")
    history = seen(look(0, workers=both[:1]), look(5, workers=both))
    assert list(history.since("retries", 60.0).values) == [6.0]
    alone = [look(at, workers=both[:1]) for at in range(10, 700, 5)]
    assert isinstance(seen(*alone[:100], look(0)).now("retries"), float)
    for one in alone:
        history.add(one)
    assert history.now("retries") == 3.0, "a worker that has not been heard of for ten minutes is not one of them any more"


def test_silence_between_two_refusals_is_forgiven_and_an_answer_is_not() -> None:
    """Nobody has listened since the first refusal, unless somebody answered or nobody asked for long."""
    refused = [Look(at, 1e9 + at, Reach.REFUSED) for at in (0.0, 5.0, 15.0)]
    silent = Look(10.0, 1e9, Reach.SILENT)
    assert seen(refused[0], refused[1], silent, refused[2]).refused_since_s == 0.0
    assert seen(refused[0], refused[1], silent._replace(reach=Reach.NONSENSE), refused[2]).refused_since_s == 15.0
    assert seen(refused[0], refused[1], look(10.0), refused[2]).refused_since_s == 15.0
    assert seen(refused[0], Look(60.0, 1e9, Reach.REFUSED)).refused_since_s == 60.0


def test_time_spent_dead_is_no_part_of_a_start() -> None:
    """Ten minutes down and twenty seconds of start teach twenty seconds; where nobody tells them apart, nothing is learnt."""
    down = [Look(at, 1e9 + at, Reach.REFUSED) for at in range(0, 600, 5)]
    assert seen(*down, look(600.0, started_unix_s=1e9 + 580)).longest_start_s == 20.0
    assert seen(*down, look(600.0)).longest_start_s == 0.0
    assert seen(*down, look(600.0, started_unix_s=1e9 + 9_999)).longest_start_s == 0.0, "its clock is not ours"


def test_a_restart_begins_the_figures_and_the_steps_anew() -> None:
    """Nothing of the process before is taken for this one's: no rise from its counters, no step, no point of the day."""
    looks = [look(at, {"steps": float(at), "running": 1.0, "waiting": 0.0}, started_unix_s=1e9) for at in range(0, 300, 5)]
    history = seen(*looks, look(300, {"steps": 900.0, "running": 1.0, "waiting": 0.0}, started_unix_s=1e9 + 290))
    assert list(history.since("steps", 1e6).values) == [900.0]
    assert len(history.long("running").times) <= 1
    ((_, pulse),) = history.cores
    assert (pulse.step_at_s, pulse.longest_gap_s) == (None, 0.0)


def test_a_restart_is_seen_once_also_where_its_start_time_comes_late() -> None:
    """Counters that fall are a new process; the start time that is read a look later does not make it two."""
    many, few = {"steps": 100.0, "success": 10.0}, {"steps": 1.0, "success": 0.0}
    history = seen(look(0, many, started_unix_s=1e9), look(5, few), look(10, few, started_unix_s=1e9 + 4))
    assert history.lives.since(0.0) == 1


def test_starts_are_counted_by_guards_own_clock_and_by_the_cluster() -> None:
    """An engine whose clock is hours off, or that never lives long enough to be seen, is counted all the same."""
    off = seen(*(look(at, started_unix_s=5e8 - at) for at in (0, 60, 120, 180)))
    assert (off.lives.since(0.0), off.lives.since(100.0)) == (3, 2)
    refused = [Look(60.0 * number, 1e9, Reach.REFUSED, container_restarts=7 + number) for number in range(4)]
    assert seen(*refused).lives.since(0.0) == 3


def test_several_servers_behind_one_address_are_noticed() -> None:
    """A start time that comes back after another was seen is restart blocked: two servers answer in turn."""
    assert not seen(look(0, started_unix_s=1e9), look(5, started_unix_s=1e9 + 50)).lives.is_shared(5.0)
    turns = [look(5 * number, started_unix_s=1e9 + 50 * (number % 2)) for number in range(3)]
    assert seen(*turns).lives.is_shared(10.0)
    assert not seen(*turns).lives.is_shared(700.0), "a rollout that is over"


def test_a_name_at_every_look_does_not_fill_the_memory() -> None:
    """Workers and cores with other names at every look are not kept for ever."""
    history = History()
    for number in range(60):
        workers = tuple(WorkerMemory(f"{number}/{rank}", 1.0, retries=0.0, by_others=1.0) for rank in range(100))
        cores = tuple(CoreFigures(f"{number}/{rank}", 1.0, 0.0, 0.0) for rank in range(100))
        history.add(look(5.0 * number, workers=workers, ranks=cores))
    assert all(len(kept) <= 1_024 for kept in (history._ranks, history._least_others, history._pulses))


def test_who_told_and_does_not_any_more_is_missed() -> None:
    """A gate that told of this process before and does not now may have told that it sleeps."""
    gate = GateState(ready=True, reason="", in_flight=0, engine_requests=0)
    history = seen(look(0, gate=gate), look(5))
    assert (history.lost, history.has_lost_gate) == ("gate", True)
    history.add(look(10, gate=gate))
    assert history.lost == ""
    assert seen(look(0, {"asleep": 0.0}), look(5, {"asleep": math.nan})).lost == "page"


def test_only_what_is_a_number_of_such_a_figure_is_known() -> None:
    """NaN, infinity and less than nothing are no figures; what a rule of the user's own may name is kept."""
    gate = GateState(ready=True, reason="", in_flight=7, engine_requests=3)
    history = seen(look(0, {"running": math.nan, "waiting": math.inf, "steps": -1.0}, gate=gate))
    assert all(isinstance(history.now(name), Unknown) for name in ("running", "waiting", "steps"))
    assert history.now("in_flight") == 7.0
    assert isinstance(seen(look(0)).now("in_flight"), Unknown)


def started(vllm: str = "0.32.0", **config: str) -> Look:
    return Look(0.0, 0.0, Reach.ANSWERS, vllm=vllm, config=config)


@each(
    ("before", "after", "said"),
    [
        ("15497", "15501", ""),
        ("15497", "15400", ""),
        ("15497", "15200", "num_gpu_blocks 15497 became 15200"),
        ("None", "15497", "num_gpu_blocks None became 15497"),
        ("nan", "15497", "num_gpu_blocks nan became 15497"),
    ],
)
def test_a_cache_that_is_measured_is_never_quite_the_same(before: str, after: str, said: str) -> None:
    """A few blocks more or less are no change: vLLM measures them anew at each start. More than a hundredth is one."""
    assert describe_changes(started(num_gpu_blocks=before), started(num_gpu_blocks=after)) == said


def test_a_setting_is_the_same_or_it_is_not() -> None:
    """Of what somebody sets, and of the version, any difference is told."""
    before, after = started(gpu_memory_utilization="0.92", block_size="16"), started("0.32.1", gpu_memory_utilization="0.921")
    assert describe_changes(before, after) == "vLLM 0.32.0 became 0.32.1; gpu_memory_utilization 0.92 became 0.921"
