"""The block-size table and its picture are what the replay says now."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from lab import write_block_size_docs as writer
from plimsoll.cli.simulate import BLOCK_SIZES

TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
PAGE = writer.PAGE.read_text(encoding="utf-8")
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not beside the repository")


def test_the_made_up_rows_are_true() -> None:
    """Every row of the workload that anybody can run stands in the page as it is measured here."""
    (workload,) = (one for one in writer.WORKLOADS if one.is_made_up)
    made_up = writer.measure(workload, Path())
    rows = [
        line for line in writer.section([made_up]).splitlines() if made_up.workload.title in line or line.startswith("|  |")
    ]
    assert len(rows) == 1 + len(writer.MEASURES)
    assert [row for row in rows if row not in PAGE] == []


@(pytest.mark.real if TRACES.is_dir() else needs_traces)  # every trace at every size; CI lets no real test be skipped
def test_all_of_it_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    """`--check` finds the page and the picture in step; remade with `python -m lab.write_block_size_docs --traces DIR`."""
    assert writer.main(["--check", "--traces", str(TRACES)]) == 0, capsys.readouterr().out


def table() -> dict[str, list[list[float]]]:
    """The page's own figures: for each workload a row for each measure, a figure for each block size."""
    found: dict[str, list[list[float]]] = {}
    title = ""
    for line in PAGE.partition(writer.BEGIN)[2].partition(writer.END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 + len(BLOCK_SIZES) and cells[1] in {kind.title for kind in writer.MEASURES}:
            title = cells[0] or title  # the title stands in the first row only
            found.setdefault(title, []).append([0.0 if cell == "-" else float(cell.replace(",", "")) for cell in cells[2:]])
    return found


def test_the_reading_follows_from_the_table() -> None:
    """The sentences below the table say what its figures say; who remakes the table must read them again."""
    rows, words = table(), " ".join(PAGE.partition(writer.END)[2].split())
    assert len(rows) == len(writer.WORKLOADS)
    waste = [one[0] for one in rows.values()]
    assert f"{min(w[1] for w in waste):.2f} to {max(w[1] for w in waste):.2f} % of the used slots are empty" in words
    assert all(1.8 < after / before < 2.6 for w in waste for before, after in pairwise(w) if before > 0.1)
    preempted = {title: one[3] for title, one in rows.items()}
    more = {title: 100 * (counts[-1] / counts[1] - 1) for title, counts in preempted.items()}
    worse = ("Azure conversations", "arXiv summaries", "system prompts")
    assert f"{more['system prompts']:.0f} % more with system prompts" in words
    assert all(value < 5 for title, value in more.items() if title not in worse)
