"""The block-size table and its picture are what the replay says now."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from lab import write_block_size_docs as writer
from plimsoll.cli.simulate import BLOCK_SIZES
from plimsoll.simulate.replay import STEP_COLUMNS, replay
from plimsoll.simulate.settings import EngineLimits
from plimsoll.simulate.trace import Integers
from plimsoll.simulate.trace_files import read_trace

TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
PAGE = writer.PAGE.read_text(encoding="utf-8")
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not beside the repository")


@pytest.fixture(scope="module")
def made_up() -> writer.Measured:
    """The one workload that needs no file."""
    (workload,) = (one for one in writer.WORKLOADS if one.is_made_up)
    return writer.measure(workload, Path())


def test_the_made_up_rows_are_true(made_up: writer.Measured) -> None:
    """Every row of the workload that anybody can run stands in the page as it is measured here."""
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
    saved = [round(w[1] - w[0], 2) for w in waste]
    assert f"saves {min(saved):.2f} to {max(saved):.2f} percentage points" in words
    assert all(1.8 < after / before < 2.6 for w in waste for before, after in pairwise(w) if before > 0.1)
    last = {title: one[0][-1] for title, one in rows.items()}
    short = [value for title, value in last.items() if "Mooncake" not in title]
    assert f"At 128 it is {min(short):.1f} to {max(short):.1f} %" in words
    assert max(value for title, value in last.items() if "Mooncake" in title) < 1
    preempted = {title: one[3] for title, one in rows.items()}
    smaller = [counts[0] - counts[1] for counts in preempted.values()]
    assert (sum(d > 0 for d in smaller), sum(d < 0 for d in smaller), smaller.count(0)) == (4, 3, 1)
    more = {title: 100 * (counts[-1] / counts[1] - 1) for title, counts in preempted.items()}
    worse = ("Azure conversations", "arXiv summaries", "system prompts")
    assert "{:.0f} % more on Azure's conversations, {:.0f} % more on the arXiv summaries, {:.0f} % more with system".format(
        *(more[title] for title in worse)
    ) in words  # fmt: skip
    assert all(value < 5 for title, value in more.items() if title not in worse)


@needs_traces
def test_a_request_wastes_half_a_block() -> None:
    """What the page says of the mean running request of Azure's conversations is what the step log says."""
    running = wasted = held = 0

    def add(rows: Integers) -> None:
        nonlocal running, wasted, held
        column = dict(zip(STEP_COLUMNS, rows.T, strict=True))
        took = column["t_end_ns"] - column["t_start_ns"]
        running += int((took * column["running"]).sum())
        wasted += int((took * column["waste_slots"]).sum())
        held += int((took * column["used_blocks"] * 16).sum())

    trace = read_trace(str(TRACES / writer.WORKLOADS[0].trace))
    replay(trace, EngineLimits(num_blocks=1025), on_steps=add)
    assert f"has {wasted / running:.1f} empty slots and holds {held / running:,.0f}" in " ".join(PAGE.split())
