"""A memory snapshot as one HTML page: nothing is loaded from anywhere, no script, light and dark, whole without colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from plimsoll.doctor.rules.snapshot import SnapshotGrowth, SnapshotVerdict
from plimsoll.doctor.rules.snapshot_facts import (
    DEFAULT_POOL,
    Category,
    CategoryUse,
    DeviceFacts,
    Segment,
    Snapshot,
    StackFrame,
    format_stack,
    sized,
)
from plimsoll.findings import Finding
from plimsoll.render.charts import STYLE, bullets, document, row, table, text, tiles

# The pictures of a memory snapshot as inline SVG: all memory in one bar, segments one by one, gaps by their size.

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
BARS_STYLE = """
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


class BarPiece(NamedTuple):
    """A stretch of a bar."""

    kind: str
    start: float  # both as shares of the bar
    end: float
    says: str
    top: float = 0.0  # as shares of the row's height
    bottom: float = 1.0


class SegmentRow(NamedTuple):
    """A segment to draw, and how many look exactly like it."""

    segment: Segment
    named: Sequence[Category | None]
    alike: int = 1


def class_of(category: Category) -> str:
    """The colour of a category."""
    return _CLASSES[category]


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _drawn(pieces: Iterable[BarPiece], y: int, height: int, left: int = _LEFT, right: int = _RIGHT) -> list[str]:
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
            pieces.append(BarPiece(kind, at / total, (at + size) / total, f"{what}: {sized(size)}"))
            at += size
    inner = _drawn(pieces, 2, 44, 0, 0)
    return _picture(f"all{facts.device}", "All reserved memory", "; ".join(piece.says for piece in pieces), 48, inner)


def is_dense(segment: Segment) -> bool:
    """True if a row cannot show every block of it."""
    return len(segment.blocks) > _CELLS


def segment_rows(rows: Sequence[SegmentRow], name: str) -> str:
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


def _dense_pieces(segment: Segment, named: Sequence[Category | None]) -> list[BarPiece]:
    """Columns: free memory above, what is live below it, each as high as its share of the stretch."""
    pieces: list[BarPiece] = []
    free = _free_kind(segment, named)
    for number, held in enumerate(_cells(segment, named, _DENSE_CELLS)):
        total, top = max(1, sum(held.values())), 0.0
        for kind, size in sorted(held.items(), key=lambda pair: (pair[0] != free, pair[0])):
            bottom = min(1.0, top + size / total)
            says = f"{_kind_name(kind)}: {sized(size)} of {sized(total)}"
            pieces.append(BarPiece(kind, number / _DENSE_CELLS, (number + 1) / _DENSE_CELLS, says, top, bottom))
            top = bottom
    return pieces


def _pieces(segment: Segment, named: Sequence[Category | None]) -> list[BarPiece]:
    """The largest holder of each cell, neighbours joined; a few live blocks are drawn again, never too thin."""
    free, size = _free_kind(segment, named), max(1, segment.size)
    cells = _cells(segment, named, _CELLS)
    held_by = [(block, category) for block, category in zip(segment.blocks, named, strict=True) if category is not None]
    live = [
        BarPiece(class_of(category), start / size, (start + block.size) / size, f"{category}: {sized(block.size)}")
        for block, category in held_by[: _ALWAYS_SHOWN + 1]
        for start in (block.address - segment.address,)
    ]
    pieces: list[BarPiece] = []
    for number, held in enumerate(cells):
        kind = max(held, key=lambda each: held[each]) if held else free
        if pieces and pieces[-1].kind == kind:
            pieces[-1] = pieces[-1]._replace(end=(number + 1) / _CELLS)
        else:
            pieces.append(BarPiece(kind, number / _CELLS, (number + 1) / _CELLS, ""))
    least = _LEAST / (_WIDTH - _LEFT - _RIGHT)
    pieces = [
        piece._replace(says=f"mostly {_kind_name(piece.kind)}, about {sized(int((piece.end - piece.start) * size))}")
        for piece in pieces
    ]
    if len(live) <= _ALWAYS_SHOWN:
        pieces += [piece._replace(end=max(piece.end, min(1.0, piece.start + least))) for piece in live]
    return pieces


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


_LOOSE_SHOWN, _FULL_SHOWN = 30, 6  # segments with and without anything free
_DEVICES_SHOWN = 4
_FRAMES_SHOWN = 24
_FOOTER = (
    "plimsoll doctor. Sizes are torch's: what CUDA, NCCL and other processes hold is not in a snapshot. "
    "Weights, KV cache and CUDA graphs are made at the start and never move; the verdict is over the rest."
)


def snapshot_page(snapshot: Snapshot, verdict: SnapshotVerdict) -> str:
    """The whole page; a large snapshot is summed up so that the page stays small."""
    title = verdict.findings[0].title if verdict.findings else "Nothing wrong in this snapshot"
    parts = [*_opening(verdict, title)]
    for finding in verdict.findings:
        parts += _finding(finding, "What happened" if finding.title == title else finding.title)
    for facts in verdict.facts[:_DEVICES_SHOWN]:
        parts += _device(snapshot, verdict, facts)
    if verdict.growth is not None:
        parts += _growth(verdict.growth)
    parts += [*_notes(verdict, len(verdict.facts)), *_settings(snapshot)]
    return document(f"{title} - {verdict.source}", STYLE + BARS_STYLE, [PATTERN, *parts], footer=_FOOTER)


