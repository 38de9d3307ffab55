"""A tuning, or a sweep, as one HTML page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from plimsoll.redaction import one_line
from plimsoll.render.html import render
from plimsoll.render.simulate import first_of_all
from plimsoll.render.tune import CURVES, SweepReport, TuneReport, sentences
from plimsoll.render.tune import sweep_value_text as value_text
from plimsoll.tune.answer import curve
from plimsoll.tune.goodput import Score
from plimsoll.tune.search import Trial
from plimsoll.tune.space import FLAGS, Candidate
from plimsoll.tune.verdict import label

_SHOWN = ("goodput", "met", "ttft_p99", "tpot_p99", "preemptions", "kv_peak")
_MOST_ROWS = 2000


def page(report: TuneReport) -> str:
    """The answer, its reasons, the curves and everything that was tried."""
    title, *reasons = sentences(report)
    found = report.tuning.found
    chosen = found.best.option.candidate if found is not None else None
    lines = [(name, curve(report.tuning, name)) for name in CURVES] if found is not None else []
    rows = [
        ([*map(value_text, trial.option.candidate), *_figures(trial.score)],
         "chosen" if trial.option.candidate == chosen else "")
        for trial in (found.tried if found is not None else ())
    ]  # fmt: skip
    return render(
        "tune", title, has_charts=True, report=report, first_of_all=first_of_all, reasons=reasons,
        eyebrow=f"plimsoll tune: {report.own.model}, {label(report.tuning)}",
        command=shlex.join(map(one_line, report.chosen.checked.rewritten)) if report.chosen is not None else "",
        curves=[_curve(name, line, chosen) for name, line in lines if len(line) > 1],
        heading="All that was replayed in full", head=[*Candidate._fields, *_SHOWN, ""], rows=rows, more=report.notes,
    )  # fmt: skip


def sweep_page(report: SweepReport) -> str:
    """Every setting, best first."""
    names, ranked = list(report.axes.values), report.ranked
    rows = [
        ([*(value_text(point.values[name]) for name in names), *_figures(score)],
         "" if point.option is None or point.option.is_safe else "unsafe")
        for point, score in ranked[:_MOST_ROWS]
    ]  # fmt: skip
    more = [f"not replayed: {why}" for why in dict.fromkeys(why for _, why in report.failures)] + list(report.notes)
    if len(ranked) > _MOST_ROWS:
        more.append(f"and {len(ranked) - _MOST_ROWS} more: --csv FILE has them all")
    return render(
        "tune", f"{len(report.points)} settings on {report.traffic.trace.name}", report=report, first_of_all=first_of_all,
        eyebrow=f"plimsoll sweep: {report.label}", reasons=(), command="", curves=(), heading="",
        head=[*names, *_SHOWN, "plan says"], rows=rows, more=more,
    )  # fmt: skip


def _curve(name: str, line: Sequence[Trial], chosen: Candidate | None) -> dict[str, object]:
    """Goodput over the flag's values, each value as far from the next as any."""
    values = [trial.score.goodput for trial in line]
    names = [str(getattr(trial.option.candidate, name)) for trial in line]
    dots = [
        (place + 0.5, trial.score.goodput, f"{trial.score.goodput:.4g}",
         "pre" if trial.option.candidate == chosen else "use")
        for place, trial in enumerate(line)
    ]  # fmt: skip
    return {
        "flag": FLAGS[name],
        "says": ", ".join(f"{said}: {value:.4g}" for said, value in zip(names, values, strict=True)) + ".",
        "drawn": {"names": names, "step": 1, "unit": "", "marks": [{"colour": "use", "values": values}], "dots": dots},
    }


def _figures(score: Score) -> list[str]:
    return ["" if (value := getattr(score, name)) is None else f"{value:.4g}" for name in _SHOWN]
