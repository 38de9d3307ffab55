"""One engine without a GPU: it serves, counts, stands still, runs out and dies as vLLM does, at moments it is told."""

from __future__ import annotations

import pytest

from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.standin.engine import EngineDead
from plimsoll.standin.faults import parse_fault
from plimsoll.standin.request import SampleGroup
from tests.standin.engines import GIB, MIB, NS, SETTINGS, ask, engine, served

STEP = 10_000_000


def test_a_request_is_served_step_by_step() -> None:
    """The first token comes with the first step, the last with the last; every one wakes its reader once."""
    one = engine()
    woken = []
    request = one.submit(ask(100, 3), 0, lambda: woken.append(request.produced))
    for number in range(1, 4):
        assert one.next_ns() == (0 if number == 1 else number * STEP)
        one.advance(number * STEP - 1)
        assert (request.produced, one.figures.running) == (number - 1, number > 1)  # gauges move when a step has ended
        one.advance(number * STEP)
    assert woken == [1, 2, 3]
    assert (request.finish, request.first_ns, request.finished_ns) == ("length", STEP, 3 * STEP)
    assert one.next_ns() is None
    assert one.requests == {}


def test_figures_are_what_the_scheduler_did() -> None:
    """Tokens, hits, steps and ends, counted when vLLM counts them."""
    one = engine()
    served(one, one.submit(ask(100, 10), 0))
    figures = one.figures
    assert (figures.prompt_tokens, figures.generation_tokens, figures.steps) == (100, 10, 10)
    assert (figures.success["length"], figures.running, figures.waiting, figures.kv_usage) == (1, 0, 0, 0.0)
    assert figures.histograms["ttft"].counts == [1, 0, 0, 0, 0]  # 10 ms is on the edge
    assert figures.histograms["step_tokens"].counts == [9, 0, 0, 1, 0]
    assert figures.histograms["step_tokens"].total == 110
    assert figures.histograms["inter_token"].total == pytest.approx(0.09)
    assert served(one, one.submit(ask(100, 10), one.now_ns)).cached_tokens == 96
    assert (figures.prefix_queries, figures.prefix_hits) == (200, 96)
    assert (figures.prompt_computed, figures.prompt_cached) == (104, 96)


def test_a_request_that_was_taken_back_leaves_nothing() -> None:
    """Its blocks are free, the gauges say so with the empty step that vLLM makes, and nothing counts it."""
    one = engine()
    request = one.submit(ask(100, 500), 0)
    one.advance(5 * STEP)
    assert one.figures.running == 1
    one.abort(request, one.now_ns)
    assert one.next_ns() == one.now_ns
    one.advance(one.now_ns)
    assert (one.figures.running, one.figures.kv_usage, sum(one.figures.success.values())) == (0, 0.0, 0)


def test_a_pool_too_small_preempts_and_says_so_later() -> None:
    """The counter rises when the victim has its next token, as vLLM's does."""
    one = engine(settings=SETTINGS._replace(num_blocks=18, max_num_seqs=8))
    for seed in range(1, 7):
        one.submit(ask(10, 120, seed), 0)
    seen = []
    while one.requests:
        one.advance(one.now_ns + STEP)
        seen.append((one.run.count(16), one.figures.preemptions))
    assert seen[-1][0] == seen[-1][1] > 0
    assert any(done > told for done, told in seen)
    assert one.figures.success["length"] == 6


def test_a_wedge_stops_every_step_and_ends_where_it_began() -> None:
    """No token for its time, frozen gauges, and afterwards everything goes on, later by just that."""
    one = engine("wedge@1s:30s")
    request = one.submit(ask(100, 200), 0)
    one.advance(int(1.0 * NS))
    before = request.produced
    one.advance(20 * NS)
    assert request.produced == before == 100
    left = one.submit(ask(10, 2, seed=3), 20 * NS)
    one.abort(left, 20 * NS)  # a client that leaves meanwhile makes nothing due
    late = one.submit(ask(10, 2, seed=2), 20 * NS)
    assert one.next_ns() == 31 * NS
    one.advance(int(30.99 * NS))
    assert (request.produced, late.produced, one.figures.running) == (before, 0, 1)
    one.advance(33 * NS)
    assert (request.finish, late.finish) == ("length", "length")
    assert request.finished_ns == 32 * NS
    assert late.scheduled_ns >= 31 * NS


