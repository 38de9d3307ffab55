"""A simulation as one HTML page: nothing is loaded from anywhere, whole without its script, light and dark, fit to print."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plimsoll.render.charts import (
    SCRIPT,
    STYLE,
    Frame,
    Line,
    Span,
    Tick,
    bars_over_time,
    bottom_axis,
    bullets,
    document,
    left_axis,
    line_over_time,
    log_ticks,
    merged,
    moment_text,
    number,
    picture,
    policy,
    round_ticks,
    row,
    table,
    text,
    tiles,
    time_ticks,
)
from plimsoll.render.simulate import (
    LATENCY_NAMES,
    counted,
    duration,
    facts,
    first_of_all,
    headline,
    percent,
    reading,
    seconds,
    throughput,
)
from plimsoll.simulate.replay import CACHED, FREE, HELD, PARTLY_FILLED, SHARED, AtBlockSize, BlockMap, Replay, Series
from plimsoll.simulate.summary import NEARLY_FULL_PERCENT, Latency, Summary, latencies_of
from plimsoll.simulate.trace import Floats
from plimsoll.units import format_count

MOST_COLUMNS, MOST_ROWS = 900, 512
_CLEAR = 0
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PALETTE_KIND = 3

Pixels = npt.NDArray[np.uint8]


class State(NamedTuple):
    """How one state of a block is named and coloured."""

    code: int
    name: str
    means: str
    colour: str


STATES = (
    State(FREE, "free", "holds nothing", "#8c959f"),
    State(CACHED, "cached", "free, but the prefix cache can still use it", "#a9c9f2"),
    State(HELD, "held", "by one request", "#2f6fd0"),
    State(SHARED, "shared", "by several requests", "#8a55cf"),
    State(PARTLY_FILLED, "partly filled", "held and not full: its empty slots are the waste", "#e69a2e"),
)


class Drawing(NamedTuple):
    """The picture, and by what rule it was made smaller."""

    png: str  # as a data URI
    columns: int
    rows: int
    every: int  # one block in so many is drawn
    shares: tuple[float, ...]  # of each state, over all blocks and moments, drawn or not


def draw(blocks: BlockMap) -> Drawing | None:
    """Time from left to right, blocks from bottom to top, without the null block; None where there is nothing to draw.

    Taking every n-th block keeps the shares of the states true, which the most common state of n neighbours would not.
    """
    pool = blocks.state[:, 1:]
    if pool.size == 0:
        return None
    columns = min(MOST_COLUMNS, len(pool))
    every = -(-pool.shape[1] // MOST_ROWS)
    moments = np.linspace(int(blocks.at_ns[0]), int(blocks.at_ns[-1]), columns)
    shown = np.clip(np.searchsorted(blocks.at_ns, moments, side="right") - 1, 0, len(pool) - 1)
    pixels = np.ascontiguousarray(pool[shown, ::every].T[::-1])
    counts = np.bincount(pool.ravel(), minlength=len(STATES))[: len(STATES)]
    data = base64.b64encode(_png(pixels)).decode("ascii")
    return Drawing(
        f"data:image/png;base64,{data}", columns, pixels.shape[0], every, tuple(float(share) for share in counts / pool.size)
    )


def _png(pixels: Pixels) -> bytes:
    """An indexed picture; what is free lets the page shine through, so that it suits light and dark."""
    rows, columns = pixels.shape
    palette = b"".join(bytes.fromhex(state.colour[1:]) for state in STATES)
    seen = bytes(_CLEAR if state.code == FREE else 255 for state in STATES)
    with_filter = np.zeros((rows, columns + 1), dtype=np.uint8)  # each line begins with its filter: 0, as it is
    with_filter[:, 1:] = pixels
    return _SIGNATURE + b"".join(
        (
            _chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, _PALETTE_KIND, 0, 0, 0)),
            _chunk(b"PLTE", palette),
            _chunk(b"tRNS", seen),
            _chunk(b"IDAT", zlib.compress(with_filter.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


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
    lines = (Line("waiting", series.waiting[first:], "wait", is_area=True), Line("running", series.running[first:], "run"))
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
    for place, measured in enumerate(rows):
        size, waste = measured.block_size, measured.waste_percent
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


_TABLE_ROWS = 24
_FOOTER = (
    "plimsoll simulate. The scheduler and the cache are replayed step by step as vLLM runs them; times are as good as the "
    "step times they are made of."
)
_BLOCK_SIZE_NOTE = (
    "The same traffic in a cache of as many tokens, cut into other blocks. Waste is the share of empty slots in used blocks; "
    "table entries are the mean length of all block tables together."
)


def page(
    summary: Summary,
    replay: Replay,
    series: Series,
    waste_by_block_size: Sequence[AtBlockSize] = (),
    block_map: BlockMap | None = None,
    *,
    command: str = "",
    notes: Sequence[str] = (),
) -> str:
    """The whole page; what was not measured is left out."""
    title = headline(summary)
    parts = _opening(summary, title, notes)
    if summary.requests:
        parts += _tiles(summary)
    if len(series.running):
        parts += _over_time(summary, replay, series)
    if summary.finished:
        parts += _latency(summary, replay)
    if waste_by_block_size:
        parts += _block_sizes(waste_by_block_size, summary.settings.block_size)
    if block_map is not None:
        parts += _block_map(block_map)
    if summary.requests:
        body = [f'<tr><th scope="row">{name}</th><td class="text">{text(said)}</td></tr>' for name, said in facts(summary)]
        parts += ["<h2>What happened</h2>", *table("Every figure in words", ("", ""), body)]
    parts += _settings(summary)
    parts += ["<h2>Command</h2>", f"<pre>{text(command)}</pre>"] if command else []
    parts += bullets(map(text, notes), "Notes")
    return document(f"{title} - {summary.trace}", STYLE, parts, footer=_FOOTER, policy=policy(), script=SCRIPT)


def _opening(summary: Summary, title: str, notes: Sequence[str]) -> list[str]:
    usable = counted(max(0, summary.settings.num_blocks - 1), "block")
    what = (
        f"{counted(summary.requests, 'request')} over {duration(summary.sim_seconds)}, "
        f"in {usable} of {summary.settings.block_size} tokens"
    )
    return [
        f'<p class="eyebrow">plimsoll simulate &nbsp;/&nbsp; {text(summary.trace)}</p>',
        f"<h1>{text(title).replace(' %', '&nbsp;%')}</h1>",
        f'<p class="lead dim">{text(what)}.</p>',
        *(f"<p>{text(sentence)}</p>" for sentence in (*first_of_all(notes), *reading(summary))),
    ]


def _tiles(summary: Summary) -> list[str]:
    usage, prefix = summary.kv_usage, summary.prefix
    waste = None if summary.waste.mean_percent is None else summary.waste.mean_percent / 100
    looked_up = f"{format_count(prefix.hit_tokens)} of {format_count(prefix.query_tokens)} tokens"
    rate = summary.throughput.output_tokens_per_second
    guide = "" if summary.is_fitted else "; rough guide"
    shown = [
        ("Finished", format_count(summary.finished), f"of {format_count(summary.requests)}, {summary.rejected:,} rejected"),
        ("Preemptions", format_count(summary.preemptions), f"of {counted(summary.preempted_requests, 'request')}"),
        ("Recomputed", percent(summary.recomputed_share), f"{counted(summary.recomputed_tokens, 'token')} again"),
        ("Cache use", percent(usage.mean), f"mean; {percent(usage.p99)} p99, {percent(usage.peak)} peak"),
        ("Prefix hits", percent(prefix.hit_rate), looked_up if summary.settings.prefix_caching else "prefix caching is off"),
        ("Waste", percent(waste), "of the used slots are empty"),
        ("First token", seconds(summary.ttft.p50), f"p50; {seconds(summary.ttft.p99)} p99{guide}"),
        ("Output", "-" if rate is None else f"{rate:,.0f}", f"tokens a second{guide}"),
    ]
    return tiles(shown)


def _over_time(summary: Summary, replay: Replay, series: Series) -> list[str]:
    full = f"Each point is the mean over {seconds(series.bin_ns / _NS)}. Nearly full is {NEARLY_FULL_PERCENT} % or more."
    parts = [
        "<h2>Over time</h2>",
        f'<p class="dim">{text(full)}</p>',
        *_figure("Cache use", cache_use(replay, series, summary)),
        *_figure(
            "Requests at once",
            running_and_waiting(replay, series, summary),
            '<span class="key run"><i></i>running</span><span class="key wait"><i></i>waiting</span>',
        ),
    ]
    if summary.preemptions:
        drawn, width = preemptions(replay, series, summary)
        parts += _figure("Preemptions", drawn, f'<span class="key">in each {text(seconds(width))}</span>')
    else:
        parts.append("<p>Nothing was preempted.</p>")
    return [*parts, *_numbers_over_time(replay, series)]


def _numbers_over_time(replay: Replay, series: Series) -> list[str]:
    span, first = span_of(replay, series)
    times = max(1, -(-(len(series.running) - first) // _TABLE_ROWS))
    usable = max(1, replay.settings.num_blocks - 1)

    def means(values: Floats) -> list[float]:
        return [float(part.mean()) for part in _parts(values[first:], times)]

    def sums(values: Floats) -> list[float]:
        return [float(part.sum()) for part in _parts(values[first:], times)]

    columns = zip(
        means(series.used_blocks), means(series.running), means(series.waiting), sums(series.preemptions), sums(series.tokens),
        sums(series.hit_tokens), strict=True,
    )  # fmt: skip
    body = [
        row(
            moment_text(round(span.start + number * times * series.bin_ns / _NS, 3)),
            [percent(used / usable), f"{run:,.1f}", f"{wait:,.1f}", f"{pre:,.0f}", f"{tokens:,.0f}", f"{hits:,.0f}"],
        )
        for number, (used, run, wait, pre, tokens, hits) in enumerate(columns)
    ]
    head = ("from", "cache use", "running", "waiting", "preemptions", "tokens computed", "prefix hits in tokens")
    return ["<details><summary>The same as a table</summary>", *table("The run over time", head, body), "</details>"]


def _parts(values: Floats, times: int) -> list[Floats]:
    return [values[start : start + times] for start in range(0, len(values), times)]


def _latency(summary: Summary, replay: Replay) -> list[str]:
    times, label = latencies_of(replay), text(summary.step_time_label)
    shown = (
        ("ttft", "To the first token (TTFT)", times.ttft, summary.ttft),
        ("tpot", "Per further token (TPOT)", times.tpot, summary.tpot),
        ("e2e", "To the last token (E2E)", times.e2e, summary.e2e),
    )
    drawn = [part for name, title, values, marks in shown if len(values)
             for part in _figure(title, within(name, title, np.asarray(values), marks), is_wide=False)]  # fmt: skip
    body = [row(name, [seconds(value) for value in getattr(summary, field)]) for field, name in LATENCY_NAMES]
    return [
        "<h2>How long requests took</h2>",
        f'<p class="dim">The share of the requests that took no longer. <span class="badge">{label}</span></p>',
        f'<div class="three">{"".join(drawn)}</div>',
        *table("Times of the finished requests", ("", *Latency._fields), body),
        f'<p class="dim">{text(throughput(summary))}.</p>',
    ]


def _block_sizes(rows: Sequence[AtBlockSize], current: int) -> list[str]:
    body = []
    for at in rows:
        cells = [
            "-" if at.waste_percent is None else f"{at.waste_percent:.2f} %",
            percent(at.hit_rate),
            format_count(at.preemptions),
            f"{at.table_entries_mean:,.0f}",
        ]
        body.append(row(format_count(at.block_size), cells, "now" if at.block_size == current else ""))
    head = ("tokens a block", "waste", "prefix hits", "preemptions", "table entries")
    return [
        "<h2>Waste by block size</h2>",
        f'<p class="dim">{_BLOCK_SIZE_NOTE}</p>',
        f'<div class="two"><figure>{waste_by_block_size(rows, current)}</figure><div>',
        *table("This run's block size is the bold one", head, body),
        "</div></div>",
    ]


def _block_map(blocks: BlockMap) -> list[str]:
    drawing = draw(blocks)
    if drawing is None:
        return []
    pool, every = (blocks.state.shape[1] - 1) * blocks.every, drawing.every * blocks.every
    rule = "Each line is one block, from the first at the bottom to the last at the top."
    if every > 1:
        rule += f" Of {format_count(pool)} blocks every {_nth(every)} is drawn, which keeps the shares true."
    items = [
        f'<li><i{" class=hollow" if state.code == FREE else ""} style="background:{state.colour}"></i>'
        f'<strong>{state.name}</strong> {percent(share)} <span class="dim">{state.means}</span></li>'
        for state, share in zip(STATES, drawing.shares, strict=True)
    ]
    return [
        "<h2>The cache in its busiest minute</h2>",
        f'<p class="dim">{text(rule)} Shares are means over all blocks and moments.</p>',
        *_figure("", block_map(blocks, drawing)),
        '<ul class="legend">',
        *items,
        "</ul>",
    ]


def _nth(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _settings(summary: Summary) -> list[str]:
    settings, times = summary.settings, summary.step_time

    def shown(value: object) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        return format_count(value) if isinstance(value, int) else str(value)

    groups = ", ".join(f"{group.kind} {group.block_size}" + (f" window {group.window}" if group.window else "")
                       for group in settings.groups)  # fmt: skip
    pairs = [(name, value) for name, value in settings._asdict().items() if name != "groups"]
    if groups:
        pairs += [("groups", groups)]
    pairs += [(name, value) for name, value in times._asdict().items() if name != "by_tokens"]
    if times.by_tokens is not None:
        pairs.append(("by_tokens", "a table, instead of base_ns and token_ns"))
    pairs.append(("step times", summary.step_time_label))
    return [
        "<h2>Settings</h2>",
        '<dl class="columns">',
        *(f"<div><dt>{text(name)}</dt><dd>{text(shown(value))}</dd></div>" for name, value in pairs),
        "</dl>",
    ]


def _figure(title: str, drawn: str, keys: str = "", *, is_wide: bool = True) -> list[str]:
    caption = f"<figcaption><h3>{text(title)}</h3>{keys}</figcaption>" if title else ""
    return [f"<figure>{caption}<div{' class=wide' if is_wide else ''}>{drawn}</div></figure>"]
