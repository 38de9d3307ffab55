"""Reads every input of `plimsoll doctor` by its kind, and judges those that are no text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.remedies.runtime import wedge_remedies
from plimsoll.doctor.rules.contained import finding_of_state, read_survival
from plimsoll.doctor.rules.diagnose import InputVerdict, diagnose
from plimsoll.doctor.rules.log_text import Log
from plimsoll.doctor.rules.metrics import judge_pages, judge_saved
from plimsoll.doctor.rules.snapshot import judge_snapshot
from plimsoll.doctor.rules.snapshot_facts import Snapshot
from plimsoll.doctor.rules.trend_growth import MetricSeries
from plimsoll.doctor.rules.trends import judge_trends
from plimsoll.doctor.words import finding
from plimsoll.errors import BadInput, WorldFailed
from plimsoll.findings import Evidence, Finding
from plimsoll.net.address import address
from plimsoll.net.inputs import STDIN, InputKind, Spool, classify, is_url, walked
from plimsoll.vllm.metrics_page import Page, fetch_health, fetch_pages, read_page

STANDARD_INPUT = "standard input"


class MetricsInput(NamedTuple):
    """A metrics page, read once or twice."""

    source: str
    first: Page
    second: Page | None = None
    health: int | None = None


class RangeOptions(TypedDict, total=False):
    """The time range and the labels of its series, as far as the user gave them."""

    since_s: float
    start_s: float
    end_s: float
    step_s: float
    match: dict[str, str]


@dataclass(slots=True)
class DoctorInputs:
    """All inputs, read."""

    logs: list[Log] = field(default_factory=list)
    pages: list[MetricsInput] = field(default_factory=list)
    ranges: list[tuple[str, tuple[MetricSeries, ...]]] = field(default_factory=list)
    snapshots: list[tuple[str, Snapshot]] = field(default_factory=list)
    gate_states: list[Log] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)  # source to file, for a bundle to copy from
    spool: Spool | None = None  # standard input, as long as it may still be copied

    def judge(self) -> list[InputVerdict]:
        """The verdicts on all inputs that are no text."""
        verdicts = [judge_gate_state(log) for log in self.gate_states]

        judged = [
            (page.source, judge_pages(page.first, page.second, page.source, health=page.health))
            for page in self.pages
            if page.second is not None or page.health is not None
        ]
        saved = [page.first for page in self.pages if page.second is None and page.health is None]
        if saved:
            judged += [(page.source, verdict) for page, verdict in judge_saved(saved)]
        for source, verdict in judged:
            engines = [{**engine._asdict(), "lines": None} for engine in verdict.facts.engines]
            facts = {"is": "metrics", **verdict.facts._asdict(), "engines": engines}
            verdicts.append(InputVerdict(source, verdict.findings, facts))
        for source, series in self.ranges:
            stamps = [at for one in series for at in (one.times[:1] + one.times[-1:])]
            points = max((len(one.times) for one in series), default=0)
            seconds = max(stamps, default=0.0) - min(stamps, default=0.0)
            figures = {"is": "range", "series": len(series), "points": points, "seconds": seconds}
            verdicts.append(InputVerdict(source, judge_trends(series, source), figures))
        # Snapshots, each against the one before it, with what a log beside them says of the same server.
        told = diagnose(self.logs).facts.get("out_of_memory") if self.snapshots and self.logs else None
        oom, before = told if isinstance(told, Mapping) else {}, None
        for source, snapshot in self.snapshots:
            seen = judge_snapshot(snapshot, source, before, oom.get("tried_bytes"), oom.get("free_bytes"))
            devices = [device._asdict() for device in seen.facts]
            verdicts.append(
                InputVerdict(source, seen.findings, {"is": "snapshot", "devices": devices, "notes": list(seen.notes)})
            )
            before = snapshot
        return verdicts

    def read(self, name: str, path: str, timeout_s: float, time_range: RangeOptions, range_flags: frozenset[str]) -> None:
        """Read one input by its kind."""
        if path == STDIN:
            self.spool = Spool(sys.stdin.buffer, deadline=time.monotonic() + timeout_s)
            name, path = STANDARD_INPUT, self.spool.path
        kind = classify(path)
        if kind is InputKind.URL:
            self._fetch(path, timeout_s, time_range, range_flags)
        elif kind is InputKind.REPORT:
            self.notes.append(f"not read: {name} (an earlier report of this command; it quotes what it read)")
        elif kind is InputKind.METRICS:
            self.pages.append(MetricsInput(name, read_page(path, name)))
        elif kind is InputKind.SNAPSHOT:
            from plimsoll.doctor.read.snapshots import read_snapshot

            self.snapshots.append((name, read_snapshot(path, timeout_s=timeout_s)))
        else:
            log = read_log(path, source=name, deadline=time.monotonic() + timeout_s)
            was_cut = name == STANDARD_INPUT and self.spool is not None and self.spool.was_cut
            if was_cut or any(count == 0 for _, count in log.skipped):
                self.notes.append(f"{name}: only a part was read: --timeout {timeout_s:g} s was over, or it is too long")
            first = "".join(line.text for line in log.lines[:_FIRST_LINES]).replace(" ", "")
            is_gate_state = first.startswith("{") and f'"schema":"{SCHEMA}"' in first
            (self.gate_states if is_gate_state else self.logs).append(log)
            self.paths[name] = path

    def _fetch(self, url: str, timeout_s: float, time_range: RangeOptions, range_flags: frozenset[str]) -> None:
        """Fetch a running server's page twice, or a time range from a Prometheus server."""
        from plimsoll.doctor.read.prometheus import fetch_range, is_prometheus

        shown = address(url).shown
        if range_flags or is_prometheus(url, timeout_s=min(timeout_s, 5.0)):
            try:
                series = fetch_range(url, **time_range, timeout_s=timeout_s)
            except WorldFailed as error:
                if range_flags and "answers 404" in str(error):
                    flags = " and ".join(sorted(range_flags))
                    raise WorldFailed(
                        f"{shown}: no Prometheus is there; without {flags} the server itself is looked at"
                    ) from None
                raise
            self.ranges.append((shown, series))
            return
        looks = fetch_pages(url, timeout_s=timeout_s)
        if len(looks) == 1:
            self.notes.append(f"{shown} answered the first look and not the second: look again, and at the end of its log")
        health = fetch_health(url, timeout_s=min(timeout_s, 5.0))
        self.pages.append(MetricsInput(shown, looks[0], looks[1] if len(looks) > 1 else None, health))


