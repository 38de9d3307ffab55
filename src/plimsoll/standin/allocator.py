"""torch's caching allocator, as far as its figures go: segments, best fit, splitting, and a cache that is kept.

    |<--------- a segment: what was asked of the device in one piece --------->|
    |  block: live  |        block: free         |  block: live  |    free      |

What was freed stays with the process. A segment of which nothing is live can be given back; free blocks beside a live one
cannot. torch gives back by itself only when the device refuses a new segment, and then tries once more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

MIB = 1 << 20
# torch's own sizes (c10/core/AllocatorConfig.h and the caching allocator's notes).
GRAIN = 512  # every request is rounded up to this
SMALL_MOST = MIB  # up to here a request comes out of a small segment
SMALL_SEGMENT = 2 * MIB
MIDDLE_BELOW = 10 * MIB  # below it a request that finds no block makes a segment of 20 MiB
MIDDLE_SEGMENT = 20 * MIB
LARGE_GRAIN = 2 * MIB

_SEGMENT_BITS = 48  # an address is a segment's number and the place in it
_IN_SEGMENT = (1 << _SEGMENT_BITS) - 1

Block = tuple[int, int]  # size, address: in this order the first that is not smaller is the best fit
Event = tuple[int, int]  # which tensor, and its bytes; 0 bytes: it is freed


class Failure(NamedTuple):
    """A request that the device refused twice, and what was live at that moment."""

    tried: int
    room: int
    live: int
    tensor: int = -1  # of a step


def rounded(size: int) -> int:
    """What a request takes of a block."""
    return max(GRAIN, -(-size // GRAIN) * GRAIN)


def segment_for(size: int) -> int:
    """What is asked of the device for a request that no cached block can hold."""
    if size <= SMALL_MOST:
        return SMALL_SEGMENT
    if size < MIDDLE_BELOW:
        return MIDDLE_SEGMENT
    return -(-size // LARGE_GRAIN) * LARGE_GRAIN


class Allocator:
    """The segments that are not wholly live. What a step allocates is gone at its end; what is kept is so for good."""

    __slots__ = (
        "_free", "_next", "_sizes", "largest_segment", "ooms", "releasable", "reserved", "reserved_peak",
        "retries", "segments", "step_peak",
    )  # fmt: skip

    def __init__(self) -> None:
        self.reserved = self.reserved_peak = 0  # bytes in all segments made here
        self.releasable = 0  # of these, in segments of which nothing is live
        self.segments = 0
        self.largest_segment = 0  # that a step has ever asked for
        self.step_peak = 0  # the most that the last step had at a time
        self.retries = self.ooms = 0
        self._free: tuple[list[Block], list[Block]] = ([], [])  # between steps: of the small and of the large segments
        self._sizes: dict[int, int] = {}  # by the segment's first address
        self._next = 1

    @property
    def largest_free_block(self) -> int:
        """The largest request that needs nothing of the device."""
        return max((blocks[-1][0] for blocks in self._free if blocks), default=0)

    def run(self, events: Sequence[Event], room: int) -> Failure | None:
        """One step from first to last; whatever it has left over is freed. `room`: what the device has to give."""
        free = (self._free[0].copy(), self._free[1].copy())
        held: dict[int, Block] = {}
        live = peak = 0
        room += self.reserved
        for tensor, asked in events:
            if asked == 0:
                live -= held[tensor][0]
                self._put(free[held[tensor][0] > SMALL_MOST], held.pop(tensor))
                continue
            size = rounded(asked)
            is_large = size > SMALL_MOST
            block = self._take(free[is_large], size, is_large=is_large)
            if block is None:
                if not self._reserve(size, room - self.reserved, free):
                    self.step_peak = peak
                    return Failure(segment_for(size), room - self.reserved, live, tensor)
                self.largest_segment = max(self.largest_segment, segment_for(size))
                block = self._take(free[is_large], size, is_large=is_large)
                assert block is not None
            held[tensor] = block
            live += block[0]
            peak = max(peak, live)
        self.step_peak = peak
        return None

    def keep(self, size: int, room: int) -> Failure | int:
        """An allocation that never ends, and holds the segment that it lies in; the bytes that are live through it."""
        size = rounded(size)
        is_large = size > SMALL_MOST
        block = self._take(self._free[is_large], size, is_large=is_large)
        if block is None:
            if not self._reserve(size, room, None):
                return Failure(segment_for(size), room, 0)
            block = self._take(self._free[is_large], size, is_large=is_large)
            assert block is not None
        first = block[1] & ~_IN_SEGMENT
        if (segment := self._sizes.pop(first, None)) is not None:
            self.releasable -= segment  # it can never be given back now
        return block[0]

    def release(self) -> int:
        """Give back every segment of which nothing is live; how many bytes that were."""
        before = self.reserved
        self._drop(self._free)
        return before - self.reserved

    def hold(self, size: int) -> None:
        """A free block beside something live: it serves steps, and cannot be given back. Its segment is counted elsewhere."""
        insort(self._free[size > SMALL_MOST], (size, self._next << _SEGMENT_BITS))
        self._next += 1

    def _take(self, blocks: list[Block], size: int, *, is_large: bool) -> Block | None:
        """The smallest free block that is large enough, less what is left of it."""
        place = bisect_left(blocks, (size, 0))
        if place == len(blocks):
            return None
        found, address = blocks.pop(place)
        left = found - size
        if left > SMALL_MOST if is_large else left >= GRAIN:
            insort(blocks, (left, address + size))
            return size, address
        return found, address  # what is left is too little to be of use to anybody

    def _put(self, blocks: list[Block], block: Block) -> None:
        """Free again, and one with the free blocks on either side; segments never touch, so none grows into another."""
        size, address = block
        if self._sizes.get(address) == size:  # a whole segment has no neighbours
            insort(blocks, block)
            return
        after = before = None
        for other in blocks:
            if other[1] == block[1] + block[0]:
                after = other
            elif other[0] + other[1] == block[1]:
                before = other
        if after is not None:
            blocks.remove(after)
            size += after[0]
        if before is not None:
            blocks.remove(before)
            size, address = size + before[0], before[1]
        insort(blocks, (size, address))

    def _reserve(self, size: int, room: int, working: tuple[list[Block], list[Block]] | None) -> bool:
        """A new segment; where the device has too little, after giving back what can be."""
        segment = segment_for(size)
        if segment > room:
            self.retries += 1
            before = self.reserved
            self._drop(self._free if working is None else working)
            if segment > room + before - self.reserved:
                self.ooms += 1
                return False
        first = self._next << _SEGMENT_BITS
        self._next += 1
        self._sizes[first] = segment
        self.segments += 1
        self.reserved += segment
        self.releasable += segment
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        for free in (self._free, working):
            if free is not None:
                insort(free[size > SMALL_MOST], (segment, first))
        return True

    def _drop(self, working: tuple[list[Block], list[Block]]) -> None:
        """Segments that are free as a whole at this moment go."""
        for now, later in zip(working, self._free, strict=True):
            whole = [block for block in now if self._sizes.get(block[1]) == block[0]]
            for block in whole:
                now.remove(block)
                if later is not now:
                    later.remove(block)
                del self._sizes[block[1]]
                self.segments -= 1
                self.reserved -= block[0]
                self.releasable -= block[0]
