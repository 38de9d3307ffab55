"""The report of `plimsoll whatif`: the recorded traffic as measured, as replayed, and with the changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plimsoll.errors import BadInput
from plimsoll.redaction import one_line
from plimsoll.render import simulate as words
from plimsoll.render.simulate import counted, is_urgent, percent, seconds
from plimsoll.render.terminal import BAD, BOLD, FAINT, WARN, Line, Report, Table, json_text, picked
from plimsoll.simulate.options import TrafficOptions
from plimsoll.simulate.summary import ROUGH_GUIDE, Summary, percentile
from plimsoll.simulate.trace import ABSENT
from plimsoll.simulate.trace_files import read_measured
from plimsoll.tune.goodput import Slo
from plimsoll.units import format_count

SCHEMA = "plimsoll.whatif/1"
APART = 1.25  # the factor on times beyond which a replay is taken to be of another server than its recording


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """One replay."""

    name: str
    summary: Summary
    replicas: int
    met: int  # requests that were served as promised
    card: str  # the card of its clock
    band: tuple[float, float]  # factors on a step's time: lowest and highest
    at_band: tuple[tuple[int, float], ...]  # requests as promised and mean seconds, with the fastest and the slowest steps
    notes: Sequence[str]

    @property
    def mean_s(self) -> float:
        """From arrival to the last token; 0 where nothing finished."""
        return self.summary.e2e.mean or 0.0


@dataclass(frozen=True, slots=True)
class MeasuredOutcome:
    """The recorder's figures, in seconds."""

    requests: int
    met: int
    figures: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class WhatifReport:
    """The question and its three answers; `measured` is None where the trace has no stamps, or only a part is replayed."""

    changes: Mapping[str, str]
    was: ReplayOutcome
    found: ReplayOutcome
    measured: MeasuredOutcome | None
    slo: Slo


def measured_outcome(options: TrafficOptions, slo: Slo) -> MeasuredOutcome | None:
    """The recording's own stamps, where all of it is replayed as fast as it came."""
    is_whole = options.speedup == 1.0 and options.limit is None and options.from_s is None and options.until_s is None
    if len(options.rest) != 1 or options.rest[0] == "-" or not is_whole:
        return None
    try:
        run = read_measured(options.rest[0], skip_bad=options.skip_bad)
    except BadInput:
        return None
    done = (run.first_token_ns != ABSENT) & (run.finish_ns != ABSENT)
    arrival, first, finish = (column[done] / 1e9 for column in (run.trace.arrival_ns, run.first_token_ns, run.finish_ns))
    further = run.trace.output[done] - 1
    ttft, tpot, e2e = first - arrival, (finish - first) / np.maximum(1, further), finish - arrival
    promised = (np.inf if limit is None else limit for limit in slo)
    met = np.logical_and.reduce([took <= limit for took, limit in zip((ttft, tpot, e2e), promised, strict=True)])
    figures = {
        f"{name}_{share}": percentile(np.sort(took), share)
        for name, took in (("ttft", ttft), ("tpot", tpot[further > 0]), ("e2e", e2e))
        for share in (50, 99)
    }
    return MeasuredOutcome(run.trace.size, int(met.sum()), figures)


def sentences(report: WhatifReport) -> list[str]:
    """The sentences, the answer first: promises kept, or the wait for the first token, then whether it keeps up."""
    was, now = report.was, report.found
    asked = " ".join(f"{name}={value}" for name, value in report.changes.items())
    if not report.slo.is_empty:
        kept = f"{format_count(now.met)} of {counted(now.summary.requests, 'request')} served as promised ({report.slo})"
        said = [f"With {asked}: {kept}; as recorded {format_count(was.met)}."]
    else:
        before, after = seconds(was.summary.ttft.p99), seconds(now.summary.ttft.p99)
        said = [f"With {asked}: the slowest one in a hundred waits {after} for its first token, not {before}."]
    if is_tie(report):
        said.append("That is a tie: within the clock's band either may be the better one.")
    measured = (report.measured.figures["e2e_50"] if report.measured is not None else None) or 0.0
    replayed = was.summary.e2e.p50 or 0.0
    if measured and replayed and not 1 / APART <= replayed / measured <= APART:
        far = f"half of the requests took up to {seconds(measured)}, in the replay of what was recorded {seconds(replayed)}"
        said.append(f"Do not trust it: {far}. Are the command and the card those that were recorded?")
    behind = words.reading(now.summary, now.replicas if now.replicas > 1 else 0)
    return [*said, *(sentence for sentence in behind if "keep up" in sentence or "such servers" in sentence)]


