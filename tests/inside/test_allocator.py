"""What is reckoned from torch's own statistics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.figures import GROUPS
from plimsoll.inside.memory import Torch, allocator_figures, walk, wants_expandable
from tests.each import each
from tests.inside.test_segments import MIB, SNAPSHOTS, raw_segments


def stats_of(segments: list[dict[str, Any]]) -> dict[str, Any]:
    """The statistics that torch would keep for these segments: gaps of expandable ones are in none of them."""
    reserved = active = split = 0
    for segment in segments:
        gaps = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        reserved += segment["total_size"]
        active += segment["total_size"] - sum(gaps)
        if len(segment["blocks"]) > 1 and not segment.get("is_expandable"):
            split += sum(gaps)
    amounts = {"reserved_bytes": reserved, "active_bytes": active, "inactive_split_bytes": split, "allocated_bytes": active}
    nested = {name: {"all": {"current": amount, "peak": amount + 1}} for name, amount in amounts.items()}
    return {**nested, "segment": {"all": {"current": len(segments)}}, "num_alloc_retries": 3, "num_ooms": 1}


@each("path", SNAPSHOTS, ids=lambda path: path.name)
def test_statistics_and_walk_say_the_same(path: Path) -> None:
    """Right after a walk, the statistics of the same moment give the walk's releasable bytes, ordinary or expandable."""
    segments = raw_segments(path)
    found = walk(segments, 0)
    figures, reasons = allocator_figures(stats_of(segments), found, 0.0)
    assert figures is not None
    assert set(figures) == set(GROUPS["allocator"])
    assert figures["releasable"] == found.releasable
    assert figures["unreleasable"] == found.reserved - found.active - found.releasable
    assert figures["expandable"] == (found.expandable_segments > 0)
    assert reasons == {}


def test_before_the_first_walk_private_pools_count_as_releasable() -> None:
    """The statistics alone give an upper bound; what needs a walk is None and says so."""
    segments = raw_segments(SNAPSHOTS[0].with_name("snapshot-ready.pickle.gz"))
    figures, reasons = allocator_figures(stats_of(segments), None, None)
    assert figures is not None
    assert figures["releasable"] >= walk(segments, 0).releasable
    assert figures["largest_free_block"] is None
    assert "walk" in reasons["allocator.largest_free_block"]
    assert (figures["alloc_retries"], figures["ooms"]) == (3, 1)


def test_expandable_segments_are_unknown_until_walked() -> None:
    """torch keeps no statistic for them: None with a reason, and never an upper bound that would promise too much."""
    stats = stats_of([{"total_size": 40 * MIB, "blocks": [{"state": "inactive", "size": 40 * MIB}]}])
    figures, reasons = allocator_figures(stats, None, None, wants_expandable=True)
    assert figures is not None
    assert figures["releasable"] is figures["unreleasable"] is None
    assert {"allocator.releasable", "allocator.unreleasable"} <= set(reasons)


def test_between_walks_pinned_gaps_are_taken_as_unchanged() -> None:
    """60 MiB more came free since the walk found 30 MiB pinned of 50: they count as releasable, and never below zero."""
    blocks = [{"state": "active_allocated", "size": 10 * MIB}, {"state": "inactive", "size": 50 * MIB}]
    segment = {"total_size": 60 * MIB, "blocks": blocks, "is_expandable": True}
    found = walk([segment], 0)
    assert found.releasable == 40 * MIB
    stats = stats_of([segment])
    stats["reserved_bytes"]["all"]["current"] += 60 * MIB
    figures, _ = allocator_figures(stats, found, 12.0)
    assert figures is not None
    assert figures["releasable"] == 100 * MIB
    stats["active_bytes"]["all"]["current"] = stats["reserved_bytes"]["all"]["current"]
    figures, _ = allocator_figures(stats, found, 12.0)
    assert figures is not None
    assert figures["releasable"] == 0


@pytest.mark.parametrize("stats", [{}, {"reserved_bytes": {}}, {"reserved_bytes": None, "active_bytes": {"all": 3}}])
def test_no_statistics_are_unknown(stats: dict[str, Any]) -> None:
    """Before torch uses the device there is nothing: None, not zeros."""
    figures, reasons = allocator_figures(stats, None, None)
    assert figures is None
    assert set(reasons) == {"allocator"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments : True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False),
    ],
)
def test_the_setting_is_read_as_torch_reads_it(environ: dict[str, str], wanted: bool) -> None:
    """The first variable that is set holds as a whole."""
    assert wants_expandable(environ) is wanted


class OlderCuda:
    """What of torch.cuda is asked, as an older torch has it: its listing takes no word on traces."""

    def __init__(self, *, is_initialized: bool) -> None:
        self._is_initialized = is_initialized

    def is_initialized(self) -> bool:
        """Whether the process uses a device."""
        return self._is_initialized

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        """Statistics of a device; asking before torch is initialized would be our mistake."""
        assert self._is_initialized
        return {"of": device}

    def memory_snapshot(self, mempool_id: object = None) -> list[dict[str, Any]]:
        return [{"total_size": 1, "pool": mempool_id}]

    def get_device_properties(self, device: int) -> SimpleNamespace:
        """The properties of a device."""
        return SimpleNamespace(uuid=f"0000-{device}")


def test_an_older_torch_is_asked_in_its_own_way() -> None:
    """Segments are listed although it cannot leave traces out; the UUID is spelled as NVML spells it."""
    torch = Torch(SimpleNamespace(cuda=OlderCuda(is_initialized=True)), 2)
    assert torch.stats() == {"of": 2}
    assert len(torch.segments()) == len(torch.segments()) == 1
    assert torch.uuid() == "GPU-0000-2"


def test_torch_is_not_asked_before_it_is_initialized() -> None:
    """Statistics of a device that is not used yet are empty, and asking for them initializes nothing."""
    assert Torch(SimpleNamespace(cuda=OlderCuda(is_initialized=False)), 0).stats() == {}
