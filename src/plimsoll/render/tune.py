"""The report of `plimsoll tune`, as a screen of text, as JSON, and as commands to compare."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple

from plimsoll.plan.read import MemoryPlan
from plimsoll.redaction import one_line
from plimsoll.render.flags import rewritten_line
from plimsoll.render.plan import as_json as plan_json
from plimsoll.render.plan import band_json, gpus_of
from plimsoll.render.simulate import counted, first_of_all, is_urgent, percent, seconds
from plimsoll.render.terminal import BAD, BOLD, FAINT, GOOD, WARN, Line, Report, Table, json_text
from plimsoll.tune.answer import Tuning, curve, runner_up
from plimsoll.tune.capacity import Capacity, Prices
from plimsoll.tune.goodput import Failed, Result, Score, Traffic
from plimsoll.tune.grid import Axes, Point
from plimsoll.tune.search import Trial
from plimsoll.tune.space import FLAGS, Candidate, value_text
from plimsoll.tune.verdict import (
    headline,
    is_tie,
    label,
    margin,
    measurement,
    of_all,
    ranges,
    reasons,
    runner_up_sentence,
    serves_none,
)
from plimsoll.units import format_count, format_gib

SWEEP_SCHEMA = "plimsoll.sweep/1"
SWEEP_UNITS = "requests a second, tokens and seconds; shares from 0 to 1"


class SweepReport(NamedTuple):
    """All points in their order, each with its result."""

    traffic: Traffic
    axes: Axes
    points: Sequence[Point]
    results: Sequence[Result | None]
    label: str  # how far the times can be trusted
    notes: Sequence[str]

    @property
    def failures(self) -> list[tuple[Point, str]]:
        """The points that could not be replayed, and why."""
        found = []
        for point, result in zip(self.points, self.results, strict=True):
            if isinstance(result, Failed):
                found.append((point, result.why))
            elif result is None:
                found.append((point, point.problem))
        return found

    @property
    def ranked(self) -> list[tuple[Point, Score]]:
        """The points with their scores, best first."""
        done = [(point, one) for point, one in zip(self.points, self.results, strict=True) if isinstance(one, Score)]
        return sorted(done, key=lambda pair: -pair[1].goodput)


def sweep_as_json(report: SweepReport) -> str:
    """One object of the schema plimsoll.sweep/1; results in the order of the combinations."""
    body = {
        "schema": SWEEP_SCHEMA,
        "units": SWEEP_UNITS,
        "trace": report.traffic.trace.name,
        "requests": report.traffic.trace.size,
        "slo": report.traffic.slo,
        "label": report.label,
        "axes": report.axes,
        "points": [_row(point, result) for point, result in zip(report.points, report.results, strict=True)],
        "notes": report.notes,
    }
    return json_text(body)


def _row(point: Point, result: Result | None) -> dict[str, object]:
    problem = result.why if isinstance(result, Failed) else point.problem
    return {
        "values": point.values,
        "num_blocks": point.job.settings.num_blocks if point.job is not None else None,
        "is_safe": point.option.is_safe if point.option is not None else None,
        "objection": point.option.why_not if point.option is not None and not point.option.is_safe else None,
        "score": result if isinstance(result, Score) else None,
        "problem": problem or None,
    }


def as_csv(report: SweepReport) -> str:
    """A row a setting, in the order of the combinations; empty cells where a figure is unknown."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(report.axes)
    writer.writerow([*names, "num_blocks", "is_safe", *Score._fields, "problem"])
    for point, result in zip(report.points, report.results, strict=True):
        row = _row(point, result)
        score = list(result) if isinstance(result, Score) else [None] * len(Score._fields)
        writer.writerow([*(point.values[name] for name in names), row["num_blocks"], row["is_safe"], *score, row["problem"]])
    return out.getvalue()


