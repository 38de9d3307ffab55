"""A tuning, or a sweep, as one HTML page: nothing is loaded from anywhere, light and dark, fit to print."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from plimsoll.render.charts import STYLE, Frame, bottom_axis, bullets, document, left_axis, number, picture, round_ticks, text
from plimsoll.render.flags import clean
from plimsoll.render.simulate import first_of_all
from plimsoll.render.tune import CURVES, SweepReport, TuneReport, sentences
from plimsoll.render.tune import sweep_value_text as value_text
from plimsoll.tune.answer import curve
from plimsoll.tune.goodput import Score
from plimsoll.tune.search import Trial
from plimsoll.tune.space import FLAGS, Candidate
from plimsoll.tune.verdict import label

_FRAME = Frame(height=260)
_SHOWN = ("goodput", "met", "ttft_p99", "tpot_p99", "preemptions", "kv_peak")
_MOST_ROWS = 2000


def page(report: TuneReport) -> str:
    """The answer, its reasons, the curves and everything that was tried."""
    said = sentences(report)
    tuning = report.tuning
    parts = [
        f'<p class="eyebrow">plimsoll tune: {text(report.own.model)}, {text(label(tuning))}</p>',
        f"<h1>{text(said[0])}</h1>",
        *(f"<p>{text(sentence)}</p>" for sentence in first_of_all(report.notes)),
    ]
    if report.chosen is not None:
        parts.append(f"<pre>{text(shlex.join(map(clean, report.chosen.checked.rewritten)))}</pre>")
    parts += bullets(text(one) for one in said[1:])
    if tuning.found is not None:
        chosen = tuning.found.best.option.candidate
        for name in CURVES:
            line = curve(tuning, name)
            if len(line) > 1:
                parts += [f"<h2>{text(FLAGS[name])}</h2>", _curve(name, line, chosen)]
        parts += ["<h2>All that was replayed in full</h2>", *_tried(tuning.found.tried, chosen)]
    parts += [f'<p class="dim">{text(note)}</p>' for note in report.notes]
    return document(said[0], STYLE, parts)


def sweep_page(report: SweepReport) -> str:
    """Every setting, best first."""
    names = list(report.axes.values)
    title = f"{len(report.points)} settings on {report.traffic.trace.name}"
    ranked = report.ranked
    rows = [
        _row(
            [value_text(point.values[name]) for name in names] + _figures(score),
            "" if point.option is None or point.option.is_safe else "unsafe",
        )
        for point, score in ranked[:_MOST_ROWS]
    ]
    parts = [
        f'<p class="eyebrow">plimsoll sweep: {text(report.label)}</p>',
        f"<h1>{text(title)}</h1>",
        *(f"<p>{text(sentence)}</p>" for sentence in first_of_all(report.notes)),
        *_table([*names, *_SHOWN, "plan says"], rows),
        *(f'<p class="dim">not replayed: {text(why)}</p>' for why in dict.fromkeys(why for _, why in report.failures)),
        *(f'<p class="dim">{text(note)}</p>' for note in report.notes),
    ]
    if len(ranked) > _MOST_ROWS:
        parts.append(f'<p class="dim">and {len(ranked) - _MOST_ROWS} more: --csv FILE has them all</p>')
    return document(title, STYLE, parts)


def _curve(name: str, line: Sequence[Trial], chosen: Candidate) -> str:
    """Goodput over the flag's values, each value as far from the next as any."""
    top = max(one.score.goodput for one in line) or 1.0
    ticks = [(value, f"{value:g}") for value in round_ticks(top)]
    most = max(ticks[-1][0], top)

    def across(place: float) -> float:
        return (place + 0.5) / len(line)

    at = [(number(_FRAME.across(across(place))), number(_FRAME.up(one.score.goodput / most))) for place, one in enumerate(line)]
    names = [str(getattr(one.option.candidate, name)) for one in line]
    inner = [
        *left_axis(_FRAME, ticks, most),
        *bottom_axis(_FRAME, [(float(place), said) for place, said in enumerate(names)], across),
        f'<path class="line use" d="M{"L".join(f"{x} {y}" for x, y in at)}"/>',
        *(
            f'<circle class="{"dot pre" if one.option.candidate == chosen else "dot use"}" cx="{x}" cy="{y}" '
            f'r="{6 if one.option.candidate == chosen else 4}"><title>{text(said)}: {one.score.goodput:.4g}</title></circle>'
            for one, said, (x, y) in zip(line, names, at, strict=True)
        ),
    ]
    says = ", ".join(f"{said}: {one.score.goodput:.4g}" for one, said in zip(line, names, strict=True))
    return picture(f"curve-{name}", f"Requests a second as promised, by {FLAGS[name]}", says, _FRAME, inner)


def _tried(tried: Sequence[Trial], chosen: Candidate) -> list[str]:
    rows = [
        _row([value_text(value) for value in one.option.candidate] + _figures(one.score),
             "chosen" if one.option.candidate == chosen else "")
        for one in tried
    ]  # fmt: skip
    return _table([*Candidate._fields, *_SHOWN, ""], rows)


def _figures(score: Score) -> list[str]:
    return ["" if (value := getattr(score, name)) is None else f"{value:.4g}" for name in _SHOWN]


def _row(cells: Sequence[str], mark: str) -> str:
    kind = ' class="now"' if mark == "chosen" else ""
    return f"<tr{kind}>{''.join(f'<td>{text(cell)}</td>' for cell in cells)}<td class='text'>{text(mark)}</td></tr>"


def _table(head: Sequence[str], rows: Sequence[str]) -> list[str]:
    names = "".join(f"<th>{text(name.replace('_', ' '))}</th>" for name in head)
    return ['<div class="scroll"><table>', f"<thead><tr>{names}</tr></thead>", "<tbody>", *rows, "</tbody></table></div>"]
