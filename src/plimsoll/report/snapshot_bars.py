"""The pictures of a memory snapshot as inline SVG: all memory in one bar, segments one by one, gaps by their size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from plimsoll.doctor.snapshot_facts import DeviceFacts, sized
from plimsoll.doctor.snapshot_parts import Category
from plimsoll.domain.memory_snapshot import DEFAULT_POOL, Segment
from plimsoll.report.page import text

_LEFT, _RIGHT, _WIDTH = 170, 150, 1000
_ROW, _GAP = 18, 8
_CELLS = 240  # pieces that one row can show
_DENSE_CELLS = 60  # of a row with more blocks than that: each tells by its height how much of it is live
_ALWAYS_SHOWN = 40  # live blocks of a row that are drawn however thin they are
_LEAST = 2.5
_BIN_MOST = 180  # a bar of the histogram is no wider
_CLASSES = {
    Category.WEIGHTS: "c0", Category.WEIGHTS_OR_KV: "c1", Category.KV: "c2", Category.GRAPHS: "c3", Category.WORKSPACE: "c4",
    Category.LOGITS: "c5", Category.ACTIVATIONS: "c6", Category.MULTIMODAL: "c7", Category.LORA: "c8",
    Category.COLLECTIVES: "c9", Category.UNKNOWN: "cu",
}  # fmt: skip
GAP, RETURNABLE, PRIVATE = "gap", "back", "own"
STYLE = """
:root{--c0:#5b6b7c;--c1:#7d8fa3;--c2:#2f6fd0;--c3:#7a4fc4;--c4:#1a8a63;--c5:#c9760c;--c6:#b8468b;--c7:#0f8f9c;--c8:#8a7a12;
--c9:#a0522d;--cu:#9aa5b1}
@media (prefers-color-scheme:dark){:root{--c0:#8fa1b5;--c1:#b3c0ce;--c2:#6ea8fe;--c3:#b191f5;--c4:#4cc79b;--c5:#f0a94a;
--c6:#ec8cc4;--c7:#4fd0dc;--c8:#d6c65a;--c9:#dc9a76;--cu:#6b7683}}
.c0{fill:var(--c0);background:var(--c0)}.c1{fill:var(--c1);background:var(--c1)}.c2{fill:var(--c2);background:var(--c2)}
.c3{fill:var(--c3);background:var(--c3)}.c4{fill:var(--c4);background:var(--c4)}.c5{fill:var(--c5);background:var(--c5)}
.c6{fill:var(--c6);background:var(--c6)}.c7{fill:var(--c7);background:var(--c7)}.c8{fill:var(--c8);background:var(--c8)}
.c9{fill:var(--c9);background:var(--c9)}.cu{fill:var(--cu);background:var(--cu)}
.gap{fill:url(#cut)}.legend .gap{background:repeating-linear-gradient(45deg,var(--pre) 0 2px,var(--soft) 2px 5px)}
.back{fill:var(--soft);stroke:var(--line)}.legend .back{background:var(--soft);border:1px solid var(--line)}
.own{fill:var(--hair)}.legend .own{background:var(--hair);border:1px solid var(--line)}
.cutline{stroke:var(--pre);stroke-width:2}.cutback{fill:var(--soft)}.edge{fill:none;stroke:var(--line)}
.finding{margin:2rem 0 0;padding:1.1rem 1.3rem;border-left:4px solid var(--bad);background:var(--soft)}
.finding h2{margin:0 0 .4rem}.finding h3{margin:1rem 0 .2rem}.finding ul{margin:.2rem 0;padding-left:1.2rem}
th.text{text-align:left}.sizes tbody th{white-space:nowrap}
main>h3{margin:2.6rem 0 .4rem}figure+.scroll,.scroll+.scroll{margin-top:1.6rem}
"""
# Gaps are hatched, so that they are told from live memory without colour.
PATTERN = (
    '<svg width="0" height="0" aria-hidden="true"><defs><pattern id="cut" width="6" height="6" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="cutback" width="6" height="6"/>'
    '<path class="cutline" d="M0 0V6"/></pattern></defs></svg>'
)


class Piece(NamedTuple):
    """A stretch of a bar."""

    kind: str
    start: float  # both as shares of the bar
    end: float
    says: str
    top: float = 0.0  # as shares of the row's height
    bottom: float = 1.0


class Row(NamedTuple):
    """A segment to draw, and how many look exactly like it."""

    segment: Segment
    named: Sequence[Category | None]
    alike: int = 1


def class_of(category: Category) -> str:
    """The colour of a category."""
    return _CLASSES[category]


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _drawn(pieces: Iterable[Piece], y: int, height: int, left: int = _LEFT, right: int = _RIGHT) -> list[str]:
    across = _WIDTH - left - right
    return [
        f'<rect class="{piece.kind}" x="{_number(left + piece.start * across)}" y="{_number(y + piece.top * height)}" '
        f'width="{_number(max(0.3, (piece.end - piece.start) * across))}" '
        f'height="{_number((piece.bottom - piece.top) * height)}">'
        f"<title>{text(piece.says)}</title></rect>"
        for piece in pieces
    ]


def _picture(name: str, title: str, says: str, height: int, inner: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="{name}-t {name}-d">',
            f'<title id="{name}-t">{text(title)}</title><desc id="{name}-d">{text(says)}</desc>',
            *inner,
            "</svg>",
        ]
    )


def whole_bar(facts: DeviceFacts) -> str:
    """All that torch holds on one device, to scale."""
    shares = [(class_of(part.category), part.bytes, str(part.category)) for part in facts.parts]
    shares += [
        (GAP, facts.pinned, "gaps beside live blocks"),
        (RETURNABLE, facts.releasable, "free, can be returned"),
        (PRIVATE, facts.private_free, "free inside private pools"),
    ]
    pieces, at, total = [], 0, max(1, facts.reserved)
    for kind, size, what in shares:
        if size:
            pieces.append(Piece(kind, at / total, (at + size) / total, f"{what}: {sized(size)}"))
            at += size
    inner = _drawn(pieces, 2, 44, 0, 0)
    return _picture(f"all{facts.device}", "All reserved memory", "; ".join(piece.says for piece in pieces), 48, inner)


def is_dense(segment: Segment) -> bool:
    """Whether a row cannot show every block of it."""
    return len(segment.blocks) > _CELLS


def segment_rows(rows: Sequence[Row], name: str) -> str:
    """Segments below each other, each as wide as the picture; the label has its size, the end what is free of it."""
    inner: list[str] = []
    for place, (segment, named, alike) in enumerate(rows):
        y = place * (_ROW + _GAP) + 2
        free = sum(block.size for block, category in zip(segment.blocks, named, strict=True) if category is None)
        label = (f"{alike:,} x " if alike > 1 else "") + sized(segment.size) + (" expandable" if segment.is_expandable else "")
        each = " each" if alike > 1 and free else ""
        inner.append(f'<text class="tick" x="{_LEFT - 10}" y="{y + _ROW - 4}" text-anchor="end">{text(label)}</text>')
        inner += _drawn(_dense_pieces(segment, named) if is_dense(segment) else _pieces(segment, named), y, _ROW)
        inner.append(f'<rect class="edge" x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_ROW}"/>')
        inner.append(f'<text class="tick" x="{_WIDTH - _RIGHT + 10}" y="{y + _ROW - 4}">{text(sized(free))} free{each}</text>')
    says = f"{sum(row.alike for row in rows)} segments; live blocks in the colour of their category, gaps hatched."
    return _picture(name, "Segments", says, len(rows) * (_ROW + _GAP) + 4, inner)


def _free_kind(segment: Segment, named: Sequence[Category | None]) -> str:
    if segment.pool != DEFAULT_POOL:
        return PRIVATE
    return RETURNABLE if all(category is None for category in named) else GAP


def _cells(segment: Segment, named: Sequence[Category | None], number: int) -> list[dict[str, int]]:
    """The bytes of each kind in each of so many equal stretches of a segment."""
    free, size = _free_kind(segment, named), max(1, segment.size)
    cells: list[dict[str, int]] = [{} for _ in range(number)]
    for block, category in zip(segment.blocks, named, strict=True):
        kind = free if category is None else class_of(category)
        start, end = block.address - segment.address, block.address - segment.address + block.size
        for cell in range(start * number // size, min(number - 1, max(start, end - 1) * number // size) + 1):
            inside = min(end, -(-(cell + 1) * size // number)) - max(start, cell * size // number)
            cells[cell][kind] = cells[cell].get(kind, 0) + max(0, inside)
    return cells


def _dense_pieces(segment: Segment, named: Sequence[Category | None]) -> list[Piece]:
    """Columns: free memory above, what is live below it, each as high as its share of the stretch."""
    pieces: list[Piece] = []
    free = _free_kind(segment, named)
    for number, held in enumerate(_cells(segment, named, _DENSE_CELLS)):
        total, top = max(1, sum(held.values())), 0.0
        for kind, size in sorted(held.items(), key=lambda pair: (pair[0] != free, pair[0])):
            bottom = min(1.0, top + size / total)
            says = f"{_kind_name(kind)}: {sized(size)} of {sized(total)}"
            pieces.append(Piece(kind, number / _DENSE_CELLS, (number + 1) / _DENSE_CELLS, says, top, bottom))
            top = bottom
    return pieces


def _pieces(segment: Segment, named: Sequence[Category | None]) -> list[Piece]:
    """What each cell of the row mostly holds, neighbours joined; a few live blocks are drawn again, never too thin."""
    free, size = _free_kind(segment, named), max(1, segment.size)
    cells = _cells(segment, named, _CELLS)
    held_by = [(block, category) for block, category in zip(segment.blocks, named, strict=True) if category is not None]
    live = [
        Piece(class_of(category), start / size, (start + block.size) / size, f"{category}: {sized(block.size)}")
        for block, category in held_by[: _ALWAYS_SHOWN + 1]
        for start in (block.address - segment.address,)
    ]
    pieces: list[Piece] = []
    for number, held in enumerate(cells):
        kind = max(held, key=lambda each: held[each]) if held else free
        if pieces and pieces[-1].kind == kind:
            pieces[-1] = pieces[-1]._replace(end=(number + 1) / _CELLS)
        else:
            pieces.append(Piece(kind, number / _CELLS, (number + 1) / _CELLS, ""))
    least = _LEAST / (_WIDTH - _LEFT - _RIGHT)
    pieces = [piece._replace(says=_said(piece, size)) for piece in pieces]
    if len(live) <= _ALWAYS_SHOWN:
        pieces += [piece._replace(end=max(piece.end, min(1.0, piece.start + least))) for piece in live]
    return pieces


def _said(piece: Piece, size: int) -> str:
    return f"mostly {_kind_name(piece.kind)}, about {sized(int((piece.end - piece.start) * size))}"


def _kind_name(kind: str) -> str:
    names = {GAP: "gap", RETURNABLE: "free, can be returned", PRIVATE: "free in a private pool"}
    return names.get(kind) or next(str(category) for category, known in _CLASSES.items() if known == kind)


def gap_histogram(facts: DeviceFacts, failed: int | None, name: str) -> str:
    """How many bytes lie in gaps of each size, by powers of two, against the size that failed."""
    places = [max(19, hole.size.bit_length() - 1) for hole in facts.holes]
    ends = [*places, *([max(19, failed.bit_length() - 1)] if failed else [])]
    first, last = min(ends), max(ends)
    held = [0] * (last - first + 1)
    for hole, place in zip(facts.holes, places, strict=True):
        held[place - first] += hole.size
    top, floor, height = max(1, *held), 190, 230
    width = min(_BIN_MOST, (_WIDTH - 40) / len(held))
    inner = [f'<path class="axis" d="M20 {floor}H{_WIDTH - 20}"/>']
    for number, size in enumerate(held):
        x, tall = 20 + number * width, 150 * size / top
        label = (
            "under 1 MiB"
            if first + number == 19
            else f"from {sized(1 << (first + number)).replace('.0 ', ' ').replace('.00', '')}"
        )
        says = f"{label}: {sized(size)} in gaps"
        inner.append(
            f'<rect class="gap" x="{_number(x + 3)}" y="{_number(floor - tall)}" width="{_number(max(1, width - 6))}" '
            f'height="{_number(tall)}"><title>{text(says)}</title></rect>'
        )
        middle = _number(x + width / 2)
        inner.append(f'<text class="tick" x="{middle}" y="{floor + 20}" text-anchor="middle">{text(label)}</text>')
        if size:
            inner.append(
                f'<text class="tick" x="{middle}" y="{_number(floor - tall - 6)}" text-anchor="middle">{sized(size)}</text>'
            )
    if failed:
        place = max(19, failed.bit_length() - 1)
        share = place - first + min(1.0, max(0.0, failed / (1 << place) - 1))
        x = 20 + share * width
        anchor = "end" if x > _WIDTH / 2 else "start"
        inner.append(f'<path class="limit" d="M{_number(x)} 20V{floor}"/>')
        shift = -8 if anchor == "end" else 8
        inner.append(f'<text x="{_number(x + shift)}" y="16" text-anchor="{anchor}">failed: {text(sized(failed))}</text>')
    return _picture(name, "Gaps by size", f"{len(facts.holes)} gaps, the largest {sized(facts.largest_hole)}", height, inner)
