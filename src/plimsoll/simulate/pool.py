"""vLLM's block pool: a free queue in order of eviction, and a map from content to the blocks that hold it.

    head ─ unhashed, last freed first ─ ... ─ hashed, longest unused first ─ tail
           taken next                                              taken last

A 64-bit key identifies content. Several blocks may hold one key (vLLM does not merge them); a look-up finds the first that
got it. Each bucket is a list in order of insertion, so the first match is that block.
"""

from __future__ import annotations

import numpy as np

from plimsoll.simulate.compiled import compiled, part, wide, wrapping

from plimsoll.simulate.layout import (  # isort: skip
    BUCKET_FIRST, BUCKET_LAST, BUCKET_NEXT, BUCKET_PREV, FREE_BLOCKS, G_BLOCK, G_FIELDS, HASHED, IDS_BEGIN, IDS_END, IDS_TOKENS,
    ITEMS_BEGIN, ITEMS_END, I_ENTRY, I_START, LENGTH, NEXT, NO_KEY, NUMBER, PREFIX_BLOCK, PREV, REFS, TABLE, Int32, Int64,
    RunState, UInt64,
)  # fmt: skip

NULL = 0  # The null block's id
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S27, _S30, _S31, _S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)


@wrapping
def mix(left: np.uint64, right: np.uint64) -> np.uint64:
    """A digest of both, never NO_KEY."""
    x = left * _GOLDEN + right + _GOLDEN
    x = (x ^ (x >> _S30)) * _MIX1
    x = (x ^ (x >> _S27)) * _MIX2
    x = x ^ (x >> _S31)
    if x == NO_KEY:
        return _GOLDEN
    return x


@wrapping
def _bucket(key: np.uint64, links: Int32) -> int:
    # As many buckets as blocks, the queue's two ends included: a row has room for both. The product's upper half is cheaper
    # than a remainder.
    return wide(((key >> _S32) * np.uint64(len(links))) >> _S32)


@part
def find(key: np.uint64, keys: UInt64, links: Int32) -> int:
    """The block that got this content first, or NULL."""
    block = wide(links[_bucket(key, links), BUCKET_FIRST])
    while block != NULL and keys[block] != key:
        block = wide(links[block, BUCKET_NEXT])
    return block


@part
def set_key(block: int, key: np.uint64, keys: UInt64, links: Int32) -> None:
    """Enters the block under its content's key."""
    bucket = _bucket(key, links)
    last = links[bucket, BUCKET_LAST]
    keys[block] = key
    links[block, BUCKET_PREV] = last
    links[block, BUCKET_NEXT] = NULL
    if last == NULL:
        links[bucket, BUCKET_FIRST] = block
    else:
        links[last, BUCKET_NEXT] = block
    links[bucket, BUCKET_LAST] = block


@part
def forget(block: int, keys: UInt64, links: Int32) -> None:
    """Removes the block's key: its content is about to be overwritten."""
    bucket = _bucket(keys[block], links)
    before, after = links[block, BUCKET_PREV], links[block, BUCKET_NEXT]
    if before == NULL:
        links[bucket, BUCKET_FIRST] = after
    else:
        links[before, BUCKET_NEXT] = after
    if after == NULL:
        links[bucket, BUCKET_LAST] = before
    else:
        links[after, BUCKET_PREV] = before
    keys[block] = NO_KEY


@part
def take(counts: Int64, links: Int32, keys: UInt64) -> int:
    """Takes the next free block, with one holder and no content. The caller has checked that there is one."""
    head = len(keys)
    block = wide(links[head, NEXT])
    after = links[block, NEXT]
    links[head, NEXT] = after
    links[after, PREV] = head
    counts[FREE_BLOCKS] -= 1
    if keys[block] != NO_KEY:
        forget(block, keys, links)
    links[block, REFS] = 1
    return block


