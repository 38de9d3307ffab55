"""A plan as one HTML page: no script, readable without colour."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.plan.ledger import Ledger
from plimsoll.plan.matrix import Cell, CellState, Matrix
from plimsoll.plan.read import MemoryPlan
from plimsoll.plan.workload import WorkloadAnswer
from plimsoll.render.flags import rewritten_line
from plimsoll.render.html import render
from plimsoll.render.plan import WASTE_NOTE, cell_text, gpus_of, legend_of, verdict, waste_cells, workload_sentences
from plimsoll.units import Estimate, format_count

_LEFT, _RIGHT = 130, 890  # of the drawing, in an SVG 1000 wide


class _Term(NamedTuple):
    name: str
    size: Estimate
    start: int  # where it begins on the card
    kind: str


def as_html(planned: MemoryPlan, *, matrix: Matrix | None = None, workload: WorkloadAnswer | None = None) -> str:
    """The whole page."""
    ledger = planned.ledger
    what = f"{planned.model} on {gpus_of(ledger)}, vLLM {ledger.settings.release}"
    terms = _terms(ledger)
    card = ledger.card
    rows = [("card", Estimate(card.total_bytes, card.low_bytes, card.high_bytes, "what vLLM sees of it"))]
    rows += [("requested", ledger.requested), *((term.name, term.size) for term in terms)]
    ends = [at for term in terms for at in (term.start, term.start + term.size.low, term.start + term.size.high)]
    first, last = min(0, *ends), max(card.total_bytes, *ends)
    return render(
        "plan", f"{verdict(planned)}: {what}",
        planned=planned, ledger=ledger, verdict=verdict(planned), what=what, command=rewritten_line(planned.checked),
        terms=terms, rows=rows, x=lambda at: round(_LEFT + (at - first) / max(1, last - first) * (_RIGHT - _LEFT), 1),
        workload=workload, workload_sentences=workload_sentences, waste_cells=waste_cells, waste_note=WASTE_NOTE,
        matrix=matrix, depth=_depth, cell_text=cell_text, legend_of=legend_of,
        contexts=[format_count(context) for context in matrix.spec.contexts] if matrix else [],
        at_once=["-" if number is None else format_count(number) for number in matrix.at_once] if matrix else [],
    )  # fmt: skip


def _terms(ledger: Ledger) -> list[_Term]:
    """In the order they lie on the card."""
    named = [
        ("others", Estimate.exact(ledger.card.used_bytes, "held by other processes")),
        ("context", ledger.context),
        ("weights", ledger.weights),
        ("non-torch", ledger.non_torch),
        ("activation", ledger.activation),
        ("graphs", ledger.graphs),
        ("KV cache", ledger.kv),
        ("slack", ledger.slack),
    ]
    terms, at = [], 0
    for place, (name, size) in enumerate(named):
        terms.append(_Term(name, size, at, f"t{place}" if size.value >= 0 else "missing"))
        at += size.value  # a negative cache steps back: what is missing overlaps what is there
    return terms


def _depth(cell: Cell) -> int:
    """How dark a cell is."""
    return 4 if cell.use is None or cell.state is CellState.NO else min(4, int(cell.use * 5))
