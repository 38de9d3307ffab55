"""Models with several kinds of layers: each kind is a group with its own block table, all groups share one pool.

    full      keeps every block
    sliding   gives back blocks that left its window, and leaves null blocks in their place
    mamba     keeps the state after the last token, in one block; earlier ones are null

A hit must hold for every group. Full attention can be hit after any block; a sliding group needs its whole window, a Mamba
group the state at exactly that place. vLLM keeps those only where it expects them back: at the end of the prompt, and where it
saw two requests part (`prefix_cache_retention_interval` = 0, its default).
"""

from __future__ import annotations

from plimsoll.simulate.compiled import WIDE, part, wide
from plimsoll.simulate.encoder import let_go_all
from plimsoll.simulate.pool import NULL, block_key, find, keep_on_host, release, set_key, take, touch

from plimsoll.simulate.layout import (  # isort: skip
    ALIGNMENT, BLOCK_SIZE, BOUNDARY, CACHING, COMPUTED, COMPUTED_RUNNING, DRAFTS, DROPS_BLOCK, FILLS, FREE_BLOCKS, FREE_SLOTS,
    FRESH_IN, FULL, FULL_SLOTS, GROUPS, G_BLOCK, G_CAP, G_FIELDS, G_KIND, G_SPEC, G_WINDOW, HASHED, HELD, HIT_SLOT, IN_FLIGHT,
    LAST_STATE, LENGTH, LOST, MAMBA, MAMBA_ALIGN, NO_KEY, PASS, PLACEHOLDERS, PREEMPTED, PREEMPTED_COUNT, PREEMPTIONS, PROMPT,
    REFS, RETIRED, SEAT_FREE_SLOT, SLIDING, SLOT, SPECS, STALE, STATUS, STEP_BUDGET, TABLE, TABLE_BLOCKS, THRESHOLD, TOKENS,
    RunState,
)  # fmt: skip
from plimsoll.simulate.pool import release_table
from plimsoll.simulate.queues import put_back

RUNNING_NOW, FIRST_CHUNK, WHOLE_AT_ADMISSION = WIDE[0], WIDE[1], WIDE[2]
"""When the pool is asked for blocks. Of a fixed type, or numba would compile the functions that take them once for each."""


@part
def _skipped(s: RunState, group: int, computed: int) -> int:
    """The number of tokens that no step after `computed` looks at any more."""
    if s.limits[G_KIND + G_FIELDS * group] == SLIDING:
        return max(0, computed - s.limits[G_WINDOW + G_FIELDS * group] + 1)
    if s.limits[G_KIND + G_FIELDS * group] == MAMBA:
        return computed - 1
    return 0


@part
def _null_out(s: RunState, group: int, slot: int, index: int, cursor: int) -> int:
    block = wide(s.tables[group, slot, TABLE + index])
    s.tables[group, slot, TABLE + index] = NULL
    s.counts[TABLE_BLOCKS] -= 1
    return release(block, cursor, s.counts, s.links, s.keys)


