"""torch's memory table: every row with its unit, cut and prefixed tables, and when gaps count."""

from __future__ import annotations

from hypothesis import given

from plimsoll.doctor.rules.log_text import Log
from plimsoll.doctor.rules.memory_summary import judge_memory_summary, read_memory_summaries
from plimsoll.findings import Code
from tests.doctor.pasted_text import pasted, printed, scrambled
from tests.each import each

(SUMMARY,) = printed("SUMMARY")
MIB = 1 << 20
LINES = SUMMARY.strip().split("\n")
BODY = "\n".join(LINES[7:])
RELEASABLE = SUMMARY.replace("|  74210 MiB |", "|  30000 MiB |").replace("3885057 KiB", " 120000 KiB")


@each(("text", "expected"), [
    (SUMMARY, [(1, 1, 3, 78100 * MIB, 3885057 << 10, 321)]),  # the pools below a total do not overwrite it
    ("\n".join(f"worker-0 | 08:00:01 ERROR {line}" for line in LINES), [(1, 1, 3, 78100 * MIB, 3885057 << 10, 321)]),
    (BODY, [(None, None, None, 78100 * MIB, 3885057 << 10, 321)]), ("\n".join(line[:60] for line in LINES), [(1, None, None,
       None, None, None)]),
    (SUMMARY + SUMMARY.replace("ID 1", "ID 2"), [(device, 1, 3, 78100 * MIB, 3885057 << 10, 321) for device in (1, 2)]),
    (f"{BODY}\n{BODY}", [(None, None, None, 78100 * MIB, 3885057 << 10, 321)] * 2),
    ("| a | b | c | d | e | f |\nAllocated memory: 3 GiB", []),
])  # fmt: skip
def test_every_table_is_read_with_its_units(text: str, expected: list[tuple[int | None, ...]]) -> None:
    """KiB, MiB and counts, behind a prefix, without a head, cut at the side; two tables stay apart, others' are none."""
    assert [table[:6] for table in read_memory_summaries(pasted(text))] == expected


@each(("text", "failed_bytes", "words"), [
    (SUMMARY, 2 << 30, ["3.7 GiB in 321 pieces", "again 3 time(s) and failed 1 time(s)"]),
    (SUMMARY, 8 << 30, []),  # more was asked for than all the gaps together hold: plain shortage
    (SUMMARY.replace("OOMs: 1 ", "OOMs: 0 ").replace("retries: 3", "retries: 0"), None, []),  # the gaps hurt nobody
    (RELEASABLE, None, []),  # half unused, but releasable: a low ratio is no sign
])  # fmt: skip
def test_large_gaps_with_failures_are_fragmentation(text: str, failed_bytes: int | None, words: list[str]) -> None:
    """The bytes and the counts are in the sentence; gaps without a failure, or smaller than what failed, are no cause."""
    findings = judge_memory_summary(pasted(text), failed_bytes=failed_bytes).findings
    assert [one.code for one in findings] == ([Code.ALLOCATOR_FRAGMENTATION] if words else [])
    for finding in findings:
        assert all(word in finding.because for word in words)
        assert any("Non-releasable" in evidence.text for evidence in finding.evidence)


@given(scrambled(SUMMARY))
def test_no_text_breaks_it(log: Log) -> None:
    """Cut and mixed lines give a verdict; a finding always rests on a failure and a gap of a GiB."""
    assert all(finding.evidence for finding in judge_memory_summary(log).findings)
