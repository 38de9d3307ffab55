"""A memory snapshot as one HTML page: nothing is loaded from anywhere, no script, light and dark, whole without colour."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.doctor.snapshot import SnapshotVerdict
from plimsoll.doctor.snapshot_facts import DeviceFacts, Part, sized, told
from plimsoll.doctor.snapshot_growth import Growth
from plimsoll.doctor.snapshot_parts import Category
from plimsoll.domain.finding import Finding
from plimsoll.domain.memory_snapshot import Frame, Snapshot
from plimsoll.report.charts_style import STYLE
from plimsoll.report.page import bullets, document, row, table, text, tiles
from plimsoll.report.snapshot_bars import (
    GAP,
    PATTERN,
    PRIVATE,
    RETURNABLE,
    Row,
    class_of,
    gap_histogram,
    is_dense,
    segment_rows,
    whole_bar,
)
from plimsoll.report.snapshot_bars import STYLE as BAR_STYLE

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
    return document(f"{title} - {verdict.source}", STYLE + BAR_STYLE, [PATTERN, *parts], footer=_FOOTER)


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


def _told_by(part: Part) -> str:
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
    rows = [Row(snapshot.segments[kind[0]], verdict.named.blocks[kind[0]], len(kind)) for kind in shown]
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
        f'<td class="text">{text(f"{pin.category}: {told(snapshot.stack_of(pin.block.stack))}")}</td></tr>'
        for pin in facts.pins
    ]
    head = ("segment", "gaps", "live", "blocks", "whose")
    return ["<h3>Large segments that little memory holds</h3>", *table("Most first", head, body, ends_in_text=True)]


def _stacks(snapshot: Snapshot, facts: DeviceFacts) -> list[str]:
    if not facts.stacks:
        return []
    body = [
        f'<tr><th scope="row">{sized(use.bytes)}</th><td>{use.blocks:,}</td><td>{text(str(use.category))}</td>'
        f'<td class="text">{text(told(snapshot.stack_of(use.stack)))}{_whole_stack(snapshot.stack_of(use.stack))}</td></tr>'
        for use in facts.stacks
    ]
    head = ("live", "blocks", "for", "asked for by")
    return ["<h3>Who holds the live memory</h3>", *table("Largest first", head, body, ends_in_text=True)]


def _whole_stack(frames: Sequence[Frame]) -> str:
    lines = "\n".join(text(f"{frame.name}  {frame.filename}:{frame.line}") for frame in frames[:_FRAMES_SHOWN])
    more = f"\nand {len(frames) - _FRAMES_SHOWN} more" if len(frames) > _FRAMES_SHOWN else ""
    return f"<details><summary>the whole stack</summary><pre>{lines}{more}</pre></details>"


def _growth(growth: Growth) -> list[str]:
    body = [row(str(category), [f"{'+' if size > 0 else ''}{sized(size)}"]) for category, size in growth.by_category]
    body += [row("gaps beside live blocks", [sized(growth.pinned)]), row("free, can be returned", [sized(growth.releasable)])]
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
