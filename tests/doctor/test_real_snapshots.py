"""Snapshots that torch 2.11 wrote on an H200: of known shapes, and of a server of vLLM 0.25.1 before and after load."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from plimsoll.doctor.read.snapshots import read_snapshot
from plimsoll.doctor.rules.out_of_memory import parse_oom
from plimsoll.doctor.rules.snapshot import SnapshotVerdict, judge_snapshot
from plimsoll.doctor.rules.snapshot_facts import LARGE_PAGE, Category, Snapshot
from plimsoll.findings import Code
from plimsoll.vllm.log_lines import measured_of
from tests.each import each

CAPTURES = Path(__file__).parents[1] / "captures" / "vllm-0.25.1-h200-failures"
SHAPES = CAPTURES / "snapshots"
MIB, GIB = 1 << 20, 1 << 30
EVERY = sorted(path.name.removesuffix(".pickle.gz") for path in SHAPES.glob("*.pickle.gz"))


@cache
def _read(name: str) -> Snapshot:
    return read_snapshot(SHAPES / f"{name}.pickle.gz")


def _judged(name: str, **options: int | None) -> SnapshotVerdict:
    return judge_snapshot(_read(name), name, failed_bytes=options.get("failed"), device_free=options.get("free"))


def _parts(verdict: SnapshotVerdict) -> dict[Category, int]:
    return {part.category: part.bytes for part in verdict.facts[0].parts}


def _mib(verdict: SnapshotVerdict) -> dict[str, int]:
    return {str(category): round(size / MIB) for category, size in _parts(verdict).items()}


@each("name", EVERY)
def test_every_captured_snapshot_adds_up_and_is_drawn(name: str) -> None:
    """Live, gaps, returnable and private memory are all that is reserved, and the page is made."""
    verdict = _judged(name)
    (facts,) = verdict.facts
    assert facts.reserved == facts.active + facts.pinned + facts.releasable + facts.private_free
    assert sum(part.bytes for part in facts.parts) == facts.active


def test_the_captures_are_all_there() -> None:
    """Five shapes with and without stacks, and three servers at two moments."""
    assert len(EVERY) == 18


@each("name", [name for name in EVERY if name not in ("split-frames", "expandable-frames")])
def test_where_no_request_failed_there_is_no_finding(name: str) -> None:
    """Only the two captures that recorded a failed request blame anything."""
    assert _judged(name).findings == ()


@pytest.mark.parametrize("moment", ["ready", "loaded"])
def test_every_byte_of_a_real_server_is_named_by_its_stack(moment: str) -> None:
    """Weights are what the server's own log says, the KV cache what was asked for, and nothing is unknown."""
    parts = _parts(_judged(f"snapshot-history-{moment}"))
    log = measured_of((CAPTURES / "snapshot-history.log").read_bytes().splitlines())
    assert log.weights_bytes is not None
    assert abs(parts[Category.WEIGHTS] - log.weights_bytes) < GIB // 200
    assert parts[Category.KV] == GIB
    assert 60 * MIB < parts[Category.LOGITS] < 70 * MIB  # counts of each token's use, and a buffer of the sampler's
    assert 32 * MIB <= parts[Category.WORKSPACE] < 40 * MIB  # cuBLAS's, made in the trial run, and the worker's tables
    assert set(parts) == {Category.WEIGHTS, Category.KV, Category.LOGITS, Category.WORKSPACE}


@pytest.mark.parametrize("moment", ["ready", "loaded"])
def test_the_first_runner_and_its_graphs_are_named_too(moment: str) -> None:
    """A capture the rules were not made on: the older model runner with CUDA graphs, and nothing of it is unknown."""
    parts = _mib(_judged(f"snapshot-history-first-runner-{moment}"))
    assert parts == {"weights": 3716, "KV cache": 1024, "workspace": 64, "CUDA graphs": 64, "sampler and logits": 31}


def test_without_stacks_only_the_private_pool_of_graphs_is_known() -> None:
    """Weights and cache may be anything by their size."""
    assert _mib(_judged("snapshot-ready")) == {"unknown": 4872, "CUDA graphs": 32}


def test_a_server_under_load_has_not_grown() -> None:
    """Between ready and loaded torch keeps more free segments and not a byte more is live."""
    for kind in ("snapshot", "snapshot-history"):
        verdict = judge_snapshot(_read(f"{kind}-loaded"), "s", before=_read(f"{kind}-ready"))
        assert verdict.findings == ()
        assert verdict.growth is not None
        assert (verdict.growth.live, verdict.growth.fixed, verdict.growth.was_starting) == (0, 0, False)
        assert verdict.growth.releasable > 400 * MIB


