"""Torch's words on an allocation that failed, in every wording vLLM's releases came with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.rules.root_cause import MOST_PROCESSES, OomFigures, parse_oom
from plimsoll.units import GIB, KIB, MIB

NEWEST = (
    "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 17.56 MiB is free. "
    "Including non-PyTorch memory, this process has 125.83 GiB memory in use. Process 1875 has 13.94 GiB memory in use. Of the "
    "allocated memory 125.10 GiB is allocated by PyTorch, with 1.50 GiB allocated in private pools (e.g., CUDA Graphs), and "
    "457.00 KiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
IN_A_CONTAINER = (
    "CUDA out of memory. Tried to allocate 896.00 MiB. GPU 1 has a total capacity of 79.19 GiB of which 552.50 MiB is free. "
    "Process 4021 has 78.63 GiB memory in use. Of the allocated memory 75.90 GiB is allocated by PyTorch, and 1.20 GiB is "
    "reserved by PyTorch but unallocated."
)
DRIVER_CANNOT_TELL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.99 GiB of which 0 bytes is free. "
    "Including non-PyTorch memory, this process has {unknown} memory in use. Of the allocated memory 21.00 GiB is allocated by "
    "PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)
HIP = (
    "HIP out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 63.98 GiB of which 1.10 GiB is free. Of the "
    "allocated memory 60.12 GiB is allocated by PyTorch, and 512.00 KiB is reserved by PyTorch but unallocated."
)
TORCH_2_0 = (
    "CUDA out of memory. Tried to allocate 4.00 GiB (GPU 0; 23.69 GiB total capacity; 17.00 GiB already allocated; 1.31 GiB "
    "free; 22.00 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb"
)
TORCH_2_1 = (
    "CUDA out of memory. Tried to allocate 136.00 MiB. GPU 0 has a total capacty of 23.69 GiB of which 18.62 MiB is free. "
    "Process 77 has 23.60 GiB memory in use. Of the allocated memory 23.10 GiB is allocated by PyTorch, and 10.11 MiB is "
    "reserved by PyTorch but unallocated."
)


def _gib(number: float) -> int:
    return round(number * GIB)


def test_the_newest_wording_gives_every_figure() -> None:
    """Nothing torch states is lost."""
    oom = parse_oom(NEWEST)
    assert oom == OomFigures(
        tried=64 * MIB,
        total=_gib(139.80),
        free=round(17.56 * MIB),
        gpu=0,
        allocated=_gib(125.10),
        private=_gib(1.5),
        reserved_unallocated=457 * KIB,
        this_process=_gib(125.83),
        processes=((1875, _gib(13.94)),),
    )
    assert not oom.is_fragmented


@pytest.mark.parametrize("wrapped", [NEWEST.replace(". ", ".\n   "), NEWEST.replace(" ", "  ")])
def test_a_message_broken_over_lines_is_the_same_message(wrapped: str) -> None:
    """A terminal's line breaks change nothing."""
    assert parse_oom(wrapped) == parse_oom(NEWEST)


@pytest.mark.parametrize(
    ("message", "tried", "total", "free", "allocated", "left"),
    [
        (IN_A_CONTAINER, 896 * MIB, _gib(79.19), round(552.5 * MIB), _gib(75.90), _gib(1.20)),
        (HIP, 2 * GIB, _gib(63.98), _gib(1.10), _gib(60.12), 512 * KIB),
        (TORCH_2_0, 4 * GIB, _gib(23.69), _gib(1.31), 17 * GIB, 5 * GIB),
        (TORCH_2_1, 136 * MIB, _gib(23.69), round(18.62 * MIB), _gib(23.10), round(10.11 * MIB)),
        ("CUDA out of memory. Tried to allocate 512 bytes. GPU 0", 512, None, None, None, None),
        ("CUDA out of memory. Tried to allocate 20.50 KiB", round(20.5 * KIB), None, None, None, None),
    ],
)
def test_older_and_other_wordings_are_read(
    message: str, tried: int, total: int | None, free: int | None, allocated: int | None, left: int | None
) -> None:
    """AMD's, torch 2.0's in parentheses, torch 2.1's with its misspelling, and messages cut short."""
    oom = parse_oom(message)
    assert (oom.tried, oom.total, oom.free, oom.allocated, oom.reserved_unallocated) == (tried, total, free, allocated, left)


