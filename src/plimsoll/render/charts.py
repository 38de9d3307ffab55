"""HTML pages that load nothing from anywhere, and charts as inline SVG: round scales, lines, bars and shares."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plimsoll.render.flags import clean
from plimsoll.simulate.trace import Floats

# What a browser may do with a page without a script: nothing but show it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def text(words: str) -> str:
    """Text of anybody's: no secret, no control character, no markup."""
    return escape(clean(words), quote=True)


def document(title: str, style: str, parts: Iterable[str], *, footer: str = "", policy: str = POLICY, script: str = "") -> str:
    """The whole page."""
    end = f'</main>\n<footer class="dim"><p>{footer}</p></footer>' if footer else "</main>"
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(title)}</title>",
            f"<style>{style}</style>\n</head>\n<body>\n<main>",
            *parts,
            end,
            *([f"<script>{script}</script>"] if script else []),
            "</body>\n</html>\n",
        ]
    )


def tiles(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """Figures side by side: a name, the figure, and what else is to be said of it."""
    return [
        '<dl class="tiles">',
        *(
            f'<div><dt>{name}</dt><dd class="big">{text(value)}</dd><dd class="more">{text(more)}</dd></div>'
            for name, value, more in rows
        ),
        "</dl>",
    ]


def row(name: str, cells: Iterable[str], kind: str = "") -> str:
    """One line of a table."""
    values = "".join(f"<td>{text(cell)}</td>" for cell in cells)
    return f'<tr{f" class={kind}" if kind else ""}><th scope="row">{text(name)}</th>{values}</tr>'


def table(caption: str, head: Sequence[str], body: Iterable[str], *, ends_in_text: bool = False) -> list[str]:
    """A table that scrolls by itself on a narrow screen, also by keyboard; without a head where no column has a name.

    One whose last column is text begins its rows with a size, which stays in one line.
    """
    sizes = " sizes" if ends_in_text else ""
    kinds = [*([""] * (len(head) - 1)), ' class="text"' if ends_in_text else ""]
    columns = "".join(f'<th scope="col"{kind}>{text(name)}</th>' for name, kind in zip(head, kinds, strict=True))
    return [
        f'<div class="scroll{sizes}" tabindex="0" role="region" aria-label="{text(caption)}"><table>',
        f"<caption>{text(caption)}</caption>",
        f"<thead><tr>{columns}</tr></thead>" if any(head) else "",
        "<tbody>",
        *body,
        "</tbody></table></div>",
    ]


def bullets(items: Iterable[str], title: str = "") -> list[str]:
    """A list of markup, with its heading where it has one; nothing where there is no item."""
    lines = [f"<li>{item}</li>" for item in items]
    return [*([f"<h2>{title}</h2>"] if title else []), "<ul>", *lines, "</ul>"] if lines else []


# How the pages with charts look, and what their script does; a page is whole without the script.
_FOLDER = Path(__file__).parent
STYLE = (_FOLDER / "charts.css").read_text(encoding="utf-8")
SCRIPT = (_FOLDER / "charts.js").read_text(encoding="utf-8")


def policy() -> str:
    """What the browser may do: nothing from anywhere, our own styles, pictures that are in the page, and this one script."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode("ascii")
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"


Tick = tuple[float, str]
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_LOG_STEPS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), tuple(n / 4 for n in range(4, 40)))


class Frame(NamedTuple):
    """Where the drawing lies in its SVG, in SVG units."""

    width: int = 1000
    height: int = 240
    left: int = 64
    right: int = 4
    top: int = 16
    bottom: int = 34

    @property
    def end(self) -> int:
        """The right edge of the drawing."""
        return self.width - self.right

    @property
    def floor(self) -> int:
        """The lower edge of the drawing."""
        return self.height - self.bottom

    def across(self, share: float) -> float:
        """From 0 at the left to 1 at the right."""
        return self.left + share * (self.end - self.left)

    def up(self, share: float) -> float:
        """From 0 at the floor to 1 at the top."""
        return self.floor - share * (self.floor - self.top)


class Line(NamedTuple):
    """One value over time; `kind` is its colour, an area is filled to the floor."""

    name: str
    values: Floats
    kind: str
    unit: str = ""
    is_area: bool = False


class Span(NamedTuple):
    """The time that a chart shows, in seconds."""

    start: float
    end: float

    def share(self, at: float) -> float:
        """Where a moment lies between the two ends."""
        return (at - self.start) / max(1e-9, self.end - self.start)


def number(value: float) -> str:
    """A coordinate, as short as it can be."""
    return f"{round(value, 1) + 0.0:g}"  # + 0.0: never -0


def round_ticks(top: float, about: int = 4) -> list[float]:
    """Round values from 0 to at least `top`, about so many."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / about
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * times for times in (1, 2, 2.5, 5, 10) if size * times >= rough * 0.999)
    return [step * n for n in range(math.ceil(top / step - 1e-9) + 1)]


def time_ticks(span: Span, about: int = 8) -> list[Tick]:
    """Round moments of a span: 0 s, 30 s, 1 min, 1 h 30 min."""
    length = max(1e-9, span.end - span.start)
    rough = length / about
    if rough < 1:
        step = next(t for t in (10.0 ** math.floor(math.log10(rough)) * m for m in (1, 2, 5, 10)) if t >= rough * 0.999)
    else:
        step = next((float(t) for t in _TIME_STEPS if t >= rough), math.ceil(rough / _DAY) * float(_DAY))
    # A moment just outside counts as inside: the span's ends are sums of many small steps.
    near = min(step, length) * 1e-9
    moments = (n * step for n in range(math.floor(span.start / step), math.ceil(span.end / step) + 1))
    return [(moment, moment_text(moment)) for moment in moments if span.start - near <= moment <= span.end + near]