def sweep_as_text(report: SweepReport, top: int) -> Report:
    """Returns the swept traffic, the best settings, and the settings that could not be replayed."""
    ranked, failed, names = report.ranked, report.failures, list(report.axes)
    promise = f", promised {report.traffic.slo}" if not report.traffic.slo.is_empty else ""
    head = (
        f"swept: {one_line(report.traffic.trace.name)}: {format_count(report.traffic.trace.size)} requests, "
        f"{format_count(len(report.points))} settings{promise}"
    )
    text = Report([Line(head, 2, FAINT), f"  {one_line(report.label)}", ""])
    text += [part for sentence in first_of_all(report.notes) for part in (Line(f"  {one_line(sentence)}", 2, BAD), "")]
    good = f"{report.traffic.slo.word}/s"
    rows, styles, objections = [], [], []
    for point, score in ranked[:top]:
        blocks = point.job.settings.num_blocks if point.job is not None else 0
        is_unsafe = point.option is not None and not point.option.is_safe
        objections += [one_line(point.option.why_not)] if point.option is not None and is_unsafe else []
        cells = [*(value_text(point.values[name]) for name in names), format_count(blocks), f"{score.goodput:.4g}"]
        cells += [percent(score.met / max(1, score.requests)), seconds(score.ttft_p99), seconds(score.tpot_p99)]
        rows.append([*cells, format_count(score.preemptions), "unsafe" if is_unsafe else ""])
        styles.append(WARN if is_unsafe else "" if rows[1:] else GOOD)
    columns = [*names, "blocks", good, "of all", "TTFT p99", "TPOT p99", "preempted", ""]
    text += [Table("r", rows, columns, styles=styles)] if rows else []
    text += [Line(f"  unsafe: {why}", 4, WARN) for why in dict.fromkeys(objections)]
    if len(ranked) > top:
        text.append(f"  and {format_count(len(ranked) - top)} more; --top N, --csv FILE and --json show them")
    for why, count in Counter(why for _, why in failed).items():
        text.append(Line(f"  not replayed: {format_count(count)}: {one_line(why)}", 4, WARN))
    return Report([*text, *(Line(f"  note: {one_line(note)}", 8, FAINT, 7) for note in report.notes if not is_urgent(note))])


SCHEMA = "plimsoll.tune/1"
UNITS = "requests a second, tokens, bytes and seconds; shares from 0 to 1"
CURVES = ("max_num_seqs", "max_num_batched_tokens")
BAR = 30


class TuneReport(NamedTuple):
    """A tuning, and the plans of the commands in it."""

    tuning: Tuning
    own: MemoryPlan
    chosen: MemoryPlan | None
    second: MemoryPlan | None  # the runner-up's
    notes: Sequence[str] = ()
    capacity: Capacity | None = None  # where the question was how many servers keep the promise

    @property
    def servers(self) -> int | None:
        """The number of servers that keep the promise; None where that was not asked, or no number does."""
        return self.capacity.servers if self.capacity is not None else None


def verdict(report: TuneReport) -> list[str]:
    """Sentences on the number of servers, and how much more traffic they take; empty where that was not asked."""
    capacity = report.capacity
    if capacity is None:
        return []
    kept, one = f"{100 * capacity.keep:g} %", capacity.trials[0]
    alone = f"one keeps it for {format_count(one.met)} of {format_count(one.requests)}"
    now, highest = capacity.now, capacity.highest
    if capacity.servers is None or now is None or highest is None:
        most = max(trial.servers for trial in capacity.trials)
        many = f"{format_count(most)} for {format_count(capacity.trials[-1].met)}"
        return [f"No number of such servers keeps the promise for {kept} of all requests: {alone}, {many}."]
    enough = (
        f"{counted(capacity.servers, 'such server')} keep{'s' if capacity.servers == 1 else ''} the promise for {kept} of all"
    )
    first = f"{enough}: {format_count(now.met)} of {format_count(now.requests)}"
    if one.servers < capacity.servers:
        first = f"Overloaded: {counted(capacity.servers - 1, 'more server')} needed. {first}; {alone}"
    than = "up to" if capacity.is_bounded else "at least"
    more = (
        f"Headroom: {than} {highest.requests_per_second:.3g} requests a second, {highest.speedup:.3g} times this traffic "
        f"({format_count(highest.met)} of {format_count(highest.requests)} as promised then)"
    )
    return [f"{first}.", f"{more}."]


def capacity_json(capacity: Capacity | None) -> dict[str, object] | None:
    """The answer with every replay it is based on; None where it was not asked."""
    if capacity is None:
        return None
    highest = capacity.highest
    return {
        "keep": capacity.keep,
        "servers": capacity.servers,
        "highest_requests_per_second": None if highest is None else highest.requests_per_second,
        "highest_speedup": None if highest is None else highest.speedup,
        "is_bounded": capacity.is_bounded,
        "trials": [asdict(trial) | {"share": trial.share} for trial in capacity.trials],
    }


CardRow = tuple[str, TuneReport | None, str | None]  # the card's word, its report, or the reason why there is none