def _opening(verdict: SnapshotVerdict, title: str) -> list[str]:
    reserved, live = sum(facts.reserved for facts in verdict.facts), sum(facts.active for facts in verdict.facts)
    segments = sum(facts.segments for facts in verdict.facts)
    what = f"torch holds {sized(reserved)} in {_counted(segments, 'segment')}, of which {sized(live)} is live."
    return [
        f'<p class="eyebrow">plimsoll doctor &nbsp;/&nbsp; {text(verdict.source)}</p>',
        f"<h1>{text(title)}</h1>",
        f'<p class="lead dim">{text(what)}</p>',
    ]


def _finding(finding: Finding, heading: str) -> list[str]:
    remedies = [f"<li>{text(remedy.do)}: {text(remedy.why)}.</li>" for remedy in finding.remedy]
    return [
        f'<section class="finding"><h2>{text(heading)}</h2>',
        f'<p><span class="badge">{text(finding.code)}</span>',
        f'<span class="badge">confidence {finding.confidence:.0%}</span></p>',
        f"<p>{text(finding.because)}</p>",
        "<h3>What shows it</h3><ul>",
        *(f"<li>{text(evidence.text)}</li>" for evidence in finding.evidence),
        "</ul><h3>What fixes it</h3><ul>",
        *remedies,
        "</ul><h3>What does not help</h3><ul>",
        *(f"<li>{text(line)}</li>" for line in finding.not_a_remedy),
        "</ul></section>",
    ]


def _device(snapshot: Snapshot, verdict: SnapshotVerdict, facts: DeviceFacts) -> list[str]:
    failed = next((failure.size for failure in verdict.failed if failure.device == facts.device), None)
    parts = [
        f"<h2>Device {facts.device}</h2>",
        *_tiles(facts, failed),
        f"<figure><figcaption><h3>All reserved memory</h3></figcaption>{whole_bar(facts)}{_legend(facts)}</figure>",
        *_parts_table(facts),
        *_segments(snapshot, verdict, facts),
    ]
    if facts.holes:
        parts += [
            "<h3>Gaps by size</h3>",
            '<p class="dim">How many bytes lie in gaps of each size. A request needs one gap that is large enough.</p>',
            f"<figure>{gap_histogram(facts, failed, f'gaps{facts.device}')}</figure>",
        ]
    return [*parts, *_pins(snapshot, facts), *_stacks(snapshot, facts)]


def _tiles(facts: DeviceFacts, failed: int | None) -> list[str]:
    rounding = "-" if facts.rounding is None else sized(facts.rounding)
    shown = [
        (
            "Reserved",
            sized(facts.reserved),
            f"{_counted(facts.segments, 'segment')}, {facts.expandable_segments:,} expandable",
        ),
        ("Live", sized(facts.active), f"{sized(facts.active - facts.allocated)} of it waits for a stream"),
        ("Gaps", sized(facts.pinned), f"{len(facts.holes):,}, held by live blocks beside them"),
        ("Largest gap", sized(facts.largest_hole), "of those"),
        ("Failed request", "-" if failed is None else sized(failed), "none known" if failed is None else "in one piece"),
        ("Returnable", sized(facts.releasable), "free; torch returns it before it fails"),
        (
            "Private pools",
            sized(facts.private_reserved),
            f"CUDA graphs and the like; {sized(facts.private_free)} free inside",
        ),
        ("Rounding", rounding, "given beyond what was asked for"),
    ]
    return tiles(shown)


def _legend(facts: DeviceFacts) -> str:
    keys = [(class_of(part.category), str(part.category)) for part in facts.parts]
    keys += [(GAP, "gap beside live blocks")] if facts.pinned else []
    keys += [(RETURNABLE, "free, can be returned")] if facts.releasable else []
    keys += [(PRIVATE, "free in a private pool")] if facts.private_free else []
    return '<ul class="legend">' + "".join(f'<li><i class="{kind}"></i>{text(what)}</li>' for kind, what in keys) + "</ul>"


def _parts_table(facts: DeviceFacts) -> list[str]:
    live = max(1, facts.active)
    body = [
        row(str(part.category), [sized(part.bytes), f"{part.bytes / live:.1%}", f"{part.blocks:,}",
                                  _told_by(part)])
        for part in facts.parts
    ]  # fmt: skip
    return table("Live memory by what it is for", ("", "live", "share", "blocks", "told"), body)


