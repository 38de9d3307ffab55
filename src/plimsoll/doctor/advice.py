"""From a cause to a finding: its words and its cures, with the lines that prove it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plimsoll.doctor import advice_cache, advice_other, advice_runtime, advice_start
from plimsoll.doctor.case import Case
from plimsoll.doctor.explained import Explained
from plimsoll.domain.finding import Code, Evidence, Finding, Severity

EXPLAIN: dict[Code, Callable[[Case], Explained]] = {
    Code.STARTUP_WEIGHTS_DO_NOT_FIT: advice_start.weights,
    Code.STARTUP_FREE_MEMORY_CHECK: advice_start.free_memory,
    Code.STARTUP_PROFILE_RUN: advice_start.profile_run,
    Code.STARTUP_PROFILE_NEIGHBOUR: advice_start.profile_neighbour,
    Code.STARTUP_NO_CACHE_BLOCKS: advice_cache.no_cache_blocks,
    Code.STARTUP_CONTEXT_TOO_LONG: advice_cache.context_too_long,
    Code.STARTUP_KV_ALLOCATION: advice_cache.kv_allocation,
    Code.STARTUP_GRAPH_CAPTURE: advice_start.graph_capture,
    Code.STARTUP_SAMPLER_WARMUP: advice_start.sampler_warmup,
    Code.STARTUP_BAD_FLAG: advice_start.bad_flag,
    Code.RUNTIME_FORWARD: advice_runtime.forward,
    Code.RUNTIME_LOGITS: advice_runtime.logits,
    Code.RUNTIME_MULTIMODAL: advice_runtime.multimodal,
    Code.RUNTIME_LORA: advice_runtime.lora,
    Code.RUNTIME_NEIGHBOUR: advice_runtime.neighbour,
    Code.RUNTIME_WAKE_UP: advice_runtime.wake_up,
    Code.RUNTIME_COLLECTIVES: advice_runtime.collectives,
    Code.ALLOCATOR_FRAGMENTATION: advice_runtime.fragmentation,
    Code.HOST_OUT_OF_MEMORY: advice_runtime.host,
    Code.KV_PREEMPTION_STORM: advice_runtime.preemption,
}


def finding_of(case: Case, evidence: Sequence[Evidence], severity: Severity = Severity.CRITICAL) -> Finding:
    """The finding for this cause."""
    code = case.complaint.code
    words = EXPLAIN.get(code, advice_other.other)(case)
    return Finding(
        code, severity, round(case.complaint.confidence, 2), words.title, words.because, tuple(evidence), tuple(words.remedy),
        tuple(words.nots),
    )  # fmt: skip
