"""A simulation as one HTML page; its tables have the figures of its charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from plimsoll.render import simulate as words
from plimsoll.render.html import render
from plimsoll.render.simulate import LATENCY_NAMES, counted, headline, percent, seconds
from plimsoll.simulate.replay import AtBlockSize, Replay, Series
from plimsoll.simulate.summary import NEARLY_FULL_PERCENT, Latency, Summary, latencies_of
from plimsoll.simulate.trace import Floats
from plimsoll.units import format_count

_MOST_BARS, _MOST_POINTS, _TABLE_ROWS = 125, 200, 24
_NS = 1e9


def page(
    summary: Summary,
    replay: Replay,
    series: Series,
    waste_by_block_size: Sequence[AtBlockSize] = (),
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
        shown_settings=_settings(summary),
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


def _settings(summary: Summary) -> list[tuple[str, str]]:
    """Every setting and step time with its value."""
    settings, times = summary.settings, summary.step_time
    pairs: list[tuple[str, object]] = [(name, value) for name, value in settings.named.items() if name != "groups"]
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
