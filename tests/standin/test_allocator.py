"""The cache of free segments, in cases small enough to reckon by hand."""

from __future__ import annotations

from plimsoll.standin.memory import MIB, AllocationFailure, Allocator, rounded, segment_for

PLENTY = 1 << 40


def test_requests_are_rounded_as_torch_does() -> None:
    """512 bytes for a block; 2 MiB, 20 MiB or whole multiples of 2 MiB for a segment."""
    assert [rounded(size) for size in (1, 512, 513, 4096)] == [512, 512, 1024, 4096]
    sizes = (1, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 437 * MIB)
    assert [segment_for(size) // MIB for size in sizes] == [2, 2, 20, 20, 10, 438]


def test_what_a_step_had_stays_cached() -> None:
    """The second step of the same size asks the device for nothing; a longer one adds, a shorter one does not."""
    allocator = Allocator()
    assert allocator.run([(0, 30 * MIB), (1, 50 * MIB)], PLENTY) is None
    assert (allocator.reserved, allocator.releasable, allocator.segments) == (80 * MIB, 80 * MIB, 2)
    assert allocator.run([(0, 30 * MIB), (1, 50 * MIB)], 0) is None
    assert allocator.step_peak == 80 * MIB
    assert allocator.run([(0, 12 * MIB), (1, 18 * MIB)], 0) is None  # both in one: 30 MiB was the best fit
    assert allocator.run([(0, 60 * MIB)], PLENTY) is None
    assert (allocator.reserved, allocator.largest_free_block) == (140 * MIB, 60 * MIB)


def test_freed_neighbours_become_one_block() -> None:
    """Three tensors in a row are freed in any order; then the whole is there again, within the same step."""
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        allocator = Allocator()
        allocator.run([(9, 60 * MIB)], PLENTY)
        split = [(0, 20 * MIB), (1, 20 * MIB), (2, 20 * MIB)]
        assert allocator.run([*split, *((tensor, 0) for tensor in order), (3, 60 * MIB)], 0) is None
        assert allocator.reserved == 60 * MIB


def test_a_full_device_makes_torch_give_back_first() -> None:
    """One retry with the cached segments gone; where even that is not enough, the failure says what was asked for."""
    allocator = Allocator()
    allocator.run([(0, 30 * MIB)], 50 * MIB)
    assert allocator.run([(0, 50 * MIB)], 20 * MIB) is None
    assert (allocator.retries, allocator.ooms, allocator.reserved) == (1, 0, 50 * MIB)
    assert allocator.run([(0, 50 * MIB)], 0) is None
    assert allocator.retries == 1
    allocator = Allocator()
    allocator.run([(0, 30 * MIB), (1, 40 * MIB)], 70 * MIB)
    failure = allocator.run([(0, 30 * MIB), (1, 61 * MIB)], 20 * MIB)
    assert failure == AllocationFailure(tried=62 * MIB, live=30 * MIB, tensor=1)
    assert (allocator.retries, allocator.ooms, allocator.reserved) == (1, 1, 30 * MIB)


def test_what_is_kept_holds_its_segment() -> None:
    """One MiB that never ends takes a segment of 30 MiB out of what can be given back; the rest still serves steps."""
    allocator = Allocator()
    allocator.run([(0, 30 * MIB)], PLENTY)
    assert allocator.keep(2 * MIB, 0) == 2 * MIB
    assert (allocator.reserved, allocator.releasable, allocator.largest_free_block) == (30 * MIB, 0, 28 * MIB)
    assert allocator.release() == 0
    assert allocator.run([(0, 28 * MIB)], 0) is None
    assert isinstance(allocator.keep(29 * MIB, 0), AllocationFailure)
    assert isinstance(allocator.keep(3 * MIB, 0), int)
    assert allocator.largest_free_block == 25 * MIB


def test_what_lies_beside_weights_serves_and_stays() -> None:
    """A held block is used like any other and is never given back."""
    allocator = Allocator()
    allocator.hold(80 * MIB)
    assert allocator.run([(0, 40 * MIB), (1, 40 * MIB)], 0) is None
    assert (allocator.release(), allocator.largest_free_block) == (0, 80 * MIB)
