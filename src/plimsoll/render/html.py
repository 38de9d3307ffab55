"""Reports as pages for a browser: one file each that loads nothing from anywhere, light and dark, fit to print."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from plimsoll.plan.ledger import Ledger
from plimsoll.plan.read import MemoryPlan
from plimsoll.plan.workload import Cell, CellState, Matrix, WorkloadAnswer
from plimsoll.redaction import one_line
from plimsoll.render.flags import rewritten_line
from plimsoll.render.plan import WASTE_NOTE, cell_text, gpus_of, legend_of, verdict, waste_cells, workload_sentences
from plimsoll.units import Estimate, format_count, format_gib

TEMPLATES = Path(__file__).parent / "templates"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(template: str, title: str, *, has_charts: bool = False, **facts: object) -> str:
    """The page; every text in it is cleaned and escaped, and only our own script may run where there are charts."""
    script = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in ("plot.js", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = f"{POLICY}; script-src 'sha256-{digest}'" if has_charts else POLICY
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,  # Markup has been cleaned already
    )  # fmt: skip
    return environment.get_template(f"{template}.html.j2").render(
        title=title, policy=policy, has_charts=has_charts, script=script, count=format_count, gib=format_gib, **facts
    )


_LEFT, _RIGHT = 130, 890  # of the drawing, in an SVG 1000 wide


class _DrawnTerm(NamedTuple):
    name: str
    size: Estimate
    start: int  # where it begins on the card
    kind: str


def plan_page(planned: MemoryPlan, *, matrix: Matrix | None = None, workload: WorkloadAnswer | None = None) -> str:
    """The whole page."""
    ledger = planned.ledger
    what = f"{planned.model} on {gpus_of(ledger)}, vLLM {ledger.settings.release}"
    terms = _drawn_terms(ledger)
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


def _drawn_terms(ledger: Ledger) -> list[_DrawnTerm]:
    """The ledger's terms in their order on the card."""
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
        terms.append(_DrawnTerm(name, size, at, f"t{place}" if size.value >= 0 else "missing"))
        at += size.value  # a negative cache steps back: the shortfall overlaps the terms before it
    return terms


def _depth(cell: Cell) -> int:
    """The darkness of a cell."""
    return 4 if cell.use is None or cell.state is CellState.NO else min(4, int(cell.use * 5))
