"""The drain as a lease: epochs only grow, phase two is not taken back, and a lease that nobody renews ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from plimsoll.inside.admission import LEAVING, REFUSING, SERVING, Drain, Stale, Wish, begin, end

spans = st.floats(0.1, 100)
wishes = st.builds(
    Wish,
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
    def ask(self, wish: Wish) -> None:
        before, phase = self.drain, self.phase()
        found = begin(before, wish, self.now, self.admitted)
        if isinstance(found, Stale):
            assert wish.epoch is not None
            assert wish.epoch < before.epoch
            return
        assert wish.epoch is None or wish.epoch >= before.epoch
        self.drain = found
        assert found.until == self.now + wish.lease_s
        if phase == REFUSING:
            assert self.phase() == REFUSING, "a renewal took phase two back"
        if phase == SERVING:
            assert found.since == self.now
        if wish.refuse:
            assert self.phase() == REFUSING

    @rule(epoch=st.none() | st.integers(0, 20))
    def stop(self, epoch: int | None) -> None:
        found = end(self.drain, epoch)
        if isinstance(found, Stale):
            assert epoch is not None
            assert epoch < self.drain.epoch
            return
        self.drain = found
        assert self.phase() == SERVING

    @rule(seconds=st.floats(0, 200))
    def wait(self, seconds: float) -> None:
        """Time passes; a lease that ends in it ends the drain."""
        end_of_lease = self.drain.until
        self.now += seconds
        if self.now >= end_of_lease:
            assert self.phase() == SERVING

    @rule()
    def admit(self) -> None:
        """A request comes in, where one may."""
        if self.phase() != REFUSING:
            self.admitted = self.now

    def phase(self) -> str:
        """As the gate sees it."""
        return self.drain.phase(self.now, self.admitted)

    @invariant()
    def epochs_only_grow(self) -> None:
        """The largest ever taken is the one that stands."""
        assert self.drain.epoch >= self.largest
        self.largest = self.drain.epoch


TestLife = Life.TestCase


def test_phases_follow_each_other() -> None:
    """Leaving while requests come, refusing when they stop or the bound passes."""
    found = begin(Drain(), Wish(epoch=1, quiet_s=5.0, bound_s=30.0, lease_s=60.0), 100.0, 0.0)
    assert isinstance(found, Drain)
    assert found.phase(104.9, 0.0) == LEAVING
    assert found.phase(105.0, 0.0) == REFUSING
    assert found.phase(129.9, 129.0) == LEAVING
    assert found.phase(130.0, 130.0) == REFUSING
    assert found.phase(160.0, 0.0) == SERVING


def test_phase_two_can_be_asked_for_at_once() -> None:
    """And stays through a renewal that does not say so, until the drain ends."""
    first = begin(Drain(), Wish(refuse=True), 100.0, 0.0)
    assert isinstance(first, Drain)
    assert first.phase(100.0, 100.0) == REFUSING
    second = begin(first, Wish(quiet_s=3000.0, bound_s=3000.0), 110.0, 110.0)
    assert isinstance(second, Drain)
    assert second.phase(110.0, 110.0) == REFUSING
    again = begin(second, Wish(), second.until + 1, 0.0)
    assert isinstance(again, Drain)
    assert again.phase(second.until + 1, 0.0) == LEAVING


def test_a_renewal_with_longer_bounds_does_not_take_phase_two_back() -> None:
    """Whether quiet or the bound had brought it."""
    longer = Wish(quiet_s=3000.0, bound_s=3000.0)
    for first, admitted in ((Wish(quiet_s=5.0), 0.0), (Wish(bound_s=10.0, quiet_s=100.0), 109.0)):
        begun = begin(Drain(), first, 100.0, 0.0)
        assert isinstance(begun, Drain)
        assert begun.phase(110.0, admitted) == REFUSING
        renewed = begin(begun, longer, 110.0, admitted)
        assert isinstance(renewed, Drain)
        assert renewed.phase(110.0, admitted) == REFUSING


@given(current=st.integers(1, 100), asked=st.integers(0, 99))
def test_an_older_epoch_changes_nothing(current: int, asked: int) -> None:
    """Whoever was replaced is told by whom."""
    held = Drain(epoch=current, since=1.0, until=50.0)
    begun, ended = begin(held, Wish(epoch=asked), 2.0, 0.0), end(held, asked)
    if asked < current:
        assert begun == ended == Stale(asked, current)
    else:
        assert isinstance(begun, Drain)
        assert isinstance(ended, Drain)
        assert begun.epoch == ended.epoch == asked
