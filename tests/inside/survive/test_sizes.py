"""The size of steps after failures: how it shrinks, whom it aborts, when it grows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.survive.sizes import (
    ALONE_TRIES,
    CALM_S,
    GROW_AFTER_S,
    LIMP_AFTER_S,
    RETRY_AFTER_S,
    SMALLEST_TOKENS,
    STORM_WINDOW_S,
    Limits,
    OutOfMemoryStep,
    Sizes,  # fmt: skip
)

START = Limits(8192, 256, 4096)


def step(tokens: int, requests: int = 48, **more: object) -> OutOfMemoryStep:
    return OutOfMemoryStep(tokens, tuple(f"r{number}" for number in range(requests)), **more)  # type: ignore[arg-type]


def after(sizes: Sizes, failed: OutOfMemoryStep, now: float) -> Limits:
    sizes.fail(failed, now)
    return sizes.now


def test_a_failed_step_halves_what_it_held() -> None:
    """Not the bound, which it did not reach; no more sequences than it can serve; a mamba block still fits."""
    sizes = Sizes(START)
    assert after(sizes, step(3000), 0.0) == Limits(1500, 256, 4096)
    assert after(sizes, step(1500), 0.1).tokens == 750
    sizes = Sizes(START, tokens_per_sequence=3)
    assert after(sizes, step(600), 0.0) == Limits(300, 100, 4096)
    sizes = Sizes(START)
    assert after(sizes, step(32, 32), 0.0) == Limits(4096, 16, 4096)
    assert after(sizes, step(16, 16), 0.1).sequences == 8
    sizes = Sizes(START, smallest=528)
    assert after(sizes, step(600), 0.0).tokens == 528


def test_the_request_that_fails_alone_is_aborted_and_the_others_get_their_size_back() -> None:
    """Not one that sends tokens between its failures: it makes progress."""
    sizes = Sizes(START)
    sizes.fail(step(8192), 0.0)
    verdicts = [sizes.fail(step(64, 1), 0.1 * turn) for turn in range(1, ALONE_TRIES + 1)]
    assert [verdict.abort for verdict in verdicts] == [None] * (ALONE_TRIES - 1) + ["r0"]
    assert sizes.now == START
    sizes = Sizes(START)
    for turn in range(20):
        assert sizes.fail(step(1, 1), 0.1 * turn).abort is None
        sizes.progress(["r0"])


def test_a_picture_that_fails_alone_is_aborted_whatever_the_step_held_besides() -> None:
    """An encoder takes whole pictures; tries alone count over a calm of ten seconds."""
    sizes = Sizes(START)
    two = step(8192, 40, site="encoder", encoder_requests=("r1", "r2"), largest_item=900)
    one = step(8192, 40, site="encoder", encoder_requests=("r1",), largest_item=900)
    assert after(sizes, two, 0.0) == Limits(8192, 256, 900)
    assert [sizes.fail(one, 0.1).abort for _ in range(ALONE_TRIES)] == [None] * (ALONE_TRIES - 1) + ["r1"]
    sizes = Sizes(START)
    one = step(8192, 40, site="encoder", encoder_requests=("r1",), largest_item=900)
    assert [sizes.fail(one, 10.0 * turn).abort for turn in range(ALONE_TRIES)] == [None] * (ALONE_TRIES - 1) + ["r1"]


def test_steps_grow_back_by_half_below_the_size_that_failed() -> None:
    """That size itself waits for more free memory than at the failure."""
    sizes = Sizes(START)
    sizes.fail(step(8192), 0.0)
    sizes.fail(step(4096), 0.1)
    assert sizes.now.tokens == 2048
    assert not sizes.grow(GROW_AFTER_S - 1, has_room=None)
    assert sizes.grow(GROW_AFTER_S + 1, has_room=False)
    assert sizes.now.tokens == 3072
    sizes = Sizes(START)
    sizes.fail(step(8192), 0.0)
    assert sizes.grow(GROW_AFTER_S, has_room=False)
    assert sizes.now.tokens == 6144
    assert not any(sizes.grow(20.0 + second, has_room=False) for second in range(10_000))
    assert sizes.grow(10_100.0, has_room=True)
    assert sizes.is_whole


def test_where_memory_cannot_be_read_each_failed_try_doubles_the_pause() -> None:
    """A shortage that lasts ends in smaller steps, not in a cascade of recomputing."""
    sizes, failures, now = Sizes(Limits(2048, 128)), 0, 0.0
    while now < 3600:
        if sizes.now.tokens > 300:
            sizes.fail(step(sizes.now.tokens), now)
            failures += 1
        sizes.grow(now, has_room=None)
        now += 1.0
    assert failures <= 14
    assert 128 <= sizes.now.tokens <= 300


def test_a_try_that_fails_goes_back_to_the_size_that_held() -> None:
    """The size before was shown to work: nobody needs a smaller one."""
    sizes = Sizes(START)
    sizes.fail(step(8192), 0.0)
    sizes.grow(GROW_AFTER_S, has_room=None)
    assert after(sizes, step(6000), GROW_AFTER_S + 1).tokens == 4096


def test_so_many_failures_are_a_storm_and_twice_as_many_the_end() -> None:
    """A server that only recomputes is better restarted; 0 switches this off."""
    sizes = Sizes(START, storm=5)
    verdicts = [(sizes.fail(step(8192), 10.0 * turn).is_over, sizes.is_storm(10.0 * turn)) for turn in range(10)]
    assert verdicts == [(False, False)] * 4 + [(False, True)] * 5 + [(True, True)]
    assert not sizes.is_storm(100.0 + STORM_WINDOW_S)
    off = Sizes(START, storm=0)
    assert not any(off.fail(step(8192), 0.1 * turn).is_over for turn in range(500))


def test_small_steps_for_minutes_are_limping() -> None:
    """Under a quarter of the usual tokens or sequences for five minutes; half of them is not."""
    sizes = Sizes(START)
    sizes.fail(step(8192), 0.0)
    assert not sizes.is_limping(LIMP_AFTER_S + 1)
    sizes.fail(step(2048), 1.0)
    assert not sizes.is_limping(LIMP_AFTER_S)
    assert sizes.is_limping(LIMP_AFTER_S + 2)
    sizes = Sizes(START)
    sizes.fail(step(2, 2), 0.0)
    assert sizes.now.sequences == 1
    assert sizes.is_limping(LIMP_AFTER_S + 1)


@given(st.data())
def test_whatever_fails_the_limits_stay_sound(data: st.DataObject) -> None:
    """Never above the start, never below one sequence, never more sequences than tokens, and the smallest step can run."""
    start = Limits(data.draw(st.integers(16, 20_000)), data.draw(st.integers(1, 2000)), data.draw(st.integers(0, 9000)))
    drafts = data.draw(st.integers(1, 6))
    sizes, now = Sizes(start, drafts, data.draw(st.integers(0, 1100)), storm=0), 0.0
    for _ in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.floats(0.0, 3 * max(CALM_S, GROW_AFTER_S, RETRY_AFTER_S)))
        if data.draw(st.booleans()):
            count = data.draw(st.integers(1, sizes.now.sequences))
            tokens = data.draw(st.integers(count, max(count, sizes.now.tokens)))
            items = tuple(f"r{number}" for number in range(data.draw(st.integers(0, 3))))
            site = data.draw(st.sampled_from(["forward", "encoder", "logits", "unknown"]))
            sizes.fail(step(tokens, count, site=site, encoder_requests=items, largest_item=7), now)
        else:
            sizes.grow(now, has_room=data.draw(st.sampled_from([None, True, False])))
        assert 1 <= sizes.now.sequences <= start.sequences
        assert min(SMALLEST_TOKENS, start.tokens) <= sizes.now.tokens <= start.tokens
        assert sizes.now.sequences == 1 or sizes.now.sequences * drafts <= sizes.now.tokens or sizes.now.tokens == start.tokens


@given(st.integers(64, 20_000), st.integers(1, 512))
def test_whatever_the_size_a_request_that_always_fails_is_found(tokens: int, sequences: int) -> None:
    """The steps that hold it shrink until it is alone; at most one failure a halving and three alone."""
    sizes, count, turns = Sizes(Limits(tokens, sequences), storm=0), min(sequences, 48), 0
    while turns < 60:
        turns += 1
        held = min(count, sizes.now.sequences)
        size = max(held, min(sizes.now.tokens, 4000 * held))
        if sizes.fail(step(size, held), 0.01 * turns).abort is not None:
            break
    assert turns <= 16 + ALONE_TRIES + 6


def test_what_is_known_of_requests_that_have_ended_is_forgotten() -> None:
    """An engine that stays small for days does not grow; a trial ends when another request has the place."""
    sizes = Sizes(START)
    sizes.fail(step(8192), 0.0)
    sizes.fail(step(1, 1), 0.1)
    for number in range(1000):
        sizes.progress([f"request-{number}"])
        sizes.keep_only({f"request-{number}"})
    assert len(sizes._cleared) + len(sizes._alone) <= 1
    sizes = Sizes(Limits(64, 8))
    sizes.fail(step(8, 8), 0.0)
    sizes.progress(["r0", "r1", "r2"])
    assert sizes.fail(step(4, 4), 0.1).first == "r3"
    assert sizes.now.sequences == 1
    sizes.progress(["another"])
    assert sizes.on_trial is None
    assert sizes.now.sequences == 3
