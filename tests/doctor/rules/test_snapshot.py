"""Snapshots whose right answer is known, from a model of torch's allocator."""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plimsoll.doctor.read.snapshots import parse_snapshot
from plimsoll.doctor.rules.snapshot import SnapshotVerdict, judge_snapshot
from plimsoll.doctor.rules.snapshot_facts import Category, StackFrame, category_of_stack
from tests.doctor.snapshot_maker import FORWARD, GIB, KV, LOGPROBS, MIB, VLLM, WEIGHTS, Allocator, pinned, serving
from tests.each import each


def _parts(verdict: SnapshotVerdict) -> dict[Category, int]:
    return {part.category: part.bytes for part in verdict.facts[0].parts}


def failing(made: Allocator, size: int, free: int) -> Allocator:
    made.fail(size, free)
    return made


def calm() -> Allocator:
    """Pinned segments, and no request that failed."""
    made = pinned()
    del made.events[-1]
    return made


def returned() -> Allocator:
    """Free segments as large as the request that failed long before."""
    made = pinned()
    made.free(made.alloc(700 * MIB, FORWARD))
    for _ in range(20):
        made.free(made.alloc(MIB, FORWARD))
    return made


def streamed() -> Allocator:
    """All of it another stream's."""
    made = pinned()
    for segment in made.segments:
        segment["stream"] = 7
    return made


def asleep() -> Allocator:
    """Weights and KV cache in pools of their own, as sleep mode keeps them."""
    made = Allocator(with_stacks=False)
    for _ in range(16):
        made.alloc(224 * MIB, WEIGHTS, pool=(0, 1))
    made.alloc(15 * GIB, KV, pool=(0, 2))
    made.alloc(30 * MIB)
    return made


@each(("made", "failed_bytes", "confidence", "note"), [
    (failing(serving(), 3 * GIB, 500 * MIB), None, None, "memory was short, not fragmented"),
    (failing(serving(), 3 * GIB, 50 * GIB), None, None, "a memory limit set for this process, not gaps"),
    (returned(), None, None, "does not show the moment"), (streamed(), None, None, ""),
    (calm(), None, None, "No request is known to have failed"),
    # A size from a log judges as one in the history does, with a little less confidence.
    (pinned(with_stacks=False), None, None, "No stacks were recorded"), (pinned(with_stacks=False), 600 * MIB, 0.7, ""),
    (pinned(with_stacks=False), 400 * MIB, None, "does not show the moment"),
    (pinned(with_stacks=False), 4 * GIB, None, "short"),
    (Allocator(), 5, None, ""),
])  # fmt: skip
def test_what_is_no_fragmentation_says_why(
    made: Allocator, failed_bytes: int | None, confidence: float | None, note: str, tmp_path: Path
) -> None:
    """Plain shortage, a limit, memory that torch returns itself, another stream's gaps, nothing failed, nothing at all."""
    verdict = judge_snapshot(made.snapshot(tmp_path), "s", failed_bytes=failed_bytes)
    assert [one.confidence for one in verdict.findings] == ([] if confidence is None else [confidence])
    assert note in "\n".join(verdict.notes)


def test_a_private_pool_with_most_of_the_memory_is_not_taken_for_graphs(tmp_path: Path) -> None:
    """Sleep mode keeps weights and KV cache in pools of their own."""
    parts = _parts(judge_snapshot(asleep().snapshot(tmp_path), "s"))
    assert parts[Category.UNKNOWN] >= 15 * GIB


def test_the_gaps_of_expandable_segments_go_back_page_by_page(tmp_path: Path) -> None:
    """Of a gap only what lies on half-used pages stays."""
    made = Allocator(is_expandable=True)
    whole = made.alloc(200 * MIB, FORWARD)
    made.free(whole)
    made.alloc(30 * MIB, LOGPROBS)
    facts = judge_snapshot(made.snapshot(tmp_path), "s").facts[0]
    assert (facts.holes[0].size, facts.pinned, facts.releasable) == (170 * MIB, 10 * MIB, 160 * MIB)


def test_growth_without_stacks_is_told_by_size(tmp_path: Path) -> None:
    """Equal blocks that are new are not taken for layers."""
    before = serving(with_stacks=False).snapshot(tmp_path, "before")
    grown = serving(with_stacks=False)
    for _ in range(20):
        grown.alloc(40 * MIB)
    (finding,) = judge_snapshot(grown.snapshot(tmp_path, "grown"), "s", before=before).findings
    assert "blocks of 40.0 MiB: 800.0 MiB more in +20 blocks" in finding.evidence[0].text


