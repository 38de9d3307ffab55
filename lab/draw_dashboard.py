"""Draws a generated dashboard from what a real Prometheus answers: a picture of the panels where no Grafana is at hand.

    python -m lab.draw_dashboard http://127.0.0.1:9090 out/monitoring/dashboards/plimsoll-engine.json picture.svg --minutes 10

Every panel of the file is drawn at its place, with the data of its own expressions; one without data says so. It is not
Grafana: colours, legends and scales are ours.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

SHADES = 5
UNIT, COLUMN, GAP = 26, 50, 6
COLOURS = ("#3274d9", "#e0752d", "#37872d", "#8f3bb8", "#c4162a", "#7eb26d", "#6d1f62", "#447ebc", "#b7a000", "#584477")
VARIABLES = {"$__rate_interval": "1m", "$job": ".+", "$instance": ".+", "$rank": ".+"}


class Line(NamedTuple):
    """One series: its name, and value by time."""

    name: str
    points: list[tuple[float, float]]


def filled(expr: str) -> str:
    """An expression with something for each of Grafana's variables."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def asked(url: str, expr: str, start_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
    """What Prometheus has for it over this time."""
    query = urllib.parse.urlencode({"query": filled(expr), "start": start_s, "end": end_s, "step": step_s})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/api/v1/query_range?{query}", timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def lines(url: str, panel: dict[str, Any], span: tuple[float, float]) -> list[Line]:
    """Every series of a panel, without what is no number."""
    found = []
    for target in panel["targets"]:
        for series in asked(url, target["expr"], *span, max(1.0, (span[1] - span[0]) / 150)):
            name = target.get("legendFormat") or series["metric"].get("alertname", "")
            for label, value in series["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            points = [(float(at), float(value)) for at, value in series["values"] if value not in ("NaN", "+Inf", "-Inf")]
            if points:
                found.append(Line(name, points))
    return found


def drawing(url: str, page: dict[str, Any], span: tuple[float, float]) -> str:
    """The whole page as SVG."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in page["panels"]) * UNIT + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{24 * COLUMN}" height="{height}" font-family="sans-serif">',
        f'<rect width="100%" height="100%" fill="#f4f5f5"/><text x="8" y="26" font-size="18">{escape(page["title"])}</text>',
    ]
    for panel in page["panels"]:
        at = panel["gridPos"]
        box = (at["x"] * COLUMN, at["y"] * UNIT + 40, at["w"] * COLUMN - GAP, at["h"] * UNIT - GAP)
        parts.append(_row(panel, box) if panel["type"] == "row" else _panel(panel, box, lines(url, panel, span), span))
    return "\n".join([*parts, "</svg>", ""])


Box = tuple[float, float, float, float]


def _row(panel: dict[str, Any], box: Box) -> str:
    return f'<text x="{box[0] + 6}" y="{box[1] + 16}" font-size="14" font-weight="bold">{escape(panel["title"])}</text>'


def _panel(panel: dict[str, Any], box: Box, found: Sequence[Line], span: tuple[float, float]) -> str:
    left, top, width, height = box
    head = (
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="white" stroke="#d0d0d0"/>'
        f'<text x="{left + 8}" y="{top + 16}" font-size="12" font-weight="bold">{escape(panel["title"])}</text>'
    )
    inner = (left + 54, top + 24, width - 64, height - 60)
    if not found:
        return f'{head}<text x="{left + 8}" y="{top + 40}" font-size="11" fill="#888">no data in this run</text>'
    unit = panel["fieldConfig"]["defaults"].get("unit", "")
    if panel["type"] == "stat":
        value = shown(found[0].points[-1][1], unit)
        return f'{head}<text x="{left + 8}" y="{top + height - 20}" font-size="28" fill="#37872d">{value}</text>'
    if panel["type"] == "heatmap":
        return head + _heat(found, inner, span)
    if panel["type"] in ("state-timeline", "table"):
        return head + _states(found, (left + 8, top + 24, width - 16, height - 30), span, _colours(panel))
    is_stacked = "stacking" in panel["fieldConfig"]["defaults"].get("custom", {})
    return head + _curves(_stacked(found) if is_stacked else found, inner, span, unit, is_filled=is_stacked)


def _stacked(found: Sequence[Line]) -> list[Line]:
    total: dict[float, float] = {}
    lifted = []
    for line in found:
        for at, value in line.points:
            total[at] = total.get(at, 0.0) + value
        lifted.append(Line(line.name, [(at, total[at]) for at, _ in line.points]))
    return lifted


def shown(value: float, unit: str) -> str:
    """A value with its unit, short."""
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "bytes":
        return f"{value / (1 << 30):.2f} GiB" if value >= 1 << 30 else f"{value / (1 << 20):.0f} MiB"
    text = f"{value / 1000:.1f}k" if abs(value) >= 10_000 else f"{value:.3g}"
    return f"{text} s" if unit == "s" else text


def _curves(found: Sequence[Line], box: Box, span: tuple[float, float], unit: str, *, is_filled: bool = False) -> str:
    left, top, width, height = box
    most = max(value for line in found for _, value in line.points) or 1.0
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = top + height * (1 - share)
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e8e8e8"/>')
        label = shown(most * share, unit)
        parts.append(f'<text x="{left - 4}" y="{y + 4:.1f}" font-size="9" text-anchor="end" fill="#666">{label}</text>')
    # The highest of those that are stacked comes first, so that the lower ones are drawn over it.
    for place, line in reversed(list(enumerate(found[:10]))) if is_filled else enumerate(found[:10]):
        colour = COLOURS[place % len(COLOURS)]
        points = " ".join(
            f"{_x(at, left, width, span):.0f},{top + height * (1 - value / most):.0f}" for at, value in line.points
        )
        ends = [_x(line.points[end][0], left, width, span) for end in (0, -1)]
        area = f"{ends[0]:.0f},{top + height:.0f} {points} {ends[1]:.0f},{top + height:.0f}"
        fill = f'points="{area}" fill="{colour}"' if is_filled else f'points="{points}" fill="none"'
        parts.append(f'<polyline {fill} stroke="{colour}" stroke-width="1.3"/>')
        column, row = place % 3, place // 3
        x, y = left + column * width / 3, top + height + 14 + row * 11
        if row < 2:
            name = escape(line.name[:34])
            parts.append(f'<text x="{x:.0f}" y="{y:.0f}" font-size="9" fill="{colour}">{name}</text>')
    return "".join(parts)


def _x(at: float, left: float, width: float, span: tuple[float, float]) -> float:
    return left + width * (at - span[0]) / (span[1] - span[0])


def _heat(found: Sequence[Line], box: Box, span: tuple[float, float]) -> str:
    """One cell for each bucket and moment; what is in a bucket alone is its count less the one below it."""
    left, top, width, height = box
    ordered = sorted(found, key=lambda line: float(line.name.replace("+Inf", "inf")))
    used = [line for line in ordered if any(value > 0 for _, value in line.points)][:14]
    if not used:
        return f'<text x="{left}" y="{top + 16}" font-size="11" fill="#888">no request in this run</text>'
    times = sorted({at for line in used for at, _ in line.points})
    cell, tall = width / max(1, len(times)), height / len(used)
    below: dict[float, float] = {}
    counts: list[list[tuple[float, float]]] = []
    for line in used:
        here = dict(line.points)
        counts.append([(at, max(0.0, here.get(at, 0.0) - below.get(at, 0.0))) for at in times])
        below = here
    most = max(count for row in counts for _, count in row) or 1.0
    parts = []
    for place, row in enumerate(counts):
        shades = [(at, math.ceil(SHADES * count / most)) for at, count in row]
        for begin, end, shade in _stretches(shades, 3 * (times[-1] - times[0]) / max(1, len(times))):
            if shade:
                x, until = (_x(at, left, width, span) for at in (begin, end))
                size = f'width="{until - x + cell:.0f}" height="{tall:.0f}"'
                y = top + height - (place + 1) * tall
                parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" {size} fill="#3274d9" fill-opacity="{shade / SHADES:g}"/>')
    for place, line in enumerate(used[:: max(1, len(used) // 5)]):
        y = top + height - (place * max(1, len(used) // 5)) * tall
        parts.append(f'<text x="{left - 4}" y="{y:.1f}" font-size="9" text-anchor="end" fill="#666">{line.name} s</text>')
    return "".join(parts)


def _colours(panel: dict[str, Any]) -> dict[str, str]:
    """By value, as the panel's own mappings have it; an alert in a table is red."""
    found = {"0": "#96d98d", "1": "#c4162a"}
    for mapping in panel["fieldConfig"]["defaults"].get("mappings", ()):
        for value, shown_as in mapping["options"].items():
            found[value] = "#96d98d" if shown_as["color"] == "green" else "#c4162a"
    return found


def _stretches(points: Sequence[tuple[float, float]], hole_s: float) -> list[tuple[float, float, float]]:
    """Begin, end and value of each time over which it stayed the same without a hole."""
    found: list[tuple[float, float, float]] = []
    for at, value in points:
        if found and found[-1][2] == value and at - found[-1][1] < hole_s:
            found[-1] = (found[-1][0], at, value)
        else:
            found.append((at, at, value))
    return found


def _states(found: Sequence[Line], box: Box, span: tuple[float, float], colours: dict[str, str]) -> str:
    """A bar for each, in the colour of its value; those that ever were 1 come first."""
    left, top, width, height = box
    ordered = sorted(found, key=lambda line: -max(value for _, value in line.points))
    parts, tall = [], 14
    for place, line in enumerate(ordered[: int(height // tall)]):
        y = top + place * tall
        parts.append(f'<text x="{left}" y="{y + 10}" font-size="9">{escape(line.name[:30])}</text>')
        for begin, end, value in _stretches(line.points, (span[1] - span[0]) / 75):
            x, until = (_x(at, left + 150, width - 160, span) for at in (begin, end))
            size = f'width="{until - x + 2:.0f}" height="{tall - 3}"'
            parts.append(f'<rect x="{x:.0f}" y="{y}" {size} fill="{colours["1" if value else "0"]}"/>')
    return "".join(parts)


def main() -> None:
    """Ask, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prometheus")
    parser.add_argument("dashboard", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    words = parser.parse_args()
    end_s = time.time()
    page = json.loads(words.dashboard.read_text(encoding="utf-8"))
    words.picture.write_text(drawing(words.prometheus, page, (end_s - 60 * words.minutes, end_s)), encoding="utf-8")


if __name__ == "__main__":
    main()