def _cards(rows: Sequence[CardRow], prices: Prices | None) -> list[tuple[CardRow, int | None, float | None]]:
    """Each row with its number of cards and its price an hour; rows that keep the promise first, by price."""
    found = []
    for row in rows:
        _, report, _ = row
        ledger = report.tuning.server.ledger if report is not None else None
        cards = report.servers * ledger.settings.gpus if report is not None and report.servers and ledger is not None else None
        price = prices.of(ledger.card.name) if ledger is not None and prices is not None and cards is not None else None
        found.append((row, cards, None if price is None or cards is None else price * cards))
    return sorted(found, key=lambda one: (one[1] is None, one[2] is None, one[2] or 0.0, one[1] or 0))


def beaten_by(rows: Sequence[tuple[CardRow, int | None, float | None]], place: int) -> str | None:
    """Another row that costs no more, takes no less traffic and answers no later, and is better in one of the three."""

    def figures(row: tuple[CardRow, int | None, float | None]) -> tuple[float, float, float] | None:
        (_, report, _), cards, price = row
        capacity = report.capacity if report is not None else None
        if capacity is None or capacity.now is None or capacity.highest is None or cards is None:
            return None
        return price if price is not None else float(cards), -capacity.highest.requests_per_second, capacity.now.ttft_p99

    own = figures(rows[place])
    is_priced = rows[place][2] is not None
    for other in rows:
        theirs = figures(other) if (other[2] is not None) == is_priced else None
        if own is not None and theirs is not None and theirs != own and all(a <= b for a, b in zip(theirs, own, strict=True)):
            return other[0][0]
    return None


def cards_as_json(rows: Sequence[CardRow], prices: Prices | None) -> str:
    """One object of the schema plimsoll.tune/1, with a row for each card instead of one setting."""
    each = []
    ordered = _cards(rows, prices)
    for place, ((word, report, problem), cards, price) in enumerate(ordered):
        chosen = report.chosen if report is not None else None
        each.append({
            "gpu": word,
            "problem": problem,
            "gpus": cards,
            "usd_per_hour": price,
            "beaten_by": beaten_by(ordered, place),
            "capacity": capacity_json(report.capacity) if report is not None else None,
            "command": chosen.checked.rewritten if chosen is not None else None,
            "reading": sentences(report) if report is not None else [],
        })  # fmt: skip
    body = {"schema": SCHEMA, "units": UNITS, "prices_of": prices.date if prices is not None else None, "cards": each}
    return json_text(body)


def cards_as_text(rows: Sequence[CardRow], prices: Prices | None) -> Report:
    """A table of cards, the cheapest first, and the command of each."""
    ordered = _cards(rows, prices)
    lines, cells = Report(), []
    for (word, report, problem), cards, price in ordered:
        capacity = report.capacity if report is not None else None
        highest = capacity.highest if capacity is not None else None
        rate = "-" if highest is None else f"{highest.requests_per_second:.3g}"
        servers = "none keeps it" if cards is None else format_count(report.servers or 0) if report is not None else "-"
        first = "-" if capacity is None or capacity.now is None else seconds(capacity.now.ttft_p99)
        cost = "-" if price is None else f"{price:,.2f}"
        cells.append([word, servers, "-" if cards is None else str(cards), rate, first, cost])
        if problem is not None:
            lines.append(Line(f"  {word}: {one_line(problem)}", 4, WARN))
    head = ["card", "servers", "cards", "up to, requests/s", "first token, p99", "dollars an hour"]
    lines = Report([Table("lrrrrr", cells, head), *lines, ""])
    for place, ((word, report, _), _, _) in enumerate(ordered):
        if report is not None and report.chosen is not None:
            said = verdict(report)
            if report.capacity is not None and (refused := report.capacity.trials[0].rejected):
                said.append(f"{counted(refused, 'request')} {'is' if refused == 1 else 'are'} too long for it and refused.")
            if other := beaten_by(ordered, place):
                said.append(f"Why not: {other} costs no more, takes no less and answers no later.")
            lines += [Line(f"  {word}: {' '.join(said)}", 4)]
            lines += [Line(f"    {shlex.join(map(one_line, report.chosen.checked.rewritten))}", 6, GOOD)]
    if prices is None:
        lines.append(Line("  no prices: --prices FILE adds them", 2, FAINT))
    else:
        lines.append(Line(f"  prices of {one_line(prices.date)}", 2, FAINT))
    return lines


def commands(report: TuneReport) -> list[str]:
    """The chosen command, the runner-up and the user's own, one a line."""
    plans = [one for one in (report.chosen, report.second, report.own) if one is not None]
    return list(dict.fromkeys(rewritten_line(one.checked) for one in plans))


