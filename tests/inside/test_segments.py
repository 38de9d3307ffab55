"""The walk over torch's segments, on snapshots that a real H200 wrote."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.read.snapshots import read_snapshot
from plimsoll.doctor.rules.snapshot_facts import FREE, BlockCategories, Category, device_facts
from plimsoll.inside.memory import LARGE_PAGE_BYTES, SMALL_PAGE_BYTES, WalkClock, walk
from tests.each import each

CAPTURES = Path(__file__).parents[1] / "captures" / "vllm-0.25.1-h200-failures" / "snapshots"
SNAPSHOTS = sorted(CAPTURES.glob("*.pickle.gz"))
MIB = 1 << 20


def raw_segments(path: Path) -> list[dict[str, Any]]:
    """The segments as torch hands them out; the captures are our own, so unpickling them runs nothing of others."""
    found = pickle.loads(gzip.decompress(path.read_bytes()))
    segments: list[dict[str, Any]] = found["segments"] if isinstance(found, dict) else found
    return segments


def segment(blocks: list[tuple[str, int]], **more: Any) -> dict[str, Any]:
    """A segment of these blocks, in order, as torch lists one."""
    listed = [{"state": state, "size": size} for state, size in blocks]
    return {"device": 0, "total_size": sum(size for _, size in blocks), "segment_type": "large", "blocks": listed, **more}


@each("path", SNAPSHOTS, ids=lambda path: path.name)
def test_the_walk_agrees_with_the_doctor(path: Path) -> None:
    """What the worker reckons from torch's list is what `doctor` reads from the file of the same moment."""
    snapshot = read_snapshot(path)
    some = next(iter(Category))
    named = tuple(tuple(None if block.state == FREE else some for block in each.blocks) for each in snapshot.segments)
    (facts,) = device_facts(snapshot, BlockCategories(named, frozenset()))
    found = walk(raw_segments(path), 0)
    assert found.reserved == facts.reserved
    assert found.active == facts.active
    assert found.releasable == facts.releasable
    assert found.private_reserved == facts.private_reserved
    assert found.largest_free_block == facts.largest_free
    assert found.expandable_segments == facts.expandable_segments
    assert found.segments == facts.segments


def test_releasable_is_what_torch_would_give_back() -> None:
    """Whole free segments and whole expandable pages; no gap beside a live block, no private pool, no other device."""
    found = walk([segment([("inactive", 20 * MIB)]), segment([("active_allocated", MIB), ("inactive", 9 * MIB)])], 0)
    assert (found.releasable, found.reserved - found.active) == (20 * MIB, 29 * MIB)
    assert found.largest_free_block == 20 * MIB
    found = walk([segment([("inactive", 20 * MIB)], segment_pool_id=(0, 1))], 0)
    assert (found.releasable, found.private_reserved, found.private_whole_free) == (0, 20 * MIB, 20 * MIB)
    assert found.largest_free_block == 0
    blocks = [("active_allocated", 10 * MIB), ("inactive", 50 * MIB), ("active_pending_free", 20 * MIB)]
    large = walk([segment(blocks, is_expandable=True)], 0)
    assert large.releasable == 2 * LARGE_PAGE_BYTES
    assert large.active == 30 * MIB
    small = [("active_allocated", MIB), ("inactive", 4 * MIB), ("active_allocated", MIB)]
    assert walk([segment(small, is_expandable=True, segment_type="small")], 0).releasable == SMALL_PAGE_BYTES
    assert walk([segment([("inactive", MIB)], device=1)], 0).reserved == 0


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from(["inactive", "active_allocated"]), st.integers(1, 1 << 32)), min_size=1),
            st.booleans(),
            st.sampled_from([(0, 0), (0, 1)]),
        )
    )
)
def test_releasable_never_exceeds_what_is_free(drawn: list[tuple[list[tuple[str, int]], bool, tuple[int, int]]]) -> None:
    """For any list of segments the parts are not negative and add up."""
    found = walk([segment(blocks, is_expandable=grows, segment_pool_id=pool) for blocks, grows, pool in drawn], 0)
    assert 0 <= found.releasable <= found.reserved - found.active
    assert 0 <= found.private_whole_free <= found.private_reserved <= found.reserved


def test_walks_are_at_least_thirty_seconds_apart_and_a_thousandth_of_the_time() -> None:
    """After a walk of 20 ms half a minute passes, after one of 100 ms a hundred seconds."""
    clock = WalkClock()
    assert clock.is_due(0.0)
    clock.note(0.0, 0.02)
    assert not clock.is_due(29.9)
    assert clock.is_due(30.0)
    clock.note(30.0, 0.1)
    assert not clock.is_due(129.9)
    assert clock.is_due(130.0)
