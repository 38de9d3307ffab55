"""Whom the gate lets in: the drain as a lease, reasons for not being ready, and how long a request would wait."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from plimsoll.inside.admission import (
    LEAVING,
    LONGEST_RETRY_S,
    REASONS,
    REFUSING,
    SERVING,
    Drain,
    Queue,
    StaleEpoch,
    begin,
    end,
    expected_wait,
    judge,
    retry_after,
)

spans = st.floats(0.1, 100)
wishes: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    epoch=st.none() | st.integers(0, 20),
    lease_s=spans,
    quiet_s=st.none() | spans,
    bound_s=st.none() | spans,
    refuse=st.booleans(),
    retry_after_s=st.none() | st.integers(0, 60),
)


class Life(RuleBasedStateMachine):
    """Wishes and time in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.drain = Drain()
        self.now = 1000.0
        self.admitted = 0.0
        self.largest = 0

    @rule(wish=wishes)
    def ask(self, wish: dict[str, Any]) -> None:
        before, phase, epoch = self.drain, self.phase(), wish["epoch"]
        try:
            found = begin(before, self.now, self.admitted, **wish)
        except StaleEpoch:
            assert epoch < before.epoch
            return
        assert epoch is None or epoch >= before.epoch
        self.drain = found
        assert found.until == self.now + wish["lease_s"]
        if phase == REFUSING:
            assert self.phase() == REFUSING, "a renewal took phase two back"
        if phase == SERVING:
            assert found.since == self.now
        if wish["refuse"]:
            assert self.phase() == REFUSING

    @rule(epoch=st.none() | st.integers(0, 20))
    def stop(self, epoch: int | None) -> None:
        try:
            self.drain = end(self.drain, epoch)
        except StaleEpoch:
            assert epoch is not None
            assert epoch < self.drain.epoch
            return
        assert self.phase() == SERVING

    @rule(seconds=st.floats(0, 200))
    def wait(self, seconds: float) -> None:
        end_of_lease = self.drain.until
        self.now += seconds
        if self.now >= end_of_lease:
            assert self.phase() == SERVING

    @rule()
    def admit(self) -> None:
        if self.phase() != REFUSING:
            self.admitted = self.now

    def phase(self) -> str:
        return self.drain.phase(self.now, self.admitted)

    @invariant()
    def epochs_only_grow(self) -> None:
        assert self.drain.epoch >= self.largest
        self.largest = self.drain.epoch


TestLife = Life.TestCase


def test_phases_follow_each_other() -> None:
    """Leaving while requests come, refusing when they stop or the bound passes, serving when nobody renews the lease."""
    found = begin(Drain(), 100.0, epoch=1, quiet_s=5.0, bound_s=30.0, lease_s=60.0)
    moments = {(104.9, 0.0): LEAVING, (105.0, 0.0): REFUSING, (129.9, 129.0): LEAVING, (130.0, 130.0): REFUSING}
    assert {moment: found.phase(*moment) for moment in moments} == moments
    assert found.phase(160.0, 0.0) == SERVING


def test_ready_means_that_no_reason_holds_and_the_gravest_is_named() -> None:
    """Over all combinations: the order of REASONS. Nothing about a queue or shedding is a reason: the judge is not told."""
    for engine, dead, wedged, asleep, phase, stopping in itertools.product(
        (True, False), (True, False), (True, False), ("", "paused: waits"), (SERVING, LEAVING, REFUSING), (True, False)
    ):
        holds = dict(zip(REASONS, (not engine, dead, wedged, bool(asleep), stopping or phase != SERVING), strict=True))
        expected = next((reason for reason in REASONS if holds[reason]), "ready")
        found = judge(has_engine=engine, is_dead=dead, is_wedged=wedged, asleep=asleep, is_stopping=stopping, drain_phase=phase)
        assert (found.reason, found.is_ready) == (expected, not any(holds.values()))
        if expected == "asleep":
            assert found.detail == asleep
        if expected == "draining" and not stopping:
            assert phase in found.detail
    assert REASONS == ("starting", "dead", "wedged", "asleep", "draining")


some = st.floats(0, 1e9)
queues = st.builds(
    Queue,
    waiting=st.none() | st.integers(0, 10_000),
    running=st.none() | st.integers(0, 10_000),
    places=st.none() | st.integers(1, 10_000),
    queued_tokens=some,
    coming=st.integers(0, 10_000),
    tokens_each=st.none() | some,
    tokens_per_s=st.none() | some,
)
KNOWN = Queue(5, 4, 4, 3000.0, 0, 100.0, 500.0)


def test_the_wait_is_the_tokens_ahead_by_the_rate() -> None:
    """3,000 tokens at 500 a second are six seconds; without a rate, a usual length or a number of places it is unknown."""
    for queue, seconds in (
        (KNOWN, 6.0),
        (KNOWN._replace(coming=10), 8.0),
        (KNOWN._replace(tokens_per_s=None), None),
        (KNOWN._replace(tokens_per_s=0.0), None),
        (KNOWN._replace(coming=1, tokens_each=None), None),
        (KNOWN._replace(waiting=0, coming=1, places=None), None),
    ):
        assert expected_wait(queue).seconds == seconds, queue


@given(queue=queues, more_waiting=st.integers(0, 100), more_tokens=some, more_coming=st.integers(0, 100))
def test_whatever_the_queue_a_wait_is_a_time_or_unknown(
    queue: Queue, more_waiting: int, more_tokens: float, more_coming: int
) -> None:
    """Never negative, never without a word why; idle never waits; with the same rate a longer queue never waits less."""
    wait = expected_wait(queue)
    assert wait.because
    assert wait.seconds is None or wait.seconds >= 0
    if not queue.tokens_per_s:
        assert wait.seconds in (None, 0.0)
    assert expected_wait(queue._replace(waiting=0, running=0, places=max(queue.coming, 1) + 1)).seconds == 0.0
    longer = queue._replace(
        waiting=(queue.waiting or 0) + more_waiting,
        queued_tokens=queue.queued_tokens + more_tokens,
        coming=queue.coming + more_coming,
    )
    before, after = expected_wait(queue).seconds, expected_wait(longer).seconds
    if before is not None and after is not None:
        assert after >= before * (1 - 1e-9)


@given(wait_s=st.floats(0, 1e12), bound_s=st.floats(0, 1e6))
def test_come_again_after_a_second_to_two_minutes(wait_s: float, bound_s: float) -> None:
    """Whole seconds, never 0, never so far that a client gives up for good."""
    found = retry_after(wait_s, bound_s)
    assert isinstance(found, int)
    assert 1 <= found <= LONGEST_RETRY_S
    assert found >= min(wait_s - bound_s, LONGEST_RETRY_S)
