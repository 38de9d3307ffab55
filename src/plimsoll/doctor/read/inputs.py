"""Reads everything the user gave to `plimsoll doctor`, each by its kind."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypedDict

from plimsoll.doctor.rules.diagnose import InputVerdict
from plimsoll.doctor.rules.log_text import Log
from plimsoll.errors import BadInput, WorldFailed
from plimsoll.launch.options import Split

TYPE_CHECKING = False
if TYPE_CHECKING:
    from plimsoll.doctor.rules.metrics import MetricsVerdict
    from plimsoll.doctor.rules.snapshot import SnapshotVerdict
    from plimsoll.doctor.rules.snapshot_facts import LogHints, Snapshot
    from plimsoll.doctor.rules.trend_growth import MetricSeries
    from plimsoll.net.inputs import Spool
    from plimsoll.vllm.metrics_page import Page

USUAL_TIMEOUT_S = 60.0
OF_A_RANGE = frozenset({"--since", "--start", "--end", "--step", "--match"})

LOWEST_EXIT = -64  # Python's way to name a signal

STANDARD_INPUT = "standard input"


class MetricsInput(NamedTuple):
    """A page of metrics, looked at once or twice."""

    source: str
    first: Page
    second: Page | None = None
    health: int | None = None


class Inputs(NamedTuple):
    """All inputs, read."""

    logs: tuple[Log, ...] = ()
    pages: tuple[MetricsInput, ...] = ()
    ranges: tuple[tuple[str, tuple[MetricSeries, ...]], ...] = ()
    snapshots: tuple[tuple[str, Snapshot], ...] = ()
    notes: tuple[str, ...] = ()
    paths: Mapping[str, str] = {}  # source to file, for a bundle to copy from
    spool: Spool | None = None  # what came on standard input, as long as it may still be copied
    gates: tuple[Log, ...] = ()  # what a gate said of its engine

    def judged(self) -> list[InputVerdict]:
        """What the inputs that are no text say."""
        snapshots = (InputVerdict(source, verdict.findings, _snapshot_facts(verdict)) for source, verdict in self.verdicts())
        return [*self._of_gates(), *self._of_pages(), *self._of_ranges(), *snapshots]

    def _of_gates(self) -> Iterator[InputVerdict]:
        for one in self.gates:
            from plimsoll.doctor.rules.diagnose import judge_gate_state

            yield judge_gate_state(one)

    def _of_pages(self) -> Iterator[InputVerdict]:
        for one in self.pages:
            if one.second is not None or one.health is not None:
                from plimsoll.doctor.rules.metrics import judge_pages

                yield _judged_page(one.source, judge_pages(one.first, one.second, one.source, health=one.health))
        saved = [one.first for one in self.pages if one.second is None and one.health is None]
        if saved:
            from plimsoll.doctor.rules.metrics import judge_saved

            for page, verdict in judge_saved(saved):
                yield _judged_page(page.source, verdict)

    def _of_ranges(self) -> Iterator[InputVerdict]:
        for source, series in self.ranges:
            from plimsoll.doctor.rules.trends import judge_trends

            yield InputVerdict(source, judge_trends(series, source), {"is": "range", "series": len(series), **_seen(series)})

    def verdicts(self) -> Iterator[tuple[str, SnapshotVerdict]]:
        """Snapshots, each against the one before it, with what a log beside them says of the same server."""
        before = None
        failed, free, hints = self._told() if self.snapshots and self.logs else (None, None, None)
        for source, snapshot in self.snapshots:
            from plimsoll.doctor.rules.snapshot import judge_snapshot

            yield source, judge_snapshot(snapshot, source, before, failed, hints, free)
            before = snapshot

    def _told(self) -> tuple[int | None, int | None, LogHints | None]:
        """The request that failed, what the device had left, and how large weights and cache are."""
        from plimsoll.doctor.rules.diagnose import diagnose
        from plimsoll.doctor.rules.snapshot_facts import LogHints

        facts = diagnose(self.logs).facts
        oom, memory, flags = (_mapping(facts.get(name)) for name in ("out_of_memory", "memory", "flags"))
        given = str(flags.get("kv_cache_memory_bytes", ""))
        kv = int(given) if given.isascii() and given.isdigit() and len(given) < 16 else _size(memory.get("kv_bytes"))
        return _size(oom.get("tried_bytes")), _size(oom.get("free_bytes")), LogHints(_size(memory.get("weights_bytes")), kv)

    def picture(self) -> str:
        """The last snapshot as a page."""
        if not self.snapshots:
            raise BadInput("--html draws a memory snapshot, and none was given")
        from plimsoll.render.snapshot_html import snapshot_page

        *_, (_, verdict) = self.verdicts()
        return snapshot_page(self.snapshots[-1][1], verdict)


def _judged_page(source: str, verdict: MetricsVerdict) -> InputVerdict:
    engines = [{**engine._asdict(), "lines": None} for engine in verdict.facts.engines]
    return InputVerdict(source, verdict.findings, {"is": "metrics", **verdict.facts._asdict(), "engines": engines})


def _seen(series: tuple[MetricSeries, ...]) -> dict[str, object]:
    stamps = [at for one in series for at in (one.times[:1] + one.times[-1:])]
    seconds = max(stamps, default=0.0) - min(stamps, default=0.0)
    return {"points": max((len(one.times) for one in series), default=0), "seconds": seconds}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _snapshot_facts(verdict: SnapshotVerdict) -> dict[str, object]:
    return {"is": "snapshot", "devices": [one._asdict() for one in verdict.facts], "notes": list(verdict.notes)}


def number(options: Split, name: str, usual: float) -> float:
    """A positive number given to an option."""
    text = options.values.get(name)
    if text is None:
        return usual
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise BadInput(f"{name} {text!r} is not a number of seconds")
    return value


def exit_code(options: Split) -> int | None:
    """What the process ended with, as the user gave it."""
    text = options.values.get("--exit-code")
    if text is None:
        return None
    if not text.removeprefix("-").isdigit() or not text.isascii() or len(text) > 8:
        raise BadInput(f"--exit-code {text!r} is not a number")
    code = int(text)
    if not (LOWEST_EXIT <= code <= 255 or (code % 256 == 0 and 0 < code >> 8 <= 255)):
        raise BadInput(f"--exit-code {text}: there is no such code; 0 to 255, a signal as -1 to -64, or a wait status (35072)")
    return code


def read_inputs(options: Split) -> Inputs:
    """Every input, read by its kind."""
    from plimsoll.net.inputs import is_url, walked

    found = walked(options.rest)
    reader = _Reader(options, number(options, "--timeout", USUAL_TIMEOUT_S))
    notes = [f"{found.left_out} more files in the folders were not looked at"] if found.left_out else []
    if (unused := sorted(OF_A_RANGE & set(options.values))) and not any(map(is_url, options.rest)):
        notes.append(f"{', '.join(unused)}: not used, since no Prometheus server was named")
    notes += [f"not read: {name} (no text, no metrics page, no snapshot)" for name in found.not_text]
    for name in found.files:
        try:
            reader.read(name, name)
        except BadInput as error:
            if name in options.rest:
                raise
            notes.append(f"left out: {error}")  # one bad file of a folder does not hide the others
    return Inputs(
        tuple(reader.logs), tuple(reader.pages), tuple(reader.ranges), tuple(reader.snapshots), (*notes, *reader.notes),
        reader.paths, reader.spool, tuple(reader.gates),
    )  # fmt: skip


class _Reader:
    """Reads input after input into the list of its kind."""

    def __init__(self, options: Split, timeout: float) -> None:
        self.options, self.timeout = options, timeout
        self.logs: list[Log] = []
        self.gates: list[Log] = []
        self.pages: list[MetricsInput] = []
        self.ranges: list[tuple[str, tuple[MetricSeries, ...]]] = []
        self.snapshots: list[tuple[str, Snapshot]] = []
        self.paths: dict[str, str] = {}
        self.spool: Spool | None = None
        self.notes: list[str] = []

    def read(self, name: str, path: str) -> None:
        """One input, by what it is."""
        from plimsoll.doctor.read.text import read_log
        from plimsoll.net.inputs import STDIN, Kind, Spool, classify

        if path == STDIN:
            import sys

            self.spool = Spool(sys.stdin.buffer, deadline=time.monotonic() + self.timeout)
            name, path = STANDARD_INPUT, self.spool.path
        kind = classify(path)
        if kind is Kind.URL:
            self._fetch(path)
        elif kind is Kind.REPORT:
            self.notes.append(f"not read: {name} (an earlier report of this command; it quotes what it read)")
        elif kind is Kind.METRICS:
            from plimsoll.vllm.metrics_page import read_page

            self.pages.append(MetricsInput(name, read_page(path, name)))
        elif kind is Kind.SNAPSHOT or _is_packed_snapshot(path):
            from plimsoll.doctor.read.snapshots import read_snapshot

            self.snapshots.append((name, read_snapshot(path)))
        else:
            from plimsoll.doctor.rules.diagnose import is_gate_state

            log = read_log(path, source=name, deadline=time.monotonic() + self.timeout)
            (self.gates if is_gate_state(log) else self.logs).append(log)
            self.paths[name] = path

    def _fetch(self, url: str) -> None:
        """A running server's page, twice; or a range of time from a Prometheus server."""
        from plimsoll.doctor.read.prometheus import is_prometheus
        from plimsoll.net.http_get import address

        shown = address(url).shown
        asked = OF_A_RANGE & set(self.options.values)
        if asked or is_prometheus(url, timeout_s=min(self.timeout, 5.0)):
            self.ranges.append((shown, self._range(url, shown, asked)))
            return
        from plimsoll.vllm.metrics_page import fetch_health, fetch_pages

        looks = fetch_pages(url, timeout_s=self.timeout)
        if len(looks) == 1:
            self.notes.append(f"{shown} answered the first look and not the second: look again, and at the end of its log")
        health = fetch_health(url, timeout_s=min(self.timeout, 5.0))
        self.pages.append(MetricsInput(shown, looks[0], looks[1] if len(looks) > 1 else None, health))

    def _range(self, url: str, shown: str, asked: frozenset[str]) -> tuple[MetricSeries, ...]:
        from plimsoll.doctor.read.prometheus import fetch_range

        try:
            return fetch_range(url, **range_of(self.options), timeout_s=self.timeout)
        except WorldFailed as error:
            if asked and "answers 404" in str(error):
                left_out = " and ".join(sorted(asked))
                raise WorldFailed(
                    f"{shown}: no Prometheus is there; without {left_out} the server itself is looked at"
                ) from None
            raise


