"""One worker's memory: figures that add up whatever happens, and no failure where it said that there can be none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.figures import GROUPS
from plimsoll.standin.memory import MIB, Allocator, DeviceModel, MemorySizes, OutOfMemory, rounded, segment_for
from tests.each import sure

GIB = 1 << 30
SMALL = MemorySizes(
    total=24 * GIB, context=500 * MIB, neighbours=0, requested=21 * GIB, weights=15 * GIB, non_torch=100 * MIB,
    activation_peak=900 * MIB, graphs=300 * MIB, kv_cache=5 * GIB, max_num_batched_tokens=8192, max_num_seqs=128, vocab=128_256,
)  # fmt: skip


def world(room: int, peak: int, limits: tuple[int, int, int], *, graphs: bool, is_profiled: bool) -> MemorySizes:
    """A device on which this much is left after the start, in tenths of the peak."""
    tokens, sequences, vocab = limits
    taken = SMALL.context + SMALL.non_torch + SMALL.weights + SMALL.kv_cache + graphs * SMALL.graphs
    return SMALL._replace(
        total=taken + 80 * MIB + room * peak * MIB // 10, activation_peak=peak * MIB, max_num_batched_tokens=tokens,
        max_num_seqs=sequences, vocab=vocab, graphs=graphs * SMALL.graphs, is_profiled=is_profiled,
    )  # fmt: skip


# Between so tight that the longest step cannot fit and roomy; a step is safe from about 22 tenths on.
worlds = st.builds(
    world,
    st.integers(0, 60),
    st.integers(0, 1700).map(lambda size: size + 30),
    st.tuples(
        st.sampled_from([1, 512, 2048, 8192, 16384]), st.sampled_from([1, 16, 256]), st.sampled_from([100, 32_000, 128_256])
    ),
    graphs=st.booleans(),
    is_profiled=st.booleans(),
)
shares = st.floats(0.0, 1.0)
deeds = st.lists(
    st.one_of(
        st.tuples(st.just("step"), shares, shares),
        st.tuples(st.just("step"), st.just(1.0), st.just(1.0)),
        st.tuples(st.sampled_from(["grow", "neighbour", "neighbour gone", "compact"]), shares, shares),
    ),
    max_size=20,
)


def do(memory: DeviceModel, deed: str, much: float, many: float) -> OutOfMemory | None:
    sizes = memory.sizes
    if deed == "step":
        return memory.step(1 + int(much * (sizes.max_num_batched_tokens - 1)), 1 + int(many * (sizes.max_num_seqs - 1)))
    if deed == "grow":
        return memory.grow(int((64 * MIB) ** much))
    if deed == "neighbour":
        memory.take_neighbour(int(much * memory.free * 0.5))
    elif deed == "neighbour gone":
        memory.take_neighbour(-int(much * memory.neighbours))
    else:
        memory.compact()
    return None


def check(memory: DeviceModel) -> dict[str, dict[str, Any]]:
    figures = memory.figures()
    torch, device = figures["allocator"], figures["device_memory"]
    assert all(value >= 0 for group in (torch, device) for value in group.values() if isinstance(value, int))
    assert torch["allocated"] <= torch["reserved"] <= torch["reserved_peak"]
    assert torch["allocated"] <= torch["allocated_peak"]
    assert torch["releasable"] + torch["unreleasable"] == torch["reserved"] - torch["allocated"]
    assert torch["largest_free_block"] <= torch["reserved"] - torch["allocated"]
    assert device["free"] + device["used"] == device["total"]
    assert device["by_this_process"] + device["by_others"] == device["used"]
    held = memory.sizes.context + memory.sizes.non_torch + torch["reserved"]
    assert device["by_this_process"] == held
    return figures


@given(worlds, deeds)
def test_the_figures_always_add_up(sizes: MemorySizes, done: Iterable[tuple[str, float, float]]) -> None:
    """Allocated within reserved, what is free and what is used make the whole, nothing below zero, failures among it."""
    memory = DeviceModel(sizes)
    check(memory)
    for deed in done:
        before = memory.figures()["allocator"]
        trouble = do(memory, *deed)
        after = check(memory)["allocator"]
        assert (after["ooms"] > before["ooms"]) == (trouble is not None)
        if deed[0] != "grow":
            assert after["allocated"] == before["allocated"]


@given(worlds, deeds, st.lists(st.tuples(shares, shares), max_size=40))
def test_safe_means_that_no_step_can_fail(
    sizes: MemorySizes, before: Iterable[tuple[str, float, float]], steps: Iterable[tuple[float, float]]
) -> None:
    """Whatever came before, and whichever steps within the limits come next; and it stays so."""
    memory = DeviceModel(sizes)
    for deed in before:
        do(memory, *deed)
    if not memory.is_safe():
        return
    for much, many in steps:
        assert do(memory, "step", much, many) is None
        assert memory.is_safe()
    assert memory.step(sizes.max_num_batched_tokens, sizes.max_num_seqs) is None


@given(worlds, deeds, shares, shares)
def test_compaction_gives_back_what_is_releasable_and_the_next_step_takes_it_again(
    sizes: MemorySizes, before: Iterable[tuple[str, float, float]], much: float, many: float
) -> None:
    """To the byte; what is live is not touched, and the same step on the emptied cache leads to the same reserved."""
    memory = DeviceModel(sizes)
    for deed in before:
        do(memory, *deed)
    reserved = []
    for _ in range(3):
        figures = check(memory)
        answer = memory.compact()
        assert answer["returned"] == figures["allocator"]["releasable"] == answer["reserved_before"] - answer["reserved_after"]
        assert answer["free_after"] - answer["free_before"] == answer["returned"]
        assert check(memory)["allocator"]["releasable"] == 0
        assert memory.figures()["allocator"]["allocated"] == figures["allocator"]["allocated"]
        do(memory, "step", much, many)
        reserved.append(memory.reserved)
    assert reserved[0] == reserved[1] == reserved[2]


def test_figures_have_the_keys_of_the_probe() -> None:
    """The four groups, each key, and nothing else."""
    figures = DeviceModel(SMALL).figures()
    assert {name: tuple(table) for name, table in figures.items()} == GROUPS
    assert figures["budget"]["activation_peak"] == 900 * MIB
    unprofiled = DeviceModel(SMALL._replace(is_profiled=False)).figures()["budget"]
    assert [unprofiled[name] for name in ("activation_peak", "non_torch", "graphs")] == [None] * 3


def test_growth_takes_until_there_is_nothing_left() -> None:
    """Pieces of any size add up, are never given back, and end in torch's failure."""
    memory = DeviceModel(SMALL)
    allocated = memory.allocated
    assert memory.grow(0) is None
    for piece in (300, 300_000, 3 * MIB, 30 * MIB):
        assert memory.grow(piece) is None
        memory.compact()
    assert 33 * MIB < memory.allocated - allocated < 34 * MIB
    for _ in range(10_000):
        if (trouble := memory.grow(8 * MIB)) is not None:
            break
    assert trouble is not None
    assert trouble.tried == 20 * MIB > trouble.free
    assert memory.compact()["returned"] == 0


