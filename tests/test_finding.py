"""The codes everything else refers to."""

from __future__ import annotations

import pytest

from plimsoll.findings import Code, Finding, Severity
from plimsoll.unknown import Condition, Status


def test_codes_are_promises() -> None:
    """These may gain company, never change or go; what is memory is told from what is not; a finding reads as a sentence."""
    promised = (
        "startup.weights-do-not-fit startup.free-memory-check startup.profile-run startup.profile-neighbour"
        " startup.no-cache-blocks startup.context-too-long startup.kv-allocation startup.graph-capture startup.sampler-warmup"
        " startup.bad-flag runtime.forward runtime.logits runtime.multimodal runtime.lora runtime.neighbour runtime.wake-up"
        " runtime.collectives runtime.contained allocator.fragmentation gpu.growth host.out-of-memory host.growth kv.saturated"
        " kv.preemption-storm kv.internal-fragmentation prefix-cache.low-hit-rate engine.dead engine.wedged engine.saturated"
        " engine.crash-loop"
    )
    assert set(promised.split()) <= {code.value for code in Code}
    assert not any(c.is_memory for c in (Code.STARTUP_BAD_FLAG, Code.ENGINE_DEAD, Code.OTHER_PORT_IN_USE))
    assert all(c.is_memory for c in (Code.KV_SATURATED, Code.HOST_OUT_OF_MEMORY, Code.STARTUP_NO_CACHE_BLOCKS))
    finding = Finding(Code.KV_SATURATED, Severity.WARNING, 0.9, "the cache is full", "because")
    assert str(finding) == "kv.saturated: the cache is full"


def test_unknown_is_not_true() -> None:
    """It neither holds nor is known not to hold; a condition has a reason and reads as a sentence."""
    true, false, unknown = (
        Condition("KvSaturated", status, "UsageHigh", "the cache is full", 10.0)
        for status in (Status.TRUE, Status.FALSE, Status.UNKNOWN)
    )
    assert (unknown.is_true, unknown.is_known, false.is_true, false.is_known) == (False, False, False, True)
    assert str(true) == "KvSaturated is true: the cache is full"
    with pytest.raises(AssertionError):
        Condition("KvSaturated", Status.TRUE, "", "the cache is full", 0.0)
