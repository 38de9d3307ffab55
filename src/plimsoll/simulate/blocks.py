"""What a running request holds: its blocks grow with it, become part of the prefix cache when they are full, and are given back
when it ends or must give way.
"""

from __future__ import annotations

from plimsoll.simulate.compiled import part, wide
from plimsoll.simulate.groups import RUNNING_NOW, allocate_groups, cache_groups, fits_in_groups, remove_skipped_in_groups
from plimsoll.simulate.layout import (
    BLOCK_SIZE,
    CACHING,
    COMPUTED,
    COMPUTED_RUNNING,
    FILLS,
    FREE_BLOCKS,
    FREE_SLOTS,
    FULL,
    FULL_SLOTS,
    G_BLOCK,
    G_FIELDS,
    G_KIND,
    GROUPS,
    HASHED,
    HELD,
    IN_FLIGHT,
    LENGTH,
    LOST,
    PLACEHOLDERS,
    PREEMPTED,
    PREEMPTED_COUNT,
    PREEMPTIONS,
    SEAT_FREE_SLOT,
    SLOT,
    STALE,
    STATUS,
    TABLE,
    TABLE_BLOCKS,
    State,
)
from plimsoll.simulate.pool import block_key, release_table, set_key, take
from plimsoll.simulate.queues import put_back

Hybrid = int | None
"""Whether there are several groups, or one that is not full attention. None: numba leaves the code for that out, which nearly
halves the time it takes to compile."""


@part
def cache_blocks(s: State, hybrid: Hybrid, request: int, tokens: int) -> None:
    """Blocks that are full after `tokens` tokens can be hit from now on."""
    if not s.limits[CACHING]:
        return
    if hybrid is not None:
        cache_groups(s, request, tokens)
        return
    table = s.tables[0, s.requests[request, SLOT]]
    full = tokens // s.limits[BLOCK_SIZE]
    for index in range(table[HASHED], full):
        set_key(wide(table[TABLE + index]), block_key(s, request, index, wide(0)), s.keys, s.links)
    if full > table[HASHED]:
        table[HASHED] = full
        s.requests[request, FILLS] = (full + 1) * s.limits[BLOCK_SIZE]


@part
def extend(s: State, hybrid: Hybrid, request: int, tokens: int, processed: int) -> bool:
    """Give a running request slots for `tokens` tokens; False if the pool cannot."""
    slot = wide(s.requests[request, SLOT])
    if hybrid is not None:
        remove_skipped_in_groups(s, slot, processed)
        if not fits_in_groups(s, slot, wide(0), tokens, RUNNING_NOW, wide(0)):
            return False
        allocate_groups(s, slot, tokens)
        return True
    table = s.tables[0, slot]
    block_size = s.limits[BLOCK_SIZE]
    length = wide(table[LENGTH])
    needed = (tokens + block_size - 1) // block_size - length
    if needed > s.counts[FREE_BLOCKS]:
        return False
    for place in range(TABLE + length, TABLE + length + needed):
        table[place] = take(s.counts, s.links, s.keys)
    table[LENGTH] = length + needed
    s.requests[request, HELD] = (length + needed) * block_size
    s.counts[TABLE_BLOCKS] += needed
    s.counts[FULL_SLOTS] += needed * block_size
    return True


@part
def free_request(s: State, request: int) -> None:
    """Give back a running request's blocks and its slot."""
    slot = s.requests[request, SLOT]
    for group in range(s.limits[GROUPS]):
        table = s.tables[group, slot]
        if s.limits[G_KIND + G_FIELDS * group] == FULL:
            s.counts[FULL_SLOTS] -= table[LENGTH] * s.limits[G_BLOCK + G_FIELDS * group]
        s.counts[TABLE_BLOCKS] -= release_table(table, s.counts, s.links, s.keys)
    s.counts[COMPUTED_RUNNING] -= s.requests[request, COMPUTED]
    s.seats[s.counts[FREE_SLOTS], SEAT_FREE_SLOT] = slot
    s.counts[FREE_SLOTS] += 1
    s.requests[request, SLOT] = -1


@part
def preempt(s: State, request: int) -> None:
    """Take everything from a running request and let it wait first in line. It is not in `running` any more."""
    row = s.requests[request]
    free_request(s, request)
    if row[PREEMPTIONS] == 0:
        s.counts[PREEMPTED_COUNT] += 1
    row[STATUS] = PREEMPTED
    row[LOST] = row[COMPUTED]
    row[COMPUTED] = 0
    row[STALE] = row[IN_FLIGHT]
    row[PLACEHOLDERS] = 0
    row[PREEMPTIONS] += 1
    put_back(s, request)
