"""What torch's GPU memory allocator held at one moment: segments, the blocks in them, and who asked for each."""

from __future__ import annotations

from typing import NamedTuple

LIVE = "live"  # a tensor uses it
PENDING = "pending"  # given back, but another stream may still be using it
FREE = "free"  # kept by torch for the next request

NO_STACK = 0  # the stack of whatever was recorded without one
DEFAULT_POOL = (0, 0)  # any other pool is private: CUDA graphs, or a feature that keeps memory apart


class Frame(NamedTuple):
    """One line of code on the way to an allocation."""

    filename: str
    line: int
    name: str


class Block(NamedTuple):
    """A piece of a segment."""

    address: int
    size: int
    requested: int | None  # what was asked for, before torch rounded it up; None where that was not recorded
    state: str  # LIVE, PENDING or FREE
    stack: int  # a place in `Snapshot.stacks`; NO_STACK where none was recorded


class Segment(NamedTuple):
    """Memory that torch took from the device in one piece; of an expandable segment, one unbroken mapped stretch."""

    device: int
    address: int
    size: int
    stream: int
    is_small: bool  # of the pool for requests of up to 1 MiB
    pool: tuple[int, int]
    is_expandable: bool
    blocks: tuple[Block, ...]


class FailedRequest(NamedTuple):
    """One request that torch could not serve: an out-of-memory error as the recorded history has it."""

    device: int
    size: int
    device_free: int | None  # what the device still had
    stream: int | None
    time_us: int | None
    stack: int
    events_after: int  # recorded events between the failure and the end: what was freed since is not seen as it was


class Snapshot(NamedTuple):
    """One file, read: stacks hold places in `frames`, innermost first, and equal ones are kept once."""

    segments: tuple[Segment, ...]
    frames: tuple[Frame, ...]
    stacks: tuple[tuple[int, ...], ...]
    failures: tuple[FailedRequest, ...] = ()  # the last ones, oldest first
    events: int = 0  # recorded allocator events of all devices
    settings: tuple[tuple[str, str], ...] = ()  # torch's allocator settings, as text

    @property
    def has_stacks(self) -> bool:
        """Whether anybody recorded where memory was asked for."""
        return len(self.stacks) > 1

    def stack_of(self, stack: int) -> tuple[Frame, ...]:
        """The frames of a stack, innermost first."""
        return tuple(self.frames[place] for place in self.stacks[stack])