def test_an_idle_hang_waits_until_nothing_is_left() -> None:
    """Who was there is served; who comes afterwards is not, however long before it was announced."""
    one = engine("idle-hang@0.05s")
    first, second = one.submit(ask(100, 10), 0), one.submit(ask(10, 2, seed=2), 2 * NS)
    one.advance(NS)
    assert first.finish == "length"
    one.advance(60 * NS)
    assert second.finish is None
    one.faults.take_back("idle-hang")
    one.advance(61 * NS)
    assert second.finish == "length"


def test_out_of_memory_kills_it_and_tells_everybody() -> None:
    """At the next step; the text is torch's, and nothing can be asked afterwards."""
    one = engine("oom@0.5s")
    request = one.submit(ask(100, 400), 0)
    one.advance(int(0.5 * NS))
    assert not one.is_dead
    one.advance(NS)
    assert [request.finish, one.is_dead, one.next_ns()] == ["error", True, None]
    assert one.death is not None
    assert one.death.startswith("CUDA out of memory. Tried to allocate ")
    assert one.died_of_logits, "a step of one token each needs more for its logits than for anything before"
    with pytest.raises(EngineDead):
        one.submit(ask(), one.now_ns)


def test_paused_it_takes_in_and_shows_nothing() -> None:
    """`keep` freezes, `wait` finishes, `abort` ends what there is; what comes is held until it goes on."""
    one = engine()
    running = one.submit(ask(50, 100), 0)
    one.advance(NS // 10)
    one.pause("keep", one.now_ns)
    held = one.submit(ask(10, 2, seed=2), NS)
    one.advance(10 * NS)
    assert (running.produced, held.produced, one.figures.waiting) == (10, 0, 0)
    one.resume(10 * NS)
    one.advance(20 * NS)
    assert (running.finish, held.finish) == ("length", "length")
    waiting = one.submit(ask(50, 100, seed=3), 20 * NS)
    one.pause("wait", 20 * NS)
    later = one.submit(ask(10, 2, seed=4), 20 * NS)
    one.advance(30 * NS)
    assert (waiting.finish, later.finish) == ("length", None)
    one.resume(30 * NS)
    one.pause("abort", 30 * NS)
    assert later.finish == "abort"
    assert one.figures.success["abort"] == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_however_often_it_is_looked_at_it_does_the_same(is_async: bool) -> None:
    """A thousand small looks and one large one: the same figures, to the last bucket."""

    def run(piece_ns: int) -> object:
        limits = EngineLimits(num_blocks=60, block_size=16, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512,
                          async_scheduling=is_async)  # fmt: skip
        one = engine(settings=limits, step_time=StepTime(5_000_000, 20_000, 10_000, 40_000))
        requests = [one.submit(ask(40 + 7 * seed % 60, 20 + seed, seed), seed * 30_000_000) for seed in range(1, 40)]
        while one.now_ns < 60 * NS:
            one.advance(one.now_ns + piece_ns)
        assert all(request.finish == "length" for request in requests)
        shown = {name: (histogram.counts, round(histogram.total, 6)) for name, histogram in one.figures.histograms.items()}
        return {**vars(one.figures), "histograms": shown}

    assert run(60 * NS) == run(3_000_000) == run(777_777_777)


def test_a_day_goes_by_in_a_moment() -> None:
    """An idle day costs nothing, whatever is due at its end."""
    one = engine("wedge@23h")
    assert one.next_ns() == 23 * 3600 * NS  # nothing is due before
    one.advance(86_400 * NS)
    assert one.run.is_frozen
    assert one.run.tally.sums.sum() == 1  # that somebody listens, and no step


def test_asleep_its_memory_is_the_others() -> None:
    """Level 1 gives the device's memory back; awake it is taken again, and if somebody has it, that is the end."""
    one = engine()
    before = one.memory.figures()["device_memory"]["free"]
    one.sleep(1, "wait", NS)
    assert one.figures.sleep_state == "weights_offloaded"
    assert one.memory.figures()["device_memory"]["free"] > before + 10 * GIB
    one.wake_up(2 * NS)
    assert (one.figures.sleep_state, one.is_dead) == ("awake", False)
    served(one, one.submit(ask(), 2 * NS))
    one.sleep(1, "wait", one.now_ns)
    assert one.memory.take_neighbour(12 * GIB)
    one.wake_up(one.now_ns)
    assert one.is_dead


def test_a_full_host_kills_the_worker() -> None:
    """As the kernel does, without a word of its own."""
    one = engine("host-growth@0s=1TiB/s")
    one.memory.host_limit = 64 * GIB
    one.advance(10 * NS)
    assert one.is_dead
    assert "exit code: -9" in str(one.death)


def test_several_answers_to_one_prompt_count_once_where_vllm_does() -> None:
    """Their number and the longest of them, with the last that ends."""
    one = engine()
    family = SampleGroup(3)
    for seed, output in ((1, 5), (2, 9), (3, 7)):
        one.submit(ask(40, output, seed)._replace(n=3, family=family), 0)
    one.advance(6 * STEP)
    assert one.figures.histograms["params_n"].count == 0
    one.advance(NS)
    assert (one.figures.histograms["params_n"].count, one.figures.histograms["params_n"].total) == (1, 3.0)
    assert one.figures.histograms["max_output"].total == 9.0
    assert one.figures.histograms["output"].count == 3


def test_what_grows_grows_from_its_onset() -> None:
    """An idle hour before it does not count, nor does the time before it was asked for."""
    one = engine("growth@100s=1MiB/s", "host-growth@100s=1MiB/s")
    before = one.memory.figures()
    one.advance(100 * NS)
    one.advance(110 * NS)
    after = one.memory.figures()
    assert after["host_memory"]["resident"] - before["host_memory"]["resident"] == 10 * MIB
    assert 9 * MIB < after["allocator"]["allocated"] - before["allocator"]["allocated"] < 12 * MIB
    other = engine()
    other.advance(3600 * NS)
    other.faults.append(parse_fault("host-growth@3600s=1MiB/s"))
    other.advance(3601 * NS)
    assert other.memory.figures()["host_memory"]["resident"] - before["host_memory"]["resident"] == MIB


def test_a_neighbour_takes_the_rest_when_it_becomes_free() -> None:
    """One that wants more than there is has what is free, and after a compaction that, too; it leaves when it is over."""
    one = engine("neighbour@1s:10s=20GiB")
    served(one, one.submit(ask(1900, 2), 0))
    one.advance(2 * NS)
    first = one.memory.figures()["device_memory"]
    assert (first["free"], first["by_others"] > 0) == (0, True)
    (answer,) = one.compact(2 * NS)
    one.advance(4 * NS)
    assert one.memory.figures()["device_memory"]["by_others"] == first["by_others"] + answer["returned"]
    assert answer["returned"] > 0
    one.advance(20 * NS)
    assert one.memory.figures()["device_memory"]["by_others"] == 0


def test_a_storm_ends_when_it_is_over_and_a_dead_worker_writes_no_more() -> None:
    """Its requests go with it; figures stay, with their age."""
    one = engine("preemption-storm@1s:20s")
    one.advance(15 * NS)
    assert one.requests
    assert one.figures.preemptions > 20  # by the scheduler's own counters
    one.advance(22 * NS)
    assert not one.requests
    one = engine("oom@1s")
    one.submit(ask(100, 500), 0)
    one.advance(2 * NS)
    (worker,) = one.worker_figures(60 * NS)
    assert worker["alive"] is False
    assert worker["age_s"] > 50