def as_json(report: TuneReport) -> str:
    """One object of the schema plimsoll.tune/1."""
    tuning, found = report.tuning, report.tuning.found
    second = runner_up(tuning)
    ledger, safe, margin_json = tuning.server.ledger, 0, None
    if found is not None:
        of_best, low, safe = found.best.option.ledger, tuning.at_low_end, found.safe
        margin_json = {
            "slack": band_json(of_best.slack),
            "kv": band_json(of_best.kv),
            "goodput_at_low_end": None if low is None else low.goodput,
        }
    body = {
        "schema": SCHEMA,
        "units": UNITS,
        "label": label(tuning),
        "fitted": tuning.server.fitted,
        "model": report.own.model,
        "vllm": ledger.settings.release,
        "gpu": {"name": ledger.card.name, "count": ledger.settings.gpus},
        "slo": tuning.traffic.slo,
        "speedup": tuning.traffic.speedup,
        "traffic": tuning.seen,
        "engines": tuning.server.engines,
        "chosen": found.best.option.candidate if found is not None else None,
        "command": report.chosen.checked.rewritten if report.chosen is not None else None,
        "environment": [name for name, _ in report.own.checked.launch.environment],
        "plan": json.loads(plan_json(report.chosen)) if report.chosen is not None else None,
        "score": found.best.score if found is not None else None,
        "own": {
            "setting": tuning.own,
            "is_safe": tuning.own_option.is_safe,
            "score": found.own.score if found is not None and found.own is not None else None,
        },
        "runner_up": None if second is None else _tried(second),
        "most": found.most if found is not None and found.most < float("inf") else None,
        "margin": margin_json,
        "curves": {name: [_tried(one) for one in curve(tuning, name)] for name in CURVES},
        "tried": [_tried(one) for one in found.tried] if found is not None else [],
        "ranges": None if tuning.doubt is None else tuning.doubt.ranges,
        "is_tie": is_tie(tuning),
        "is_steady": None if tuning.doubt is None else tuning.doubt.steady,
        "measure": measurement(tuning) or None,
        "capacity": capacity_json(report.capacity),
        "cost": {
            "candidates": found.candidates if found is not None else len(tuning.refused),
            "safe": safe,
            "never_run_because_unsafe": len(tuning.refused),
            "ruled_out_by_a_bound": found.ruled_out if found is not None else 0,
            "runs": found.runs if found is not None else 0,
            "replayed_requests": tuning.requests,
            "share_of_trying_all": tuning.requests / (safe * max(1, tuning.traffic.trace.size)) if safe else None,
        },
        "reading": [*first_of_all(report.notes), *sentences(report)],
        "notes": report.notes,
    }
    return json_text(body)


def _tried(one: Trial) -> dict[str, object]:
    return {"setting": one.option.candidate, "kv_tokens": one.option.kv_tokens, "score": one.score}


def sentences(report: TuneReport) -> list[str]:
    """All sentences of the answer, the most important first."""
    tuning = report.tuning
    said = [*verdict(report), headline(tuning), *reasons(tuning)]
    if serves_none(tuning):
        return [one_line(one) for one in said]
    if is_tie(tuning):
        said.append("That is a tie with your own flags: with faster or slower steps they do as much. A fit would settle it.")
    said += [second] if (second := runner_up_sentence(tuning)) else []
    if tuning.found is not None:
        said.append(f"Margin: {margin(tuning)}")
    if between := ranges(tuning):
        said.append(f"The step times are not fitted, so take this as a range: {', '.join(between)}.")
    said += [measurement(tuning)] if measurement(tuning) else []
    return [one_line(one) for one in said]