def moment_text(moment: float) -> str:
    """A moment of the run, short: 0.25 s, 45 s, 2 min, 2:30 min, 1:05 h, 3 d."""
    if moment < _MINUTE:
        return f"{round(moment, 6):g} s"
    whole = round(moment)
    if whole % _DAY == 0:
        return f"{whole // _DAY} d"
    if whole < _HOUR:
        minutes, rest = divmod(whole, _MINUTE)
        return f"{minutes}:{rest:02} min" if rest else f"{minutes} min"
    hours, rest = divmod(whole // _MINUTE, _MINUTE)
    return f"{hours}:{rest:02} h" if rest else f"{hours} h"


def log_ticks(low: float, high: float) -> list[float]:
    """Round values between two on a log axis: the coarsest set that has three of them, thinned where there are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for times in _LOG_STEPS:
        found = [value for value in (m * 10.0**d for d in decades for m in times) if low <= value <= high]
        if len(found) >= 3:
            break
    return found[:: math.ceil(len(found) / 5)] if found else []


def picture(name: str, title: str, says: str, frame: Frame, inner: Iterable[str], attributes: str = "") -> str:
    """An SVG that says what it shows to those who cannot see it."""
    box = f'viewBox="0 0 {frame.width} {frame.height}"'
    return "\n".join(
        [
            f'<svg {box} role="img" aria-labelledby="{name}-title {name}-says"{attributes}>',
            f'<title id="{name}-title">{text(title)}</title>',
            f'<desc id="{name}-says">{text(says)}</desc>',
            *inner,
            "</svg>",
        ]
    )


def left_axis(frame: Frame, ticks: Sequence[Tick], top: float) -> list[str]:
    """Hairlines across the drawing with their values at the left; nothing for a drawing without height."""
    lines = []
    for value, label in ticks:
        y = number(frame.up(value / top))
        lines.append(f'<path class="grid" d="M{frame.left} {y}H{frame.end}"/>')
        lines.append(f'<text class="tick" x="{frame.left - 10}" y="{y}" dy=".35em" text-anchor="end">{text(label)}</text>')
    return lines


def bottom_axis(frame: Frame, ticks: Sequence[Tick], place: Callable[[float], float]) -> list[str]:
    """Marks below the drawing; `place` gives each value its share of the width."""
    lines = [f'<path class="axis" d="M{frame.left} {frame.floor}H{frame.end}"/>']
    for value, label in ticks:
        x = frame.across(place(value))
        anchor = "end" if x > frame.end - 12 else "middle"
        lines.append(f'<path class="axis" d="M{number(x)} {frame.floor}v5"/>')
        lines.append(f'<text class="tick" x="{number(x)}" y="{frame.floor + 21}" text-anchor="{anchor}">{text(label)}</text>')
    return lines


def line_over_time(line: Line, span: Span, bin_s: float, top: float, frame: Frame) -> list[str]:
    """The line through the middle of its bins, with its values in reach of the page's script."""
    middles = span.start + (np.arange(len(line.values)) + 0.5) * bin_s
    middles = np.minimum(middles, span.end)
    points = [
        f"{number(frame.across(span.share(float(at))))} {number(frame.up(float(value) / top))}"
        for at, value in zip(middles, line.values, strict=True)
    ]
    if not points:
        return []
    values = " ".join(f"{value:.1f}".removesuffix(".0") for value in line.values)
    known = f'data-name="{text(line.name)}" data-unit="{text(line.unit)}" data-values="{values}"'
    drawn = "M" + "L".join(points)
    lines = []
    if line.is_area:
        first, last = points[0].split()[0], points[-1].split()[0]
        lines.append(f'<path class="area {line.kind}" d="{drawn}L{last} {frame.floor}L{first} {frame.floor}Z"/>')
    return [*lines, f'<path class="line {line.kind}" d="{drawn}" {known}/>']


def bars_over_time(name: str, counts: Floats, span: Span, bin_s: float, top: float, frame: Frame, kind: str) -> list[str]:
    """A bar for each bin in which something happened."""
    values = " ".join(f"{value:g}" for value in counts)
    known = f'data-name="{text(name)}" data-unit="" data-values="{values}"'
    width = max(1.0, frame.across(span.share(span.start + bin_s)) - frame.left - 1)
    pieces = []
    for place in np.flatnonzero(counts):
        x = frame.across(span.share(span.start + float(place) * bin_s))
        wide = min(width, frame.end - x)
        y = frame.up(float(counts[place]) / top)
        pieces.append(f"M{number(x)} {frame.floor}V{number(y)}h{number(wide)}V{frame.floor}Z")
    return [f'<path class="bars {kind}" d="{"".join(pieces) or "M0 0"}" {known}/>']


def merged(values: Floats, times: int) -> Floats:
    """Sums of so many neighbours each."""
    whole = np.zeros(-(-len(values) // times) * times)
    whole[: len(values)] = values
    return np.asarray(whole.reshape(-1, times).sum(axis=1), dtype=np.float64)
