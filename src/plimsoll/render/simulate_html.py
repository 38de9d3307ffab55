"""A simulation as one HTML page; its tables have the figures of its charts."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from plimsoll.render import simulate as words
from plimsoll.render.html import render
from plimsoll.render.simulate import LATENCY_NAMES, counted, headline, percent, seconds
from plimsoll.simulate.replay import FREE, AtBlockSize, BlockMap, Replay, Series
from plimsoll.simulate.summary import NEARLY_FULL_PERCENT, Latency, Summary, latencies_of
from plimsoll.simulate.trace import Floats
from plimsoll.units import format_count

MOST_COLUMNS, MOST_ROWS = 900, 512  # pixels of the block map
_MOST_BARS, _MOST_POINTS, _TABLE_ROWS = 125, 200, 24
_NS = 1e9
STATES = (  # of a block, by their codes: name, meaning, colour
    ("free", "holds nothing", "#8c959f"),
    ("cached", "free, but the prefix cache can still use it", "#a9c9f2"),
    ("held", "by one request", "#2f6fd0"),
    ("shared", "by several requests", "#8a55cf"),
    ("partly filled", "held and not full: its empty slots are the waste", "#e69a2e"),
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
    """The whole page; parts that were not measured are left out."""
    rate, waste = summary.throughput.output_tokens_per_second, summary.waste.mean_percent
    return render(
        "simulate", f"{headline(summary)} - {summary.trace}", has_charts=True, words=words, summary=summary,
        notes=list(notes), command=command, nearly_full=NEARLY_FULL_PERCENT,
        waste=None if waste is None else waste / 100, rate="-" if rate is None else f"{rate:,.0f}",
        over_time=_over_time(replay, series) if len(series.running) else None,
        latencies=_latencies(summary, replay) if summary.finished else (),
        latency_head=("", *Latency._fields),
        latency_rows=[(name, map(seconds, getattr(summary, field))) for field, name in LATENCY_NAMES],
        by_size=waste_by_block_size, waste_chart=_waste_chart(waste_by_block_size, summary.settings.block_size),
        map=None if block_map is None else draw(block_map), states=STATES, shown_settings=_settings(summary),
    )  # fmt: skip


def _over_time(replay: Replay, series: Series) -> dict[str, Any]:
    """The charts and the table of the run, from the bin of the first arrival on."""
    bins, bin_s, usable = len(series.running), series.bin_ns / _NS, max(1, replay.settings.num_blocks - 1)
    first = min(int(replay.arrival_ns[0]) // series.bin_ns, bins - 1) if len(replay.arrival_ns) else 0
    end_ns = max(replay.totals.end_ns, (first + 1) * series.bin_ns) if bins <= 1 else replay.totals.end_ns
    shown = Series(series.bin_ns, *(values[first:] for values in series[1:]))
    bins -= first
    start = first * bin_s
    of_time = {"scale": "time", "x": (start, end_ns / _NS), "step": bin_s, "unit": ""}

    def line(name: str, colour: str, values: Floats, **more: object) -> dict[str, object]:
        return {"name": name, "colour": colour, "values": np.round(values, 1).tolist(), **more}

    per_bar, per_row = max(1, -(-bins // _MOST_BARS)), max(1, -(-bins // _TABLE_ROWS))
    preempted = line("preemptions", "pre", np.add.reduceat(shown.preemptions, range(0, bins, per_bar)), bars=True)
    starts = np.arange(0, bins, per_row)
    lengths = np.diff([*starts, bins])
    sums = {name: np.add.reduceat(values, starts) for name, values in zip(Series._fields[1:], shown[1:], strict=True)}
    rows = [
        (
            moment_text(round(start + int(at) * bin_s, 3)),
            (percent(sums["used_blocks"][n] / lengths[n] / usable), f"{sums['running'][n] / lengths[n]:,.1f}",
             f"{sums['waiting'][n] / lengths[n]:,.1f}",
             *(f"{sums[name][n]:,.0f}" for name in ("preemptions", "tokens", "hit_tokens"))),
        )
        for n, at in enumerate(starts)
    ]  # fmt: skip
    return {
        "bin_s": bin_s,
        "use": {**of_time, "top": 100, "unit": " %", "limit": f"full: {counted(usable, 'block')}",
                "marks": [line("cache use", "use", 100 * shown.used_blocks / usable, area=True)]},
        "queue": {**of_time, "least": 1,
                  "marks": [line("waiting", "wait", shown.waiting, area=True), line("running", "run", shown.running)]},
        "preemptions": {**of_time, "step": per_bar * bin_s, "least": 1, "whole": True, "marks": [preempted]},
        "rows": rows,
    }  # fmt: skip


def moment_text(moment: float) -> str:
    """A moment of the run, short: 0.25 s, 45 s, 2 min, 2:30 min, 1:05 h, 3 d."""
    if moment < 60:
        return f"{round(moment, 6):g} s"
    whole = round(moment)
    if whole % 86400 == 0:
        return f"{whole // 86400} d"
    size, unit = (60, "min") if whole < 3600 else (3600, "h")
    rest = whole % size * 60 // size
    return f"{whole // size}:{rest:02} {unit}" if rest else f"{whole // size} {unit}"


def _latencies(summary: Summary, replay: Replay) -> list[tuple[str, dict[str, object], str]]:
    """Each latency's title, the share of requests that took no longer, with three percentiles marked, and those in words."""
    times = latencies_of(replay)
    charts = []
    for title, found, marks in (
        ("To the first token (TTFT)", times.ttft, summary.ttft),
        ("Per further token (TPOT)", times.tpot, summary.tpot),
        ("To the last token (E2E)", times.e2e, summary.e2e),
    ):
        if not len(found):
            continue
        values = np.asarray(found)
        low, high = max(1e-6, float(values[0])), max(1e-6, float(values[-1]))
        if high < low * 4:
            low, high = low / 2, high * 2  # room for a few round ticks
        places = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MOST_POINTS)).astype(int))
        percentiles = (("p50", 50, marks.p50), ("p90", 90, marks.p90), ("p99", 99, marks.p99))
        drawn = {
            "scale": "log", "x": (low, high), "top": 100, "unit": " %",
            "marks": [{"colour": "lat", "area": True, "values": [float(f"{values[place]:.4g}") for place in places]}],
            "dots": [(value, share, f"{name} {seconds(value)}", "lat") for name, share, value in percentiles],
        }  # fmt: skip
        charts.append((title, drawn, "; ".join(f"{name} {seconds(value)}" for name, _, value in percentiles) + "."))
    return charts


