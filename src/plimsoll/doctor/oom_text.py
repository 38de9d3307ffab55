"""Reads torch's own words on an allocation that failed: what was asked for, what was free, and who held the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import NamedTuple

from plimsoll.domain.units import GIB

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


class OutOfMemory(NamedTuple):
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
        """Whether torch held enough unused memory for the request, but not in one piece."""
        return self.tried is not None and self.reserved_unallocated is not None and self.reserved_unallocated >= self.tried

    @property
    def own(self) -> int | None:
        """What this process holds on the card, as far as the message tells."""
        if self.this_process is not None:
            return self.this_process
        if self.allocated is None:
            return None
        torch = self.allocated + (self.reserved_unallocated or 0)
        # Inside a container torch cannot tell which of the listed processes it is itself: the one that could hold its memory.
        return min((size for _, size in self.processes if size >= torch - GIB // 4), default=torch)

    @property
    def others(self) -> int:
        """What other processes hold: as listed, or what nobody accounts for. 0 where the message cannot tell."""
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
        """Whether the card had what was asked for: then a limit set for this process refused it."""
        return self.free is not None and self.tried is not None and self.free > self.tried

    @property
    def has_neighbour(self) -> bool:
        """Whether others hold enough to be the reason; not where the card had room and a limit of its own stopped it."""
        if self.is_limited:
            return False
        floor = max(NEIGHBOUR_MATTERS_BYTES, NEIGHBOUR_MATTERS_SHARE * (self.total or 0))
        short = (self.tried or 0) - (self.free or 0)
        return self.others >= max(floor, short * 0.5)


def parse_oom(message: str) -> OutOfMemory:
    """The figures of torch's message, in its newer or older wording; empty for a bare driver error."""
    text = " ".join(message.split())
    tried = _size(_TRIED, text)
    old = _compiled(_CAPACITY_OLD).search(text)
    if old is not None:
        total, allocated, free = _bytes(old[2], old[3]), _bytes(old[4], old[5]), _bytes(old[6], old[7])
        reserved = _bytes(old[8], old[9]) if old[8] else None
        left = max(0, reserved - allocated) if reserved is not None else None
        return OutOfMemory(tried, total, free, int(old[1]), allocated, None, left)
    capacity = _compiled(_CAPACITY).search(text)
    gpu = _compiled(_GPU).search(text)
    return OutOfMemory(
        tried=tried,
        total=_bytes(capacity[1], capacity[2]) if capacity else None,
        free=_bytes(capacity[3], capacity[4]) if capacity else None,
        gpu=int(gpu[1]) if gpu else None,
        allocated=_size(_ALLOCATED, text),
        private=_size(_PRIVATE, text),
        reserved_unallocated=_size(_RESERVED, text),
        this_process=_known(_size(_THIS, text)),
        processes=tuple(islice(_listed(text), MOST_PROCESSES)),
    )


def _listed(text: str) -> Iterator[tuple[int, int]]:
    for match in _compiled(_PROCESS).finditer(text):
        if (size := _known(_bytes(match[2], match[3]))) is not None:
            yield int(match[1]), size


def _known(size: int | None) -> int | None:
    """None for what the driver could not tell."""
    return size if size is not None and 0 < size < BEYOND_ANY_CARD_BYTES else None


def parse_size(text: str) -> int | None:
    """The bytes of a size that stands alone, as torch writes it: "1.95 GiB"."""
    return _size(f"^{_SIZE}$", text)


def _size(pattern: str, text: str) -> int | None:
    match = _compiled(pattern).search(text)
    return _bytes(match[1], match[2]) if match else None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
