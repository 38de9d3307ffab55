"""Traffic made out of traffic: a window of it, some of its requests, or several services on one engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from plimsoll.domain.arrivals import LATEST_NS
from plimsoll.domain.trace import Integers, Trace
from plimsoll.domain.trace_rows import IDS_MAX, blocks_of, pick, places, starts
from plimsoll.errors import BadInput, TooLarge


def cut(trace: Trace, start_s: float, end_s: float) -> Trace:
    """The requests that arrive from `start_s` on and before `end_s`, with `start_s` as the new 0."""
    if not (math.isfinite(start_s) and 0 <= start_s < end_s):
        raise BadInput(f"a window goes from 0 or later to a later moment, not from {start_s:g} to {end_s:g} s")
    start_ns, end_ns = (round(min(second * 1e9, LATEST_NS)) for second in (start_s, end_s))
    first, last = np.searchsorted(trace.arrival_ns, [start_ns, end_ns])
    if first == last:
        raise BadInput(f"{trace.name}: no request arrives between {start_s:g} and {end_s:g} s")
    part = _slice(trace, int(first), int(last))
    return part._replace(arrival_ns=part.arrival_ns - start_ns)


def take(trace: Trace, first: int, count: int) -> Trace:
    """`count` requests (or as many as there are) beginning with number `first`, which arrives at 0."""
    if first < 0 or count < 1 or first >= trace.size:
        raise BadInput(f"{trace.name}: has requests 0 to {trace.size - 1}; cannot take {count} from number {first} on")
    part = _slice(trace, first, min(trace.size, first + count))
    return part._replace(arrival_ns=part.arrival_ns - part.arrival_ns[0])


def _slice(trace: Trace, first: int, last: int) -> Trace:
    begin, end = trace.prefix_start[first], trace.prefix_start[last]
    return trace._replace(
        arrival_ns=trace.arrival_ns[first:last],
        prompt=trace.prompt[first:last],
        output=trace.output[first:last],
        priority=trace.priority[first:last],
        prefix_ids=trace.prefix_ids[begin:end],
        prefix_start=trace.prefix_start[first : last + 1] - begin,
    )


def merge(traces: Sequence[Trace]) -> Trace:
    """All requests on one engine in order of arrival; at one instant the earlier trace goes first.

    Content is shared within a trace as before and never between two: their ids are numbered anew, side by side.
    """
    if not traces:
        raise BadInput("nothing to merge")
    sharing = [trace.prefix_block for trace in traces if trace.shares_content]
    block = math.gcd(*sharing) if sharing else traces[0].prefix_block
    ids: list[Integers] = []
    counts: list[Integers] = []
    used = total = 0
    for trace in traces:
        distinct, numbers = np.unique(trace.prefix_ids, return_inverse=True)
        finer = _finer(trace._replace(prefix_ids=numbers + used), block)
        used += len(distinct)
        total += len(finer.prefix_ids)
        if total > IDS_MAX:
            raise TooLarge(f"merged in blocks of {block} tokens there are more than {IDS_MAX} prefix ids")
        ids.append(finer.prefix_ids)
        counts.append(np.diff(finer.prefix_start))
    whole = Trace(
        " + ".join(trace.name for trace in traces),
        np.concatenate([trace.arrival_ns for trace in traces]),
        np.concatenate([trace.prompt for trace in traces]),
        np.concatenate([trace.output for trace in traces]),
        np.concatenate([trace.priority for trace in traces]),
        np.concatenate(ids),
        starts(np.concatenate(counts)),
        block,
        sum(trace.bad_rows for trace in traces),
    )
    return pick(whole, np.argsort(whole.arrival_ns, kind="stable"))


def _finer(trace: Trace, block: int) -> Trace:
    """The same content in smaller blocks: all tokens of a block are alike, so a block of 512 is 32 equal ones of 16."""
    if not trace.shares_content or trace.prefix_block == block:
        return trace
    times = trace.prefix_block // block
    counts = np.minimum(np.diff(trace.prefix_start) * times, blocks_of(trace.prompt, block))
    of = places(trace.prefix_start[:-1] * times, counts) // times
    return trace._replace(prefix_ids=trace.prefix_ids[of], prefix_start=starts(counts), prefix_block=block)