def _waste_chart(rows: Sequence[AtBlockSize], current: int) -> dict[str, object]:
    """A bar for each block size, that of this run in full colour."""
    known = [row.waste_percent or 0 for row in rows]
    sizes = [row.block_size for row in rows]
    labels = [f"{waste:.2f} %" if waste < 1 else f"{waste:.1f} %" for waste in known]
    bars = {"colour": "use", "values": known, "labels": labels, "now": sizes.index(current) if current in sizes else -1}
    return {"names": sizes, "step": 1, "least": 0.1, "unit": " %", "marks": [bars]}


class Drawing(NamedTuple):
    """The block map, and the rule by which it was made smaller."""

    drawn: dict[str, object]
    pool: int
    every: int  # one block in `every` is drawn
    shares: list[float]  # of each state, over all blocks and moments, drawn or not


def draw(blocks: BlockMap) -> Drawing | None:
    """Time from left to right, blocks from bottom to top, without the null block; None where there is nothing to draw.

    Drawing every n-th block keeps the shares of the states true; the most common state of n neighbours would not.
    """
    pool = blocks.state[:, 1:]
    if pool.size == 0:
        return None
    every = -(-pool.shape[1] // MOST_ROWS)
    moments = np.linspace(int(blocks.at_ns[0]), int(blocks.at_ns[-1]), min(MOST_COLUMNS, len(pool)))
    shown = np.clip(np.searchsorted(blocks.at_ns, moments, side="right") - 1, 0, len(pool) - 1)
    data = base64.b64encode(_png(np.ascontiguousarray(pool[shown, ::every].T[::-1]))).decode("ascii")
    counts = np.bincount(pool.ravel(), minlength=len(STATES))[: len(STATES)]
    size = pool.shape[1] * blocks.every
    drawn = {
        "scale": "time", "x": (int(blocks.at_ns[0]) / _NS, int(blocks.at_ns[-1]) / _NS), "top": size, "unit": "", "marks": [],
        "image": f"data:image/png;base64,{data}",
    }  # fmt: skip
    return Drawing(drawn, size, every * blocks.every, (counts / pool.size).tolist())


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """An indexed picture; free blocks are transparent, so that it suits light and dark pages."""
    rows, columns = pixels.shape
    lines = np.pad(pixels, ((0, 0), (1, 0)))  # each line begins with its filter: 0, as it is
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)),
        (b"PLTE", b"".join(bytes.fromhex(colour[1:]) for _, _, colour in STATES)),
        (b"tRNS", bytes(0 if code == FREE else 255 for code in range(len(STATES)))),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _settings(summary: Summary) -> list[tuple[str, str]]:
    """Every setting and step time with its value."""
    settings, times = summary.settings, summary.step_time
    pairs: list[tuple[str, object]] = [(name, value) for name, value in settings._asdict().items() if name != "groups"]
    if settings.groups:
        groups = (f"{g.kind} {g.block_size}" + (f" window {g.window}" if g.window else "") for g in settings.groups)
        pairs.append(("groups", ", ".join(groups)))
    pairs += [(name, value) for name, value in times._asdict().items() if name != "by_tokens"]
    if times.by_tokens is not None:
        pairs.append(("by_tokens", "a table, instead of base_ns and token_ns"))
    pairs.append(("step times", summary.step_time_label))
    return [
        (name, ("on" if value else "off") if isinstance(value, bool) else
         format_count(value) if isinstance(value, int) else str(value))
        for name, value in pairs
    ]  # fmt: skip
