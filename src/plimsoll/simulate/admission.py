"""Waiting requests: finds their hits in the prefix cache, checks the pool's room for the rest, and admits them."""

from __future__ import annotations

from plimsoll.simulate.compiled import hot, part, wide
from plimsoll.simulate.encoder import encode, let_go_all, look_at_items
from plimsoll.simulate.groups import (
    FIRST_CHUNK,
    WHOLE_AT_ADMISSION,
    Hybrid,
    adopt_hits,
    allocate_groups,
    cache_blocks,
    extend,
    find_hits_in_groups,
    fits_in_groups,
    mamba_aligned,
)

from plimsoll.simulate.layout import (  # isort: skip
    ADAPTER, ASIDE, BATCHES, BATCH_FIELDS, BLOCK_SIZE, BOUNDARY, B_HOW_MANY, B_LOADED, B_NEW, B_PRODUCES, B_REQUESTS, B_RESUMED,
    CACHED, CACHING, CHUNKED, COMPUTED, COMPUTED_RUNNING, DRAFTS, DRAFT_SLOTS, ENCODER_BUDGET, FILLS, FREE_BLOCKS, FREE_SLOTS,
    FULL_SLOTS, GROUPS, HASHED, HELD, HITS, HIT_SLOT, HOST_HITS, IDS_BEGIN, IDS_END, LENGTH, LOOKAHEAD, LOST, MAMBA_ALIGN,
    MAX_LEN, MAX_LORAS, MAX_SEQS, NEVER_FILLS, PASS, PREEMPTIONS, QUERIES, RECOMPUTED, REFS, RESERVE_FULL, RESUMED_HITS,
    RESUMED_QUERIES, RUNNING, RUNNING_COUNT, SEAT_BATCH, SEAT_FREE_SLOT, SEAT_RUNNING, SLOT, SPEC_TOKENS, STALE, STATUS, TABLE,
    TABLE_BLOCKS, TOKENS, WAITING_COUNT, WATERMARK_BLOCKS, RunState,
)  # fmt: skip
from plimsoll.simulate.pool import NULL, block_key, find, keep_on_host, touch
from plimsoll.simulate.queues import drop_first, first, put_back


@part
def _find_hits(s: RunState, hybrid: Hybrid, request: int) -> int:
    """The number of a waiting request's tokens that the prefix cache holds; their blocks are then in HIT_SLOT's table."""
    row = s.requests[request]
    slot = s.limits[HIT_SLOT]
    for group in range(s.limits[GROUPS]):
        s.tables[group, slot, LENGTH] = 0
    row[BOUNDARY] = 0
    if not s.limits[CACHING]:
        return 0
    if hybrid is not None:
        return find_hits_in_groups(s, request)
    most = (row[TOKENS] - 1) // s.limits[BLOCK_SIZE]
    found = wide(0)
    while found < most:
        block = find(block_key(s, request, found, wide(0)), s.keys, s.links)
        if block == NULL:
            break
        s.tables[0, slot, TABLE + found] = block
        found += 1
    s.tables[0, slot, LENGTH] = found
    return found * s.limits[BLOCK_SIZE]


@part
def _host_hit(s: RunState, request: int, hit: int) -> int:
    """The number of further tokens that the host's memory holds."""
    block_size = s.limits[BLOCK_SIZE]
    first = hit // block_size
    end = first
    while end < (s.requests[request, TOKENS] - 1) // block_size:
        if find(block_key(s, request, end, wide(0)), s.host_keys, s.host_links) == NULL:
            break
        end += 1
    return (end - first) * block_size