def is_tie(report: WhatifReport) -> bool:
    """True if the better of the two replays is not the better one throughout the clock's band.

    Two replays by one card's clock err in the same direction; those of two cards may err in opposite directions.
    """
    was, now = report.was, report.found

    def gain(before: tuple[int, float], after: tuple[int, float]) -> float:
        return before[1] - after[1] if report.slo.is_empty else after[0] - before[0]

    ends = now.at_band if was.card == now.card else now.at_band[::-1]
    gains = [gain((was.met, was.mean_s), (now.met, now.mean_s)), *map(gain, was.at_band, ends)]
    return min(gains) <= 0 <= max(gains)


_ROWS: tuple[tuple[str, Callable[[ReplayOutcome], str], str], ...] = (
    ("engines", lambda one: str(one.replicas), ""),
    ("as promised", lambda one: format_count(one.met), "met"),
    ("finished", lambda one: format_count(one.summary.finished), "requests"),
    ("refused: too long", lambda one: format_count(one.summary.rejected), ""),
    ("refused: queue full", lambda one: format_count(one.summary.refused), "refused"),
    ("to the first token, p50", lambda one: seconds(one.summary.ttft.p50), "ttft_50"),
    ("to the first token, p99", lambda one: seconds(one.summary.ttft.p99), "ttft_99"),
    ("per further token, p50", lambda one: seconds(one.summary.tpot.p50), "tpot_50"),
    ("per further token, p99", lambda one: seconds(one.summary.tpot.p99), "tpot_99"),
    ("to the last token, p50", lambda one: seconds(one.summary.e2e.p50), "e2e_50"),
    ("to the last token, p99", lambda one: seconds(one.summary.e2e.p99), "e2e_99"),
    ("preemptions", lambda one: format_count(one.summary.preemptions), ""),
    ("cache, peak", lambda one: percent(one.summary.kv_usage.peak), ""),
    ("prefix hits", lambda one: percent(one.summary.prefix.hit_rate), ""),
)


def as_text(report: WhatifReport) -> Report:
    """The answer, the three side by side, and the notes on what they leave out."""
    was, now, measured = report.was, report.found, report.measured
    traffic = f"{one_line(was.summary.trace)}: {counted(was.summary.requests, 'request')}"
    first, *rest = (one_line(sentence) for sentence in sentences(report))
    text = Report([Line(f"replayed: {traffic}", 2, FAINT), ""])
    text += [Line(f"  {one_line(note)}", 2, BAD) for note in dict.fromkeys((*was.notes, *now.notes)) if is_urgent(note)]
    text += [Line(f"  {first}", 2, BOLD), *(Line(f"  {sentence}", 2, WARN) for sentence in rest), ""]
    rows = []
    for name, read, key in _ROWS:
        if key == "met" and report.slo.is_empty:
            continue
        if key == "refused" and not (was.summary.refused or now.summary.refused):
            continue
        stamped = [] if measured is None else [_measured_cell(measured, key)]
        rows.append([name, *stamped, read(was), read(now)])
    text.append(Table("lr", rows, ["", *(["measured"] if measured is not None else []), was.name, now.name]))
    if ROUGH_GUIDE in (was.summary.step_time_label, now.summary.step_time_label):
        text.append(Line(f"  {ROUGH_GUIDE}; compare the replays with each other", 2, WARN))
    shown = {note: [one.name for one in (was, now) if note in one.notes] for one in (was, now) for note in one.notes}
    for note, names in shown.items():
        if not is_urgent(note):
            whose = "" if len(names) == 2 else f"{names[0]}: "
            text.append(Line(f"  note: {whose}{one_line(note)}", 8, FAINT, 7))
    return text


def _measured_cell(measured: MeasuredOutcome, key: str) -> str:
    if key in ("met", "requests"):
        return format_count(getattr(measured, key))
    return seconds(measured.figures[key]) if key in measured.figures else ""


def as_json(report: WhatifReport) -> str:
    """One object of the schema plimsoll.whatif/1, with both replays as `simulate --json` has them."""
    measured = report.measured
    body = {
        "schema": SCHEMA,
        "changes": report.changes,
        "slo": report.slo,
        "measured": None if measured is None else {"requests": measured.requests, "met": measured.met, **measured.figures},
        **{
            key: json.loads(words.as_json(one.summary, notes=one.notes))
            | picked(one, "replicas met band")
            | {"met_at_band": [met for met, _ in one.at_band]}
            for key, one in (("as_recorded", report.was), ("what_if", report.found))
        },
        "is_tie": is_tie(report),
        "reading": sentences(report),
    }
    return json_text(body)