@pytest.mark.parametrize(
    "message", ["CUDA error: out of memory", "CUDA driver error: out of memory", "", "CUBLAS_STATUS_ALLOC_FAILED when calling"]
)
def test_a_bare_driver_error_states_nothing(message: str) -> None:
    """What is not said stays unknown, and nobody is blamed."""
    oom = parse_oom(message)
    assert oom == OomFigures()
    assert (oom.own, oom.others, oom.has_neighbour, oom.is_fragmented, oom.neighbours) == (None, 0, False, False, ())


@pytest.mark.parametrize("unknown", ["0 bytes", "17179869184.00 GiB"])
def test_a_driver_that_cannot_tell_says_nothing(unknown: str) -> None:
    """Zero and the largest number there is both mean that NVML did not know."""
    oom = parse_oom(DRIVER_CANNOT_TELL.format(unknown=unknown))
    assert oom.this_process is None
    assert oom.own == 22 * GIB
    assert not oom.has_neighbour


def test_torch_with_enough_in_pieces_is_fragmented() -> None:
    """Five GiB held unused against four asked for."""
    assert parse_oom(TORCH_2_0).is_fragmented
    assert parse_oom(IN_A_CONTAINER).is_fragmented
    assert not parse_oom(HIP).is_fragmented


def test_this_very_process_listed_by_its_other_number_is_no_neighbour() -> None:
    """Inside a container torch lists itself as "Process N"."""
    oom = parse_oom(IN_A_CONTAINER)
    assert (oom.own, oom.others, oom.neighbours, oom.has_neighbour) == (_gib(78.63), 0, (), False)


@pytest.mark.parametrize(
    ("listed", "others", "blamed"),
    [
        (((9, 250 * MIB),), 250 * MIB, False),
        (((9, 41 * GIB),), 41 * GIB, True),
        (((9, 2 * GIB), (10, 2 * GIB)), 4 * GIB, True),
        (((9, 300 * MIB), (10, 300 * MIB), (11, 300 * MIB)), 900 * MIB, False),
    ],
)
def test_a_neighbour_matters_by_what_it_holds(listed: tuple[tuple[int, int], ...], others: int, blamed: bool) -> None:
    """A desktop's 250 MiB are no reason, 41 GiB are, and several add up."""
    own = 79 * GIB - others - 100 * MIB
    oom = OomFigures(GIB, 79 * GIB, 100 * MIB, 0, own - GIB, None, MIB, own, listed)
    assert (oom.others, oom.has_neighbour, oom.neighbours) == (others, blamed, listed)


@pytest.mark.parametrize(("hidden", "others"), [(2 * GIB, 0), (3 * GIB, 3 * GIB), (30 * GIB, 30 * GIB)])
def test_memory_that_nobody_listed_accounts_for_counts_from_3_gib(hidden: int, others: int) -> None:
    """The driver keeps up to a GiB for itself; more belongs to a process torch cannot see."""
    own = 79 * GIB - hidden - 100 * MIB
    oom = OomFigures(GIB, 79 * GIB, 100 * MIB, 0, own - GIB, None, MIB, own, ())
    assert oom.others == others


def test_a_neighbour_too_small_for_what_was_missing_is_not_the_reason() -> None:
    """Two GiB of others explain nothing where forty were missing."""
    oom = OomFigures(42 * GIB, 79 * GIB, 2 * GIB, 0, 70 * GIB, None, MIB, 74 * GIB, ((5, 4 * GIB),))
    assert oom.others == 4 * GIB
    assert not oom.has_neighbour


def test_no_more_processes_are_kept_than_a_card_can_have() -> None:
    """A hostile message of endless processes is cut."""
    message = "Tried to allocate 1.00 GiB. " + "Process 1 has 1.00 GiB memory in use. " * 5_000
    assert len(parse_oom(message).processes) == MOST_PROCESSES


_PIECES = st.lists(
    st.one_of(st.sampled_from([*NEWEST.split(". "), *TORCH_2_0.split(";"), *IN_A_CONTAINER.split(" ")]), st.text())
)


@given(_PIECES.map(" ".join))
def test_nothing_makes_it_raise_or_give_less_than_nothing(message: str) -> None:
    """Whatever the text, every figure is unknown or at least zero."""
    oom = parse_oom(message)
    sizes = [oom.tried, oom.total, oom.free, oom.allocated, oom.private, oom.reserved_unallocated, oom.this_process, oom.own]
    assert all(size is None or size >= 0 for size in (*sizes, oom.others, *(size for _, size in oom.processes)))
    assert isinstance(oom.has_neighbour, bool)
    assert isinstance(oom.is_fragmented, bool)
    assert set(oom.neighbours) <= set(oom.processes)
