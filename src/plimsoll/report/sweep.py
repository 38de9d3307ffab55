"""What `plimsoll sweep` found: a ranked table, JSON, and CSV with a row a setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.domain.units import format_count
from plimsoll.report.flags import clean
from plimsoll.report.simulate import first_of_all, is_urgent, percent, seconds
from plimsoll.report.wrapping import wrapped
from plimsoll.tune.goodput import Score
from plimsoll.tune.grid import Axes, Point
from plimsoll.tune.work import Failed, Result, Traffic

SCHEMA = "plimsoll.sweep/1"
UNITS = "requests a second, tokens and seconds; shares from 0 to 1"


class Swept(NamedTuple):
    """All points in their order, each with its result."""

    traffic: Traffic
    axes: Axes
    points: Sequence[Point]
    results: Sequence[Result | None]
    label: str
    """How far the times can be trusted."""
    notes: Sequence[str]

    @property
    def failures(self) -> list[tuple[Point, str]]:
        """Those that could not be replayed, and why."""
        found = []
        for point, result in zip(self.points, self.results, strict=True):
            if isinstance(result, Failed):
                found.append((point, result.why))
            elif result is None:
                found.append((point, point.problem))
        return found

    @property
    def ranked(self) -> list[tuple[Point, Score]]:
        """Best first."""
        done = [(point, one) for point, one in zip(self.points, self.results, strict=True) if isinstance(one, Score)]
        return sorted(done, key=lambda pair: -pair[1].goodput)


def as_json(swept: Swept) -> str:
    """One object of the schema plimsoll.sweep/1; results in the order of the combinations."""
    import json

    body = {
        "schema": SCHEMA,
        "units": UNITS,
        "trace": clean(swept.traffic.trace.name),
        "requests": swept.traffic.trace.size,
        "slo": swept.traffic.slo._asdict(),
        "label": swept.label,
        "axes": {name: list(values) for name, values in swept.axes.values.items()},
        "points": [_row(point, result) for point, result in zip(swept.points, swept.results, strict=True)],
        "notes": [clean(note) for note in swept.notes],
    }
    return json.dumps(body, indent=2, ensure_ascii=False, allow_nan=False)


def _row(point: Point, result: Result | None) -> dict[str, object]:
    problem = result.why if isinstance(result, Failed) else point.problem
    return {
        "values": dict(point.values),
        "num_blocks": point.job.settings.num_blocks if point.job is not None else None,
        "is_safe": point.option.is_safe if point.option is not None else None,
        "objection": clean(point.option.why_not) if point.option is not None and not point.option.is_safe else None,
        "score": result._asdict() if isinstance(result, Score) else None,
        "problem": clean(problem) or None,
    }


def as_csv(swept: Swept) -> str:
    """A row a setting, in the order of the combinations; empty cells where nothing is known."""
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(swept.axes.values)
    writer.writerow([*names, "num_blocks", "is_safe", *Score._fields, "problem"])
    for point, result in zip(swept.points, swept.results, strict=True):
        row = _row(point, result)
        score = list(result) if isinstance(result, Score) else [None] * len(Score._fields)
        writer.writerow([*(point.values[name] for name in names), row["num_blocks"], row["is_safe"], *score, row["problem"]])
    return out.getvalue()


def as_text(swept: Swept, top: int) -> str:
    """What was swept, the best settings, and what could not be replayed."""
    ranked, failed = swept.ranked, swept.failures
    promise = f", promised {swept.traffic.slo}" if not swept.traffic.slo.is_empty else ""
    head = (
        f"swept: {clean(swept.traffic.trace.name)}: {format_count(swept.traffic.trace.size)} requests, "
        f"{format_count(len(swept.points))} settings{promise}"
    )
    lines = [*wrapped(head, "  "), *wrapped(f"  {clean(swept.label)}", "  "), ""]
    for sentence in first_of_all(swept.notes):
        lines += [*wrapped(f"  {clean(sentence)}", "  "), ""]
    names = list(swept.axes.values)
    widths = [max(len(name), 6) + 2 for name in names]
    columns = "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    good = "served/s" if swept.traffic.slo.is_empty else "as promised/s"
    lines.append(f"{columns}{'blocks':>9}{good:>15}{'of all':>8}{'TTFT p99':>10}{'TPOT p99':>10}{'preempted':>11}")
    for point, score in ranked[:top]:
        cells = "".join(f"{value_text(point.values[name]):>{width}}" for name, width in zip(names, widths, strict=True))
        blocks = point.job.settings.num_blocks if point.job is not None else 0
        unsafe = f"   unsafe: {clean(point.option.why_not)}" if point.option is not None and not point.option.is_safe else ""
        lines.append(
            f"{cells}{format_count(blocks):>9}{score.goodput:>15.4g}{percent(score.met / max(1, score.requests)):>8}"
            f"{seconds(score.ttft_p99):>10}{seconds(score.tpot_p99):>10}{format_count(score.preemptions):>11}{unsafe}"
        )
    if len(ranked) > top:
        lines.append(f"  and {format_count(len(ranked) - top)} more; --top N, --csv FILE and --json show them")
    for why, count in _counted([why for _, why in failed]):
        lines += wrapped(f"  not replayed: {format_count(count)}: {clean(why)}", "    ")
    for note in swept.notes:
        lines += wrapped(f"  note: {clean(note)}", " " * 8) if not is_urgent(note) else ()
    return "\n".join(lines)


def _counted(reasons: Sequence[str]) -> list[tuple[str, int]]:
    return [(why, sum(one == why for one in reasons)) for why in dict.fromkeys(reasons)]


def value_text(value: object) -> str:
    """As it was typed."""
    return ("on" if value else "off") if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