def test_asleep_it_holds_little_and_may_not_wake_up() -> None:
    """Weights and cache leave the device, compaction is refused; if somebody took their place, waking fails as vLLM's does."""
    memory = DeviceModel(SMALL)
    free, resident = memory.free, memory.host_resident
    memory.sleep(1)
    assert memory.free == free + 20 * GIB
    assert memory.host_resident == resident + 15 * GIB
    assert memory.compact() == {"refused": "the worker is asleep"}
    assert memory.take_neighbour(memory.free)
    assert sure(memory.wake_up()).message.startswith("CUDA Error: out of memory")
    memory.take_neighbour(-memory.neighbours)
    assert memory.wake_up() is None
    assert (memory.free, memory.host_resident) == (free, resident)
    memory.sleep(2)
    assert memory.host_resident == resident


def test_it_is_known_whether_the_layers_or_the_logits_had_no_room() -> None:
    """A step that is replayed as a graph allocates its logits alone; a long one fails in its layers before."""
    memory = DeviceModel(SMALL)
    assert memory.refusal(1, 128).is_logits
    assert not memory.refusal(8192, 1).is_logits
    memory.take_neighbour(memory.free)
    short, long = memory.step(1, 128), memory.step(8192, 1)
    assert short is not None
    assert short.is_logits
    assert long is not None
    assert not long.is_logits


PLENTY = 1 << 40


def test_requests_are_rounded_as_torch_does() -> None:
    """512 bytes for a block; 2 MiB, 20 MiB or whole multiples of 2 MiB for a segment."""
    assert [rounded(size) for size in (1, 512, 513, 4096)] == [512, 512, 1024, 4096]
    sizes = (1, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 437 * MIB)
    assert [segment_for(size) // MIB for size in sizes] == [2, 2, 20, 20, 10, 438]


def test_freed_neighbours_become_one_block() -> None:
    """Three tensors in a row are freed in any order; then the whole is there again, within the same step."""
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        allocator = Allocator()
        allocator.run([(9, 60 * MIB)], PLENTY)
        split = [(0, 20 * MIB), (1, 20 * MIB), (2, 20 * MIB)]
        assert allocator.run([*split, *((tensor, 0) for tensor in order), (3, 60 * MIB)], 0) is None
        assert allocator.reserved == 60 * MIB
