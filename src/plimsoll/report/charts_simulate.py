"""The charts of a simulation: the run over time, waste by block size, how long requests took, and the block map."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from plimsoll.domain.trace import Floats
from plimsoll.report.charts import (
    Frame,
    Line,
    Span,
    Tick,
    bars_over_time,
    bottom_axis,
    left_axis,
    line_over_time,
    log_ticks,
    merged,
    number,
    picture,
    round_ticks,
    time_ticks,
)
from plimsoll.report.charts_map import STATES, Drawing
from plimsoll.report.page import text
from plimsoll.report.simulate import counted, percent, seconds
from plimsoll.simulate.result import AtBlockSize, BlockMap, Replay, Series
from plimsoll.simulate.summary import Latency, Summary

_MOST_BARS = 125
_MOST_POINTS = 200
_NS = 1e9


def span_of(replay: Replay, series: Series) -> tuple[Span, int]:
    """The time to show, from the bin of the first arrival on, and which bin that is."""
    first = int(replay.arrival_ns[0]) // series.bin_ns if len(replay.arrival_ns) else 0
    first = max(0, min(first, len(series.running) - 1))
    end = max(replay.totals.end_ns, (first + 1) * series.bin_ns) if len(series.running) <= 1 else replay.totals.end_ns
    return Span(first * series.bin_ns / _NS, end / _NS), first


def cache_use(replay: Replay, series: Series, summary: Summary) -> str:
    """The share of the blocks in use over time, against the line where the cache is full."""
    span, first = span_of(replay, series)
    usable = max(1, replay.settings.num_blocks - 1)
    used = Line("cache use", 100 * series.used_blocks[first:] / usable, "use", " %", is_area=True)
    frame = Frame(height=280, top=26)
    full, blocks = number(frame.up(1.0)), counted(usable, "block")
    usage = summary.kv_usage
    says = f"{percent(usage.mean)} on average, {percent(usage.p99)} at the 99th percentile, {percent(usage.peak)} at the peak."
    inner = [
        *left_axis(frame, [(share, f"{share} %") for share in (0, 25, 50, 75, 100)], 100),
        *bottom_axis(frame, time_ticks(span), span.share),
        *line_over_time(used, span, series.bin_ns / _NS, 100, frame),
        f'<path class="limit" d="M{frame.left} {full}H{frame.end}"/>',
        f'<text class="tick" x="{frame.end}" y="{frame.top - 9}" text-anchor="end">full: {blocks}</text>',
    ]
    return picture("use", "Cache use over time", says, frame, inner, _hover("time", frame, span.start, span.end, series.bin_ns))


def running_and_waiting(replay: Replay, series: Series, summary: Summary) -> str:
    """How many requests ran and how many waited."""
    span, first = span_of(replay, series)
    lines = (
        Line("waiting", series.waiting[first:], "wait", is_area=True),
        Line("running", series.running[first:], "run"),
    )
    ticks = round_ticks(max(1.0, *(float(line.values.max(initial=0.0)) for line in lines)), 5)
    frame = Frame(height=230)
    says = f"At most {summary.peak_running:,} running and {summary.peak_waiting:,} waiting at once."
    inner = [
        *left_axis(frame, [(tick, f"{tick:,g}") for tick in ticks], ticks[-1]),
        *bottom_axis(frame, time_ticks(span), span.share),
        *(part for line in lines for part in line_over_time(line, span, series.bin_ns / _NS, ticks[-1], frame)),
    ]
    attributes = _hover("time", frame, span.start, span.end, series.bin_ns)
    return picture("queue", "Requests running and waiting over time", says, frame, inner, attributes)


def preemptions(replay: Replay, series: Series, summary: Summary) -> tuple[str, float]:
    """How many preemptions each stretch of time saw, and how long a stretch is in seconds."""
    span, first = span_of(replay, series)
    times = max(1, -(-(len(series.preemptions) - first) // _MOST_BARS))
    counts, bin_ns = merged(series.preemptions[first:], times), series.bin_ns * times
    ticks = [tick for tick in round_ticks(max(1.0, float(counts.max(initial=0.0))), 3) if tick == int(tick)]
    frame = Frame(height=160)
    inner = [
        *left_axis(frame, [(tick, f"{tick:,g}") for tick in ticks], ticks[-1]),
        *bottom_axis(frame, time_ticks(span), span.share),
        *bars_over_time("preemptions", counts, span, bin_ns / _NS, ticks[-1], frame, "pre"),
    ]
    says = f"{counted(summary.preemptions, 'preemption')} in all, {int(counts.max(initial=0)):,} in the worst stretch."
    attributes = _hover("time", frame, span.start, span.end, bin_ns)
    return picture("preempted", "Preemptions over time", says, frame, inner, attributes), bin_ns / _NS


def waste_by_block_size(rows: Sequence[AtBlockSize], current: int) -> str:
    """A bar for each block size, that of this run in full colour."""
    known = [row.waste_percent for row in rows if row.waste_percent is not None]
    ticks = round_ticks(max([*known, 0.1]))
    frame = Frame(width=520, height=300, left=58, top=24, bottom=52)
    step = (frame.end - frame.left) / len(rows)
    inner = left_axis(frame, [(tick, f"{tick:g} %") for tick in ticks], ticks[-1])
    for place, row in enumerate(rows):
        size, waste = row.block_size, row.waste_percent
        middle = frame.left + (place + 0.5) * step
        inner.append(f'<text class="tick" x="{number(middle)}" y="{frame.floor + 21}" text-anchor="middle">{size}</text>')
        if waste is None:
            continue
        y, wide = frame.up(waste / ticks[-1]), step * 0.58
        kind = "bars use" if size == current else "bars use soft"
        box = f'x="{number(middle - wide / 2)}" y="{number(y)}" width="{number(wide)}" height="{number(frame.floor - y)}"'
        inner.append(f'<rect class="{kind}" {box} rx="2"/>')
        inner.append(f'<text x="{number(middle)}" y="{number(y - 7)}" text-anchor="middle">{_short_percent(waste)}</text>')
    inner.append(f'<path class="axis" d="M{frame.left} {frame.floor}H{frame.end}"/>')
    centre = number((frame.left + frame.end) / 2)
    inner.append(f'<text class="tick" x="{centre}" y="{frame.height - 8}" text-anchor="middle">tokens a block</text>')
    said = ", ".join(
        f"{row.block_size}: {'unknown' if row.waste_percent is None else _short_percent(row.waste_percent)}" for row in rows
    )
    return picture("waste", "Waste by block size", f"Empty slots as a share of the used ones. {said}.", frame, inner)


def within(name: str, title: str, ordered: Floats, marks: Latency) -> str:
    """The share of the requests that took no longer, on a log axis, with three percentiles marked; `ordered` is not empty."""
    frame = Frame(width=360, height=270, left=48, right=10, top=34, bottom=34)
    low, high = max(1e-6, float(ordered[0])), max(1e-6, float(ordered[-1]))
    if high < low * 2:
        low, high = low / 1.4, high * 1.4  # room for a few round ticks

    def share(value: float) -> float:
        return min(1.0, max(0.0, math.log(max(value, low) / low) / math.log(high / low)))

    places = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), _MOST_POINTS)).astype(int))
    points = "".join(
        f"H{number(frame.across(share(float(ordered[at]))))}V{number(frame.up((at + 1) / len(ordered)))}" for at in places
    )
    values = " ".join(f"{float(ordered[at]):.4g}" for at in places)
    known = f'data-name="{text(title)}" data-unit=" s" data-values="{values}"'
    ticks: list[Tick] = [(value, _short_seconds(value)) for value in log_ticks(low, high)]
    inner = [
        *left_axis(frame, [(part, f"{part:g} %") for part in (0, 25, 50, 75, 100)], 100),
        *bottom_axis(frame, ticks, share),
        f'<path class="area lat" d="M{frame.left} {frame.floor}{points}H{frame.end}V{frame.floor}Z"/>',
        f'<path class="line lat" d="M{frame.left} {frame.floor}{points}H{frame.end}" {known}/>',
        *_marks(frame, marks, share),
    ]
    named = zip(("p50", "p90", "p99"), marks[1:], strict=True)
    says = "; ".join(f"{percentile} {seconds(value)}" for percentile, value in named)
    return picture(name, title, f"{says}.", frame, inner, _hover("share", frame, low, high))


def _marks(frame: Frame, marks: Latency, share: Callable[[float], float]) -> list[str]:
    lines = []
    for label, part, value in (("p50", 0.5, marks.p50), ("p90", 0.9, marks.p90), ("p99", 0.99, marks.p99)):
        assert value is not None, "there are requests, so there are percentiles"
        x, y = frame.across(share(value)), frame.up(part)
        said = f"{label} {seconds(value)}"
        near_left = x - frame.left < 9 * len(said)
        anchor, shift = ("start", 9) if near_left else ("end", -9)
        lift = -9 if label == "p99" else 4
        lines.append(f'<path class="guide lat" d="M{number(x)} {number(y)}V{frame.floor}"/>')
        lines.append(f'<circle class="dot lat" cx="{number(x)}" cy="{number(y)}" r="4"/>')
        lines.append(f'<text x="{number(x + shift)}" y="{number(y + lift)}" text-anchor="{anchor}">{said}</text>')
    return lines


def block_map(blocks: BlockMap, drawing: Drawing) -> str:
    """The pool over the shown stretch of time: one line a block, one column a moment."""
    frame = Frame(height=460)
    span = Span(int(blocks.at_ns[0]) / _NS, int(blocks.at_ns[-1]) / _NS)
    pool = (blocks.state.shape[1] - 1) * blocks.every
    box = f'x="{frame.left}" y="{frame.top}" width="{frame.end - frame.left}" height="{frame.floor - frame.top}"'
    ticks = [(tick, f"{tick:,g}") for tick in round_ticks(float(pool)) if tick <= pool]
    shares = ", ".join(f"{state.name} {percent(share)}" for state, share in zip(STATES, drawing.shares, strict=True))
    inner = [
        *left_axis(frame, ticks, float(pool)),
        f'<rect class="frame" {box}/>',
        f'<image class="pixels" {box} preserveAspectRatio="none" href="{drawing.png}"/>',
        *bottom_axis(frame, time_ticks(span), span.share),
    ]
    return picture("map", "The blocks of the cache in its busiest minute", f"On average {shares}.", frame, inner)


def _hover(kind: str, frame: Frame, low: float, high: float, bin_ns: int = 0) -> str:
    """What the page's script needs to know of a chart."""
    known = {
        "hover": kind, "left": frame.left, "end": frame.end, "top": frame.top, "floor": frame.floor,
        "low": f"{low:.9g}", "high": f"{high:.9g}", "bin": f"{bin_ns / _NS:.9g}",
    }  # fmt: skip
    return "".join(f' data-{name}="{value}"' for name, value in known.items())


def _short_percent(value: float) -> str:
    return f"{value:.2f} %" if value < 1 else f"{value:.1f} %"


def _short_seconds(value: float) -> str:
    """A round time on an axis: 5 ms, 20 s, 2 min, 1 h."""
    for size, unit in ((3600, "h"), (1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= size * 0.999:
            return f"{value / size:.3g} {unit}"
    return "0 s"
