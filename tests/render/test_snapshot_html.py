"""The page of a snapshot: well formed, self-contained, small, and safe whatever a frame is called."""

from __future__ import annotations

import pickle
import re
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plimsoll.doctor.read.snapshots import read_snapshot_from
from plimsoll.doctor.rules.snapshot import judge_snapshot
from plimsoll.doctor.rules.snapshot_facts import Snapshot
from plimsoll.render.snapshot_html import snapshot_page
from tests.doctor.snapshot_maker import GIB, MIB, Allocator, pinned, serving, split
from tests.render.html_page import HtmlPage

HOSTILE = "\"><script>alert('x')</script><img src=//evil.example/x onerror=alert(1)>"
SECRET = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"


def _read(page: str) -> HtmlPage:
    """The page, which asks for nothing from outside and runs nothing."""
    read = HtmlPage(page)
    for tag, attributes in read.elements:
        assert not any(name.startswith("on") or name in ("src", "href") for name in attributes), (tag, attributes)
    return read


def _page_of(snapshot: Snapshot, source: str = "s.pickle", before: Snapshot | None = None) -> str:
    return snapshot_page(snapshot, judge_snapshot(snapshot, source, before=before))


@pytest.mark.parametrize("with_stacks", [True, False])
@pytest.mark.parametrize("make", [serving, split, pinned])
def test_every_shape_gives_a_whole_page(tmp_path: Path, make: object, with_stacks: bool) -> None:
    """Well formed, nothing loaded, no script, and the figures are there as text."""
    assert callable(make)
    snapshot = make(with_stacks=with_stacks).snapshot(tmp_path)
    page = _page_of(snapshot)
    read = _read(page)
    assert read.tags("script") == []
    assert not re.search(r"https?://|@import|url\((?!#cut\))", page)
    assert "Segments" in read.text
    assert "KV cache" in read.text
    assert "prefers-color-scheme:dark" in page


def test_the_finding_comes_first_and_the_failed_size_is_in_the_histogram(tmp_path: Path) -> None:
    """The title is the finding's; gaps are drawn against the request."""
    read = _read(_page_of(split().snapshot(tmp_path)))
    assert "GPU memory is in pieces too small for 512.0 MiB" in read.text
    assert "failed: 512.0 MiB" in read.text
    assert "Nothing wrong in this snapshot" in _read(_page_of(serving().snapshot(tmp_path))).text


def test_growth_has_its_table(tmp_path: Path) -> None:
    """Two snapshots: what changed, by category and by place."""
    read = _read(_page_of(split().snapshot(tmp_path, "b"), before=serving().snapshot(tmp_path, "a")))
    assert "Since the first snapshot" in read.text
    assert "+1.17 GiB" in read.text


def test_a_large_snapshot_stays_a_small_page() -> None:
    """Twenty thousand segments with sixty thousand blocks and a stack each: under 2 MB."""
    made = Allocator()
    for number in range(300):
        stack = tuple((f"/vllm/v1/sample/{'x' * 250}{number}.py", line, "f" * 250) for line in range(60))
        made.alloc(2 * MIB, stack)
    tree = made.tree()
    blocks = made.blocks[0]
    segments = [{**made.segments[number % 30], "address": number << 30, "blocks": blocks, "total_size": 20 * MIB}
                for number in range(20_000)]  # fmt: skip
    snapshot = read_snapshot_from(BytesIO(pickle.dumps({**tree, "segments": segments})), "s")
    assert len(_page_of(snapshot).encode()) < 2_000_000


def test_a_segment_of_very_many_blocks_is_drawn_in_few_pieces() -> None:
    """Fifty thousand live blocks and gaps in one segment."""
    blocks = [{"size": 512 * (1 + number % 3), "requested_size": 1, "state": "inactive" if number % 2 else "active_allocated"}
              for number in range(50_000)]  # fmt: skip
    total = sum(int(str(block["size"])) for block in blocks)
    tree = [{"address": 0, "total_size": total, "segment_type": "large", "blocks": blocks}]
    assert len(_page_of(read_snapshot_from(BytesIO(pickle.dumps(tree)), "s"))) < 200_000