@part
def touch(block: int, counts: Int64, links: Int32) -> None:
    """Adds a holder; a free block leaves the queue."""
    if links[block, REFS] == 0:
        before, after = links[block, PREV], links[block, NEXT]
        links[before, NEXT] = after
        links[after, PREV] = before
        counts[FREE_BLOCKS] -= 1
    links[block, REFS] += 1


@part
def release(block: int, cursor: int, counts: Int64, links: Int32, keys: UInt64) -> int:
    """Removes a holder. Free blocks without content queue up behind `cursor` at the front, others go to the end."""
    links[block, REFS] -= 1
    if links[block, REFS] > 0:
        return cursor
    if keys[block] == NO_KEY:
        before = cursor
        cursor = block
    else:
        before = wide(links[len(keys) + 1, PREV])
    after = links[before, NEXT]
    links[before, NEXT] = block
    links[block, PREV] = before
    links[block, NEXT] = after
    links[after, PREV] = block
    counts[FREE_BLOCKS] += 1
    return cursor


@part
def release_table(table: Int32, counts: Int64, links: Int32, keys: UInt64) -> int:
    """Gives back a request's blocks, last first, so that their content's end is evicted first; returns how many."""
    cursor = len(keys)
    count = 0
    for place in range(TABLE + table[LENGTH] - 1, TABLE - 1, -1):
        if table[place] != NULL:
            cursor = release(wide(table[place]), cursor, counts, links, keys)
            count += 1
    table[LENGTH] = 0
    table[HASHED] = 0
    return count


@part
def keep_on_host(s: RunState, key: np.uint64) -> None:
    """Keeps a content in the host's memory in place of what was used longest ago, or notes that it was used again."""
    links, keys = s.host_links, s.host_keys
    head, tail = len(keys), len(keys) + 1
    block = find(key, keys, links)
    if block == NULL:
        block = wide(links[head, NEXT])
        if keys[block] != NO_KEY:
            forget(block, keys, links)
        set_key(block, key, keys, links)
    before, after = links[block, PREV], links[block, NEXT]
    links[before, NEXT], links[after, PREV] = after, before
    last = links[tail, PREV]
    links[last, NEXT], links[block, PREV] = block, last
    links[block, NEXT], links[tail, PREV] = tail, block


# A block's content as a number: equal beginnings of prompts give equal numbers, everything else differs.

_OWN = np.uint64(0x5851F42D4C957F2D)
_GROUP_BITS = np.uint64(8)


@compiled
def chain(ids: Int64, start: Int64, adapters: Int64, chains: UInt64) -> None:
    """Writes for each prefix id a digest of it and of all before it in its request: of other adapters all content differs."""
    for request in range(len(start) - 1):
        before = np.uint64(adapters[request])
        for at in range(start[request], start[request + 1]):
            before = mix(before, np.uint64(ids[at]))
            chains[at] = before


@part
def block_key(s: RunState, request: int, index: int, group: int) -> np.uint64:
    """The key of a request's block with all before it. Content that no id covers is the request's own."""
    end = (index + 1) * s.limits[G_BLOCK + G_FIELDS * group]
    place = (np.uint64(end) << _GROUP_BITS) | np.uint64(group)
    if len(s.chains) > 0 and end <= s.stamps[request, IDS_TOKENS]:
        start = s.stamps[request, IDS_BEGIN]
        covering = (end + s.limits[PREFIX_BLOCK] - 1) // s.limits[PREFIX_BLOCK]
        if covering <= s.stamps[request, IDS_END] - start:
            for item in range(s.stamps[request, ITEMS_BEGIN], s.stamps[request, ITEMS_END]):
                if s.items[item, I_START] < end:  # the same ids with another picture among them are something else
                    place = mix(place, np.uint64(s.items[item, I_ENTRY] + 1))
            return mix(s.chains[start + covering - 1], place)
    return mix(np.uint64(s.stamps[request, NUMBER]) ^ _OWN, place)