def _told_by(part: CategoryUse) -> str:
    if part.category is Category.UNKNOWN:
        return "-"
    return "by size" if part.is_by_size else "by stack"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _segments(snapshot: Snapshot, verdict: SnapshotVerdict, facts: DeviceFacts) -> list[str]:
    gaps: dict[int, int] = {}
    for hole in facts.holes:
        gaps[hole.segment] = gaps.get(hole.segment, 0) + hole.pinned
    places = [place for place, segment in enumerate(snapshot.segments) if segment.device == facts.device]
    places.sort(key=lambda place: (-gaps.get(place, 0), -snapshot.segments[place].size))
    alike: dict[tuple[object, ...], list[int]] = {}  # segments that look the same are one row
    for place in places:
        segment = snapshot.segments[place]
        blocks = tuple(
            (block.size, category) for block, category in zip(segment.blocks, verdict.named.blocks[place], strict=True)
        )
        alike.setdefault((segment.size, segment.pool, segment.is_expandable, blocks), []).append(place)
    kinds = list(alike.values())
    loose = [kind for kind in kinds if None in verdict.named.blocks[kind[0]]][:_LOOSE_SHOWN]
    shown = [*loose, *[kind for kind in kinds if None not in verdict.named.blocks[kind[0]]][:_FULL_SHOWN]]
    rest = sorted(set(places) - {place for kind in shown for place in kind})
    words = "Each bar is one segment from its first byte to its last, those with most memory in gaps first; not to one scale."
    if any(len(kind) > 1 for kind in shown):
        words += " Segments that look the same are drawn once."
    if any(is_dense(snapshot.segments[kind[0]]) for kind in shown):
        words += (
            " Where there are more blocks than can be drawn, the height of each column is how much of that stretch is live."
        )
    if rest:
        held, lost = sum(snapshot.segments[place].size for place in rest), sum(gaps.get(place, 0) for place in rest)
        words += f" Not drawn: {_counted(len(rest), 'segment')} of {sized(held)} with {sized(lost)} in gaps."
    rows = [SegmentRow(snapshot.segments[kind[0]], verdict.named.blocks[kind[0]], len(kind)) for kind in shown]
    return [
        "<h3>Segments</h3>",
        f'<p class="dim">{text(words)}</p>',
        f'<figure><div class="wide">{segment_rows(rows, f"seg{facts.device}")}</div></figure>',
    ]


def _pins(snapshot: Snapshot, facts: DeviceFacts) -> list[str]:
    if not facts.pins:
        return []
    body = [
        f'<tr><th scope="row">{sized(snapshot.segments[pin.segment].size)}</th><td>{sized(pin.gap_bytes)}</td>'
        f"<td>{sized(pin.live_bytes)}</td><td>{pin.live_blocks:,}</td>"
        f'<td class="text">{text(f"{pin.category}: {format_stack(snapshot.stack_of(pin.block.stack))}")}</td></tr>'
        for pin in facts.pins
    ]
    head = ("segment", "gaps", "live", "blocks", "whose")
    return ["<h3>Large segments that little memory holds</h3>", *table("Most first", head, body, ends_in_text=True)]


def _stacks(snapshot: Snapshot, facts: DeviceFacts) -> list[str]:
    if not facts.stacks:
        return []
    body = [
        f'<tr><th scope="row">{sized(use.bytes)}</th><td>{use.blocks:,}</td><td>{text(str(use.category))}</td>'
        f'<td class="text">{text(format_stack(frames))}{_whole_stack(frames)}</td></tr>'
        for use in facts.stacks
        for frames in (snapshot.stack_of(use.stack),)
    ]
    head = ("live", "blocks", "for", "asked for by")
    return ["<h3>Who holds the live memory</h3>", *table("Largest first", head, body, ends_in_text=True)]


def _whole_stack(frames: Sequence[StackFrame]) -> str:
    lines = "\n".join(text(f"{frame.name}  {frame.filename}:{frame.line}") for frame in frames[:_FRAMES_SHOWN])
    more = f"\nand {len(frames) - _FRAMES_SHOWN} more" if len(frames) > _FRAMES_SHOWN else ""
    return f"<details><summary>the whole stack</summary><pre>{lines}{more}</pre></details>"


def _growth(growth: SnapshotGrowth) -> list[str]:
    body = [row(str(category), [f"{'+' if size > 0 else ''}{sized(size)}"]) for category, size in growth.by_category]
    body += [
        row("gaps beside live blocks", [sized(growth.pinned)]),
        row("free, can be returned", [sized(growth.releasable)]),
    ]
    places = [row(place.what, [sized(place.bytes), f"{place.blocks:+,}", str(place.category)]) for place in growth.places]
    parts = ["<h2>Since the first snapshot</h2>", *table("Now less before", ("", "change"), body)]
    return [*parts, *table("Where live memory grew", ("", "bytes", "blocks", "for"), places)] if places else parts


def _notes(verdict: SnapshotVerdict, devices: int) -> list[str]:
    notes = list(verdict.notes)
    if devices > _DEVICES_SHOWN:
        notes.append(f"{devices - _DEVICES_SHOWN} more devices are not drawn.")
    return bullets(map(text, notes), "Notes")


def _settings(snapshot: Snapshot) -> list[str]:
    if not snapshot.settings:
        return []
    pairs = (f"<div><dt>{text(name)}</dt><dd>{text(value or '-')}</dd></div>" for name, value in snapshot.settings)
    return ["<h2>torch's allocator settings</h2>", '<dl class="columns">', *pairs, "</dl>"]