def test_markup_and_secrets_in_names_stay_out(tmp_path: Path) -> None:
    """Frames, settings and the file's name are anybody's text."""
    made = pinned()
    made.alloc(2 * GIB, ((f"/vllm/{HOSTILE}.py", 1, SECRET),))
    snapshot = made.snapshot(tmp_path)._replace(settings=((HOSTILE, SECRET),))
    page = _page_of(snapshot, HOSTILE)
    _read(page)
    assert "<script" not in page
    assert "<img" not in page
    assert SECRET not in page


def test_odd_sizes_are_drawn() -> None:
    """Empty snapshots, segments of nothing, blocks of nothing, and the largest numbers there are."""
    for sizes in ([], [0], [0, 0], [1], [1 << 60, 1], [(1 << 63) - 1]):
        blocks = [
            {"size": size, "state": state, "requested_size": 0} for size in sizes for state in ("inactive", "active_allocated")
        ]
        tree = [{"address": 0, "total_size": 2 * sum(sizes), "segment_type": "large", "blocks": blocks}]
        _read(_page_of(read_snapshot_from(BytesIO(pickle.dumps(tree)), "s")))
    _read(_page_of(read_snapshot_from(BytesIO(pickle.dumps([])), "s")))


_BLOCKS = st.lists(
    st.tuples(st.integers(0, 1 << 40), st.sampled_from(["inactive", "active_allocated", "active_pending_free"])), max_size=12
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(_BLOCKS, st.booleans(), st.booleans(), st.integers(0, 1)), max_size=6), st.integers(1, 1 << 41))
def test_any_snapshot_is_judged_and_drawn(rows: list[tuple[list[tuple[int, str]], bool, bool, int]], failed: int) -> None:
    """Whatever lies in it: facts add up, the page is whole."""
    tree = [
        {"address": number << 45, "total_size": sum(size for size, _ in blocks), "segment_type": "small" if small else "large",
         "is_expandable": grows, "segment_pool_id": (0, pool),
         "blocks": [{"size": size, "state": state, "requested_size": size} for size, state in blocks]}
        for number, (blocks, small, grows, pool) in enumerate(rows)
    ]  # fmt: skip
    snapshot = read_snapshot_from(BytesIO(pickle.dumps(tree)), "s")
    verdict = judge_snapshot(snapshot, "s", before=snapshot, failed_bytes=failed)
    for facts in verdict.facts:
        assert facts.reserved == facts.active + facts.pinned + facts.releasable + facts.private_free
        assert sum(part.bytes for part in facts.parts) == facts.active
    assert all(finding.code == "allocator.fragmentation" for finding in verdict.findings)
    _read(snapshot_page(snapshot, verdict))


def test_segments_that_look_the_same_are_one_row(tmp_path: Path) -> None:
    """A hundred equal segments do not fill the page; how many there are is said."""
    made = Allocator()
    for _ in range(100):
        made.alloc(30 * MIB)
    made.alloc(31 * MIB)
    page = _page_of(made.snapshot(tmp_path))
    assert "100 x 30.0 MiB" in page
    assert page.count('class="edge"') == 2
    assert "Segments that look the same are drawn once" in page


def test_a_segment_with_more_blocks_than_can_be_drawn_shows_shares(tmp_path: Path) -> None:
    """Live and free alternate too finely to draw: each column is half live, not one or the other by chance."""
    made = Allocator(is_expandable=True)
    addresses = [made.alloc(5 * MIB) for _ in range(400)]
    for address in addresses[::2]:
        made.free(address)
    page = _page_of(made.snapshot(tmp_path))
    assert "the height of each column" in page
    heights = [
        float(height) for height in re.findall(r'<rect class="cu" x="[\d.]+" y="[\d.]+" width="[\d.]+" height="([\d.]+)"', page)
    ]
    assert len(heights) > 50
    assert all(6 < height < 12 for height in heights[1:])


def test_memory_of_unknown_purpose_is_not_said_to_be_told(tmp_path: Path) -> None:
    """Neither a stack nor a size named it."""
    made = Allocator(with_stacks=False)
    made.alloc(30 * MIB)
    page = _page_of(made.snapshot(tmp_path))
    assert "by stack" not in page
    assert "by size" not in page
    assert "in 1 segment," in page