def test_gaps_under_a_limit_of_the_process_are_fragmentation_and_say_so() -> None:
    """64 MiB failed while 1010 MiB lay in gaps of 5 MiB: the limit kept torch from taking more, the gaps from having it."""
    verdict = _judged("split-frames")
    (finding,) = verdict.findings
    assert finding.code is Code.ALLOCATOR_FRAGMENTATION
    assert finding.confidence == 0.6
    assert "memory limit of its own" in finding.because
    assert "1010.0 MiB in 202 pieces, the largest 5.0 MiB" in finding.because
    assert "memory limit" in finding.remedy[0].do
    assert "may help little" in finding.remedy[-1].why  # the next capture shows it: expandable segments failed alike


def test_expandable_segments_whose_pages_are_all_in_use_are_fragmented_too() -> None:
    """Every page of 20 MiB holds live blocks, so torch could unmap none: the same verdict, without the advice to expand."""
    snapshot = _read("expandable-frames")
    verdict = judge_snapshot(snapshot, "s")
    (finding,) = verdict.findings
    assert finding.code is Code.ALLOCATOR_FRAGMENTATION
    assert "whole pages of 20 MiB" in finding.because
    assert not any("expandable" in remedy.do for remedy in finding.remedy)
    (segment,) = snapshot.segments
    assert segment.is_expandable
    assert segment.size % LARGE_PAGE == 0
    assert verdict.facts[0].releasable == 0


@pytest.mark.parametrize("shape", ["split", "expandable"])
def test_without_a_history_the_error_in_the_log_tells_what_failed(shape: str) -> None:
    """torch's own text has the size and what the device had free."""
    error = parse_oom((SHAPES / f"{shape}.error.txt").read_text())
    (finding,) = _judged(shape, failed=error.tried, free=error.free).findings
    assert finding.code is Code.ALLOCATOR_FRAGMENTATION
    assert "64.0 MiB" in finding.title
    assert "memory limit of its own" in finding.because
    assert finding.confidence < 0.6
    (unlimited,) = _judged(shape, failed=error.tried).findings
    assert "memory limit" not in unlimited.because


@pytest.mark.parametrize("shape", ["pinned", "pinned-frames"])
def test_a_segment_that_one_small_block_holds_is_a_note_until_a_request_fails(shape: str) -> None:
    """Four segments of 512 MiB, each held by 4 MiB: harmless alone, the reason why 1 GiB does not fit."""
    quiet = _judged(shape)
    held = "A segment of 512.0 MiB is held by one live block of 4.0 MiB"
    assert any(held in note and "No request is known to have failed" in note for note in quiet.notes)
    (finding,) = _judged(shape, failed=GIB).findings
    assert held in finding.because
    assert "3 more segments" in finding.because
    assert ("snapshot_shapes.py" in finding.because) == (shape == "pinned-frames")
    assert _judged(shape, failed=400 * MIB).findings == ()  # it fits into one of the gaps


@pytest.mark.parametrize("shape", ["healthy", "healthy-frames"])
def test_a_healthy_process_is_never_called_fragmented(shape: str) -> None:
    """Whatever fails beside it, its gaps are not the reason."""
    for failed in (MIB, 64 * MIB, GIB, 100 * GIB):
        assert _judged(shape, failed=failed).findings == ()
        assert _judged(shape, failed=failed, free=120 * GIB).findings == ()


@pytest.mark.parametrize("shape", ["growing", "growing-frames"])
def test_live_memory_that_grew_between_two_snapshots_is_growth(shape: str) -> None:
    """60 blocks of 8 MiB more: a finding of little confidence, since two points are no trend."""
    early, late = _read(f"{shape}-early"), _read(f"{shape}-late")
    verdict = judge_snapshot(late, "late", before=early)
    (finding,) = verdict.findings
    assert finding.code is Code.GPU_GROWTH
    assert finding.confidence <= 0.4
    assert "480.0 MiB" in finding.title
    assert "+60 blocks" in finding.evidence[0].text
    assert ("snapshot_shapes.py" in finding.evidence[0].text) == (shape == "growing-frames")
    assert judge_snapshot(early, "early", before=late).findings == ()