@part
def _load(s: RunState, batch: int, request: int, hit: int, loaded: int) -> None:
    """Notes the use of a new request's hits in the host's memory, and the blocks that the step loads."""
    row, block_size = s.requests[request], s.limits[BLOCK_SIZE]
    for index in range((hit + loaded) // block_size):
        keep_on_host(s, block_key(s, request, index, wide(0)))
    s.counts[HOST_HITS] += loaded
    s.counts[BATCHES + batch * BATCH_FIELDS + B_LOADED] += loaded // block_size
    if row[PREEMPTIONS] > 0:
        s.counts[RECOMPUTED] -= min(loaded, max(0, row[LOST] - hit))


@part
def _fits(s: RunState, hybrid: Hybrid, hit: int, tokens: int, when: int, spare: int) -> bool:
    """True if the pool has the blocks a new request needs for `tokens` tokens beyond its hits."""
    if hybrid is not None:
        return fits_in_groups(s, s.limits[HIT_SLOT], hit, tokens, when, spare)
    hits = s.tables[0, s.limits[HIT_SLOT]]
    found = hits[LENGTH]
    needed = max((tokens + s.limits[BLOCK_SIZE] - 1) // s.limits[BLOCK_SIZE] - found, 0) + spare
    for index in range(found):
        # A hit that nobody holds is in the free queue: taking it leaves one free block less.
        if s.links[hits[TABLE + index], REFS] == 0:
            needed += 1
    return bool(needed <= s.counts[FREE_BLOCKS])


@part
def _admit(s: RunState, hybrid: Hybrid, request: int, hit: int, tokens: int) -> bool:
    """Give a waiting request its hits and slots for its first `tokens` tokens; False if the pool cannot."""
    row = s.requests[request]
    spare = s.limits[WATERMARK_BLOCKS] if s.counts[RUNNING_COUNT] > 0 else 0
    if s.limits[RESERVE_FULL] and not _fits(
        s, hybrid, hit, min(wide(row[TOKENS]), s.limits[MAX_LEN]), WHOLE_AT_ADMISSION, spare
    ):
        return False
    end = hit + tokens
    if hybrid is not None:
        end = min(end + s.limits[LOOKAHEAD], s.limits[MAX_LEN])
    if not _fits(s, hybrid, hit, end, FIRST_CHUNK, spare):
        return False
    s.counts[FREE_SLOTS] -= 1
    slot = s.seats[s.counts[FREE_SLOTS], SEAT_FREE_SLOT]
    row[SLOT] = slot
    row[HELD] = 0
    row[FILLS] = 0
    if hybrid is not None:
        adopt_hits(s, slot, hit)
        allocate_groups(s, slot, end)
        return True
    table, hits = s.tables[0, slot], s.tables[0, s.limits[HIT_SLOT]]
    found = wide(hits[LENGTH])
    for place in range(TABLE, TABLE + found):
        touch(wide(hits[place]), s.counts, s.links)
        table[place] = hits[place]
    table[LENGTH] = found
    table[HASHED] = found
    row[FILLS] = (found + 1) * s.limits[BLOCK_SIZE] if s.limits[CACHING] else NEVER_FILLS
    s.counts[TABLE_BLOCKS] += found
    s.counts[FULL_SLOTS] += found * s.limits[BLOCK_SIZE]
    return extend(s, hybrid, request, end, wide(0))


@part
def _count_admission(s: RunState, batch: int, request: int, hit: int) -> None:
    row = s.requests[request]
    queried = row[TOKENS] if s.limits[CACHING] else 0
    if row[PREEMPTIONS] == 0:
        s.counts[BATCHES + batch * BATCH_FIELDS + B_NEW] += 1
        s.counts[QUERIES] += queried
        s.counts[HITS] += hit
        row[CACHED] = hit
    else:
        s.counts[BATCHES + batch * BATCH_FIELDS + B_RESUMED] += 1
        s.counts[RESUMED_QUERIES] += queried
        s.counts[RESUMED_HITS] += hit
        s.counts[RECOMPUTED] += max(0, row[LOST] - hit)


@hot
def _is_hopeless(s: RunState, request: int) -> bool:
    """True if a request without shared content needs more blocks than are free, whatever the cache still holds of it.

    Its hits are in the free queue: a hit saves computing, not room. In a full pool this spares a look-up in every step.
    """
    if not s.limits[RESERVE_FULL] or s.stamps[request, IDS_END] > s.stamps[request, IDS_BEGIN]:
        return False
    spare = s.limits[WATERMARK_BLOCKS] if s.counts[RUNNING_COUNT] > 0 else 0
    whole = min(wide(s.requests[request, TOKENS]), s.limits[MAX_LEN])
    return bool((whole + s.limits[BLOCK_SIZE] - 1) // s.limits[BLOCK_SIZE] + spare > s.counts[FREE_BLOCKS])


@part
def _adapters_of(s: RunState, batch: int) -> int:
    """Notes the LoRA adapters of the requests that run in this step; returns how many they are."""
    count = 0
    for at in range(s.counts[BATCHES + batch * BATCH_FIELDS + B_REQUESTS]):
        count += _takes_adapter(s, s.seats[at, SEAT_BATCH + 3 * batch])
    return count


@part
def _takes_adapter(s: RunState, request: int) -> int:
    """Notes the adapter of a request in this step; returns 1 if it is one more."""
    adapter = s.stamps[request, ADAPTER]
    if adapter == 0 or s.adapters[adapter] == s.counts[PASS]:
        return 0
    s.adapters[adapter] = s.counts[PASS]
    return 1


@part
def _padded(s: RunState, batch: int, hit: int, ran: int) -> bool:
    """True if a request with one token to compute is filled up to the length of the others, which drafts have made longer."""
    if s.limits[SPEC_TOKENS] == 0 or (ran == 0 and hit == 0) or hit + 2 + s.limits[SPEC_TOKENS] > s.limits[MAX_LEN]:
        return False
    prompts = 0
    for at in range(ran):
        prompts += s.requests[s.seats[at, SEAT_BATCH + 3 * batch], DRAFTS] == 0
    return bool(prompts == 0)


@part
def schedule_waiting(s: RunState, hybrid: Hybrid, batch: int, budget: int, threshold: int) -> None:
    """Waiting requests in their order, until one does not fit."""
    who = SEAT_BATCH + 3 * batch
    scheduled = BATCHES + batch * BATCH_FIELDS + B_REQUESTS
    aside, ran, slots, adapters = wide(-1), s.counts[scheduled], wide(0), wide(0)
    if hybrid is not None:
        slots = s.limits[DRAFT_SLOTS]
        if s.limits[MAX_LORAS] > 0:
            adapters = wide(_adapters_of(s, batch))
    while budget > slots and s.counts[WAITING_COUNT] > 0 and s.counts[RUNNING_COUNT] < s.limits[MAX_SEQS]:
        request = first(s)
        row = s.requests[request]
        is_skipped = row[STALE] > 0  # a token of it is still under way: admitting it now could compute that one twice
        if hybrid is not None and adapters == s.limits[MAX_LORAS] > 0:
            adapter = s.stamps[request, ADAPTER]
            is_skipped = is_skipped or (adapter > 0 and s.adapters[adapter] != s.counts[PASS])
        if is_skipped:
            drop_first(s)
            s.stamps[request, ASIDE] = aside
            aside = request
            continue
        if hybrid is None and _is_hopeless(s, request):
            break
        hit, loaded = wide(_find_hits(s, hybrid, request)), wide(0)
        if hybrid is not None and len(s.host_keys) > 0:
            loaded = wide(_host_hit(s, request, hit))
            hit += loaded
        tokens, filled = row[TOKENS] - hit, wide(0)
        if hybrid is not None and tokens == 1 and _padded(s, batch, hit, ran):
            filled = s.limits[SPEC_TOKENS]
            tokens += filled
            if tokens > budget - slots:
                break
        if 0 < threshold < tokens:
            tokens = threshold
        if not s.limits[CHUNKED] and tokens > budget - slots:
            break
        tokens = min(tokens, budget - slots)
        if s.limits[MAMBA_ALIGN]:
            tokens = mamba_aligned(s, request, hit, tokens)
        encoder_budget = s.counts[ENCODER_BUDGET]
        if hybrid is not None:
            tokens = look_at_items(s, request, hit, tokens)
        if tokens == 0:
            break
        if not _admit(s, hybrid, request, hit, tokens):
            let_go_all(s, request)
            break
        if hybrid is not None:
            s.counts[ENCODER_BUDGET] = encode(s, request, encoder_budget)
        cache_blocks(s, hybrid, request, min(hit + tokens, wide(row[TOKENS])))
        drop_first(s)
        s.seats[s.counts[RUNNING_COUNT], SEAT_RUNNING] = request
        s.counts[RUNNING_COUNT] += 1
        _count_admission(s, batch, request, hit - loaded)
        if hybrid is not None and len(s.host_keys) > 0:
            _load(s, batch, request, hit - loaded, loaded)
        row[STATUS] = RUNNING
        row[COMPUTED] = hit
        s.counts[COMPUTED_RUNNING] += hit
        s.seats[s.counts[scheduled], who] = request
        s.seats[s.counts[scheduled], who + B_HOW_MANY] = tokens
        s.seats[s.counts[scheduled], who + B_PRODUCES] = -filled
        if hybrid is not None and s.limits[MAX_LORAS] > 0:
            adapters += _takes_adapter(s, request)
        s.counts[scheduled] += 1
        budget -= tokens + slots
    while aside >= 0:
        put_back(s, aside)
        aside = s.stamps[aside, ASIDE]
