"""Who waits, and who is next: as a sorted list would tell it."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.simulate import layout as at
from plimsoll.simulate import queues
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.start import start
from plimsoll.simulate.trace import make_trace
from tests.simulate.plain_parts import as_written

plain = as_written(queues)
DEEDS = st.lists(st.sampled_from(["new", "new", "new", "next", "back", "leave"]), max_size=60)


def _state(priorities: list[int], arrivals: list[int], policy: Literal["fcfs", "priority"]) -> at.RunState:
    count = len(priorities)
    trace = make_trace("t", sorted(arrivals), [1] * count, [1] * count, priorities)
    return start(trace, EngineLimits(policy=policy), StepTime(), trace.arrival_ns)


def _line(s: at.RunState) -> list[int]:
    """All who wait, as they lie in the ring or heap."""
    head = 0 if s.limits[at.BY_PRIORITY] else int(s.counts[at.WAITING_HEAD])
    return [int(s.waiting[(head + place) % len(s.waiting)]) for place in range(int(s.counts[at.WAITING_COUNT]))]


@given(DEEDS, st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 3)), min_size=12, max_size=12), st.data())
def test_priorities_go_in_order(deeds: list[str], rows: list[tuple[int, int]], data: st.DataObject) -> None:
    """By priority, arrival, then the text of the number, whoever comes, goes back or leaves from the middle."""
    s = _state([row[0] for row in rows], [row[1] for row in rows], "priority")
    waiting: list[int] = []
    away = list(range(12))
    for deed in deeds:
        if deed in ("new", "back") and away:
            who = away.pop(data.draw(st.integers(0, len(away) - 1)))
            (plain.enqueue if deed == "new" else plain.put_back)(s, who)
            waiting.append(who)
        elif deed == "next" and waiting:
            away.append(int(plain.first(s)))
            plain.drop_first(s)
            waiting.remove(away[-1])
        elif deed == "leave" and waiting:
            away.append(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
            plain.drop(s, away[-1])
        waiting.sort(key=lambda who: (int(s.requests[who, at.PRIORITY]), int(s.stamps[who, at.ARRIVAL]), str(who)))
        assert sorted(_line(s)) == sorted(waiting)
        assert not waiting or plain.first(s) == waiting[0]
    while waiting:
        assert plain.first(s) == waiting.pop(0)
        plain.drop_first(s)


@given(DEEDS, st.data())
def test_first_come_is_first_served(deeds: list[str], data: st.DataObject) -> None:
    """New ones stand at the end, those put back at the front, and a gap in the middle is closed."""
    s = _state([0] * 5, [0] * 5, "fcfs")
    waiting: list[int] = []
    away = list(range(5))
    for deed in deeds:
        if deed == "new" and away:
            waiting.append(away.pop(0))
            plain.enqueue(s, waiting[-1])
        elif deed == "back" and away:
            waiting.insert(0, away.pop(0))
            plain.put_back(s, waiting[0])
        elif deed == "next" and waiting:
            assert plain.first(s) == waiting[0]
            plain.drop_first(s)
            away.append(waiting.pop(0))
        elif deed == "leave" and waiting:
            away.append(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
            plain.drop(s, away[-1])
        assert _line(s) == waiting


def test_who_fills_a_gap_may_go_up() -> None:
    """Somebody leaves a branch of the unimportant, and the last of the line, more urgent than they are, takes the place."""
    priorities = [0, 10, 1, 11, 12, 2, 3]
    s = _state(priorities, [0] * 7, "priority")
    for who in range(7):
        plain.enqueue(s, who)
    plain.drop(s, 3)
    heap = [priorities[who] for who in _line(s)]
    assert sorted(heap) == [0, 1, 2, 3, 10, 12]
    assert all(heap[(place - 1) // 2] < heap[place] for place in range(1, len(heap)))