def as_text(report: TuneReport) -> Report:
    """The finding, the command, the reasons, two curves and the effort of the search, on one screen."""
    tuning, said = report.tuning, sentences(report)
    fit = f"; step times {one_line(tuning.server.fitted)}" if tuning.server.fitted is not None else ""
    promise = f", promised {tuning.traffic.slo}" if not tuning.traffic.slo.is_empty else ""
    where = f"{one_line(report.own.model)} on {gpus_of(tuning.server.ledger)} for {one_line(tuning.traffic.trace.name)}"
    traffic = f"{format_count(tuning.seen.requests)} requests, {tuning.seen.rate:.3g} a second{promise}"
    text = Report([Line(f"tuned: {where}: {traffic}", 2, FAINT), f"  {label(tuning)}{fit}", ""])
    text += [part for sentence in first_of_all(report.notes) for part in (Line(f"  {one_line(sentence)}", 2, BAD), "")]
    is_found = report.chosen is not None and not serves_none(tuning)
    text.append(Line(f"  {said[0]}", 2, BOLD if is_found else BAD))
    if is_found and report.chosen is not None:
        text += ["", Line(f"    {shlex.join(map(one_line, report.chosen.checked.rewritten))}", 6, GOOD), ""]
    text += [Line(f"  - {sentence}", 4) for sentence in said[1:]]
    if report.chosen is None and report.own.advice:
        text += [Line(f"  - {advice.words}: {advice.why}", 4) for advice in report.own.advice]
        command = f"vllm serve {one_line(report.own.model)} ... {report.own.advice[0].words}"
        text.append(Line(f"  Give it with the command, behind `--`: -- {command}", 4))
    if tuning.found is not None:
        text += ["", _compared(tuning)]
        text += [part for name in (() if serves_none(tuning) else CURVES) for part in _curve(tuning, name)]
        unsafe = f", {format_count(len(tuning.refused))} of them unsafe and never run" if tuning.refused else ""
        runs = tuning.requests / max(1, tuning.traffic.trace.size)
        planned = f"{format_count(tuning.found.candidates)} settings planned{unsafe}"
        share = f"{runs / tuning.found.safe:.1%} of what trying all would take"
        text += ["", Line(f"  {planned}; replayed as much as {runs:.1f} runs of the whole traffic, {share}", 2, FAINT)]
    return Report([*text, *(Line(f"  note: {one_line(note)}", 8, FAINT, 7) for note in report.notes if not is_urgent(note))])


def _compared(tuning: Tuning) -> Table:
    """The chosen setting beside the user's own and the runner-up."""
    assert tuning.found is not None, "asked only of an answer"
    second = runner_up(tuning)
    is_own = tuning.found.own is not None and tuning.found.own == tuning.found.best
    columns = [("yours" if serves_none(tuning) and is_own else "chosen", tuning.found.best)]
    if tuning.found.own is not None and tuning.found.own != tuning.found.best:
        columns.append(("yours", tuning.found.own))
    if second is not None and second != tuning.found.own:
        columns.append(("runner-up", second))
    word = tuning.traffic.slo.word
    rows = [[name.format(word), *(read(one) for _, one in columns)] for name, read in _ROWS]
    return Table("lr", rows, ["", *(name for name, _ in columns)])


def _curve(tuning: Tuning, name: str) -> list[str | Line]:
    line = curve(tuning, name)
    top = max((one.score.goodput for one in line), default=0.0)
    if len(line) < 2 or tuning.found is None:
        return []
    lines: list[str | Line] = ["", Line(f"  {FLAGS[name]}: requests a second {tuning.traffic.slo.word}", 2, BOLD)]
    for one in line:
        is_best = one.option.candidate == tuning.found.best.option.candidate
        drawn = "#" * round(BAR * one.score.goodput / top) if top else ""
        value = value_text(getattr(one.option.candidate, name))
        said = f"  {value:>8}  {one.score.goodput:<8.3g}{drawn}{'  <' if is_best else ''}"
        lines.append(Line(said, 2, GOOD if is_best else ""))
    return lines


_ROWS: tuple[tuple[str, Callable[[Trial], str]], ...] = (
    *((FLAGS[name], lambda one, name=name: value_text(getattr(one.option.candidate, name))) for name in Candidate._fields),
    ("KV cache, tokens", lambda one: format_count(one.option.kv_tokens)),
    ("free beside vLLM", lambda one: format_gib(one.option.ledger.slack.value)),
    ("{}, requests a second", lambda one: f"{one.score.goodput:.3g}"),
    ("{}, of all", lambda one: of_all(one.score.met, one.score)),
    ("late: first token", lambda one: of_all(one.score.late_first, one.score)),
    ("late: further tokens", lambda one: of_all(one.score.late_further, one.score)),
    ("first token, p50", lambda one: seconds(one.score.ttft_p50)),
    ("first token, p99", lambda one: seconds(one.score.ttft_p99)),
    ("further tokens, p50", lambda one: seconds(one.score.tpot_p50)),
    ("further tokens, p99", lambda one: seconds(one.score.tpot_p99)),
    ("preemptions", lambda one: format_count(one.score.preemptions)),
    ("most running at once", lambda one: format_count(one.score.peak_running)),
)
