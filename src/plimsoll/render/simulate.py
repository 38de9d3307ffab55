"""The report of `plimsoll simulate`, as a screen of text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.redaction import one_line
from plimsoll.render.terminal import BAD, FAINT, GOOD, NAME, WARN, Line, Report, Table, json_text, picked
from plimsoll.simulate.settings import REPLAYED_ALL_THE_SAME
from plimsoll.simulate.summary import NEARLY_FULL_PERCENT, POOR_FIT, POOR_GUIDE, Latency, Summary
from plimsoll.units import format_count

SCHEMA = "plimsoll.simulate/1"
UNITS = "times in seconds, shares from 0 to 1 unless the name says percent, cache use over num_blocks - 1"
LATENCY_NAMES = (
    ("queue", "waiting for a place"),
    ("ttft", "to the first token (TTFT)"),
    ("tpot", "per further token (TPOT)"),
    ("e2e", "to the last token (E2E)"),
)
ENGINE_FIELDS = "requests finished rejected steps preemptions recomputed_tokens peak_blocks peak_running peak_waiting"
_UNKNOWN = "-"


def as_json(summary: Summary, *, notes: Sequence[str] = (), engines: Sequence[Summary] = (), router: str = "") -> str:
    """One object of the schema plimsoll.simulate/1; figures that the run lacks are null. Each of several engines has a row."""
    each = [picked(one, ENGINE_FIELDS) | {"kv_peak": one.kv_usage.peak} for one in engines]
    plain = (
        "requests finished rejected bad_rows steps sim_seconds arrival_seconds busy_seconds wall_seconds "
        "scheduled_tokens output_tokens preemptions preempted_requests recomputed_tokens peak_blocks peak_running peak_waiting"
    )
    body = {
        "schema": SCHEMA,
        "units": UNITS,
        "trace": summary.trace,
        **picked(summary, plain),
        **_of_features(summary),
        "replicas": max(1, len(engines)),
        **({"router": router, "engines": each} if engines else {}),
        "servers_to_keep_up": _servers(summary, len(engines)) or (max(1, len(engines)) if summary.finished else None),
        **picked(summary, "kv_usage waste prefix throughput ttft tpot e2e queue"),
        "settings": summary.settings.named,
        "step_time": {
            **summary.step_time._asdict(),
            "by_tokens": summary.step_time.by_tokens is not None,
            "label": summary.step_time_label,
        },
        "reading": [*first_of_all(notes), headline(summary), *reading(summary, len(engines))],
        "notes": notes,
    }
    return json_text(body)


def as_text(summary: Summary, *, notes: Sequence[str] = (), engines: Sequence[Summary] = (), router: str = "") -> Report:
    """Returns one screen: the replayed traffic, the finding, the figures and the latencies."""
    is_bad = summary.preemptions or summary.rejected or summary.servers_to_keep_up is not None
    span, blocks = duration(summary.sim_seconds), counted(max(0, summary.settings.num_blocks - 1), "block")
    if summary.servers_to_keep_up is not None:
        span = f"{duration(summary.arrival_seconds)}, done after {span}"
    traffic = f"{one_line(summary.trace)}: {counted(summary.requests, 'request')} over {span}"
    report = Report([Line(f"replayed: {traffic}, {blocks} of {summary.settings.block_size} tokens", 2, FAINT), ""])
    report += [Line(f"  {one_line(sentence)}", 2, BAD) for sentence in first_of_all(notes)]
    report.append(Line(f"  {one_line(headline(summary))}", 2, WARN if is_bad else GOOD))
    report += [Line(f"  {one_line(sentence)}") for sentence in reading(summary, len(engines))]
    if engines:
        report += ["", *_engines(engines, router)]
    if summary.requests:
        report += ["", *(Line(f"  {name:<14}{said}", 16, NAME, 16) for name, said in facts(summary))]
    if summary.finished:
        report += ["", *_latencies(summary)]
    return Report([*report, *(Line(f"  note: {one_line(note)}", 8, FAINT, 7) for note in notes if not is_urgent(note))])


def _engines(engines: Sequence[Summary], router: str) -> Report:
    """One row for each engine behind the router."""
    rows = [
        [str(number), *map(format_count, (one.requests, one.preemptions, one.peak_waiting)), percent(one.kv_usage.peak),
         percent(one.prefix.hit_rate), seconds(one.ttft.p99)]
        for number, one in enumerate(engines)
    ]  # fmt: skip
    head = ["engine", "requests", "preemptions", "most waiting", "cache peak", "prefix hits", "TTFT p99"]
    return Report([f"  {len(engines)} engines, {router}:", Table("lrrrrrr", rows, head)])


def first_of_all(notes: Sequence[str]) -> list[str]:
    """Notes without which the finding misleads, as sentences: the server does not start, or the fit is poor."""
    return [f"{note[0].upper()}{note[1:]}{'' if note.endswith('?') else '.'}" for note in notes if is_urgent(note)]


def is_urgent(note: str) -> bool:
    """True if a note belongs above the finding instead of below the figures."""
    return note == POOR_FIT or note.endswith(REPLAYED_ALL_THE_SAME)


def _latencies(summary: Summary) -> Report:
    guide, poor, fitted = summary.step_time_label.partition(f"{POOR_GUIDE}; ")
    label = "" if summary.is_fitted else POOR_GUIDE if poor else guide
    rows = [[name, *map(seconds, getattr(summary, field))] for field, name in LATENCY_NAMES]
    report = Report([Line(f"  {label}", 2, WARN)] if label else [])
    report += [Table("lr", rows, ["times", *Latency._fields]), f"  throughput: {throughput(summary)}"]
    if summary.is_fitted or poor:
        report.append(f"  step times {one_line(fitted if poor else guide)}")
    return report


def _of_features(summary: Summary) -> dict[str, object]:
    """What a server has only with limits of its queue, or with a drafter."""
    limits, drafted = summary.settings, summary.drafted_tokens
    has_limit = limits.max_num_queued_reqs is not None or limits.max_num_queued_tokens is not None
    found: dict[str, object] = {"refused": summary.refused} if has_limit else {}
    if limits.host_cache is not None:
        found["host_hit_tokens"] = summary.host_hit_tokens
    if limits.speculation is not None:
        rate = summary.accepted_tokens / drafted if drafted else None
        found["drafts"] = {"drafted_tokens": drafted, "accepted_tokens": summary.accepted_tokens, "rate": rate}
    return found


def _why_rejected(summary: Summary) -> str:
    return f"longer than --max-model-len {summary.settings.max_model_len} or than the whole cache"


def headline(summary: Summary) -> str:
    """The finding in one sentence."""
    usage = summary.kv_usage
    if summary.requests == 0:
        return "Nothing was replayed: the trace has no requests."
    if summary.rejected == summary.requests:
        return f"Every request was rejected: {_why_rejected(summary)}."
    if summary.preemptions:
        again = f"{counted(summary.preemptions, 'preemption')} recomputed {percent(summary.recomputed_share)} of all tokens"
        if usage.nearly_full:
            return f"The cache was nearly full {percent(usage.nearly_full)} of the time, and {again}."
        return f"{again[0].upper()}{again[1:]}."
    if usage.nearly_full:
        return f"The cache was nearly full {percent(usage.nearly_full)} of the time, but nothing was preempted."
    if usage.peak is None:
        return "Nothing was preempted; no step took any time, so that there is no share of time to tell."
    return f"The cache was never short: it peaked at {percent(usage.peak)} and nothing was preempted."


def reading(summary: Summary, engines: int = 0) -> list[str]:
    """Returns further sentences that an operator should read before the figures."""
    said: list[str] = []
    if (servers := _servers(summary, engines)) is not None:  # the backlog takes long to finish
        came, done = summary.requests / summary.arrival_seconds, summary.finished / summary.sim_seconds
        left = duration(summary.sim_seconds - summary.arrival_seconds)
        they, rates = "They do" if engines > 1 else "It does", f"{came:,.3g} requests came a second and {done:,.3g} were done"
        said.append(f"{they} not keep up: {rates}, so that the last answer came {left} after the last request.")
        needed = f"At least {format_count(servers)} such servers are needed, more where answers must be quick"
        said.append(f"{needed}; --replicas {servers} replays them.")
    if 0 < summary.rejected < summary.requests:
        were = "was" if summary.rejected == 1 else "were"
        many = f"{counted(summary.rejected, 'request')} of {format_count(summary.requests)}"
        said.append(f"{many} {were} rejected: {_why_rejected(summary)}.")
    if summary.refused:
        limits = (summary.settings.max_num_queued_reqs, summary.settings.max_num_queued_tokens)
        flags = zip(("--max-num-queued-reqs", "--max-num-queued-tokens"), limits, strict=True)
        full = ", ".join(f"{flag} {most}" for flag, most in flags if most is not None)
        were, share = "was" if summary.refused == 1 else "were", percent(summary.refused / summary.requests)
        said.append(f"{counted(summary.refused, 'request')}, {share}, {were} refused: the queue was full ({full}).")
    if summary.bad_rows:
        were = "was" if summary.bad_rows == 1 else "were"
        said.append(f"{counted(summary.bad_rows, 'row')} of the trace {were} left out: unreadable, or without an answer.")
    if summary.peak_waiting and summary.peak_running >= summary.settings.max_num_seqs:
        said.append(f"At times --max-num-seqs {format_count(summary.settings.max_num_seqs)} was what requests waited for.")
    if summary.queue.p50 is not None and summary.finished > 1:
        half, slow = seconds(summary.queue.p50), seconds(summary.queue.p99)
        waited = f"Half of the requests got a place within {half}; one in a hundred waited {slow} or more."
        said.append("No request waited for a place." if summary.queue.p99 == 0 else waited)
    return said


def _servers(summary: Summary, engines: int) -> int | None:
    """The number of such servers that would keep up; None where the present ones do."""
    return None if summary.servers_to_keep_up is None else summary.servers_to_keep_up * max(1, engines)


def facts(summary: Summary) -> list[tuple[str, str]]:
    """Returns the figures of the run, line by line: a name and its text."""
    usage = summary.kv_usage
    blocks = f"{format_count(summary.peak_blocks)} of {format_count(max(0, summary.settings.num_blocks - 1))} blocks"
    steps = f"{format_count(summary.steps)}; at most {format_count(summary.peak_running)} running"
    again = f"{counted(summary.recomputed_tokens, 'token')} recomputed, {percent(summary.recomputed_share)} of the work"
    preempted = f"{format_count(summary.preemptions)}, of {counted(summary.preempted_requests, 'request')}; {again}"
    full = f"{percent(usage.nearly_full)} of the time at {NEARLY_FULL_PERCENT} % or more"
    slots, share = summary.waste
    waste = "unknown" if slots is None else f"{slots:,.1f} empty slots in held blocks on average"
    waste = waste if share is None else f"{percent(share / 100)} of the used slots; {waste}"
    prefix = summary.prefix
    hits = f"{format_count(prefix.hit_tokens)} of {format_count(prefix.query_tokens)} tokens, {percent(prefix.hit_rate)}"
    if prefix.resumed_query_tokens:
        resumed = f"{format_count(prefix.resumed_hit_tokens)} of {format_count(prefix.resumed_query_tokens)}"
        hits += f"; {resumed} when preempted requests came back"
    done = f"{format_count(summary.finished)} of {format_count(summary.requests)}, {summary.rejected:,} rejected"
    from_host = f"{format_count(summary.host_hit_tokens)} tokens came from the host's memory"
    drafts = f"{format_count(summary.accepted_tokens)} of {format_count(summary.drafted_tokens)} accepted"
    return [
        ("finished", done + (f", {summary.refused:,} refused" if summary.refused else "")),
        ("steps", f"{steps} and {format_count(summary.peak_waiting)} waiting at once"),
        ("preemptions", preempted if summary.preemptions else "none"),
        ("cache use", f"{percent(usage.mean)} mean, {percent(usage.p99)} p99, {blocks} at the peak; {full}"),
        ("waste", waste),
        ("prefix hits", hits if summary.settings.prefix_caching else "prefix caching is off"),
        *([("host hits", from_host)] if summary.settings.host_cache is not None else []),
        *([("drafts", drafts)] if summary.settings.speculation is not None else []),
        ("replay took", duration(summary.wall_seconds)),
    ]


def throughput(summary: Summary) -> str:
    """Returns the output tokens and requests a second over the simulated time."""
    tokens, requests = summary.throughput
    if tokens is None or requests is None:
        return "unknown"
    return f"{tokens:,.1f} output tokens and {requests:,.2f} requests a second"


def counted(number: int, noun: str) -> str:
    """A count with its noun: 1 request, 2,000 requests."""
    return f"{format_count(number)} {noun}{'' if number == 1 else 's'}"


def percent(share: float | None) -> str:
    """A share for people: 37 %, 2.6 %; 0 and 100 only when exact."""
    if share is None:
        return _UNKNOWN
    if 0 < share < 0.0005:
        return "under 0.1 %"
    if 0.9995 <= share < 1:
        return "99.9 %"
    digits = 1 if 0 < share < 0.0995 or 0.99 < share < 1 else 0
    return f"{100 * share:,.{digits}f} %"


def seconds(value: float | None) -> str:
    """A time to three digits in the unit that suits it: 7.69 ms, 4.20 s, 12.5 min."""
    if value is None:
        return _UNKNOWN
    for least, size, unit in (
        (7200.0, 3600.0, "h"),
        (600.0, 60.0, "min"),
        (1.0, 1.0, "s"),
        (1e-3, 1e-3, "ms"),
        (1e-6, 1e-6, "us"),
    ):
        if value >= least:
            scaled = value / size
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:,.{digits}f} {unit}"
    return "0 s"


def duration(value: float) -> str:
    """A span in two units: 7 min 6 s, 2 h 5 min."""
    whole = round(value)
    if whole < 60:
        return seconds(value)
    minutes, left = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {left} s"
    hours, minutes = divmod(minutes, 60)
    return f"{format_count(hours)} h {minutes} min"
