"""The expected wait: idle never waits, unknown is never a number, more ahead is never less."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.admission import LONGEST_RETRY_S, PRIORITIES, Queue, bound_for, expected_wait, retry_after

some = st.floats(0, 1e9)
queues = st.builds(
    Queue,
    waiting=st.none() | st.integers(0, 10_000),
    running=st.none() | st.integers(0, 10_000),
    places=st.none() | st.integers(1, 10_000),
    queued_tokens=some,
    coming=st.integers(0, 10_000),
    tokens_each=st.none() | some,
    coming_item_tokens=some,
    tokens_per_s=st.none() | some,
)
KNOWN = Queue(5, 4, 4, 3000.0, 0, 100.0, 0.0, 500.0)


def test_the_wait_is_the_tokens_ahead_by_the_rate() -> None:
    """3,000 tokens at 500 a second are six seconds; ten more of 100 each are two more."""
    assert expected_wait(KNOWN).seconds == 6.0
    assert expected_wait(KNOWN._replace(coming=10)).seconds == 8.0
    assert expected_wait(KNOWN._replace(coming=10, coming_item_tokens=500.0)).seconds == 9.0


def test_what_is_missing_makes_the_wait_unknown() -> None:
    """No rate or one of nothing, no usual length, no number of places."""
    assert expected_wait(KNOWN._replace(tokens_per_s=None)).seconds is None
    assert expected_wait(KNOWN._replace(tokens_per_s=0.0)).seconds is None
    assert expected_wait(KNOWN._replace(coming=1, tokens_each=None)).seconds is None
    assert expected_wait(KNOWN._replace(waiting=0, coming=1, places=None)).seconds is None


@given(queue=queues)
def test_an_idle_server_makes_nobody_wait(queue: Queue) -> None:
    """Nothing waits and there is a place for all that come: the wait is 0, whatever else is believed."""
    free = queue._replace(waiting=0, running=0, places=max(queue.coming, 1) + 1)
    assert expected_wait(free).seconds == 0.0


@given(queue=queues)
def test_unknown_is_none_and_a_number_is_a_time(queue: Queue) -> None:
    """Never negative, never without a word why."""
    wait = expected_wait(queue)
    assert wait.because
    assert wait.seconds is None or wait.seconds >= 0
    if not queue.tokens_per_s:
        assert wait.seconds in (None, 0.0)


@given(queue=queues, more_waiting=st.integers(0, 100), more_tokens=some, more_coming=st.integers(0, 100))
def test_more_ahead_never_shortens_the_wait(queue: Queue, more_waiting: int, more_tokens: float, more_coming: int) -> None:
    """With the same rate and the same items, a longer queue waits at least as long."""
    queue = queue._replace(coming_item_tokens=0.0)
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


@given(word=st.binary(max_size=20))
def test_an_unknown_priority_is_normal(word: bytes) -> None:
    """No word a client makes up helps it."""
    known = word.decode("latin-1").strip().lower()
    assert bound_for(10.0, word) == 10.0 * PRIORITIES.get(known, 1.0)
    assert bound_for(10.0, b"high") > bound_for(10.0, b"") > bound_for(10.0, b" LOW ")
