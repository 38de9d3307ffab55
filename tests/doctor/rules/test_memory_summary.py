"""torch's memory table: every row with its unit, cut and prefixed tables, and when gaps count."""

from __future__ import annotations

from hypothesis import given

from plimsoll.doctor.rules.log_text import Log
from plimsoll.doctor.rules.memory_summary import judge_memory_summary, read_memory_summaries
from plimsoll.findings import Code
from tests.doctor.pasted_text import pasted, scrambled

SUMMARY = """
|===========================================================================|
|                  PyTorch CUDA memory summary, device ID 1                 |
|---------------------------------------------------------------------------|
|            CUDA OOMs: 1            |        cudaMalloc retries: 3         |
|===========================================================================|
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
|---------------------------------------------------------------------------|
| Allocated memory      |  74210 MiB |  76900 MiB |   3210 GiB |   3137 GiB |
|       from large pool |  74100 MiB |  76800 MiB |   3200 GiB |   3127 GiB |
|       from small pool |    110 MiB |    100 MiB |     10 GiB |     10 GiB |
|---------------------------------------------------------------------------|
| Active memory         |  74210 MiB |  76900 MiB |   3210 GiB |   3137 GiB |
|       from large pool |  74100 MiB |  76800 MiB |   3200 GiB |   3127 GiB |
|       from small pool |    110 MiB |    100 MiB |     10 GiB |     10 GiB |
|---------------------------------------------------------------------------|
| Requested memory      |  74000 MiB |  76000 MiB |   3200 GiB |   3127 GiB |
|       from large pool |  73900 MiB |  75900 MiB |   3190 GiB |   3117 GiB |
|       from small pool |    100 MiB |    100 MiB |     10 GiB |     10 GiB |
|---------------------------------------------------------------------------|
| GPU reserved memory   |  78100 MiB |  78100 MiB |  78100 MiB |      0 B   |
|       from large pool |  77900 MiB |  77900 MiB |  77900 MiB |      0 B   |
|       from small pool |    200 MiB |    200 MiB |    200 MiB |      0 B   |
|---------------------------------------------------------------------------|
| Non-releasable memory | 3885057 KiB |   4000 MiB |   1200 GiB |   1196 GiB |
|       from large pool | 3885000 KiB |   3900 MiB |   1190 GiB |   1186 GiB |
|       from small pool |     57 KiB |    100 MiB |     10 GiB |     10 GiB |
|---------------------------------------------------------------------------|
| Allocations           |    1234    |    2345    |    4300 K  |    4299 K  |
|       from large pool |     600    |     700    |    1300 K  |    1299 K  |
|       from small pool |     634    |    1645    |    3000 K  |    3000 K  |
|---------------------------------------------------------------------------|
| Active allocs         |    1234    |    2345    |    4300 K  |    4299 K  |
|---------------------------------------------------------------------------|
| GPU reserved segments |     210    |     210    |     210    |       0    |
|---------------------------------------------------------------------------|
| Non-releasable allocs |     321    |     400    |    2100 K  |    2099 K  |
|---------------------------------------------------------------------------|
| Oversize allocations  |       0    |       0    |       0    |       0    |
|---------------------------------------------------------------------------|
| Oversize GPU segments |       0    |       0    |       0    |       0    |
|===========================================================================|
"""
MIB = 1 << 20


def test_what_is_judged_is_read_with_its_unit() -> None:
    """KiB, MiB and counts; the pools below a total do not overwrite it."""
    (table,) = read_memory_summaries(pasted(SUMMARY))
    assert (table.device, table.ooms, table.retries) == (1, 1, 3)
    assert (table.reserved, table.non_releasable, table.non_releasable_blocks) == (78100 * MIB, 3885057 << 10, 321)


def test_large_gaps_with_failures_are_fragmentation() -> None:
    """3.7 GiB in gaps, one failure and three retries; the bytes and the counts are in the sentence."""
    (finding,) = judge_memory_summary(pasted(SUMMARY), failed_bytes=2 << 30).findings
    assert finding.code is Code.ALLOCATOR_FRAGMENTATION
    assert "3.7 GiB in 321 pieces" in finding.because
    assert "again 3 time(s) and failed 1 time(s)" in finding.because
    assert any("Non-releasable" in evidence.text for evidence in finding.evidence)


def test_gaps_smaller_than_what_failed_are_not_the_cause() -> None:
    """More was asked for than all the gaps together hold: plain shortage."""
    assert judge_memory_summary(pasted(SUMMARY), failed_bytes=8 << 30).findings == []


def test_gaps_without_a_failure_are_harmless() -> None:
    """No retry and no failure: the gaps hurt nobody."""
    text = SUMMARY.replace("OOMs: 1 ", "OOMs: 0 ").replace("retries: 3", "retries: 0")
    assert judge_memory_summary(pasted(text)).findings == []


def test_a_low_ratio_is_no_sign() -> None:
    """Half of the reserved memory unused, but releasable: no finding, whatever the ratio."""
    text = SUMMARY.replace("| Allocated memory      |  74210 MiB", "| Allocated memory      |  30000 MiB").replace(
        "3885057 KiB", " 120000 KiB"
    )
    assert judge_memory_summary(pasted(text)).findings == []


def test_a_table_behind_a_prefix_and_without_its_head() -> None:
    """A log's prefix before each line, and a table cut at the top and at the side, keep their other rows."""
    lines = SUMMARY.strip().split("\n")
    prefixed = pasted("\n".join(f"worker-0 | 08:00:01 ERROR {line}" for line in lines))
    (table,) = read_memory_summaries(prefixed)
    assert (table.device, table.reserved) == (1, 78100 * MIB)
    (headless,) = read_memory_summaries(pasted("\n".join(lines[18:])))
    assert (headless.device, headless.ooms) == (None, None)
    assert headless.reserved is not None
    (cut,) = read_memory_summaries(pasted("\n".join(line[:60] for line in lines)))
    assert cut.reserved is None


def test_two_tables_stay_apart() -> None:
    """One per device or per moment, with or without a head."""
    assert len(read_memory_summaries(pasted(SUMMARY + SUMMARY.replace("ID 1", "ID 2")))) == 2
    body = "\n".join(SUMMARY.strip().split("\n")[7:])
    assert len(read_memory_summaries(pasted(f"{body}\n{body}"))) == 2


def test_text_without_a_table_gives_nothing() -> None:
    """Other tables with bars are not torch's."""
    assert judge_memory_summary(pasted("| a | b | c | d | e | f |\nAllocated memory: 3 GiB")).facts == ()


@given(scrambled(SUMMARY))
def test_no_text_breaks_it(log: Log) -> None:
    """Cut and mixed lines give a verdict; a finding always rests on a failure and a gap of a GiB."""
    for finding in judge_memory_summary(log).findings:
        assert finding.evidence
