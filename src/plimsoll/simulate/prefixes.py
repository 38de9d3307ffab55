"""What a block holds, as a number: equal beginnings of prompts give equal numbers, everything else differs."""

from __future__ import annotations

import numpy as np

from plimsoll.simulate.compiled import compiled, part
from plimsoll.simulate.layout import (
    G_BLOCK,
    G_FIELDS,
    IDS_BEGIN,
    IDS_END,
    IDS_TOKENS,
    NUMBER,
    PREFIX_BLOCK,
    Int64,
    State,
    UInt64,
)
from plimsoll.simulate.pool import mix

_OWN = np.uint64(0x5851F42D4C957F2D)
_GROUP_BITS = np.uint64(8)


@compiled
def chain(ids: Int64, start: Int64, chains: UInt64) -> None:
    """For each prefix id, a digest of it and of all before it in its request."""
    for request in range(len(start) - 1):
        before = np.uint64(0)
        for at in range(start[request], start[request + 1]):
            before = mix(before, np.uint64(ids[at]))
            chains[at] = before


@part
def block_key(s: State, request: int, index: int, group: int) -> np.uint64:
    """The content of a request's block, and of all before it. What no id stands for is the request's own."""
    end = (index + 1) * s.limits[G_BLOCK + G_FIELDS * group]
    place = (np.uint64(end) << _GROUP_BITS) | np.uint64(group)
    if len(s.chains) > 0 and end <= s.stamps[request, IDS_TOKENS]:
        start = s.stamps[request, IDS_BEGIN]
        covering = (end + s.limits[PREFIX_BLOCK] - 1) // s.limits[PREFIX_BLOCK]
        if covering <= s.stamps[request, IDS_END] - start:
            return mix(s.chains[start + covering - 1], place)
    return mix(np.uint64(s.stamps[request, NUMBER]) ^ _OWN, place)
