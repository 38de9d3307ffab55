"""The figures of torch's out-of-memory message: what was asked for, what was free, who held the rest."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from itertools import islice
from typing import NamedTuple

from plimsoll.units import GIB

_compiled = cache(re.compile)
_SIZE = r"(\d{1,12}(?:\.\d{1,6})?) ?(bytes|B|KiB|KB|MiB|MB|GiB|GB|TiB)"
_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "KB": 1 << 10, "MiB": 1 << 20, "MB": 1 << 20, "GiB": 1 << 30, "GB": 1 << 30,
          "TiB": 1 << 40}  # fmt: skip
_TRIED = rf"Tried to allocate {_SIZE}"
_CAPACITY = rf"total capaci?ty of {_SIZE} of which {_SIZE} is free"
_CAPACITY_OLD = rf"\(GPU (\d{{1,4}}); {_SIZE} total capacity; {_SIZE} already allocated; {_SIZE} free(?:; {_SIZE} reserved)?"
_THIS = rf"this process has {_SIZE} memory in use"
_PROCESS = rf"Process (\d{{1,10}}) has {_SIZE} memory in use"
_ALLOCATED = rf"{_SIZE} is allocated by PyTorch"
_PRIVATE = rf"with {_SIZE} allocated in private pools"
_RESERVED = rf"{_SIZE} is reserved by PyTorch but unallocated"
_GPU = r"GPU (\d{1,4}) has a total"

MOST_PROCESSES = 64
# Where NVML cannot tell, torch prints the largest number there is (17179869184.00 GiB), or 0 bytes.
BEYOND_ANY_CARD_BYTES = 1 << 42
# Memory that no listed process accounts for: the driver itself keeps up to about a GiB of a large card.
HIDDEN_MATTERS_BYTES = 3 * GIB
# A desktop, a monitoring agent or the API server's own context: real, but not what a server fails for.
NEIGHBOUR_MATTERS_BYTES = 3 * GIB // 2
NEIGHBOUR_MATTERS_SHARE = 0.04


class OomFigures(NamedTuple):
    """The figures of one message; None where it does not state them."""

    tried: int | None = None
    total: int | None = None
    free: int | None = None
    gpu: int | None = None
    allocated: int | None = None  # live, by torch
    private: int | None = None  # of these, in private pools such as CUDA graphs
    reserved_unallocated: int | None = None
    this_process: int | None = None
    processes: tuple[tuple[int, int], ...] = ()  # (pid, bytes) as listed

    @property
    def is_fragmented(self) -> bool:
        """True if torch held enough unused memory for the request, but not in one piece."""
        return self.tried is not None and self.reserved_unallocated is not None and self.reserved_unallocated >= self.tried

    @property
    def own(self) -> int | None:
        """Memory that this process holds on the card, as far as the message states it."""
        if self.this_process is not None:
            return self.this_process
        if self.allocated is None:
            return None
        torch = self.allocated + (self.reserved_unallocated or 0)
        # Inside a container torch cannot tell which of the listed processes it is itself: the one that could hold its memory.
        return min((size for _, size in self.processes if size >= torch - GIB // 4), default=torch)

    @property
    def others(self) -> int:
        """Memory of other processes, listed or unaccounted for; 0 where the message does not tell."""
        own = self.own
        if own is None:
            return 0
        listed = sum(size for _, size in self.processes)
        if self.this_process is None:
            return max(0, listed - own) if listed else 0
        hidden = self.total - self.free - own if self.total is not None and self.free is not None else 0
        return max(listed, hidden if hidden >= HIDDEN_MATTERS_BYTES else 0)

    @property
    def neighbours(self) -> tuple[tuple[int, int], ...]:
        """The listed processes that are not this one."""
        if self.this_process is not None:
            return self.processes
        own = next((one for one in self.processes if one[1] == self.own), None)
        return tuple(one for one in self.processes if one is not own)

    @property
    def is_limited(self) -> bool:
        """True if the card had what was asked for: then a limit set for this process refused it."""
        return self.free is not None and self.tried is not None and self.free > self.tried

    @property
    def has_neighbour(self) -> bool:
        """True if others hold enough to be the reason; not where the card had room and a limit of its own stopped it."""
        if self.is_limited:
            return False
        floor = max(NEIGHBOUR_MATTERS_BYTES, NEIGHBOUR_MATTERS_SHARE * (self.total or 0))
        short = (self.tried or 0) - (self.free or 0)
        return self.others >= max(floor, short * 0.5)


def without_siblings(oom: OomFigures, pids: Collection[int]) -> OomFigures:
    """The figures without the server's own other ranks (`pids`): what these hold is no neighbour's.

    Inside a container the numbers differ: there a rank is known by holding as much as this one. What the card cannot hold
    together lies on several.
    """
    own = oom.own
    if len(pids) < 2 or own is None or not oom.processes:
        return oom
    is_one_card = oom.total is None or sum(size for _, size in oom.processes) <= oom.total
    mine = next((entry for entry in oom.processes if entry[1] == own), None)
    kept = [
        (pid, size)
        for pid, size in oom.processes
        if (pid, size) == mine or (is_one_card and pid not in pids and abs(size - own) > SIBLING_SHARE * own)
    ]
    return OomFigures(*oom[:-1], tuple(kept))


SIBLING_SHARE = 0.03  # by which the memory of two ranks may differ


def parse_oom(message: str) -> OomFigures:
    """The figures of torch's message, in its newer or older wording; empty for a bare driver error."""
    text = " ".join(message.split())

    def size(pattern: str, group: int = 1) -> int | None:
        match = _compiled(pattern).search(text)
        return _bytes(match[group], match[group + 1]) if match is not None and match[group] else None

    old, gpu = _compiled(_CAPACITY_OLD).search(text), _compiled(_GPU).search(text)
    if old is not None:
        allocated, reserved = size(_CAPACITY_OLD, 4), size(_CAPACITY_OLD, 8)
        left = max(0, reserved - (allocated or 0)) if reserved is not None else None
        free = size(_CAPACITY_OLD, 6)
        return OomFigures(size(_TRIED), size(_CAPACITY_OLD, 2), free, int(old[1]), allocated, None, left)
    listed = ((int(match[1]), _bytes(match[2], match[3])) for match in _compiled(_PROCESS).finditer(text))
    this = size(_THIS)
    return OomFigures(
        tried=size(_TRIED), total=size(_CAPACITY), free=size(_CAPACITY, 3), gpu=int(gpu[1]) if gpu else None,
        allocated=size(_ALLOCATED), private=size(_PRIVATE), reserved_unallocated=size(_RESERVED),
        this_process=this if this and this < BEYOND_ANY_CARD_BYTES else None,
        processes=tuple(islice((one for one in listed if 0 < one[1] < BEYOND_ANY_CARD_BYTES), MOST_PROCESSES)),
    )  # fmt: skip


def parse_size(text: str) -> int | None:
    """The bytes of a size that stands alone, as torch writes it: "1.95 GiB"."""
    match = _compiled(f"^{_SIZE}$").search(text)
    return _bytes(match[1], match[2]) if match is not None else None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