def read_inputs(
    names: Sequence[str], *, timeout_s: float, time_range: RangeOptions, range_flags: frozenset[str],
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> DoctorInputs:  # fmt: skip
    """Every input, read by its kind; `range_flags` are the options that ask for a Prometheus range."""
    found = walked(names)
    inputs = DoctorInputs()
    notes = [f"{found.left_out} more files in the folders were not looked at"] if found.left_out else []
    if range_flags and not any(map(is_url, names)):
        notes.append(f"{', '.join(sorted(range_flags))}: not used, since no Prometheus server was named")
    notes += [f"not read: {name} (no text, no metrics page, no snapshot)" for name in found.not_text]
    for number, name in enumerate(found.files):
        on_progress(number, len(found.files))
        try:
            inputs.read(name, name, timeout_s, time_range, range_flags)
        except BadInput as error:
            if name in names:
                raise
            notes.append(f"left out: {error}")  # one bad file of a folder does not hide the others
    inputs.notes = [*notes, *inputs.notes]
    return inputs


# The state of a gate (`/plimsoll/state`, or `state.json` in guard's evidence): it alone proves a wedge.
SCHEMA = "plimsoll.state/1"
LONGEST = 320  # letters of a line that are shown
_FIRST_LINES = 3


def judge_gate_state(log: Log) -> InputVerdict:
    """The findings of a gate's state; a text that is cut off says nothing."""
    try:
        state = json.loads("\n".join(line.text for line in log.lines))
    except (ValueError, RecursionError):
        state = {}
    state = state if isinstance(state, dict) else {}
    engine = state.get("engine")
    findings: list[Finding] = []
    if isinstance(engine, dict) and engine.get("is_wedged") is True:
        age, longest = engine.get("last_step_age_s"), engine.get("longest_step_s")
        since = f"no step for {age:.0f} s" if isinstance(age, int | float) else "no step"
        before = f"; the longest before took {longest:.2f} s" if isinstance(longest, int | float) else ""
        because = f"{since} with requests there{before}; and the gate's canary request of one token got no answer"
        findings.append(finding("wedged-by-gate", [_line(log, '"is_wedged"')], because, first=wedge_remedies()))
    survival = read_survival(state.get("survive"))
    contained = finding_of_state(survival, (_line(log, '"contained"'),)) if survival is not None else None
    findings += [] if contained is None else [contained]
    return InputVerdict(log.source, tuple(findings), {"is": "gate state", "ready": state.get("ready")})


def _line(log: Log, name: str) -> Evidence:
    place = next((n for n, line in enumerate(log.lines) if name in line.text), 0)
    text = log.lines[place].text.strip()
    at = max(0, text.find(name) - 40) if len(text) > LONGEST else 0  # a state on one line is long
    return Evidence(log.source, text[at : at + LONGEST], log.lines[place].number)
