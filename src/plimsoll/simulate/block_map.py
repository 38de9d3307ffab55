"""The pool, block by block, at some moments of a run: a second run that stops to look."""

from __future__ import annotations

import numpy as np

from plimsoll.domain.trace import States, Trace
from plimsoll.simulate import layout as at
from plimsoll.simulate.clock import advance
from plimsoll.simulate.replay import hybrid_of, new_record, speed_up
from plimsoll.simulate.result import CACHED, FREE, HELD, PARTLY_FILLED, SHARED, BlockMap, Series
from plimsoll.simulate.settings import Settings, StepTime
from plimsoll.simulate.start import start

MINUTE_NS = 60 * 10**9
MOMENTS = 120
MOST_BLOCKS = 8192
"""More could not be told apart."""
MANY = 2**62


def busiest_minute(series: Series) -> tuple[int, int]:
    """From when to when, in ns, the most blocks were in use; the whole run if it is shorter than a minute."""
    bins = len(series.used_blocks)
    width = min(bins, max(1, round(MINUTE_NS / max(1, series.bin_ns))))
    sums = np.concatenate(([0.0], np.cumsum(series.used_blocks)))
    first = int(np.argmax(sums[width:] - sums[:-width])) if bins else 0
    return first * series.bin_ns, (first + width) * series.bin_ns


def map_blocks(
    trace: Trace, settings: Settings, step_time: StepTime, begin_ns: int, end_ns: int, *, speedup: float = 1.0
) -> BlockMap:
    """The state of every block at even moments from `begin_ns` to `end_ns`."""
    state = start(trace, settings, step_time, speed_up(trace, speedup))
    record = new_record(settings, step_time)
    moments = np.linspace(begin_ns, end_ns, MOMENTS).astype(np.int64)
    every = -(-settings.num_blocks // MOST_BLOCKS)
    states = np.zeros((MOMENTS, -(-settings.num_blocks // every)), dtype=np.uint8)
    for row, moment in enumerate(moments):
        advance(state, hybrid_of(state), record, MANY, int(moment))
        states[row] = _look(state)[::every]
    return BlockMap(moments, states, every)


def _look(state: at.State) -> States:
    blocks = len(state.keys)
    refs = state.links[:blocks, at.REFS]
    found = np.where(state.keys != at.NO_KEY, np.uint8(CACHED), np.uint8(FREE))
    found[refs == 1], found[refs > 1] = HELD, SHARED
    for seat in range(int(state.counts[at.RUNNING_COUNT])):
        request = state.requests[state.seats[seat, at.SEAT_RUNNING]]
        for group in range(int(state.limits[at.GROUPS])):
            if state.limits[at.G_KIND + at.G_FIELDS * group] == at.FULL:
                table = state.tables[group, request[at.SLOT]]
                full = request[at.COMPUTED] // state.limits[at.G_BLOCK + at.G_FIELDS * group]
                found[table[at.TABLE + full : at.TABLE + table[at.LENGTH]]] = PARTLY_FILLED
    found[0] = FREE
    return found
