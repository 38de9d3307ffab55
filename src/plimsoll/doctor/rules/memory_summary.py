"""Reads the table that torch.cuda.memory_summary() prints, and says when it shows memory lost in gaps."""

from __future__ import annotations

import re
from typing import NamedTuple

from plimsoll.doctor.rules.log_text import Log, LogLine, TextVerdict, contains_any, quote
from plimsoll.doctor.words import finding
from plimsoll.units import GIB, format_gib

MOST_TABLES = 256
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "": 1, "K": 1000, "M": 10**6}
_CELL = r"\s{0,12}\d{1,20} ?(?:[KMGTP]iB|B|K|M|)\s{0,6}"
_ROW = (
    r"\|\s{1,4}(?P<name>[A-Za-z][A-Za-z \-]{3,30}?)\s{0,24}\|\s{0,12}(?P<number>\d{1,20}) ?(?P<unit>[KMGTP]iB|B|K|M|)\s{0,6}"
    rf"\|{_CELL}\|{_CELL}\|{_CELL}\|?"
)
_COUNTS = r"CUDA OOMs: (\d{1,12})\s{0,16}\|\s{0,16}cudaMalloc retries: (\d{1,12})"
_ROWS = {
    "GPU reserved memory": "reserved", "Non-releasable memory": "non_releasable",
    "Non-releasable allocs": "non_releasable_blocks",
}  # fmt: skip


_SHOWN = ("Non-releasable", "CUDA OOMs", "GPU reserved memory")


class MemorySummary(NamedTuple):
    """One table as it is now, in bytes; a row that is not there (old torch, a cut table) is None, never 0."""

    device: int | None = None
    ooms: int | None = None
    retries: int | None = None
    reserved: int | None = None
    non_releasable: int | None = None
    non_releasable_blocks: int | None = None
    lines: tuple[LogLine, ...] = ()


def read_memory_summaries(log: Log) -> tuple[MemorySummary, ...]:
    """Every table in the text, whatever stands in front of its lines and wherever it was cut."""
    if not contains_any(log.lines, "memory_summary", vllm=True):
        return ()
    tables: list[MemorySummary] = []
    for line in log.lines:
        text = line.text
        values: dict[str, int] = {}
        if "|" not in text:
            continue
        if "memory summary, device ID" in text:
            device = re.search(r"device ID (\d{1,6})", text)
            tables.append(MemorySummary(device=int(device[1]) if device else None, lines=(line,)))
        elif "CUDA OOMs:" in text and (counts := re.search(_COUNTS, text)):
            values = {"ooms": int(counts[1]), "retries": int(counts[2])}
        elif text.count("|") >= 5 and (row := re.search(_ROW, text)) and (field := _ROWS.get(row["name"].strip())):
            values = {field: int(row["number"]) * _UNITS[row["unit"]]}  # the rows of the two pools below it are left
        if values:
            # A value it has already means that a new table began, its head cut off.
            if not tables or any(getattr(tables[-1], name) is not None for name in values):
                tables.append(MemorySummary())
            tables[-1] = tables[-1]._replace(lines=(*tables[-1].lines, line), **values)
        del tables[:-MOST_TABLES]
    return tuple(tables)


def judge_memory_summary(log: Log, *, failed_bytes: int | None = None) -> TextVerdict[tuple[MemorySummary, ...]]:
    """Gaps count when they are large in bytes AND an allocation had to be retried or failed; a ratio never counts."""
    tables, judged = read_memory_summaries(log), []
    for table in tables:
        gaps = table.non_releasable
        if gaps is None or not (table.retries or table.ooms) or gaps < max(GIB // 2, failed_bytes or 0):
            continue
        shown = [line for line in table.lines if any(word in line.text for word in _SHOWN)]
        judged.append(finding(
            "summary-gaps", quote(log, shown), confidence=0.75 if failed_bytes and table.ooms else None, gaps=format_gib(gaps),
            device="" if table.device is None else f" on device {table.device}", retries=table.retries or 0,
            against=f", more than the {format_gib(failed_bytes)} that could not be had" if failed_bytes else "",
            split=f" in {table.non_releasable_blocks:,} pieces" if table.non_releasable_blocks is not None else "",
            held=f" of {format_gib(table.reserved)} that torch holds" if table.reserved is not None else "",
            ooms=table.ooms or 0,
        ))  # fmt: skip
    worst = max(judged, key=lambda one: one.confidence, default=None)
    return TextVerdict([worst] if worst else [], tables)
