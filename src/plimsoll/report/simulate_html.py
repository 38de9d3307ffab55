"""A simulation as one HTML page: nothing is loaded from anywhere, whole without its script, light and dark, fit to print."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plimsoll.domain.trace import Floats
from plimsoll.domain.units import format_count
from plimsoll.report import charts_simulate as charts
from plimsoll.report.charts import moment_text
from plimsoll.report.charts_map import STATES, draw
from plimsoll.report.charts_style import SCRIPT, STYLE, policy
from plimsoll.report.page import bullets, document, row, table, text, tiles
from plimsoll.report.simulate import (
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
from plimsoll.simulate.result import FREE, AtBlockSize, BlockMap, Replay, Series
from plimsoll.simulate.summary import NEARLY_FULL_PERCENT, Latency, Summary, latencies_of

_TABLE_ROWS = 24
_FOOTER = (
    "plimsoll simulate. The scheduler and the cache are replayed step by step as vLLM runs them; times are as good as the "
    "step times they are made of."
)
_BLOCK_SIZE_NOTE = (
    "The same traffic in a cache of as many tokens, cut into other blocks. Waste is the share of empty slots in used blocks; "
    "table entries are the mean length of all block tables together."
)
_NS = 1e9


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
    parts = [*_opening(summary, title, notes)]
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
    parts += [*_all_figures(summary), *_settings(summary), *_command(command), *bullets(map(text, notes), "Notes")]
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
        ("Work done twice", percent(summary.recomputed_share), f"{counted(summary.recomputed_tokens, 'token')} again"),
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
        *_figure("Cache use", charts.cache_use(replay, series, summary)),
        *_figure(
            "Requests at once",
            charts.running_and_waiting(replay, series, summary),
            '<span class="key run"><i></i>running</span><span class="key wait"><i></i>waiting</span>',
        ),
    ]
    if summary.preemptions:
        drawn, width = charts.preemptions(replay, series, summary)
        parts += _figure("Preemptions", drawn, f'<span class="key">in each {text(seconds(width))}</span>')
    else:
        parts.append("<p>Nothing was preempted.</p>")
    return [*parts, *_numbers_over_time(replay, series)]


def _numbers_over_time(replay: Replay, series: Series) -> list[str]:
    span, first = charts.span_of(replay, series)
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
             for part in _figure(title, charts.within(name, title, np.asarray(values), marks), is_wide=False)]  # fmt: skip
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
        f'<div class="two"><figure>{charts.waste_by_block_size(rows, current)}</figure><div>',
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
        *_figure("", charts.block_map(blocks, drawing)),
        '<ul class="legend">',
        *items,
        "</ul>",
    ]


def _nth(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _all_figures(summary: Summary) -> list[str]:
    if not summary.requests:
        return []
    body = [f'<tr><th scope="row">{name}</th><td class="text">{text(said)}</td></tr>' for name, said in facts(summary)]
    return ["<h2>What happened</h2>", *table("Every figure in words", ("", ""), body)]


def _settings(summary: Summary) -> list[str]:
    settings, times = summary.settings, summary.step_time
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
        *(f"<div><dt>{text(name)}</dt><dd>{text(_plain(value))}</dd></div>" for name, value in pairs),
        "</dl>",
    ]


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return format_count(value) if isinstance(value, int) else str(value)


def _command(command: str) -> list[str]:
    return ["<h2>Command</h2>", f"<pre>{text(command)}</pre>"] if command else []


def _figure(title: str, drawn: str, keys: str = "", *, is_wide: bool = True) -> list[str]:
    caption = f"<figcaption><h3>{text(title)}</h3>{keys}</figcaption>" if title else ""
    return [f"<figure>{caption}<div{' class=wide' if is_wide else ''}>{drawn}</div></figure>"]
