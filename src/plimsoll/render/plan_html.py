"""A plan as one HTML page: nothing is loaded from anywhere, no script, light and dark, readable without colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from plimsoll.plan.ledger import Ledger
from plimsoll.plan.matrix import Cell, Matrix, State
from plimsoll.plan.read import MemoryPlan
from plimsoll.plan.workload import WorkloadAnswer
from plimsoll.render.charts import bullets, document, table, text
from plimsoll.render.flags import rewritten_line
from plimsoll.render.plan import WASTE_NOTE, cell_text, gpus_of, legend_of, verdict, waste_cells, workload_sentences
from plimsoll.units import Estimate, format_count, format_gib

_STYLE = (Path(__file__).parent / "plan.css").read_text(encoding="utf-8")
_WIDTH, _LEFT, _ROW = 1000, 130, 30
_SCALE_NOTE = (
    "The dashed line is the end of the card; a whisker is the band of its term; a red frame is memory that is missing. "
    "The table has the same figures."
)


class _Term(NamedTuple):
    name: str
    term: Estimate
    start: int  # where it begins on the card


def as_html(planned: MemoryPlan, *, matrix: Matrix | None = None, workload: WorkloadAnswer | None = None) -> str:
    """The whole page."""
    what = f"{planned.model} on {gpus_of(planned.ledger)}, vLLM {planned.ledger.settings.release}"
    parts = [
        f'<h1><span class="{"good" if planned.fits else "bad"}">{verdict(planned)}</span>: {text(what)}</h1>',
        "<h2>Command</h2>",
        f"<pre>{text(rewritten_line(planned.checked))}</pre>",
        *_ledger(planned.ledger),
        *_cache(planned.ledger),
        *_findings(planned),
        *_advice(planned),
        *(_workload(workload) if workload is not None else ()),
        *(_matrix(matrix) if matrix is not None else ()),
        *bullets((text(note) for note in planned.notes), "Notes"),
    ]
    footer = "plimsoll plan. Sizes are per GPU, of the rank that rules."
    return document(f"{verdict(planned)}: {what}", _STYLE, parts, footer=footer)


def _ledger(ledger: Ledger) -> list[str]:
    terms = _terms(ledger)
    rows = [("card", Estimate(ledger.card.total_bytes, ledger.card.low_bytes, ledger.card.high_bytes, "what vLLM sees of it"))]
    rows += [("requested", ledger.requested), *((t.name, t.term) for t in terms)]
    body = [
        f'<tr><th scope="row">{name}</th><td>{format_gib(term.value)}</td>'
        f"<td>{'exact' if term.is_exact else f'{format_gib(term.low)} to {format_gib(term.high)}'}</td>"
        f'<td class="text">{text(term.why)}</td></tr>'
        for name, term in rows
    ]
    head = ("term", "value", "band", "where it comes from")
    return [
        "<h2>The memory of one GPU</h2>",
        *_drawing(ledger, terms),
        *table("Every term with the band it lies in", head, body),
    ]


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
    found, at = [], 0
    for name, term in named:
        found.append(_Term(name, term, at))
        at += term.value  # a negative cache steps back: what is missing overlaps what is there
    return found


def _drawing(ledger: Ledger, terms: Sequence[_Term]) -> list[str]:
    """One bar of the whole card, and below it every term on the same scale with its band as a whisker."""
    total = ledger.card.total_bytes
    ends = [at for t in terms for at in (t.start + t.term.low, t.start + t.term.high, t.start)]
    first, last = min(0, *ends), max(total, *ends)

    def x(at: int) -> float:
        return round(_LEFT + (at - first) / max(1, last - first) * (_WIDTH - _LEFT - 10), 1)

    height = 60 + _ROW * len(terms)
    said = ", ".join(f"{t.name} {format_gib(t.term.value)}" for t in terms)
    lines = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="bar-title bar-says">',
        '<title id="bar-title">The card drawn to scale</title>',
        f'<desc id="bar-says">{text(f"{format_gib(total)} in all: {said}.")}</desc>',
        '<text x="0" y="27">card</text>',
    ]
    lines += [_box(x, t, number, 8, 28) for number, t in enumerate(terms) if t.term.value > 0]
    edge = x(total)
    lines.append(f'<rect class="edge" x="{x(0)}" y="8" width="{round(edge - x(0), 1)}" height="28"/>')
    lines.append(f'<line class="line" x1="{edge}" y1="2" x2="{edge}" y2="{height}"/>')
    for number, t in enumerate(terms):
        y = 50 + number * _ROW
        low, high, middle = x(t.start + t.term.low), x(t.start + t.term.high), y + 10
        lines += [f'<text x="0" y="{y + 15}">{t.name}</text>', _box(x, t, number, y, 20)]
        if not t.term.is_exact:
            lines.append(f'<path class="band" d="M{low} {middle}H{high}M{low} {middle - 6}v12M{high} {middle - 6}v12"/>')
        tip = max(high, x(t.start), x(t.start + t.term.value))
        before = min(low, x(t.start), x(t.start + t.term.value))
        place = f'x="{round(tip + 6, 1)}"'
        if tip >= _WIDTH - 110:  # no room at the right: before it, or inside where it fills the card
            place = f'x="{round(before - 6, 1)}" text-anchor="end"' if before > _LEFT + 90 else f'x="{round(before + 8, 1)}"'
        lines.append(f'<text {place} y="{y + 15}">{format_gib(t.term.value)}</text>')
    return [*lines, "</svg>", f'<p class="dim">{_SCALE_NOTE}</p>']


def _box(x: Callable[[int], float], term: _Term, number: int, y: int, height: int) -> str:
    ends = sorted((x(term.start), x(term.start + term.term.value)))
    width = round(ends[1] - ends[0], 1)
    tip = f"{term.name} {format_gib(term.term.value)}"
    kind = f"t{number}" if term.term.value >= 0 else "missing"
    shape = f'<rect class="{kind}" x="{ends[0]}" y="{y}" width="{width}" height="{height}">'
    return f"{shape}<title>{escape(tip)}</title></rect>"


def _cache(ledger: Ledger) -> list[str]:
    kv = ledger.kv_plan
    if kv.num_blocks <= 0 or ledger.kv.value <= 0:
        return ["<h2>KV cache</h2>", "<p>no KV blocks</p>"]
    said = (
        f"{format_count(kv.num_blocks)} blocks of {kv.block_size} tokens and {format_gib(kv.bytes_per_block)}: "
        f"{format_count(kv.tokens)} tokens"
    )
    if kv.max_concurrency is not None:
        said += f", {kv.max_concurrency:.2f} requests of {format_count(kv.max_model_len)} tokens at once"
    body = [
        f'<tr><th scope="row">{text(g.kind)}</th><td>{g.layers}</td><td>{g.block_size}</td><td>{g.blocks_per_request}</td></tr>'
        for g in kv.groups
    ]
    head = ("kind", "layers", "tokens a block", "blocks of the longest request")
    return ["<h2>KV cache</h2>", f"<p>{text(said)}.</p>", *table("Groups of layers", head, body)]


def _findings(planned: MemoryPlan) -> list[str]:
    items = [
        f'<strong class="{"bad" if f.severity.value == "critical" else ""}">{f.severity.value}</strong> '
        f"<code>{f.code.value}</code> {text(f.title)}<br>{text(f.because)}"
        for f in planned.findings
    ]
    return bullets(items, "Findings") or ["<h2>Findings</h2>", "<p>Nothing found.</p>"]


def _advice(planned: MemoryPlan) -> list[str]:
    items = (f"<code>{text(a.words)}</code><br>{text(a.why)}: {text(a.effect)}" for a in planned.advice)
    return bullets(items, "What would help, planned again to be sure")


def _workload(answer: WorkloadAnswer) -> list[str]:
    body = []
    for waste in answer.waste:
        name, *rest = waste_cells(waste)
        body.append(f'<tr><th scope="row">{name}</th>{"".join(f"<td>{text(cell)}</td>" for cell in rest)}</tr>')
    head = ("block", "unfilled slots", "of the last block", "of all slots", "any length")
    said = [f"<p>{text(sentence)}</p>" for sentence in workload_sentences(answer)]
    return ["<h2>Workload</h2>", *said, *table(WASTE_NOTE, head, body)]


def _matrix(matrix: Matrix) -> list[str]:
    head = ("at once", *(format_count(context) for context in matrix.spec.contexts))
    body = [
        f'<tr><th scope="row">{format_count(number)}</th>{"".join(map(_cell, row))}</tr>'
        for number, row in zip(matrix.spec.concurrencies, matrix.rows, strict=True)
    ]
    most = "".join(f"<td>{'-' if number is None else format_count(number)}</td>" for number in matrix.at_once)
    body.append(f'<tr><th scope="row">at most</th>{most}</tr>')
    caption = "Requests at once (rows) by context in tokens (columns)"
    return ["<h2>What fits</h2>", *table(caption, head, body), *bullets(text(line) for line in legend_of(matrix))]


def _cell(cell: Cell) -> str:
    depth = 4 if cell.use is None or cell.state is State.NO else min(4, int(cell.use * 5))
    return f'<td class="{cell.state.value} u{depth}" title="{text(cell.why)}">{text(cell_text(cell))}</td>'