@part
def remove_skipped_in_groups(s: RunState, slot: int, processed: int) -> None:
    """Gives back the blocks that no later step reads. `processed`: tokens of steps that are over."""
    for group in range(s.limits[GROUPS]):
        skipped = _skipped(s, group, processed)
        is_aligned_mamba = s.limits[G_KIND + G_FIELDS * group] == MAMBA and s.limits[MAMBA_ALIGN]
        if skipped > 0:
            last = min(skipped // s.limits[G_BLOCK + G_FIELDS * group], s.tables[group, slot, LENGTH])
            cursor = len(s.keys)
            retired = s.tables[group, slot, RETIRED] if is_aligned_mamba else 0
            for index in range(last - 1, retired - 1, -1):
                if s.tables[group, slot, TABLE + index] != NULL:
                    cursor = _null_out(s, group, slot, index, cursor)
                elif not is_aligned_mamba:
                    break
            if is_aligned_mamba and last > retired:
                s.tables[group, slot, RETIRED] = last
        if is_aligned_mamba:
            state = wide(s.tables[group, slot, LAST_STATE])
            block_size = s.limits[G_BLOCK + G_FIELDS * group]
            if 0 <= state < (processed + block_size - 1) // block_size - 1 and s.tables[group, slot, TABLE + state] != NULL:
                _null_out(s, group, slot, state, len(s.keys))


@part
def _is_fresh(s: RunState, group: int) -> bool:
    """True if a Mamba hit is a state that only appears in this very step."""
    found = wide(s.tables[group, s.limits[HIT_SLOT], LENGTH])
    if s.limits[G_KIND + G_FIELDS * group] != MAMBA or found == 0:
        return False
    block = s.tables[group, s.limits[HIT_SLOT], TABLE + found - 1]
    return bool(s.links[block, FRESH_IN] == s.counts[PASS])


@part
def fits_in_groups(s: RunState, slot: int, hit: int, tokens: int, when: int, spare: int) -> bool:
    """True if the pool can give every group the blocks for `tokens` tokens, with `spare` blocks kept back.

    When the whole sequence is reserved at admission, a sliding group never holds more than its cap.
    """
    needed = spare
    for group in range(s.limits[GROUPS]):
        block_size = s.limits[G_BLOCK + G_FIELDS * group]
        required = (tokens + block_size - 1) // block_size
        if when == WHOLE_AT_ADMISSION and s.limits[G_CAP + G_FIELDS * group] > 0:
            required = min(required, s.limits[G_CAP + G_FIELDS * group])
        if when == RUNNING_NOW:
            more = max(required - s.tables[group, slot, LENGTH], 0)
            if s.limits[G_KIND + G_FIELDS * group] == MAMBA and s.limits[MAMBA_ALIGN]:
                more = min(more, 1)
            needed += more
            continue
        if _is_fresh(s, group):
            return False
        found = wide(s.tables[group, s.limits[HIT_SLOT], LENGTH])
        skipped = 0
        if s.limits[G_KIND + G_FIELDS * group] == MAMBA and s.limits[MAMBA_ALIGN]:
            needed += min(max(required - found, 0), 1)
        else:
            skipped = _skipped(s, group, hit) // block_size if hit > 0 else 0
            needed += max(required - max(skipped, found), 0)
        for index in range(skipped, found):
            block = s.tables[group, s.limits[HIT_SLOT], TABLE + index]
            if block != NULL and s.links[block, REFS] == 0:
                needed += 1
    return bool(needed <= s.counts[FREE_BLOCKS])


@part
def adopt_hits(s: RunState, slot: int, hit: int) -> None:
    """Makes a new request hold its hits, in all groups before any new block is taken: no group may evict another's."""
    for group in range(s.limits[GROUPS]):
        found = wide(s.tables[group, s.limits[HIT_SLOT], LENGTH])
        skipped = 0
        if hit > 0:
            skipped = max(0, _skipped(s, group, hit)) // s.limits[G_BLOCK + G_FIELDS * group]
        for index in range(min(skipped, found)):
            s.tables[group, s.limits[HIT_SLOT], TABLE + index] = NULL
        for index in range(found):
            block = s.tables[group, s.limits[HIT_SLOT], TABLE + index]
            s.tables[group, slot, TABLE + index] = block
            if block != NULL:
                touch(wide(block), s.counts, s.links)
                s.counts[TABLE_BLOCKS] += 1
        s.tables[group, slot, LENGTH] = found
        s.tables[group, slot, HASHED] = found
        s.tables[group, slot, LAST_STATE] = -1
        s.tables[group, slot, RETIRED] = 0
        if s.limits[G_KIND + G_FIELDS * group] == FULL:
            s.counts[FULL_SLOTS] += found * s.limits[G_BLOCK + G_FIELDS * group]


@part
def allocate_groups(s: RunState, slot: int, tokens: int) -> None:
    """Takes new blocks for `tokens` tokens in every group; the caller has checked that there are enough."""
    for group in range(s.limits[GROUPS]):
        block_size = s.limits[G_BLOCK + G_FIELDS * group]
        required = (tokens + block_size - 1) // block_size
        length = wide(s.tables[group, slot, LENGTH])
        if required <= length:
            continue
        if s.limits[G_KIND + G_FIELDS * group] == FULL:
            s.counts[FULL_SLOTS] += (required - length) * block_size
        elif s.limits[G_KIND + G_FIELDS * group] == MAMBA and s.limits[MAMBA_ALIGN]:
            # Only the state at the end is kept: places before it stay empty.
            if length > 0:
                s.tables[group, slot, LAST_STATE] = length - 1
            while length < required - 1:
                s.tables[group, slot, TABLE + length] = NULL
                length += 1
        while length < required:
            s.tables[group, slot, TABLE + length] = take(s.counts, s.links, s.keys)
            s.counts[TABLE_BLOCKS] += 1
            length += 1
        s.tables[group, slot, LENGTH] = required


@part
def _publish(s: RunState, request: int, group: int, start: int, end: int) -> None:
    """Makes blocks [start, end) of the table hits from now on; null blocks are left out."""
    slot = wide(s.requests[request, SLOT])
    for index in range(start, end):
        block = wide(s.tables[group, slot, TABLE + index])
        if block == NULL:
            continue
        key = block_key(s, request, index, group)
        if s.keys[block] == NO_KEY:
            set_key(block, key, s.keys, s.links)
        if s.limits[G_KIND + G_FIELDS * group] == MAMBA:
            # A look-up of this state finds the first block that has it, which may be an older one.
            s.links[block, FRESH_IN] = s.counts[PASS]
            s.links[find(key, s.keys, s.links), FRESH_IN] = s.counts[PASS]


@part
def _publish_end(s: RunState, request: int, group: int, start: int, full: int, boundary: int) -> None:
    """Makes of blocks [start, full) those hits that a request resuming at the boundary needs."""
    block_size, dropped = s.limits[G_BLOCK + G_FIELDS * group], s.limits[DROPS_BLOCK]
    length = wide(1)
    if s.limits[G_KIND + G_FIELDS * group] == SLIDING:
        length = (s.limits[G_WINDOW + G_FIELDS * group] - 1 + block_size - 1) // block_size + dropped
    end = boundary // block_size + dropped
    _publish(s, request, group, max(start, end - length), min(full, end))


@part
def cache_groups(s: RunState, request: int, tokens: int) -> None:
    """Makes blocks that are full after `tokens` tokens hits from now on, where the group keeps them for that."""
    row = s.requests[request]
    slot = wide(row[SLOT])
    alignment = s.limits[ALIGNMENT]
    if s.limits[GROUPS] > 1:
        tokens = tokens // alignment * alignment
    for group in range(s.limits[GROUPS]):
        block_size, kind = s.limits[G_BLOCK + G_FIELDS * group], s.limits[G_KIND + G_FIELDS * group]
        start, full = wide(s.tables[group, slot, HASHED]), tokens // block_size
        # vLLM notes the state at the end of the prompt whenever it is asked, also when it is not new.
        if kind == MAMBA and tokens > 0 and tokens == (row[PROMPT] - 1) // block_size * block_size:
            _publish(s, request, group, full - 1, full)
        if start >= full:
            continue
        s.tables[group, slot, HASHED] = full
        if kind == FULL:
            _publish(s, request, group, start, full)
            if len(s.host_keys) > 0:  # prompts alone are kept there
                for index in range(start, min(full, row[PROMPT] // block_size)):
                    keep_on_host(s, block_key(s, request, index, group))
            continue
        # A later request that repeats this prompt resumes before its last token, or after the last block that it fills; one
        # that diverged from it, at that place. Where the last block of a hit is dropped, it is looked for one block later.
        back = alignment * s.limits[DROPS_BLOCK]
        _publish_end(s, request, group, start, full, max((row[PROMPT] - 1) // alignment * alignment - back, 0))
        if back > 0:
            _publish_end(s, request, group, start, full, max(row[PROMPT] // alignment * alignment - back, 0))
        if row[BOUNDARY] > 0:
            _publish_end(s, request, group, start, full, row[BOUNDARY] // alignment * alignment)


@part
def _is_cached(s: RunState, request: int, spec: int, index: int) -> bool:
    """True if all groups of one kind hold this block of the request, which is then noted in HIT_SLOT's table."""
    for group in range(s.limits[GROUPS]):
        if s.limits[G_SPEC + G_FIELDS * group] == spec:
            block = find(block_key(s, request, index, group), s.keys, s.links)
            if block == NULL:
                return False
            s.tables[group, s.limits[HIT_SLOT], TABLE + index] = block
    return True


@part
def _clear(s: RunState, spec: int, start: int, end: int) -> None:
    for group in range(s.limits[GROUPS]):
        if s.limits[G_SPEC + G_FIELDS * group] == spec:
            s.tables[group, s.limits[HIT_SLOT], TABLE + start : TABLE + end] = NULL


@part
def _set_length(s: RunState, spec: int, length: int) -> None:
    for group in range(s.limits[GROUPS]):
        if s.limits[G_SPEC + G_FIELDS * group] == spec:
            s.tables[group, s.limits[HIT_SLOT], LENGTH] = length


@part
def _sliding_hit(s: RunState, request: int, spec: int, leader: int, most: int, drops: int) -> int:
    """The longest beginning, at most `most` blocks, whose last window is all there; in blocks, with one to be dropped."""
    block_size, alignment = s.limits[G_BLOCK + G_FIELDS * leader], s.limits[ALIGNMENT]
    needed = (s.limits[G_WINDOW + G_FIELDS * leader] - 1 + block_size - 1) // block_size + drops
    run = 0
    for index in range(most - 1, -1, -1):
        if not _is_cached(s, request, spec, index):
            run = 0
            continue
        if run == 0 and (index + 1 - drops) * block_size % alignment != 0:
            continue
        run += 1
        if run >= needed:
            _clear(s, spec, 0, index)
            return index + run
    while run * block_size % alignment != 0:
        run -= 1
    return run


@part
def _mamba_hit(s: RunState, request: int, spec: int, leader: int, most: int) -> int:
    """The longest beginning, at most `most` blocks, whose state is there; in blocks."""
    block_size, alignment = s.limits[G_BLOCK + G_FIELDS * leader], s.limits[ALIGNMENT]
    for index in range(most - 1, -1, -1):
        if _is_cached(s, request, spec, index) and (index + 1) * block_size % alignment == 0:
            _clear(s, spec, 0, index)
            return index + 1
    return 0


@part
def _hit_of_spec(s: RunState, request: int, spec: int, leader: int, most_tokens: int, drops: int) -> int:
    """The number of the request's tokens that groups of one kind hold; their blocks are then in HIT_SLOT's table.

    `drops` is 1 where the last block is dropped, whose last token a drafter needs computed.
    """
    block_size, alignment = s.limits[G_BLOCK + G_FIELDS * leader], s.limits[ALIGNMENT]
    most = most_tokens // block_size
    if s.limits[G_KIND + G_FIELDS * leader] == SLIDING:
        found = _sliding_hit(s, request, spec, leader, most, drops)
    elif s.limits[G_KIND + G_FIELDS * leader] == MAMBA:
        found = _mamba_hit(s, request, spec, leader, most)
    else:
        found = wide(0)
        while found < most and _is_cached(s, request, spec, found):
            found += 1
    found = max(found - drops, 0) * block_size // alignment * alignment // block_size
    _set_length(s, spec, found)
    return found * block_size


@part
def _first_of(s: RunState, spec: int) -> int:
    leader = wide(0)
    while s.limits[G_SPEC + G_FIELDS * leader] != spec:
        leader += 1
    return leader


@part
def find_hits_in_groups(s: RunState, request: int) -> int:
    """The longest beginning that every group holds, in tokens. Kinds are checked in turn until all agree."""
    specs = s.limits[SPECS]
    agreed = s.requests[request, TOKENS] - 1
    longest, dropped = 0, 0  # a bit for each kind whose last block was dropped
    is_first_round = True
    while True:
        now = agreed
        for spec in range(specs):
            leader = _first_of(s, spec)
            if s.limits[G_KIND + G_FIELDS * leader] == FULL and not is_first_round:
                # Full attention holds every shorter beginning too.
                now = min(now, s.tables[leader, s.limits[HIT_SLOT], LENGTH] * s.limits[G_BLOCK + G_FIELDS * leader])
                continue
            drops, most = wide(0), now
            if s.limits[DROPS_BLOCK] > 0 and dropped >> spec & 1 == 0:
                drops, dropped = wide(1), dropped | 1 << spec
                if s.limits[GROUPS] > 1:
                    most = min(now + s.limits[G_BLOCK + G_FIELDS * leader], wide(s.requests[request, TOKENS]))
            before, now = now, _hit_of_spec(s, request, wide(spec), leader, most, drops)
            if drops == 0 and now < before:
                dropped = 0
            longest = max(longest, now)
        is_settled = now >= agreed
        agreed = min(agreed, now)
        is_first_round = False
        # Full attention and one other kind: the second answer is final.
        if is_settled or specs == 1 or (specs == 2 and s.limits[G_KIND + G_FIELDS * _first_of(s, wide(0))] == FULL):
            break
    for group in range(s.limits[GROUPS]):
        if s.limits[G_KIND + G_FIELDS * group] == FULL:
            s.tables[group, s.limits[HIT_SLOT], LENGTH] = min(
                s.tables[group, s.limits[HIT_SLOT], LENGTH], agreed // s.limits[G_BLOCK + G_FIELDS * group]
            )
    if specs > 1 and longest > agreed:
        s.requests[request, BOUNDARY] = longest
    return agreed


@part
def mamba_aligned(s: RunState, request: int, start: int, tokens: int) -> int:
    """Cuts a chunk of a prompt so that it ends where a Mamba state can be kept."""
    row = s.requests[request]
    prefill_end = max(row[PROMPT], row[TOKENS] - 1)
    if start >= prefill_end:
        return tokens
    block_size = s.limits[BLOCK_SIZE]
    last_kept = (row[TOKENS] - 1) // block_size * block_size
    end = start + tokens
    if end < prefill_end:
        most = s.counts[STEP_BUDGET]
        if s.limits[THRESHOLD] > 0:
            most = min(most, s.limits[THRESHOLD])
        aligned = end // block_size * block_size
        if aligned > start or block_size <= most:
            end = aligned
    stop = end
    if start % block_size != 0:
        following = (start // block_size + 1) * block_size
        if start < following < stop:
            stop = following
    if start < last_kept < stop:
        stop = last_kept
    if start < row[BOUNDARY] < end:
        parting = start + (row[BOUNDARY] - start) // block_size * block_size
        if start < parting < stop:
            stop = parting
    return max(stop - start, 0)


Hybrid = int | None
"""None for one group of full attention and nothing else: numba leaves the code for several groups, other kinds, drafts,
adapters and queue limits out, which saves time in every step and nearly halves the time it takes to compile."""


@part
def cache_blocks(s: RunState, hybrid: Hybrid, request: int, tokens: int) -> None:
    """Makes blocks that are full after `tokens` tokens hits from now on."""
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
def extend(s: RunState, hybrid: Hybrid, request: int, tokens: int, processed: int) -> bool:
    """Gives a running request slots for `tokens` tokens; False if the pool cannot."""
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
def free_request(s: RunState, request: int) -> None:
    """Gives back a running request's blocks and its slot."""
    let_go_all(s, request)
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
def preempt(s: RunState, request: int) -> None:
    """Takes everything from a running request and puts it first in the waiting line. It is not in `running` any more."""
    row = s.requests[request]
    free_request(s, request)
    if row[PREEMPTIONS] == 0:
        s.counts[PREEMPTED_COUNT] += 1
    row[STATUS] = PREEMPTED
    row[LOST] = row[COMPUTED]
    row[COMPUTED] = 0
    row[STALE] = row[IN_FLIGHT]
    row[PLACEHOLDERS] = 0
    row[DRAFTS] = 0
    row[PREEMPTIONS] += 1
    put_back(s, request)
