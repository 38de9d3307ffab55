"""Picking requests out of a trace, with the prefix ids that belong to them."""

from __future__ import annotations

import numpy as np

from plimsoll.domain.trace import Integers, Trace
from plimsoll.errors import TooLarge

IDS_MAX = 300_000_000
"""Prefix ids that are held at once: 2.4 GB."""


def pick(trace: Trace, rows: Integers) -> Trace:
    """The requests `rows`, in that order, with arrivals as they are."""
    counts = np.diff(trace.prefix_start)[rows]
    return trace._replace(
        arrival_ns=trace.arrival_ns[rows],
        prompt=trace.prompt[rows],
        output=trace.output[rows],
        priority=trace.priority[rows],
        prefix_ids=trace.prefix_ids[places(trace.prefix_start[:-1][rows], counts)],
        prefix_start=starts(counts),
    )


def starts(counts: Integers) -> Integers:
    """Where each of consecutive runs begins, and where the last one ends."""
    begin = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=begin[1:])
    return begin


def places(first: Integers, counts: Integers) -> Integers:
    """first[0], first[0]+1, ... (counts[0] of them), first[1], ...: the places of several runs, one after the other."""
    total = int(counts.sum())
    if total > IDS_MAX:
        raise TooLarge(f"{total} prefix ids in all: more than {IDS_MAX} is too much to hold")
    begin = np.cumsum(counts) - counts
    found: Integers = np.arange(total, dtype=np.int64) + np.repeat(first - begin, counts)
    return found


def blocks_of(tokens: Integers, block: int) -> Integers:
    """Prefix ids that so many tokens need; up: a block once begun needs its id."""
    needed: Integers = -(-tokens // block)
    return needed