def _is_packed_snapshot(path: str) -> bool:
    from plimsoll.net.inputs import named_packed

    if not named_packed(path):
        return False
    import gzip
    import zlib

    from plimsoll.doctor.read.snapshots import is_pickle

    try:
        with gzip.open(path) as file:
            return is_pickle(file.read(64))
    except (OSError, EOFError, zlib.error):
        return False


class RangeOptions(TypedDict, total=False):
    """A stretch of time and the labels of its series, as far as they were asked for."""

    since_s: float
    start_s: float
    end_s: float
    step_s: float
    match: dict[str, str]


def range_of(options: Split) -> RangeOptions:
    """The stretch of time the user asked for."""
    given: RangeOptions = {}
    if "--since" in options.values:
        given["since_s"] = _duration(options.values["--since"])
    if "--start" in options.values:
        given["start_s"] = _moment(options.values["--start"], "--start")
    if "--end" in options.values:
        given["end_s"] = _moment(options.values["--end"], "--end")
    if "--step" in options.values:
        given["step_s"] = number(options, "--step", 0.0)
    if "--match" in options.values:
        pairs = [pair.partition("=") for pair in options.values["--match"].split(",")]
        if not all(name and found for name, found, _ in pairs):
            raise BadInput("--match wants label=value, several joined by commas")
        given["match"] = {name.strip(): value.strip().strip("\"'") for name, _, value in pairs}
    return given


def _duration(text: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
    scale = units.get(text[-1:], 0)
    try:
        value = float(text[:-1] if scale else text) * (scale or 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise BadInput(f"--since {text!r} is not a time: 30m, 6h, 2d")
    return value


def _moment(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e11:
        raise BadInput(f"{name} {text!r} is not a time in Unix seconds (date +%s)")
    return value
