"""From conditions to findings: each kind under its own code, with a remedy, and nothing from what is not known."""

from __future__ import annotations

from plimsoll.findings import Code, Evidence, Severity
from plimsoll.guard.judge.findings import PLAN, PlannedTokens, as_planned, code_of, finding, findings, severity_of
from plimsoll.guard.judge.judge import QUESTIONS
from plimsoll.guard.judge.look import Look, Reach
from plimsoll.unknown import Condition, Status
from plimsoll.vllm.flags import flags_of
from tests.each import each

CODES = {
    "dead": Code.ENGINE_DEAD, "wedged": Code.ENGINE_WEDGED, "hung": Code.ENGINE_WEDGED, "saturated": Code.ENGINE_SATURATED,
    "storm": Code.KV_PREEMPTION_STORM, "backlog": Code.KV_SATURATED, "retries": Code.ALLOCATOR_FRAGMENTATION,
    "growth": Code.GPU_GROWTH, "exhausted": Code.GPU_GROWTH, "neighbour": Code.RUNTIME_NEIGHBOUR, "slack": Code.GPU_THIN_SLACK,
    "host": Code.HOST_GROWTH, "card": Code.OTHER_HARDWARE, "prefix": Code.PREFIX_CACHE_LOW_HIT_RATE,
    "stalled": Code.ENGINE_STALLED, "slow": Code.ENGINE_SLOW, "garbage": Code.ENGINE_GARBAGE, "loop": Code.ENGINE_CRASH_LOOP,
    "contained": Code.RUNTIME_CONTAINED, "limping": Code.RUNTIME_CONTAINED,
    "changed": Code.ENGINE_CHANGED, PLAN: Code.STARTUP_DIFFERS_FROM_PLAN,
}  # fmt: skip
LOOK = Look(
    10.0, 1e9, Reach.ANSWERS,
    figures={"running": 40.0, "waiting": 60.0, "kv_cache_usage": 0.99, "success": 100.0, "prompt_tokens": 80_000.0,
             "generation_tokens": 20_000.0},
    config={"num_gpu_blocks": "1000", "block_size": "16", "gpu_memory_utilization": "0.9", "cache_dtype": "auto"},
)  # fmt: skip


def condition(kind: str, status: Status = Status.TRUE) -> Condition:
    return Condition(kind, status, "Reason", "it is so", 0.0, (Evidence("page", "a line"),))


def test_every_question_has_a_code() -> None:
    """Each kind of the judge has its code, and none has two."""
    assert {kind for kind, _ in QUESTIONS} <= set(CODES)
    assert {kind: code_of(kind) for kind in CODES} == CODES


@each("kind", CODES)
@each("look", [None, LOOK])
def test_a_condition_that_holds_becomes_a_finding(kind: str, look: Look | None) -> None:
    """It says the condition's own reason and evidence, what to do, what is no use, and flags that exist."""
    found = finding(condition(kind), look)
    assert found is not None
    assert (found.code, found.severity) == (CODES[kind], severity_of(kind))
    assert (found.because, found.evidence) == ("it is so", (Evidence("page", "a line"),))
    assert found.remedy
    assert found.not_a_remedy
    known = flags_of("0.32.0")
    assert all(remedy.flag is None or remedy.flag in known for remedy in found.remedy)


@each("status", [Status.FALSE, Status.UNKNOWN])
@each("kind", CODES)
def test_nothing_comes_of_what_does_not_hold_or_is_not_known(kind: str, status: Status) -> None:
    """Only what is known to hold is a finding."""
    assert finding(condition(kind, status), LOOK) is None
    assert findings([condition(kind, status)], LOOK) == ()


def test_a_code_is_told_once_by_its_worst_condition() -> None:
    """Growth with allocations that fail is one finding, not two; the worst comes first."""
    found = findings([condition("prefix"), condition("growth"), condition("exhausted"), condition("storm")], LOOK)
    assert [one.code for one in found] == [Code.GPU_GROWTH, Code.KV_PREEMPTION_STORM, Code.PREFIX_CACHE_LOW_HIT_RATE]
    assert found[0].severity is Severity.CRITICAL


def test_a_full_cache_is_advised_with_its_own_numbers() -> None:
    """With 16,000 tokens of cache and 1,000 a request, 16 fit at once."""
    (found,) = findings([condition("storm")], LOOK)
    assert ("--max-num-seqs", "16") in [(remedy.flag, remedy.value) for remedy in found.remedy]


@each(
    ("config", "status"),
    [
        ({"num_gpu_blocks": "1000", "block_size": "16"}, Status.FALSE),
        ({"num_gpu_blocks": "500", "block_size": "32"}, Status.FALSE),
        ({"num_gpu_blocks": "900", "block_size": "16"}, Status.TRUE),
        ({"num_gpu_blocks": "1200", "block_size": "16"}, Status.TRUE),
        ({"num_gpu_blocks": "900", "block_size": "16", "kv_cache_size_tokens": "16000"}, Status.FALSE),
        ({"num_gpu_blocks": "None", "block_size": "16"}, Status.UNKNOWN),
        ({}, Status.UNKNOWN),
    ],
)
def test_a_start_is_held_against_its_plan(config: dict[str, str], status: Status) -> None:
    """Outside the plan's own band it differs; without figures it is not known; tokens are compared, not blocks."""
    assert as_planned(PlannedTokens(16_000.0, 15_500.0, 16_500.0), LOOK._replace(config=config)).status is status
    assert as_planned(PlannedTokens(1.0, 1.0, 1.0), None).status is Status.UNKNOWN