@each(
    ("file", "name", "category"),
    [
        ("v1/worker/gpu_model_runner.py", "load_model", Category.WEIGHTS),
        ("model_executor/model_loader/base_loader.py", "anything", Category.WEIGHTS),
        ("v1/worker/gpu/attn_utils.py", "init_kv_cache", Category.KV),
        ("worker/cache_engine.py", "_allocate_kv_cache", Category.KV),
        ("v1/worker/gpu_model_runner.py", "capture_model", Category.GRAPHS),
        ("v1/worker/workspace.py", "_ensure_workspace_size", Category.WORKSPACE),
        ("v1/worker/gpu_worker.py", "init_device", Category.WORKSPACE),
        ("v1/sample/ops/topk_topp_sampler.py", "forward_native", Category.LOGITS),
        ("model_executor/layers/logits_processor.py", "forward", Category.LOGITS),
        ("v1/worker/gpu_model_runner.py", "_execute_mm_encoder", Category.MULTIMODAL),
        ("lora/model_manager.py", "activate_adapter", Category.LORA),
        ("distributed/device_communicators/custom_all_reduce.py", "__init__", Category.COLLECTIVES),
        ("model_executor/models/llama.py", "forward", Category.ACTIVATIONS),
        ("v1/worker/gpu_worker.py", "compile_or_warm_up_model", Category.UNKNOWN),
        ("entrypoints/cli/main.py", "main", Category.UNKNOWN),
    ],
)
def test_a_stack_tells_what_it_asked_memory_for(file: str, name: str, category: Category) -> None:
    """One frame of vLLM's is enough; the names hold over releases 0.8 to 0.32."""
    frames = [
        StackFrame("/lib/python3/site-packages/torch/nn/modules/module.py", 1, "load_model"),
        StackFrame(VLLM + file, 10, name),
    ]
    assert category_of_stack(frames) is category
    assert category_of_stack([StackFrame("/app/mine.py", 3, name)]) is Category.UNKNOWN, "somebody else's function"


@each(
    ("stack", "category"),
    [
        # the second runner makes its sampler and its masks inside load_model, and its block tables with the KV cache
        ("v1/worker/gpu/sample/penalties.py __init__, v1/worker/gpu/model_runner.py load_model", Category.LOGITS),
        ("v1/worker/gpu/structured_outputs.py __init__, v1/worker/gpu/model_runner.py load_model", Category.WORKSPACE),
        ("v1/worker/gpu/block_table.py __init__, v1/worker/gpu/model_runner.py initialize_kv_cache", Category.WORKSPACE),
        ("v1/worker/gpu/attn_utils.py _allocate_kv_cache, v1/worker/gpu/model_runner.py initialize_kv_cache", Category.KV),
        # and so does the first
        ("v1/worker/block_table.py __init__, v1/worker/gpu_model_runner.py initialize_kv_cache", Category.WORKSPACE),
        ("v1/attention/backends/flex.py __init__, v1/worker/gpu_model_runner.py initialize_attn_backend", Category.WORKSPACE),
        ("model_executor/layers/linear.py create_weights, v1/worker/gpu_model_runner.py load_model", Category.WEIGHTS),
        ("v1/sample/sampler.py sample, v1/worker/gpu_model_runner.py _dummy_sampler_run", Category.LOGITS),
    ],
)  # fmt: skip
@each("folder", [VLLM, "vllm/", "C:\\env\\vllm\\"])
def test_of_nested_work_the_inner_purpose_counts(stack: str, category: Category, folder: str) -> None:
    """Both runners, with whole paths and with paths whose upper folders were cut off."""
    frames = [StackFrame(folder + file, 1, name) for file, name in (place.split() for place in stack.split(", "))]
    assert category_of_stack(frames) is category


def test_a_server_still_starting_is_told_by_its_stacks_too(tmp_path: Path) -> None:
    """Weights alone, then the whole server: what came is what a start makes."""
    early = Allocator()
    early.alloc(1050 * MIB, WEIGHTS)
    grown = serving()
    for _ in range(10):
        grown.alloc(30 * MIB, LOGPROBS)
    verdict = judge_snapshot(grown.snapshot(tmp_path, "b"), "s", before=early.snapshot(tmp_path, "a"))
    assert verdict.findings == ()
    assert verdict.growth is not None
    assert verdict.growth.was_starting


_BLOCKS = st.lists(
    st.tuples(st.integers(0, 1 << 40), st.sampled_from(["inactive", "active_allocated", "active_pending_free"])), max_size=12
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(_BLOCKS, st.booleans(), st.booleans(), st.integers(0, 1)), max_size=6), st.integers(1, 1 << 41))
def test_any_snapshot_is_judged(rows: list[tuple[list[tuple[int, str]], bool, bool, int]], failed: int) -> None:
    """Whatever lies in it, the facts add up."""
    tree = [
        {"address": number << 45, "total_size": sum(size for size, _ in blocks), "segment_type": "small" if small else "large",
         "is_expandable": grows, "segment_pool_id": (0, pool),
         "blocks": [{"size": size, "state": state, "requested_size": size} for size, state in blocks]}
        for number, (blocks, small, grows, pool) in enumerate(rows)
    ]  # fmt: skip
    snapshot = parse_snapshot(BytesIO(pickle.dumps(tree)), "s")
    verdict = judge_snapshot(snapshot, "s", before=snapshot, failed_bytes=failed)
    for facts in verdict.facts:
        assert facts.reserved == facts.active + facts.pinned + facts.releasable + facts.private_free
        assert sum(part.bytes for part in facts.parts) == facts.active
    assert all(finding.code == "allocator.fragmentation" for finding in verdict.findings)
